"""Tricks are few and shown: every cache and every access to private names of PyTorch and Triton is in a table of DESIGN."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import regard

ROOT = Path(regard.__file__).parent
DESIGN = (Path(__file__).parent.parent / "DESIGN.md").read_text()
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


#: Empty dicts of modules that are filled at import and hold no results.
REGISTRIES = {"_MASK_FUNCTIONS", "_KINDS", "_NODES", "STORABLE", "_HEALTH", "forced"}


def module(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__")


def section(title: str) -> str:
    match = re.search(rf"^## {title}\n(.*?)(?=^## )", DESIGN, flags=re.S | re.M)
    assert match, f"DESIGN has no section {title!r}"
    return match[1]


def caches(tree: ast.AST, scope: tuple[str, ...] = ()) -> Iterator[str]:
    """Names of all caches: decorated functions, weak dictionaries, module dicts, entries of an object's `vars`."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = (*scope, node.name)
            names = {ast.unparse(d).split("(")[0].rpartition(".")[2] for d in node.decorator_list}
            if names & {"lru_cache", "cache", "cached_property"}:
                yield ".".join(inner)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            value = ast.unparse(node.value)
            if re.search(r"lru_cache\(|functools\.cache\(|Weak\w+Dictionary\(", value):
                yield ".".join((*scope, target))
            elif re.search(r"vars\(\w+\)\.setdefault\(", value):
                yield ".".join(scope)
            elif not scope and value == "{}" and target not in REGISTRIES:
                yield target
        yield from caches(node, inner)


def test_caches_are_found() -> None:
    source = """
@lru_cache(4)
def a(): ...
class B:
    @functools.cached_property
    def c(self): ...
    def d(self):
        x = vars(self).setdefault("x", {})
E: dict[str, int] = {}
f = functools.lru_cache(maxsize=8)(g)
h = weakref.WeakKeyDictionary()
"""
    assert list(caches(ast.parse(source))) == ["a", "B.c", "B.d", "E", "f", "h"]


@pytest.mark.parametrize("path", FILES, ids=module)
def test_every_cache_is_in_the_table(path: Path) -> None:
    table = section("Caches")
    for name in caches(parsed(path)):
        assert f"`{module(path)}.{name}`" in table, f"DESIGN's table of caches lacks `{module(path)}.{name}`"


def test_every_cache_of_the_table_exists() -> None:
    there = {f"{module(path)}.{name}" for path in FILES for name in caches(parsed(path))}
    rows = re.findall(r"`((?!tests/)[a-z_]+/[\w/]+\.[\w.]+)`", section("Caches"))
    assert rows
    by_hand = {"core/result_cache.ResultCache", "recorder/calls.MaskCache", "nn/positions.Rotary.table"}
    assert {name for name in rows if name not in there} <= by_hand
    for name in by_hand:
        file, _, rest = name.partition(".")
        assert rest.split(".")[-1] in (ROOT / f"{file}.py").read_text()


#: Modules of Triton that are no part of its language.
PRIVATE_TRITON = ("triton.backends", "triton.compiler", "triton.runtime")


def private_names(tree: ast.AST) -> set[str]:
    """Private names of PyTorch and internal modules of Triton that a file uses."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if re.match(r"torch\._(?!_)\w+", dotted) and "(" not in dotted:
                names.add(dotted)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith(("torch._", *PRIVATE_TRITON)):
                names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith(("torch._", *PRIVATE_TRITON))}
    return names


def test_private_names_are_found() -> None:
    for line in (
        "torch._C._x()",
        "from torch._dynamo import y",
        "from triton.runtime import driver",
        "import torch._C",
    ):
        assert private_names(ast.parse(line)), line
    assert not private_names(ast.parse("torch.__version__; torch.nn.functional; import triton"))


def test_private_names_are_used_only_where_the_table_says() -> None:
    used = {module(path) for path in FILES if private_names(parsed(path))}
    assert used == set(re.findall(r"^\| `([\w/]+)` \|", section("Private names"), flags=re.M))


def test_private_names_are_looked_up_when_they_are_used() -> None:
    """At import a private name is read by getattr with a default: a PyTorch without it still loads a recording."""
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            read = [inner for inner in ast.walk(node) if isinstance(inner, ast.Attribute | ast.ImportFrom | ast.Import)]
            names = {name for inner in read for name in private_names(ast.Module([ast.Expr(inner)], []))
                     if isinstance(inner, ast.Attribute)}  # fmt: skip
            assert names <= {"torch._C"}, f"{module(path)} reads {names} when it is imported"
            assert not private_names(ast.Module([node], [])) or isinstance(node, ast.Assign | ast.AnnAssign), module(
                path
            )


def test_without_private_names_a_file_is_still_loaded(tmp_path: Path) -> None:
    code = f"""
import torch, regard
x = torch.randn(2, 5, 8)
layer = regard.nn.SelfAttention(8, 2)
with regard.record(layer) as seen:
    layer(x)
seen.save({str(tmp_path / "a.regard")!r})
print(float(seen[0].entropy().sum()))
"""
    bare = f"""
import logging, sys, torch
logging.basicConfig(stream=sys.stdout)
for name in ("_get_dispatch_mode", "_TorchDispatchModeKey", "_current_graph_task_id", "_dispatch_key_parse"):
    delattr(torch._C, name)
del torch._C._functorch.peek_interpreter_stack
import regard
print(float(regard.load({str(tmp_path / "a.regard")!r})[0].entropy().sum()))
"""
    done = [subprocess.run([sys.executable, "-c", text], capture_output=True, text=True) for text in (code, bare)]
    assert [each.returncode for each in done] == [0, 0], done[-1].stderr
    assert done[0].stdout.splitlines()[-1] == done[1].stdout.splitlines()[-1]
    assert "WARNING:regard" in done[1].stdout
