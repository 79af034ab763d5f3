"""The guide to recording is a program: its examples run and print what it says, its table is what was measured."""

import doctest
import re
from pathlib import Path

from bench.tables import filled

GUIDE = Path(__file__).parents[2] / "docs" / "record.md"


def test_every_example_prints_what_it_says():
    text = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.S))
    example = doctest.DocTestParser().get_doctest(text, {}, "record.md", str(GUIDE), 0)
    assert len(example.examples) > 20
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_the_table_is_made_from_its_result_file():
    assert filled(GUIDE.read_text()) == GUIDE.read_text(), "fill it with bench.tables.filled"
