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
import torch

import regard
from regard.core import torch_state
from regard.distributed import transport
from regard.engines import numba, replay

ROOT = Path(regard.__file__).parent
DESIGN = (Path(__file__).parent.parent / "DESIGN.md").read_text()
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


#: Dicts of modules that are filled at import, and numberings: they hold no results.
REGISTRIES = {"_MASK_FUNCTIONS", "_KINDS", "_NODES", "STORABLE", "forced", "_numbers", "_sequence_numbers"}


def module(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__")


def section(title: str) -> str:
    match = re.search(rf"^## {title}\n(.*?)(?=^## )", DESIGN, flags=re.S | re.M)
    assert match, f"DESIGN has no section {title!r}"
    return match[1]


def caches(tree: ast.AST, scope: tuple[str, ...] = ()) -> Iterator[str]:
    """Names of all caches: decorated functions, weak or ordered dicts, dicts of modules, what objects remember."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = (*scope, node.name)
            names = {ast.unparse(d).split("(")[0].rpartition(".")[2] for d in node.decorator_list}
            if names & {"lru_cache", "cache", "cached_property"}:
                yield ".".join(inner)
            if isinstance(node, ast.FunctionDef):
                yield from (f"{scope[0]}.{name}" for name in remembered(node) if name not in REGISTRIES)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            value = ast.unparse(node.value)
            if re.search(r"lru_cache\(|functools\.cache\(|Weak\w+Dictionary\(", value):
                yield ".".join((*scope, target))
            elif re.search(r"vars\(\w+\)\.setdefault\(", value):
                yield ".".join(scope)
            elif not scope and value == "{}" and target not in REGISTRIES:
                yield target
            elif value == "OrderedDict()":
                yield f"{scope[0]}.{target.removeprefix('self.')}"
        yield from caches(node, inner)


def remembered(method: ast.FunctionDef) -> set[str]:
    """Attributes x of `if key not in self.x: self.x[key] = …` and `if self.x is not None: return self.x … self.x = …`."""
    text = ast.unparse(method)
    tables = set(re.findall(r"if .+ not in self\.(\w+):\n[\s\S]*self\.\1\[.+\] = ", text))
    return tables | set(re.findall(r"if self\.(\w+) is not None:\n\s+return self\.\1\n[\s\S]*self\.\1 = ", text))


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
class I:
    def __init__(self):
        self._j: OrderedDict[str, int] = OrderedDict()
    def k(self, key):
        if key not in self._l:
            first, second = key
            self._l[key] = compute(key)
    def m(self):
        if self._n is not None:
            return self._n
        self._n = compute()
        return self._n
    def o(self):
        if self.p is not None:
            return self.p
"""
    assert list(caches(ast.parse(source))) == ["a", "B.c", "B.d", "E", "f", "h", "I._j", "I._l", "I._n"]


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

#: Names that DESIGN allows everywhere: Python's own, and those that PyTorch's notes document in spite of their underscore.
ALLOWED = {
    "_asdict",
    "_replace",
    "_make",
    "_exit",
    "_getframe",
    "_SubParsersAction",
    "_version",
    "_base",
    "_python_dispatch",
}


def is_private(name: str) -> bool:
    return re.match(r"_(?!_)", name) is not None and name not in ALLOWED


@functools.cache
def own_names() -> set[str]:
    """All names that the package defines: functions, classes, variables, attributes, arguments and modules."""
    names = {path.stem for path in FILES}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return names


def private_names(tree: ast.AST) -> set[str]:
    """Private names of PyTorch and internal modules of Triton that a file uses, also by getattr and of any object."""
    names: set[str] = set()
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Call) else ""
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and (text.startswith("torch._") or node.attr not in own_names()):
                names.add(text)
        elif re.match(r"(get|has|set)attr\(", text) and len(node.args) > 1:
            name = ast.unparse(node.args[1]).lstrip("f").strip("'")
            if is_private(name) and name not in own_names():
                names.add(text)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            where = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for module in (f"{where}.{alias.name}".strip(".") for alias in node.names):
                first, *rest = module.split(".")
                if module.startswith(PRIVATE_TRITON) or (first == "torch" and any(map(is_private, rest))):
                    names.add(module)
    return names


def test_private_names_are_found() -> None:
    for line in (
        "torch._C._x()",
        "from torch._dynamo import y",
        "from torch import _ops",
        "from triton.runtime import driver",
        "import torch._C",
        "x._is_zerotensor()",
        "dist.distributed_c10d._get_process_group_store(group)",
        "getattr(forward_ad, '_current_level', -1)",
        "getattr(guards, f'_empty_strided_{device}')",
    ):
        assert private_names(ast.parse(line)), line
    public = "torch.__version__; torch.nn.functional; import triton; from .x import _y; row._replace(); self._version"
    assert not private_names(ast.parse(public))


def test_private_names_are_used_only_where_the_table_says() -> None:
    used = {module(path) for path in FILES if private_names(parsed(path))}
    assert used == set(re.findall(r"^\| `([\w/]+)` \|", section("Private names"), flags=re.M))


def test_private_names_are_looked_up_when_they_are_used() -> None:
    """At import a private name is read by getattr with a default: a PyTorch without it still loads a recording."""
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            names = {name for name in private_names(ast.Module([node], [])) if not re.match(r"(get|has)attr\(", name)}
            assert names <= {"torch._C"}, f"{module(path)} reads {names} when it is imported"


@pytest.mark.early
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


@pytest.mark.early
def test_without_private_names_attention_is_still_recorded() -> None:
    """FlexAttention's operator and the list of compiled code: each falls back with one log line."""
    code = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout)
import torch._dynamo.eval_frame
from torch._higher_order_ops import flex_attention
del torch._higher_order_ops.flex_attention, torch._dynamo.eval_frame._debug_get_cache_entry_list
import regard
layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 5, 8)
for _ in range(2):
    with regard.record(layer) as seen:
        _, w = layer(x, x, x, average_attn_weights=False)
    assert torch.allclose(seen[0].dense(), w, atol=1e-6)
    with regard.record(layer):
        pass  # a model that did not run is looked up among compiled code
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("flex_attention", "_debug_get_cache_entry_list"):
        assert len(re.findall(f"WARNING:regard:.*{name}", done.stdout)) == 1, done.stdout


def test_fallbacks_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Lookups behind a cache, here without it, in an installation that lacks what they look for."""
    caplog.set_level("INFO", "regard")
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_process_group_store", None)
    assert transport._store_getter.__wrapped__() is None
    assert replay._inductor_allocator.__wrapped__("abacus") is None
    monkeypatch.setattr(numba, "_hide_blas", False)
    monkeypatch.setattr(numba.ctypes, "CDLL", lambda path: object())
    assert numba.load.__wrapped__() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert numba.load.__wrapped__() is None
    lines = [(record.levelname, record.message.partition(":")[0]) for record in caplog.records]
    assert lines == [
        ("WARNING", "this PyTorch has no _get_process_group_store"),
        ("INFO", "this PyTorch has no _empty_strided_abacus"),
        ("INFO", "this PyTorch exports no sgemm_, dgemm_ and GOMP_parallel"),
        ("INFO", "numba is not installed"),
    ]


def test_a_renamed_level_of_forward_ad_does_not_stop_its_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch_state.in_forward_ad()
    monkeypatch.delattr(torch.autograd.forward_ad, "_current_level")
    assert torch_state.in_forward_ad()  # so that every call looks for tangents
