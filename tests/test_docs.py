"""Docs are programs: every example runs and prints what it says, every table is what was measured."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from bench.tables import DOCUMENTS, filled

import regard

ROOT = Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("document", ["README.md"])
def test_every_example_of_a_document_prints_what_it_says(document):
    text = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.S))
    example = doctest.DocTestParser().get_doctest(text, {}, document, document, 0)
    assert len(example.examples) > 10
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    report: list[str] = []
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def modules():
    names = ["regard"] + [f"regard.{m.name}" for m in pkgutil.iter_modules(regard.__path__)]
    return [name for name in names if not importlib.import_module(name).__name__.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_every_example_in_a_docstring_prints_what_it_says(name):
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, optionflags=FLAGS, extraglobs={"torch": __import__("torch")})
    assert failures == 0


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_table_is_made_from_its_result_file(document):
    text = (ROOT / document).read_text()
    assert filled(text) == text, "run: python -m bench.tables"


def test_every_public_name_is_exported_and_documented():
    for name in regard.__all__:
        assert getattr(regard, name).__doc__, name
