"""The recipes of CONTRIBUTING, followed: a toy score, mask, modifier, question and statistic in a copy of the package.

Each toy is a few edits of as many files as its recipe says. One process then uses all of them as users do: through every
engine that takes them, with gradients, in a layer, a recording and its file, and in `regard.walk`.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import regard

PACKAGE = Path(regard.__file__).parent
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"


class Edit(NamedTuple):
    """One step of a recipe: text that is added to a file, before or after a line of it."""

    file: str
    anchor: str
    text: str
    after: bool = False


PUBLIC_LISTS = (
    Edit("__init__.py", "__all__ = [", '"{name}", ', after=True),
    Edit("__init__.py", '        "{module}": (', '"{name}", ', after=True),
)


def public(name: str, module: str) -> list[Edit]:
    return [Edit(e.file, *(part.format(name=name, module=module) for part in e[1:3]), e.after) for e in PUBLIC_LISTS]


SCORE = [
    Edit("core/scores/kinds.py", "@register_node(storable=True)\nclass ScaledDot(Score):", '''@register_node(storable=True)
class Opposite(Score):
    """s = −q · k: the least alike weigh most."""

    formula = "−q·k"

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return -(q @ k.mT)

    def lower(self, q: Tensor, k: Tensor) -> Lowered:
        return Lowered(q, k, Product(-1.0), self.modifiers)


'''),
    *public("Opposite", "core.scores.kinds"),
]  # fmt: skip

MASK = [
    Edit("core/masks/kinds.py", "@register_node(storable=True)\nclass Window(Mask):", '''@register_node(storable=True)
class Prefix(Mask):
    n: int
    interval_source = "positions"
    is_one_interval = True

    def visible(self, block: MatrixBlock) -> Tensor:
        return block.j < self.n

    def intervals(self, geometry: Geometry) -> KeyIntervals:
        return geometry.interval(0, self.n)

    def crop(self, rows: slice, cols: slice) -> Mask:
        return Prefix(max(0, self.n - cols.start))

    def check_stored(self, shape: tuple[int, ...], offset: int) -> None:
        require(type(self.n) is int and 0 <= self.n <= shape[3], f"a prefix has {self.n!r:.80} keys")


@makes_mask("prefix(n)")
def prefix(n: int) -> Mask:
    """The first n keys."""
    return Prefix(n)


'''),
    *public("prefix", "core.masks.kinds"),
]  # fmt: skip

MODIFIER = [
    Edit("core/scores/modifiers.py", "@register_node(storable=True)\nclass Softcap(Modifier):", '''@register_node(storable=True)
class Square(Modifier):
    """s · |s|."""

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        return s * s.abs()

    def check_stored(self, shape: tuple[int, ...]) -> None:
        pass


'''),
    Edit("core/scores/base.py", "    def softcap(self, cap: float) -> Self:", '''    def square(self) -> Self:
        """s · |s|."""
        from .modifiers import Square

        return self._then(Square())

'''),
]  # fmt: skip

QUESTION = [
    Edit("core/rows/complete_rows.py", "@register_node\nclass DistanceBins(CompleteRowStatistic):", '''@register_node
class EffectiveKeys(CompleteRowStatistic):
    """1 / Σ_j w_ij², (b, h, i)."""

    name: ClassVar[str] = "effective_keys"

    def of_rows(self, strip: Strip, part: Part) -> Tensor:
        return 1 / strip.w.square().sum(-1)

    def of_dense(self, matrices: list[Tensor]) -> list[Tensor]:
        return [1 / matrices[0].square().sum(-1)]


'''),
    Edit("core/rows/questions.py", "from .complete_rows import ", "EffectiveKeys, ", after=True),
    Edit("core/rows/questions.py", "    def segment_mass(", '''    def effective_keys(self) -> Tensor:
        """The number of keys among which equal weights would have this sum of squares."""
        return self._ask_rows(EffectiveKeys())[0]

'''),
]  # fmt: skip

STATISTIC = [
    Edit("core/stats.py", '    "mass",\n', '    "mean_offset",\n'),
    Edit("core/stats.py", '        "mass": lambda: w @ required',
         '        "mean_offset": lambda: (w * offsets(w.shape[-2], w.shape[-1], offset, w)).sum(-1),\n'),
    Edit("core/stats.py", "def distance(rows: int", '''def offsets(rows: int, keys: int, offset: int, like: Tensor) -> Tensor:
    """j − i in positions, (i, j)."""
    i = torch.arange(rows, device=like.device)[:, None] + offset
    return (torch.arange(keys, device=like.device) - i).to(like.dtype)


'''),
    Edit("core/online_softmax.py", "    @staticmethod\n    def empty(", "    mean_offset: Tensor | None = None\n\n"),
    Edit("core/online_softmax.py", '            mass=zero if request.wants("mass")',
         '            mean_offset=zero if request.wants("mean_offset") else None,\n'),
    Edit("core/online_softmax.py", "            mass=mass,\n",
         '            mean_offset=(p * (block.j - block.i)).sum(-1) if request.wants("mean_offset") else None,\n'),
    Edit("core/online_softmax.py", "            mass=both(self.mass, other.mass),\n",
         "            mean_offset=both(self.mean_offset, other.mean_offset),\n"),
    Edit("core/online_softmax.py", '            "mass": None if total.mass',
         '            "mean_offset": None if total.mean_offset is None else total.mean_offset * share,\n'),
    Edit("core/autograd.py", 'IN_OWN_GRADIENT = (', '"mean_offset", ', after=True),
    Edit("core/autograd.py", '    if (g := grads.get("z")) is not None:', '''    if (g := grads.get("mean_offset")) is not None:
        delta = delta + g * results["mean_offset"]
        at = torch.arange(i, device=g.device, dtype=g.dtype) + problem.offset
        keys = torch.arange(j, device=g.device, dtype=g.dtype)
        pairs.append((torch.stack([g, -g * at], -1), torch.stack([keys, torch.ones_like(keys)], -1)[None, None]))
'''),
    Edit("core/results.py", 'Literal["lse",', ' "mean_offset",', after=True),
    Edit("core/results.py", "    mass: Tensor\n", "    mean_offset: Tensor\n"),
    Edit("core/weights.py", "    def mass(self, keys: KeysLike) -> Tensor:", '''    def mean_offset(self) -> Tensor:
        """The mean offset Σ_j w_ij (j − i) of every row."""
        return self.see("mean_offset").mean_offset

'''),
]  # fmt: skip

RECIPES = {
    "A score": SCORE, "A mask": MASK, "A modifier of scores": MODIFIER, "A question about complete rows": QUESTION,
    "A row statistic": STATISTIC,
}  # fmt: skip

USE = '''
import torch
import regard
from pathlib import Path

torch.manual_seed(0)
q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True) for n in (7, 7, 7))
at = torch.arange(7.0, dtype=torch.float64)
offsets = at - at[:, None]


def agree(of, *tensors, **arguments):
    """All engines and their gradients; returns the truth."""
    want = of(regard.weights(q, k, engine="reference", **arguments))
    wanted = torch.autograd.grad(want.square().sum(), tensors, retain_graph=True)
    for engine in ("auto", "blockwise"):
        have = of(regard.weights(q, k, engine=engine, **arguments))
        torch.testing.assert_close(have, want)
        torch.testing.assert_close(torch.autograd.grad(have.square().sum(), tensors), wanted)
    return want.detach()


def falls_back(of, **arguments):
    """In float32, where compiled tiles serve: they have no code for a toy, and leave it to plain ones."""
    have, want = (of(regard.weights(x, y, **arguments)) for x, y in ((q.detach().float(), k.detach().float()), (q, k)))
    torch.testing.assert_close(have.double(), want.detach(), rtol=1e-4, atol=1e-5)


def by_hand(s, keys=7):
    return s.masked_fill(torch.arange(7) >= keys, -torch.inf).softmax(-1)


s = (q @ k.mT).detach()
entropy = lambda W: W.entropy()
dense = lambda W: W.dense()
close = torch.testing.assert_close

# The score: by itself, step by step, in a layer and in a file.
close(agree(dense, q, k, score=regard.Opposite()), by_hand(-s))
agree(entropy, q, k, score=regard.Opposite().softcap(3.0))
walked = regard.walk(regard.weights(q[0, 0], score=regard.Opposite()), v[0, 0], 2)
assert walked.formula == "−q·k", walked.formula
layer = regard.nn.SelfAttention(6, 2, score=regard.Opposite()).double()
x = torch.randn(2, 7, 6, dtype=torch.float64)
with regard.record(layer) as seen:
    layer(x)
seen.save("recording.regard")
close(regard.load("recording.regard").layers[0].weights.dense(), layer.weights(x).dense())

# The mask: alone, combined, cut out of a longer sequence, and in a file.
close(agree(dense, q, k, mask=regard.prefix(3)), by_hand(s / 2, 3))
agree(entropy, q, k, mask=regard.prefix(3) | regard.window(1, 0))
agree(entropy, q, k, mask=~regard.prefix(3) & regard.causal())
print(regard.prefix(2).draw(2, 3))
with regard.record(layer) as seen:
    layer(x, mask=regard.prefix(3))
seen.save("recording.regard")
loaded = regard.load("recording.regard").layers[0].weights
close(loaded.dense(), layer.weights(x, mask=regard.prefix(3)).dense())

# The modifier: in its place among others.
close(agree(dense, q, k, score=regard.Dot().square()), by_hand(s * s.abs()))
falls_back(entropy, score=regard.Dot().square())
agree(entropy, q, k, score=regard.ScaledDot().square().softcap(2.0), mask=regard.causal())

# The question: of single heads and of heads together.
close(agree(lambda W: W.effective_keys(), q, k), 1 / by_hand(s / 2).square().sum(-1))
agree(lambda W: W.reduce_heads().effective_keys(), q, k, mask=regard.window(2, 1))

# The row statistic: with gradients, beside others.
close(agree(lambda W: W.mean_offset(), q, k), (by_hand(s / 2) * offsets).sum(-1))
agree(lambda W: W.see("mean_offset", "entropy", "received", topk=2).mean_offset, q, k, mask=regard.window(2, 1))
falls_back(lambda W: W.mean_offset())
agree(lambda W: W.mean_offset(), q, k, score=regard.Dot().sink(torch.zeros(3, dtype=torch.float64)))
print("all recipes work")
'''


def apply(edits: list[Edit], package: Path) -> set[str]:
    """Follow a recipe; returns the files it touched."""
    for edit in edits:
        path = package / edit.file
        source = path.read_text()
        assert source.count(edit.anchor) == 1, f"{edit.file} has moved on: {edit.anchor!r} must occur exactly once"
        replacement = edit.anchor + edit.text if edit.after else edit.text + edit.anchor
        path.write_text(source.replace(edit.anchor, replacement))
        ast.parse(path.read_text())
    return {edit.file for edit in edits}


def documented(recipe: str) -> tuple[int, int, str]:
    """Of a recipe of CONTRIBUTING: its numbers of files, without kernels and with them, and its text."""
    match = re.search(
        rf"^\*\*{recipe}\*\* \((\d+) files(?:, (\d+) with kernels)?\)(.*?)\n\n",
        CONTRIBUTING.read_text(),
        flags=re.M | re.S,
    )
    assert match, f"CONTRIBUTING has no recipe of {recipe!r} with its number of files"
    return int(match[1]), int(match[2] or match[1]), match[3]


def kernel_files(text: str) -> list[Path]:
    """The files that a recipe names for its kernels, each below the package or beside the one before it."""
    sentence = re.search(r"Kernels are a second step(.*?)\.\s", text, flags=re.S)
    files: list[Path] = []
    for name in re.findall(r"`([\w/]+\.py)`", sentence[1]) if sentence else ():
        folders = [PACKAGE, *(files[-1].parents if files else ())]
        files.append(next(folder / name for folder in folders if (folder / name).is_file()))
    return files


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_takes_as_many_files_as_it_says(recipe):
    plain, with_kernels, text = documented(recipe)
    assert len({edit.file for edit in RECIPES[recipe]}) == plain
    assert plain + len(set(kernel_files(text))) == with_kernels


@pytest.mark.parametrize(
    ("recipe", "example"), [("A modifier of scores", "alibi"), ("A row statistic", "mean_distance|mass|row_stats")]
)
def test_kernel_files_of_a_recipe_are_those_that_have_the_others(recipe, example):
    files = kernel_files(documented(recipe)[2])
    assert {file.parts[file.parts.index("engines") + 1] for file in files} == {"numba", "triton"}
    for file in files:
        assert re.search(example, file.read_text(), flags=re.I), f"{file.name} has no code for {example}"


def test_recipes_are_short():
    limits = {
        "A score": 2,
        "A mask": 2,
        "A modifier of scores": 6,
        "A question about complete rows": 2,
        "A row statistic": 10,
    }
    assert {recipe: documented(recipe)[1] <= limit for recipe, limit in limits.items()} == dict.fromkeys(limits, True)


@pytest.mark.early
def test_recipes_work(tmp_path):
    package = tmp_path / "regard"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for edits in RECIPES.values():
        apply(edits, package)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all recipes work\n")
