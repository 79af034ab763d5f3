"""Docs are programs: every example runs and prints what it says, every table is what was measured, every name is listed."""

import ast
import doctest
import importlib
import importlib.metadata
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from bench import rows, suites
from bench.tables import DOCUMENTS, filled
from packaging.specifiers import SpecifierSet

import regard
from regard import cli
from support import versions

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
TEXTS = ["README.md", *(f"docs/{page}" for page in PAGES)]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(document):
    """The fenced blocks of a document: (language, text)."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / document).read_text(), flags=re.S | re.M)


def run(text, names, where):
    example = doctest.DocTestParser().get_doctest(text, names, where, where, 0)
    assert example.examples, f"{where} has no examples"
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    report: list[str] = []
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


# Examples.


# tests/test_guide.py runs the chapters of the guide, as notebooks.
@pytest.mark.parametrize(
    "document",
    [
        text
        for text in TEXTS
        if not re.match(r"docs/guide/\d", text) and any(kind == "python" for kind, _ in blocks(text))
    ],
)
def test_every_example_of_a_document_prints_what_it_says(document):
    run("\n".join(text for kind, text in blocks(document) if kind == "python"), {}, document)


@pytest.mark.parametrize("document", TEXTS)
def test_every_block_is_of_a_kind_that_is_run(document):
    for kind, text in blocks(document):
        assert kind in ("python", "console", ""), f"{document}: ```{kind} is run by no test"
        assert (">>>" in text) == (kind == "python"), f"{document}: {text}"
        # Those of the guide are run, with their output, by the tests of the command.
        assert kind != "console" or document == "docs/look.md", f"{document}: {text}"


def commands(document):
    """Lines that call `regard`, outside of the blocks that are run."""
    text = re.sub(r"^```console\n.*?^```", "", (ROOT / document).read_text(), flags=re.S | re.M).replace("\\\n", " ")
    verbs = "look|walk|serve|learn|generate|translate|corpus"
    lines = re.findall(rf"^(?: {{4,}})?(regard (?:{verbs})\b.*)$", text, flags=re.M)
    return [part for line in lines for part in re.split(r" && | {3,}(?=regard )", line)]


@pytest.mark.parametrize("document", [text for text in TEXTS if commands(text)])
def test_every_command_line_is_one_that_the_parser_takes(document):
    for line in commands(document):
        cli.parser().parse_all(shlex.split(line, comments=True)[1:])


def docstrings():
    for path in sorted((SOURCE / "regard").rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and ">>>" in text:
                    yield pytest.param(module, text, id=f"{module}:{getattr(node, 'name', '')}")


# Read from the sources: doctest's own search passes over objects whose `__module__` is the public one.
@pytest.mark.parametrize(("module", "text"), list(docstrings()))
def test_every_example_of_a_docstring_prints_what_it_says(module, text):
    run(text, {**vars(importlib.import_module(module)), "torch": torch, "regard": regard}, module)


# Published uses.

SECTIONS = {
    part.partition("\n")[0]: part for part in re.split(r"^## ", (ROOT / "docs/uses.md").read_text(), flags=re.M)[1:]
}
RECIPES = [title for title in SECTIONS if title not in ("Losses at work", "What they cost")]


@pytest.mark.parametrize("title", RECIPES)
def test_a_published_use_takes_at_most_fifteen_lines_and_says_what_it_costs_elsewhere(title):
    code = "".join(text for kind, text in blocks("docs/uses.md") if kind == "python" and text in SECTIONS[title])
    lines = re.findall(r"^(?:>>>|\.\.\.) ", code, flags=re.M)
    assert 1 <= len(lines) <= 15, f"{title} takes {len(lines)} lines"
    (elsewhere,) = re.findall(r"^\*\*Elsewhere:\*\* .+(?:\n.+)*", SECTIONS[title], flags=re.M)
    assert re.search(r"\]\(https://\S+\)", elsewhere), f"{title} names no source"


# Tables.


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_table_is_made_from_its_result_file(document):
    text = (ROOT / document).read_text()
    assert filled(text) == text, "run: python -m bench.tables"


def row(ratio, device="NVIDIA H200", **versions):
    return rows.Row("y", [2, 3], "SDPA", ratio, 1.2, 1.0, "lower", [ratio], device, versions)


def test_tables_name_what_they_were_measured_on():
    here, there = row(1.1, torch="2.11.0+cu130", triton="3.6.0", numba="0.68.1"), row(0.9, "a CPU", torch="2.13.0+cpu")
    for show in (rows.table, rows.summary):
        assert "Measured on: NVIDIA H200, torch 2.11.0, Triton 3.6.0." in show([here, here])
        both = show([here, there]).splitlines()
        assert both[0].endswith("| measured on |")
        assert [line.split(" | ")[-1] for line in both[2:]] == [
            "NVIDIA H200, torch 2.11.0, Triton 3.6.0 |",
            "a CPU, torch 2.13.0 |",
        ]


def test_results_are_said_in_words_of_limits_and_targets():
    verdicts = [row(ratio).verdict() for ratio in (0.9, 1.1, 1.3)]
    assert verdicts == ["target met", "within the limit", "limit missed"]


def test_results_of_the_suite_are_added_up_over_its_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "RESULTS", tmp_path)
    installed = {"python": "3.11.7", "torch": "2.6.0", "triton": "3.2.0", "transformers": "5.0.0"}
    result = {"machine": "a CPU", "versions": installed, "failures": [], "skipped": 1, "failed": 0, "sources": ""}
    results = [
        {**result, "name": "PyTorch 2.6.0", "part": "core", "passed": 900, "date": "2026-01-31"},
        {**result, "name": "PyTorch 2.6.0", "part": "nn", "passed": 200, "date": "2026-02-01", "failed": 3},
        {**result, "name": "PyTorch 2.7.0", "part": "nn", "passed": 200, "date": "2026-02-02"},
        {**result, "name": "PyTorch 2.8.0", "part": "all", "passed": 1_100, "date": "2026-02-02"},
    ]
    (tmp_path / "versions.json").write_text(json.dumps({"parts": ["core", "nn"], "rows": results}))
    head, _, *lines = suites.table("versions").splitlines()
    assert head.startswith("| Python | PyTorch | Triton | numba |")
    here = "| 3.11.7 | 2.6.0 | 3.2.0 | – | 5.0.0 |"
    assert lines == [
        f"{here} all | 1,100 | 3 | 2 | a CPU | 2026-02-01 |",
        f"{here} nn | 200 | 0 | 1 | a CPU | 2026-02-02 |",
        f"{here} all | 1,100 | 0 | 1 | a CPU | 2026-02-02 |",
    ]


def test_the_floors_and_the_pinned_versions_are_among_those_of_make_test_versions():
    project = (ROOT / "pyproject.toml").read_text()
    pinned = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    torch_floor, transformers_floor = (
        re.search(r"torch>=([\d.]+)", project)[1],
        re.search(r"transformers>=(\d+)", project)[1],
    )
    assert next(iter(versions.VERSIONS.items())) == (f"{torch_floor}.0", f"{transformers_floor}.0.0")
    assert versions.VERSIONS[pinned["torch"]] == pinned["transformers"]
    assert f"PyTorch {torch_floor} or later" in (ROOT / "docs" / "install.md").read_text()


def test_every_pinned_version_runs_on_the_oldest_python():
    """`make test` of a clone must set itself up there: Debian 12 has Python 3.11.2. The versions at hand are looked at."""
    floor = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    installed = {dist.name.lower(): dist for dist in importlib.metadata.distributions()}
    pinned = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    at_hand = [installed[name.lower()] for name, version in pinned
               if name.lower() in installed and installed[name.lower()].version == version]  # fmt: skip
    assert len(at_hand) > len(pinned) / 2
    needs = {dist.name: dist.metadata["Requires-Python"] or "" for dist in at_hand}
    assert not {name: python for name, python in needs.items() if f"{floor}.0" not in SpecifierSet(python)}


# The site.


def test_every_page_is_in_the_navigation():
    def pages(part):
        if isinstance(part, str):
            return [part]
        return [page for inner in (part.values() if isinstance(part, dict) else part) for page in pages(inner)]

    assert sorted(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == PAGES


@pytest.mark.parametrize(
    "module",
    [
        "regard",
        "regard.nn",
        "regard.learn",
        "regard.look",
        "regard.recorder",
        "regard.kv",
        "regard.losses",
        "regard.distributed",
        "regard.corpora",
    ],
)
def test_every_public_name_is_documented_and_in_the_reference(module):
    listed = re.findall(r"^::: (\S+)$", "".join((ROOT / "docs" / page).read_text() for page in PAGES), flags=re.M)
    public = importlib.import_module(module)
    for name in public.__all__:
        assert getattr(public, name).__doc__, name
        # A module that is listed shows all its public names.
        assert {module, f"{module}.{name}", f"regard.{name}"} & set(listed), f"docs/api lists no {module}.{name}"


@pytest.mark.parametrize("document", [*TEXTS, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_every_link_to_a_file_leads_somewhere(document):
    path = ROOT / document
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not link.startswith(("https://", "#")):
            assert (path.parent / link.partition("#")[0]).exists(), f"{document}: {link}"


def test_the_copy_button_takes_code_without_prompts_and_output(browser):
    page = browser.new_page()
    session = "&gt;&gt;&gt; def f(x):\n...     return x\n...\n&gt;&gt;&gt; f(3)\n3\n"
    page.set_content(
        "".join(f'<div class="highlight"><code>{text}</code></div>' for text in (session, "pip install .\n"))
    )
    page.add_style_tag(content="code { white-space: pre }")
    page.add_script_tag(path=ROOT / "docs" / "copy.js")
    copied = page.eval_on_selector_all("code", "codes => codes.map(code => code.dataset.copy ?? null)")
    page.close()
    assert copied == ["def f(x):\n    return x\n\nf(3)", None]
    assert "extra_javascript: [copy.js]" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "DESIGN.md"])
def test_every_file_that_is_named_exists(document):
    folders = ("bench", "docs", "examples", "src", "tests")
    files = [f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|js|css|md|json))(?:::\w+)?`", (ROOT / document).read_text())
    assert len(named) > 10
    for name in named:
        assert any(file.endswith(f"/{name}") for file in files), f"{document}: {name}"


def test_the_version_is_the_same_everywhere():
    assert f"version: {regard.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{regard.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
