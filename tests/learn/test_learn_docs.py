"""The guide to layers and training is a program: its examples run and print what it says, its table was measured."""

import doctest
import re
from pathlib import Path

from bench.tables import filled

from regard.nn import attention, encoder_decoder, models

GUIDE = Path(__file__).parents[2] / "docs" / "learn.md"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_every_example_prints_what_it_says():
    text = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.S))
    example = doctest.DocTestParser().get_doctest(text, {}, "learn.md", str(GUIDE), 0)
    assert len(example.examples) > 20
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_the_table_is_made_from_its_result_file():
    assert filled(GUIDE.read_text()) == GUIDE.read_text(), "fill it with bench.tables.filled"


def test_examples_in_docstrings_print_what_they_say():
    for module in (attention, models, encoder_decoder):
        failures, tried = doctest.testmod(module, optionflags=FLAGS, extraglobs={"torch": __import__("torch")})
        assert failures == 0
        assert tried > 0
