"""The law of rooms: imports point one way, as each room's docstring says, and `import regard` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import regard

ROOT = Path(regard.__file__).parent

#: Each room and the rooms it may import from. A room below never knows one above.
ARROWS: dict[str, set[str]] = {
    "names": set(),
    "tree": set(),
    "around": set(),
    "again": {"around"},
    "block": set(),
    "index": set(),
    "score": {"block", "tree"},
    "mask": {"again", "around", "block", "tree"},
    "lowered": {"around", "block", "mask", "tree"},
    "factors": {"around", "score", "lowered", "mask", "block", "tree"},
    "statistics": {"factors", "block", "tree"},
    "state": {"block", "factors", "statistics"},
    "engines": {"again", "around", "factors", "statistics", "state", "block", "mask", "score", "tree"},
    "see": {"again", "around", "engines", "factors", "score", "statistics", "tree"},
    "memory": {"around", "factors", "statistics", "tree"},
    "asking": {"index", "score", "statistics"},
    "matrix": {"around", "see", "asking", "memory", "engines", "factors", "index", "score", "statistics", "tree"},
    "door": {"around", "block", "matrix", "engines", "factors", "lowered", "mask", "score", "tree"},
    "recorder": {"door", "factors", "index", "mask", "matrix", "score", "tree"},
    "nn": {"door", "mask", "matrix", "score", "tree"},
    "learn": {"names", "nn", "recorder"},
    "look": {"block", "factors", "index", "learn", "mask", "matrix", "names", "recorder", "score", "tree"},
    "cli": {"look", "learn"},
    "__main__": {"cli"},
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The rooms of regard that a file imports from."""
    package = ["regard", *path.relative_to(ROOT).parts[:-1]]
    found: set[str] = set()
    for at in ast.walk(ast.parse(path.read_text())):
        if isinstance(at, ast.ImportFrom) and at.level:
            base = package[: len(package) - at.level + 1] + (at.module.split(".") if at.module else [])
            names = [[*base, alias.name] for alias in at.names] if len(base) == 1 else [base]
            found |= {parts[1] for parts in names if len(parts) > 1}
        elif isinstance(at, ast.ImportFrom) and at.module and at.module.split(".")[0] == "regard":
            found |= {at.module.split(".")[1]} if "." in at.module else {alias.name for alias in at.names}
        elif isinstance(at, ast.Import):
            found |= {alias.name.split(".")[1] for alias in at.names if alias.name.startswith("regard.")}
    return found


CORE = [path for path in sorted(ROOT.rglob("*.py")) if room_of(path) in ARROWS]


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_what_lies_below_it(path: Path) -> None:
    room = room_of(path)
    assert imports(path) - {room, "__version__"} <= ARROWS[room]


def test_the_arrows_run_one_way() -> None:
    above: set[str] = set()

    def climb(room: str, path: tuple[str, ...]) -> None:
        assert room not in path, f"{' ← '.join((*path, room))} is a circle"
        above.add(room)
        for below in ARROWS[room]:
            climb(below, (*path, room))

    for room in ARROWS:
        climb(room, ())
    assert above == set(ARROWS)


def test_every_room_has_its_arrows() -> None:
    assert {room_of(path) for path in ROOT.rglob("*.py")} - {"__init__"} == set(ARROWS)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.name} has no docstring"


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


def test_without_numba_only_speed_is_lost() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch, regard\n"
        "torch.manual_seed(0); q, k, v = (torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3))\n"
        "seen = regard.weights(q, k, mask=regard.causal()).see('entropy', 'received', top=3, values=v)\n"
        "want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
        "torch.testing.assert_close(seen.y, want)\n"
        "(seen.y.sum() + seen.entropy.sum()).backward()\n"
        "assert q.grad.isfinite().all()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_are_those_that_are_exported() -> None:
    public = {
        name for name in vars(regard) if not name.startswith("_") and not isinstance(vars(regard)[name], type(sys))
    }
    assert public - {"TYPE_CHECKING", "later"} <= set(regard.__all__) <= set(dir(regard))
    assert regard.__all__ == sorted(regard.__all__)
    for name in regard.__all__:
        assert getattr(regard, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atend'"):
        regard.atend  # noqa: B018
