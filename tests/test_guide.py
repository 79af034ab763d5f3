"""The guide runs: every cell of every chapter gives the output that its page shows, and draws the picture that it shows."""

import doctest
import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import regard
from regard.look.spotlight import spotlight

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)

CHAPTERS = pytest.mark.parametrize("path", notebooks.CHAPTERS, ids=lambda path: path.stem)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def expected(cell):
    return "".join("".join(output.get("text") or output["data"]["text/plain"]) for output in cell["outputs"])


def picture(path):
    (name,) = re.findall(r"^!\[.+\]\((\S+)\)$", path.read_text(), flags=re.M)
    return name


# The cells hold all examples of the page: running them is running the page.
@CHAPTERS
def test_a_chapter_computes_what_it_shows_and_draws_its_picture(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, checker = {}, doctest.OutputChecker()
    for cell in notebooks.code_cells(path):
        got, want = notebooks.run(cell, names), expected(cell)
        if want and not want.endswith("\n"):
            want += "\n"
        example = doctest.Example("".join(cell["source"]), want)
        assert checker.check_output(want, got, FLAGS), checker.output_difference(example, got, FLAGS)
    assert [file.name for file in tmp_path.iterdir()] == [picture(path)]
    ET.parse(tmp_path / picture(path))


def test_the_table_of_a_thousand_sentences_is_that_of_the_results():
    figures = json.loads((ROOT / "bench" / "results" / "many_sentences.json").read_text())
    page = (ROOT / "docs" / "guide" / "16-many-sentences.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (0\.\d+) \| (0\.\d+) – (0\.\d+) \|$", page, flags=re.M)
    assert len(rows) == 7
    for name, *numbers in rows:
        assert [f"{x:.3f}" for x in figures[name]] == numbers, name
    assert f"| layer 3, head 1, {figures['sentences']:,} sentences |" in page
    assert figures["moved most"] == [3, 1]


@CHAPTERS
def test_every_example_of_a_chapter_is_in_its_notebook(path):
    blocks = "".join(notebooks.BLOCK.findall(path.read_text()))
    sources = "".join(example.source for example in doctest.DocTestParser().get_examples(blocks))
    cells = "".join("".join(cell["source"]) + "\n" for cell in notebooks.code_cells(path))
    assert cells == sources
    assert sources.count("\n") > 20


@CHAPTERS
def test_notebooks_are_those_of_the_chapters(path):
    content = notebooks.notebook(path)
    nbformat.validate(content)
    file = notebooks.NOTEBOOKS / f"{path.stem}.ipynb"
    assert file.read_text() == notebooks.dumped(content), "run: python docs/notebooks.py"
    assert "pip" in "".join(content["cells"][0]["source"])


def test_there_is_a_notebook_for_every_chapter_and_no_other():
    assert sorted(path.stem for path in notebooks.NOTEBOOKS.iterdir()) == [path.stem for path in notebooks.CHAPTERS]


@CHAPTERS
def test_a_chapter_has_a_small_picture_exercises_with_solutions_and_something_to_try(path):
    text = path.read_text()
    assert (path.parent / picture(path)).stat().st_size < 40_000
    exercises = text.partition("## Exercises")[2].partition("## Try it")[0]
    count = len(re.findall(r"^\*\*\d\.\*\* ", exercises, flags=re.M))
    assert count >= 2
    assert len(notebooks.SOLUTION.findall(exercises)) == count
    assert len(notebooks.BLOCK.findall(exercises)) >= 1
    assert re.search(r"^    regard (look|walk|learn) ", text.partition("## Try it")[2], flags=re.M)


@CHAPTERS
def test_a_chapter_sends_readers_to_views_that_the_page_has(path):
    views = (ROOT / "src" / "regard" / "look" / "page" / "js" / "views.js").read_text()
    names = re.findall(r'^    name: "(.+?)"', views, flags=re.M)
    assert "Lab" in names
    tried = path.read_text().partition("## Try it")[2]
    assert [name for name in re.findall(r"\*\*(.+?)\*\*", tried) if name not in names] == []


def test_a_cell_with_another_output_is_noticed():
    cell = {"source": ["x = 2\n", "x + 2"], "outputs": []}
    assert notebooks.run(cell, {}) == "4\n"
    assert not doctest.OutputChecker().check_output("5\n", notebooks.run(cell, {}), FLAGS)


def test_beyond_is_what_the_glossary_says():
    (source,) = re.findall(r"^>>> (def beyond.*?)^>>>", (ROOT / "docs" / "glossary.md").read_text(), flags=re.S | re.M)
    names = {}
    exec(source.replace("\n... ", "\n"), names)
    for seed in range(5):
        w = torch.randn(7, 7, generator=torch.Generator().manual_seed(seed)).softmax(-1)
        lit = spotlight(regard.Weights.from_dense(w).label(list("tuvwxyz")), "w")
        expected = max(names["beyond"](w, 3, j) for j in range(7) if j != 3)
        assert lit.heads[0].beyond == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.slow
@CHAPTERS
def test_a_notebook_runs_in_jupyter(path, tmp_path):
    content = nbformat.reads(notebooks.dumped(notebooks.notebook(path)), as_version=4)
    nbclient.NotebookClient(
        content, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown = [cell for cell in content.cells if cell.source.startswith(notebooks.SHOW)]
    assert "image/svg+xml" in shown[0].outputs[0].data
