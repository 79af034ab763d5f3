"""What a notebook shows, in a notebook that is run."""

from __future__ import annotations

import html
import json
import re

import pytest

from support.page_probe import Read

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")

CELLS = [
    """import torch, regard
torch.manual_seed(0)
W = regard.weights(torch.randn(6, 8), mask=regard.causal()).label("the cat sat on the mat".split())
W.show("cat")""",
    """model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False).eval()
with torch.no_grad(), regard.record(model, tokens="the cat sat on the mat".split(), values=True) as seen:
    model(torch.randn(1, 6, 16))
seen.show("mat")""",
    """history = []
with regard.watch(model.train(), every=1, callback=lambda numbers, step: history.append((step, numbers))):
    for _ in range(3):
        model(torch.randn(1, 6, 16)).sum().backward()
regard.look.View(history)""",
    'print(seen.show("mat"))',
]


@pytest.fixture(scope="module")
def outputs() -> list[list[dict]]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    nbformat.validate(notebook)
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.parametrize("n", range(3))
def test_a_view_at_the_end_of_a_cell_is_shown_as_a_page_in_a_frame(outputs: list, n: int) -> None:
    (shown,) = (output for output in outputs[n] if output.output_type == "execute_result")
    framed = shown.data["text/html"]
    assert framed.startswith('<iframe sandbox="allow-scripts allow-downloads" allow="clipboard-write" srcdoc=')
    page = html.unescape(re.search('srcdoc="([^"]*)"', framed).group(1))
    header = Read(page).header
    assert header["kind"] == ("training" if n == 2 else "attention")
    if n < 2:
        assert header["start"]["word"] == (1, 5)[n]
    else:
        assert header["steps"] == [0, 1, 2]


def test_where_no_page_can_be_shown_there_is_the_text_of_the_terminal(outputs: list) -> None:
    (shown,) = (output for output in outputs[1] if output.output_type == "execute_result")
    (printed,) = (output for output in outputs[3] if output.output_type == "stream")
    assert shown.data["text/plain"].strip() == printed.text.strip()
    assert "mat" in printed.text


def test_the_notebook_stays_small(outputs: list) -> None:
    assert len(json.dumps(outputs[0])) < 100_000
