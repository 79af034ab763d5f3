"""The architecture: imports point one way, `import regard` stays light, and planted bugs follow the code."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import regard
from support import planted

ROOT = Path(regard.__file__).parent
API = Path(__file__).parent.parent / "docs" / "api"


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


#: Each part of the package and the parts it may import: a module of `core` or of a package in it, or another whole package. A part never imports one above it.
ARROWS: dict[str, set[str]] = {
    "_lazy": set(),
    "_io": set(),
    "_options": set(),
    "core.pytree": set(),
    "core.torch_state": set(),
    "core.tensor_kinds": {"core.pytree", "core.torch_state"},
    "core.block": set(),
    "core.shared": set(),
    "core.inherited": set(),
    "core.indexing": {"core.tensor_kinds"},
    "core.operators": set(),
    "core.patches": set(),
    "core.broadcast": set(),
    "core.stored": set(),
    "core.scores.similarity": {"core.broadcast", "core.pytree", "core.torch_state"},
    "core.scores.modifiers": {"core.block", "core.broadcast", "core.pytree", "core.stored", "core.tensor_kinds"},
    "core.scores.base": {"core.broadcast", "core.scores.modifiers", "core.pytree", "core.scores.similarity", "core.stored"},
    "core.scores.kinds": {
        "core.broadcast", "core.scores.modifiers", "core.pytree", "core.scores.base", "core.scores.similarity", "core.stored",
    },
    "core.masks.intervals": {"core.torch_state"},
    "core.masks.call_hints": set(),
    "core.masks.algebra": {"core.masks.call_hints", "core.block", "core.broadcast", "core.masks.intervals", "core.pytree", "core.stored", "core.tensor_kinds"},
    "core.masks.kinds": {
        "core.block", "core.broadcast", "core.indexing", "core.masks.intervals", "core.masks.algebra", "core.masks.call_hints", "core.pytree", "core.stored",
        "core.tensor_kinds", "core.torch_state",
    },
    "core.masks.selection": {"core.block", "core.masks.algebra", "core.pytree"},
    "core.masks.lowering": {"core.block", "core.masks.intervals", "core.masks.kinds", "core.pytree", "core.torch_state"},
    "core.types": {"core.indexing", "core.masks.kinds", "core.results", "core.scores.kinds"},
    "core.problem": {
        "core.block", "core.masks.intervals", "core.masks.lowering", "core.masks.kinds", "core.masks.selection", "core.pytree", "core.scores.kinds", "core.torch_state",
    },
    "core.stats": {"core.problem", "core.pytree", "core.torch_state"},
    "core.online_softmax": {"core.block", "core.problem", "core.stats"},
    "engines": {
        "core.block", "core.masks.intervals", "core.masks.kinds", "core.online_softmax", "core.problem", "core.pytree",
        "core.scores.kinds", "core.scores.similarity", "core.stats", "core.torch_state",
    },
    "core.distance_grads": {"core.problem", "core.pytree", "core.stats", "engines"},
    "core.autograd": {
        "core.distance_grads", "core.problem", "core.pytree", "core.scores.kinds", "core.stats", "core.tensor_kinds", "core.torch_state", "engines",
    },
    "core.result_cache": {"core.stats", "core.torch_state"},
    "core.arguments": {"core.indexing", "core.scores.kinds", "core.stats", "core.tensor_kinds"},
    "core.results": set(),
    "core.evaluation": {
        "core.arguments", "core.autograd", "core.indexing", "core.operators", "core.problem", "core.pytree", "core.result_cache", "core.results", "core.shared",
        "core.stats", "core.tensor_kinds", "core.torch_state", "core.types", "engines",
    },
    "core.array_protocol": {"core.evaluation", "core.indexing", "core.inherited", "core.tensor_kinds", "core.torch_state", "core.types"},
    "core.rows.head_shares": {"core.block", "core.pytree", "core.scores.kinds", "core.torch_state", "core.tensor_kinds"},
    "core.rows.sources": {
        "core.block", "core.masks.intervals", "core.problem", "core.pytree", "core.rows.head_shares", "core.scores.kinds",
    },
    "core.rows.strips": {"core.block", "core.masks.intervals", "core.pytree", "core.rows.sources", "core.torch_state"},
    "core.rows.comparison": {"core.pytree", "core.rows.sources", "core.rows.strips", "core.torch_state"},
    "core.rows.spans": {"core.block", "core.masks.algebra", "core.pytree", "core.rows.sources", "core.rows.strips", "core.torch_state"},
    "core.rows.complete_rows": {
        "core.block", "core.pytree", "core.rows.sources", "core.stats", "core.rows.strips", "core.torch_state", "core.tensor_kinds",
    },
    "core.rows.fused": {
        "core.rows.comparison", "core.problem", "core.pytree", "core.rows.sources", "core.rows.complete_rows", "core.rows.head_shares", "core.rows.spans", "core.rows.strips",
        "core.stats", "core.torch_state", "engines",
    },
    "core.rows.segments": {"core.arguments", "core.indexing", "core.masks.intervals"},
    "core.rows.traced": {"core.rows.fused", "core.pytree", "core.rows.sources", "core.rows.strips"},
    "core.rows.questions": {
        "core.arguments", "core.broadcast", "core.rows.comparison", "core.indexing", "core.masks.algebra", "core.operators", "core.problem",
        "core.pytree", "core.result_cache", "core.shared", "core.rows.sources", "core.rows.complete_rows", "core.rows.spans", "core.rows.strips", "core.torch_state", "core.rows.traced", "core.types",
        "engines", "core.tensor_kinds",
    },
    "core.rows.position_questions": {"core.indexing", "core.rows.complete_rows", "core.rows.questions", "core.torch_state", "core.tensor_kinds"},
    "core.rows.head_reduction": {
        "core.arguments", "core.broadcast", "core.inherited", "core.pytree", "core.results", "core.rows.position_questions", "core.rows.questions", "core.rows.sources", "core.rows.complete_rows", "core.scores.kinds",
        "core.rows.head_shares", "core.rows.spans", "core.rows.strips", "core.stats", "core.torch_state", "core.types", "engines", "core.result_cache",
    },
    "core.rows.key_choice": {"core.rows.questions", "core.rows.sources", "core.rows.strips"},
    "core.rows.relations": {
        "core.evaluation", "core.rows.head_reduction", "core.rows.head_shares", "core.indexing", "core.problem", "core.rows.position_questions", "core.rows.questions", "core.rows.sources",
        "core.rows.fused", "core.rows.segments", "core.rows.spans", "core.rows.strips", "core.stats", "core.torch_state", "core.types", "engines",
    },
    "core.rows.head_profile": {
        "core.evaluation", "core.problem", "core.rows.relations", "core.rows.sources", "core.stats", "core.torch_state", "engines",
    },
    "core.weights": {
        "core.arguments", "core.array_protocol", "core.evaluation", "core.indexing", "core.inherited", "core.patches", "core.problem", "core.rows.questions", "core.rows.relations",
        "core.result_cache", "core.results", "core.scores.kinds", "core.rows.spans", "core.stats", "core.tensor_kinds", "core.torch_state",
        "core.types",
    },
    "core.api": {
        "core.block", "core.broadcast", "core.masks.kinds", "core.problem", "core.scores.kinds", "core.tensor_kinds", "core.torch_state",
        "core.types", "core.weights", "engines", "core.pytree",
    },
    "distributed": {
        "_lazy", "core.api", "core.array_protocol", "core.autograd", "core.block", "core.evaluation", "core.indexing", "core.masks.intervals", "core.masks.kinds",
        "core.scores.modifiers", "core.online_softmax", "core.operators", "core.problem", "core.pytree", "core.result_cache", "core.results",
        "core.rows.head_reduction", "core.rows.head_shares", "core.rows.questions", "core.rows.relations", "core.rows.sources", "core.rows.spans",
        "core.rows.complete_rows",
        "core.rows.strips", "core.scores.kinds", "core.shared", "core.stats", "core.tensor_kinds", "core.torch_state", "core.types", "core.weights", "engines",
    },
    "recorder": {
        "_io", "_lazy", "chains", "core.api", "core.block", "core.indexing", "core.inherited", "core.masks.kinds", "core.problem", "core.pytree",
        "core.rows.complete_rows", "core.scores.kinds", "core.stored", "core.torch_state", "core.types", "core.weights", "engines",
    },
    "core.dropout": {"core.api", "core.masks.kinds", "core.scores.kinds", "core.types"},
    "nn": {
        "_lazy", "_options", "core.api", "core.dropout", "core.masks.kinds", "core.pytree", "core.scores.kinds", "core.torch_state", "core.types",
        "core.weights",
    },
    "learn": {"_io", "_lazy", "_options", "nn", "recorder"},
    "integrations": {
        "_lazy", "core.api", "core.dropout", "core.masks.kinds", "core.torch_state", "core.types", "core.weights", "recorder",
    },
    "chains": {
        "core.indexing", "core.rows.complete_rows", "core.scores.kinds", "core.shared", "core.torch_state", "core.weights", "core.arguments", "core.broadcast", "core.scores.modifiers", "core.tensor_kinds",
    },
    "kv": {"core.arguments", "core.shared", "core.weights", "core.tensor_kinds"},
    "patterns": {"core.pytree", "core.rows.complete_rows", "core.scores.kinds", "core.shared", "core.weights", "core.arguments", "core.indexing"},
    "losses": {
        "core.api", "core.broadcast", "core.rows.comparison", "core.rows.head_reduction", "core.rows.key_choice",
        "core.rows.questions", "core.scores.kinds", "core.shared", "core.types", "core.weights", "core.arguments", "core.scores.modifiers",
    },
    "corpora": {
        "_io", "_lazy", "core.block", "core.rows.head_profile", "core.pytree", "core.rows.questions", "core.rows.sources", "core.rows.complete_rows",
        "core.stats", "core.rows.strips", "core.weights", "learn", "recorder",
    },
    "look": {
        "_io", "_lazy", "_options", "core.block", "core.rows.comparison", "core.indexing", "core.masks.kinds", "core.patches", "core.problem",
        "core.pytree", "core.results", "core.scores.kinds", "core.shared", "core.stats", "core.weights", "corpora", "learn", "patterns", "recorder",
    },
    "cli": {"_options", "corpora", "learn", "look"},
    "__main__": {"cli"},
}  # fmt: skip


def part_of(module: list[str]) -> str:
    """The key of `ARROWS` that a dotted module below `regard` belongs to."""
    return next(
        (part for part in (".".join(module[:depth]) for depth in (3, 2, 1)) if part in ARROWS), ".".join(module)
    )


def module_of(path: Path) -> list[str]:
    return [part.removesuffix(".py") for part in path.relative_to(ROOT).parts if part != "__init__.py"]


def imports(path: Path) -> set[str]:
    """The parts of the package that a file imports from when it runs; type checkers alone may look upwards."""
    package = ["regard", *path.relative_to(ROOT).parts[:-1]]
    parts: set[str] = set()
    tree = parsed(path)
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            if base[:1] == ["regard"]:
                targets = (
                    [[*base, alias.name] for alias in node.names]
                    if base in (["regard"], ["regard", "core"])
                    else [base]
                )
                parts |= {part_of(target[1:]) for target in targets}
        elif isinstance(node, ast.Import):
            parts |= {part_of(alias.name.split(".")[1:]) for alias in node.names if alias.name.startswith("regard.")}
    return parts


FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py" or module_of(path)[:1] not in ([], ["core"])
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    part = part_of(module_of(path))
    assert imports(path) - {part, "__version__"} <= ARROWS[part]


def test_the_arrows_run_one_way() -> None:
    above: set[str] = set()

    def climb(part: str, path: tuple[str, ...]) -> None:
        assert part not in path, f"{' <- '.join((*path, part))} is a cycle"
        above.add(part)
        for below in ARROWS[part]:
            climb(below, (*path, part))

    for part in ARROWS:
        climb(part, ())
    assert above == set(ARROWS)


def test_the_picture_of_the_modules_has_every_part() -> None:
    picture = (PROJECT / "DESIGN.md").read_text().partition("## Modules\n```")[2].partition("```")[0]
    shown = set(re.findall(r"\w+", picture))
    assert {part.rpartition(".")[2] for part in ARROWS} - shown == {"__main__"}


def test_every_part_has_its_arrows() -> None:
    assert {part_of(module_of(path)) for path in FILES} == set(ARROWS)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(parsed(path)), f"{path.name} has no docstring"


HEAVY = (
    "numba",
    "llvmlite",
    "transformers",
    "matplotlib",
    "triton",
    "pandas",
    "scipy",
    "IPython",
    "tokenizers",
    "jinja2.ext",
    "http.server",
)


def test_the_command_line_explains_itself_before_torch_is_there() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import regard; from regard import cli\n"
        "sys.exit(sum(cli.main(a.split()) for a in ('--help', 'look --help', 'learn lm --help', '--version')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "regard look" in done.stdout


@pytest.mark.early
def test_a_name_may_be_used_first_while_torch_compile_follows_the_code() -> None:
    code = (
        "import torch, regard\n"
        "q = torch.randn(2, 5, 4)\n"
        "ask = torch.compile(lambda q: regard.weights(q, mask=regard.causal()).entropy(), fullgraph=True, backend='eager')\n"
        "torch.testing.assert_close(ask(q), regard.weights(q, mask=regard.causal()).entropy())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_regard_is_light() -> None:
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import regard; regard.weights\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = [name for name in loaded if name.split(".")[0] in HEAVY]
    assert not heavy
    others = {name.split(".")[0] for name in loaded} - {"regard", "torch"} - set(sys.stdlib_module_names)
    assert others <= {"numpy", "_frozen_importlib_external"}, f"import regard loads {sorted(others)}"


@pytest.mark.early
def test_without_numba_only_speed_is_lost() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch, regard\n"
        "torch.manual_seed(0); q, k, v = (torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3))\n"
        "seen = regard.weights(q, k, mask=regard.causal()).see('entropy', 'received', topk=3, values=v)\n"
        "want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "torch.testing.assert_close(seen.y, want)\n"
        "(seen.y.sum() + seen.entropy.sum()).backward()\n"
        "assert q.grad.isfinite().all()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["regard", "regard.learn", "regard.look", "regard.nn", "regard.recorder"])
def test_dir_shows_public_names_and_nothing_that_was_imported_for_them(name: str) -> None:
    code = f"import sys, {name} as package; print(*dir(package)); print(*package.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown, public = (set(line.split()) for line in done.stdout.splitlines())
    assert public <= shown
    assert not shown & {"TYPE_CHECKING", "lazy_getattr", "later", "names", "Any", "torch", "Tensor", "annotations"}
    assert name != "regard" or {"distributed", "integrations", "learn", "look", "nn"} <= shown


def test_public_names_are_those_that_are_exported() -> None:
    public = {
        name for name in vars(regard) if not name.startswith("_") and not isinstance(vars(regard)[name], type(sys))
    }
    assert public - {"TYPE_CHECKING", "lazy_getattr"} <= set(regard.__all__) <= set(dir(regard))
    assert not {"TYPE_CHECKING", "lazy_getattr"} & set(dir(regard))
    documented = re.findall(r"^::: regard\.([a-z]+)\b", "".join(p.read_text() for p in API.glob("*.md")), flags=re.M)
    assert set(documented) <= set(dir(regard))
    assert regard.__all__ == sorted(regard.__all__)
    for name in regard.__all__:
        assert getattr(regard, name).__module__ == "regard"
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        regard.atend  # noqa: B018


def test_autograd_functions_are_those_that_design_lists() -> None:
    of_file = {path.relative_to(ROOT).with_suffix("").as_posix(): path.read_text() for path in FILES}
    counts = {file: n for file, text in of_file.items() if (n := text.count("(torch.autograd.Function):"))}
    assert counts == {
        "core/autograd": 2, "core/problem": 1, "core/rows/strips": 1, "core/rows/fused": 3, "distributed/sharded": 3, "distributed/questions": 1,
        "distributed/dtensors": 1,
    }  # fmt: skip
    for file in counts:
        assert f"`{file}`" in (ROOT.parent.parent / "DESIGN.md").read_text()


def test_no_engine_is_recognised_by_its_name() -> None:
    """An attribute of `Engine` says what differs, so that one more engine is one more object."""
    for path in FILES:
        compared = re.findall(r"engine\w* [!=]= .(?:triton|blockwise|reference)", path.read_text())
        assert not compared or path.name == "file_reader.py", f"{path.name} compares {compared}"


#: Words that say nothing about the role or type of what they name.
ROLELESS = frozenset(
    ["told", "given", "kept", "found", "made", "asked", "said", "room", "rooms", "lying", "laid", "heard", "whole", "known",
     "halved", "junk", "likes", "news", "promised", "unread"]
)  # fmt: skip

#: Names of other libraries that have such a word.
OF_LIBRARIES = {"given", "parse_known_args"}


def roleless(names: set[str]) -> set[str]:
    """Names that have such a word between their underscores; those of tests are sentences."""
    return {name for name in names if not name.startswith("test_") and ROLELESS & {*name.lower().split("_")}}


def identifiers(tree: ast.AST) -> set[str]:
    """Every name that a file binds or uses: variables, parameters, attributes, keywords, functions, classes, imports."""
    names: set[str | None] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name)
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name):
                names.add(name)
    return {name for name in names if name is not None}


def test_roleless_names_are_found_wherever_they_stand() -> None:
    for line in (
        "told = 1",
        "x.kept",
        "told_too = 1",
        "def _whole(): ...",
        "f(given=1)",
        "def made(): ...",
        "lambda room: 0",
        "import x as laid",
        "class whole: ...",
    ):
        assert roleless(identifiers(ast.parse(line))), line
    assert not roleless(identifiers(ast.parse("def test_a_file_is_found(): ...")))


PROJECT = ROOT.parents[1]
SOURCES = sorted(
    path for folder in ("src", "tests", "bench", "docs", "examples") for path in (PROJECT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_every_name_says_its_role(path: Path) -> None:
    library = OF_LIBRARIES if re.search(r"hypothesis import given|argparse", path.read_text()) else set()
    assert not roleless(identifiers(parsed(path))) - library


#: Comments and strings of the page's scripts.
NO_CODE = re.compile(r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"|'[^'\n]*'|`[^`]*`", re.S)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.js")), ids=lambda path: path.name)
def test_every_name_of_the_page_says_its_role(path: Path) -> None:
    assert not set(re.findall(r"\w+", NO_CODE.sub(" ", path.read_text()))) & ROLELESS


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_has_at_most_500_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


#: A screen, and what kernels may take: they are compiled as one, and their state stays in registers.
SCREEN, KERNEL = 60, 120


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_function_fits_a_screen(path: Path) -> None:
    limit = KERNEL if {"kernels", "hopper"} & {*path.parts} else SCREEN
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            assert (node.end_lineno or 0) - first.lineno < limit, f"{path.name}: {node.name}"


def type_names(tree: ast.Module) -> Iterator[str]:
    """Classes anywhere, and what a module calls a type: an alias, a Literal, a TypeVar."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if re.fullmatch(r"_?[A-Z][a-z]\w*", name):
                yield name


#: `learn.settings` repeats what `nn.positions` calls so: `regard learn --help` answers without PyTorch.
REPEATED = {"PositionsName"}


def test_no_name_stands_for_two_types() -> None:
    """Nor do two that differ in a leading underscore."""
    homes: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for name in type_names(parsed(path)):
            homes.setdefault(name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert {name for name, paths in homes.items() if len(paths) > 1} == REPEATED


def test_names_of_types_are_found() -> None:
    source = "class A:\n    class _B: ...\nC: TypeAlias = int\nDe = Literal['x']\nF_G = 1\nHI = 2"
    assert list(type_names(ast.parse(source))) == ["A", "_B", "C", "De"]


#: Classes that others ask by methods and attributes, and the files that define them.
NODE_FILES = (
    "core/masks/kinds.py", "core/masks/algebra.py", "core/masks/lowering.py",
    "core/scores/kinds.py", "core/scores/base.py", "core/scores/modifiers.py", "core/scores/similarity.py",
)  # fmt: skip
#: Base classes: an argument of a user or a field of a file is checked against them.
BASES = {"Mask", "Score", "Modifier", "SimilarityKernel"}
NODES = {
    node.name for file in NODE_FILES for node in ast.walk(parsed(ROOT / file)) if isinstance(node, ast.ClassDef)
} - BASES


def type_switches(tree: ast.AST) -> set[str]:
    """Nodes that a file tells apart by their class: isinstance, issubclass, type(x), match."""
    tested: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
                tested.append(classes)
            case ast.Compare(left=ast.Call(func=ast.Name(id="type"))):
                tested.append(node)
            case ast.MatchClass(cls=cls):
                tested.append(cls)
    return {name for part in tested for name in identifiers(part)} & NODES


def test_type_switches_are_found() -> None:
    assert {"Causal", "Bias", "Precomputed"} <= NODES
    for line in ("isinstance(x, Causal)", "type(x) is Bias", "type(x) in (Dot, Bias)", "isinstance(m, masks.And | Or)"):
        assert type_switches(ast.parse(line)), line


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_masks_and_scores_are_asked_by_methods(path: Path) -> None:
    if str(path.relative_to(ROOT)) not in NODE_FILES:
        assert not type_switches(parsed(path)), "give the class a method or an attribute"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_module_may_import_is_not_said_in_words(path: Path) -> None:
    assert "Imports " not in (ast.get_docstring(parsed(path)) or "")


def prose(path: Path) -> Iterator[str]:
    """Docstrings up to their sections, and comments, each as one line."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield " ".join(re.split(r"\n+(?:Args|Attributes|Returns|Raises|Example)s?:\n|>>> ", text)[0].split())
    lines = io.StringIO(path.read_text()).readline
    yield from (token.string for token in tokenize.generate_tokens(lines) if token.type == tokenize.COMMENT)


#: CONTRIBUTING, "Comments and docstrings": the subject comes first, and is none of these.
NO_SUBJECT = re.compile(r"(?:^|^#:? |\. )What (?!to do )|\b(?i:whoever|nobody|somebody|someone|everybody)\b")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_subject_of_a_comment_says_what_it_is(path: Path) -> None:
    assert not [text[:100] for text in prose(path) if NO_SUBJECT.search(text)]


def test_empty_subjects_are_found() -> None:
    for text in ("What a mask is, and how.", "#: What ranks agree on", "# Whoever reads it", "Sums. What is left"):
        assert NO_SUBJECT.search(text), text
    assert not NO_SUBJECT.search("What to do with a tensor; says what it is")


#: Names in backticks that are of other libraries, of shells and of files beside the package.
FOREIGN = re.compile(
    r"\.md\b|bench/|attn_implementation|DynamicCache|TESTING_ONLY_|functionalize|dual_level|distribute_tensor|position_ids|"
    r"save_pretrained|TransformerEncoder|\bpickle\b|ln_attn|UNSET|\bwc\b"
)


@functools.cache
def words_of_the_package() -> frozenset[str]:
    """Identifiers and short strings of all sources, names of their files, and PyTorch's own names."""
    words = {*dir(torch), *dir(torch.Tensor)}
    for path in (*ROOT.rglob("*.py"), *ROOT.rglob("*.js")):
        words |= {path.stem, path.parent.name}
        if path.suffix == ".js":
            words |= set(re.findall(r"\w+", path.read_text()))
            continue
        words |= {part for name in identifiers(parsed(path)) for part in name.split(".")}
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Constant(value=str(text)) if len(text) < 40:
                    words |= set(re.findall(r"\w+", text))
                case ast.ImportFrom(module=str(name)):
                    words |= set(name.split("."))
    return frozenset(words)


def stale(text: str) -> set[str]:
    """Names in backticks that are nowhere in the package."""
    spans = (span for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text) if not FOREIGN.search(span))
    return {name for span in spans for name in re.findall(r"[A-Za-z_]\w+", span)} - words_of_the_package()


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_comment_names_what_is_there(path: Path) -> None:
    assert not {name for text in prose(path) for name in stale(text)}


def test_stale_names_are_found() -> None:
    assert stale("`score_base` has what all share, `KeyIntervals.intersect` too") == {"score_base"}


#: A name that a user can type: `regard.losses.qk_clip` in a warning, an error, an example or a page of the docs.
DOTTED = re.compile(r"(?<![\w./-])regard((?:\.[A-Za-z_]\w*)+)")
PAGES = [
    *sorted((PROJECT / "docs").rglob("*.md")),
    PROJECT / "README.md",
    PROJECT / "DESIGN.md",
    PROJECT / "CONTRIBUTING.md",
]


def unresolved(text: str) -> set[str]:
    """Dotted names of the package that nothing has."""
    return {name for name in DOTTED.findall(text) if not is_there(name.split(".")[1:])}


def is_there(parts: list[str]) -> bool:
    value, path = regard, "regard"
    for part in parts:
        path += f".{part}"
        if not hasattr(value, part):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(path)  # a module is an attribute of its package once it is imported
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("path", [*sorted(ROOT.rglob("*.py")), *PAGES], ids=lambda path: str(path.relative_to(PROJECT)))
def test_a_text_names_what_a_user_can_type(path: Path) -> None:
    assert not unresolved(path.read_text())


def test_names_that_moved_are_found() -> None:
    assert unresolved("regard.losses.qk_clip, run.regard, regard.recorder.qk_clip, regard.weights.x") == {
        ".recorder.qk_clip",
        ".weights.x",
    }


@pytest.mark.parametrize("bug", planted.BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_still_applies(bug: planted.Bug) -> None:
    source = (planted.PACKAGE / bug.file).read_text()
    assert source.count(bug.old) == 1, f"{bug.file} has moved on: {bug.old!r} must occur exactly once"
    ast.parse(source.replace(bug.old, bug.new))
    for tests in bug.tests:
        file, _ = planted.TESTS[tests]
        assert (planted.ROOT / "tests" / file).is_file(), f"{file} has moved on"
