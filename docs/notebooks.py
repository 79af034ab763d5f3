"""Draw the pictures of the guide and turn its chapters into notebooks: `python docs/notebooks.py`.

The Markdown of a chapter is the source. Its examples become the cells of docs/guide/notebooks/NAME.ipynb, with the
outputs that the page shows; the pictures are what the examples save when they run. tests/test_guide.py runs the cells.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parent / "guide"
NOTEBOOKS = GUIDE / "notebooks"
CHAPTERS = sorted(GUIDE.glob("[0-9]*.md"))

#: The first cell. The package is no part of Colab; a clone is three folders up from a notebook.
INSTALL = """\
# Install regard where it is missing. In Colab, set SOURCE to "regard[look] @ git+https://…" of the repository.
import importlib.util, subprocess, sys

SOURCE = "../../..[look]"  # the folder of a clone
if importlib.util.find_spec("regard") is None:
    subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", SOURCE, "matplotlib"])"""

SHOW = "from IPython.display import SVG"

BLOCK = re.compile(r"^```python\n(.*?)^```\n", flags=re.S | re.M)
SOLUTION = re.compile(r'<details markdown="1"><summary>(.*?)</summary>\n(.*?)</details>\n', flags=re.S)
PICTURE = re.compile(r"^!\[(.*?)\]\((\S+\.svg)\)\n", flags=re.M)


def main() -> None:
    """Run every chapter in its folder, which draws its picture, and write its notebook."""
    os.chdir(GUIDE)
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # matplotlib writes the date into a picture
    import matplotlib

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "regard"})
    NOTEBOOKS.mkdir(exist_ok=True)
    for path in CHAPTERS:
        names: dict[str, Any] = {}
        for cell in code_cells(path):
            run(cell, names)
        (NOTEBOOKS / f"{path.stem}.ipynb").write_text(dumped(notebook(path)))
        print(path.stem)


def dumped(content: dict[str, Any]) -> str:
    """A notebook as the text of its file."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def notebook(path: Path) -> dict[str, Any]:
    """A chapter as a notebook: nbformat 4.5."""
    text = re.sub(r"\]\((\d\d-[\w-]+)\.md\)", r"](\1.ipynb)", path.read_text())
    text = re.sub(r"^\[This chapter as a notebook\].*\n", "", text, flags=re.M)
    cells = [_code(INSTALL, "")]
    start = 0
    for solution in SOLUTION.finditer(text):
        cells += _cells(text[start : solution.start()])
        title, inside = solution.groups()
        words, code = BLOCK.split(inside, maxsplit=1)[0].strip(), _cells(inside)
        cells.append(_markdown(f"<details><summary>{title}</summary>\n\n{words}\n\n</details>"))
        cells += [{**cell, "metadata": {"jupyter": {"source_hidden": True}}} for cell in code if "outputs" in cell]
        start = solution.end()
    cells += _cells(text[start:])
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    numbered = [{"id": f"cell-{n}", **cell} for n, cell in enumerate(cells)]
    return {"cells": numbered, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def code_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a chapter that compute, without those that install or show a picture."""
    cells = [cell for cell in notebook(path)["cells"] if "outputs" in cell]
    return [cell for cell in cells if not "".join(cell["source"]).startswith((INSTALL, SHOW))]


def run(cell: dict[str, Any], names: dict[str, Any]) -> str:
    """Run a cell as a notebook does; returns what it prints, and its last expression."""
    body = ast.parse("".join(cell["source"])).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None
    return printed.getvalue() + ("" if value is None else f"{value!r}\n")


def _cells(text: str) -> list[dict[str, Any]]:
    """Markdown, a code cell for every output, and one for every picture: Colab has no file to link to before it ran."""
    cells: list[dict[str, Any]] = []
    for n, part in enumerate(BLOCK.split(text)):
        if n % 2:
            cells += _examples(part)
            continue
        words, *pictures = PICTURE.split(part)
        cells.append(_markdown(words.strip()))
        while pictures:
            _, name, words, *pictures = pictures
            cells += [_cell(f'{SHOW}\n\nSVG("{name}")', []), _markdown(words.strip())]
    return [cell for cell in cells if cell["source"]]


def _examples(block: str) -> list[dict[str, Any]]:
    """Code up to the next output is a cell: a notebook shows the last value of a cell alone."""
    cells, source = [], ""
    for example in doctest.DocTestParser().get_examples(block):
        source += example.source
        if example.want:
            cells.append(_code(source, example.want))
            source = ""
    return cells + ([_code(source, "")] if source else [])


def _code(source: str, want: str) -> dict[str, Any]:
    last = ast.parse(source).body[-1]
    value = isinstance(last, ast.Expr) and not ast.unparse(last).startswith("print(")
    result: dict[str, Any] = {"output_type": "stream", "name": "stdout", "text": _lines(want)}
    if value:
        data = {"text/plain": _lines(want.rstrip("\n"))}
        result = {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
    return _cell(source, [result] if want else [])


def _cell(source: str, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    lines = _lines(source.rstrip("\n"))
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs, "source": lines}


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(text)}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    sys.exit(main())
