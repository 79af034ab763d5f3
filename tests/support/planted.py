"""Planted bugs: each is a small patch to the library that the ordinary tests must catch.

    python tests/planted.py            all of them; exits with 1 if one survives
    python tests/planted.py pool sink  those whose names hold one of these words

Every patch is applied to a copy of the package, the tests named beside it run against the copy, and the copy is put
right again. First the same tests run with nothing planted: a test that fails anyway catches nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "regard"

#: What is run: the file, and which of its tests.
TESTS = {
    "merge": ("test_merge.py", ""),
    "statistics": ("test_statistics.py", "tiles and end and (scaled_dot or sink or bias) and not long_rows"),
    "ties": ("test_statistics.py", "equals"),
    "scores and sinks": ("test_statistics.py", "every_statistic and end and reference and (modifiers or alibi) and (causal or none)"),
    "identities": ("test_statistics.py", "not every_statistic"),
    "gradients": ("test_gradients.py", "tiles and every_answer and (scaled_dot or sink or alibi or additive) and (causal or padding or first)"),
    "memory of numbers": ("test_gradients.py", "remembered or two_calls or in_place or after_backward"),
    "masks": ("test_masks.py", ""),
    "scores": ("test_scores.py", ""),
    "indexing": ("test_indexing.py", ""),
    "edges": ("test_empty_and_infinite.py", "float64 and tiles"),
    "edges in float32": ("test_empty_and_infinite.py", "float32"),
    "belonging": ("test_belong.py", "whatever_way and (100 or 1000) and (sink or tensor)"),
    "belonging twice": ("test_belong.py", "whatever_way and compiled-bias-10"),
    "belonging to intervals": ("test_belong.py", "whatever_way and compiled-window"),
    "gradients of cells": ("test_belong.py", "gradients_of_cells and -1] and (scaled or tensor)"),
    "bound": ("test_bound.py", "within_its_bound and not 20000 and (0 or 5)"),
    "twofold rule": ("test_bound.py", "over_many_seeds"),
    "gradients in float32": ("test_bound.py", "three_times and dtype0"),
    "inputs": ("test_inputs.py", "not compiled and not forked and not spawned"),
    "errors": ("test_errors.py", ""),
    "again": ("test_again.py", ""),
    "layouts": ("test_inputs.py", "lies_as or lies_in_no_order"),
}  # fmt: skip


class Bug(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BUGS = [
    # state.py: the merge.
    Bug("merge forgets to rescale its own sum", "state.py", "m, a * self.l + b * other.l, t,", "m, self.l + b * other.l, t,", ("merge",)),
    Bug("merge shifts the entropy's sum the wrong way", "state.py", "t = a * (self.t + ours * self.l)", "t = a * (self.t - ours * self.l)", ("merge",)),
    Bug("merge pivots on −inf", "state.py", "return torch.where(old == -torch.inf, 0, old - new)", "return old - new", ("merge",)),
    Bug("a block pivots on −inf", "state.py", "return torch.where(m == -torch.inf, 0, m)", "return m", ("merge",)),
    Bug("ties go to the higher index", "state.py", "tie = (self.m == other.m) & _before(self.argmax, other.argmax)", "tie = (self.m == other.m) & _before(other.argmax, self.argmax)", ("merge",)),
    Bug("top merges by score alone", "state.py", "score, index = score.gather(-1, by_index), index.gather(-1, by_index)", "pass", ("merge",)),
    Bug("a sink is the maximum", "state.py", '"max_score": self.m,', '"max_score": whole.m,', ("merge",)),
    Bug("a row with no key divides by zero", "state.py", "share = torch.where(l == 0, 0, 1 / l)", "share = 1 / l", ("merge",)),
    Bug("lse in base 2", "statistics.py", "torch.where(empty, 1, l).log())", "torch.where(empty, 1, l).log2())", ("merge",)),
    Bug("−0.0 sorts below 0.0", "state.py", "bits = (s.detach() + 0.0).contiguous()", "bits = s.detach().contiguous()", ("ties",)),
    # statistics.py and the tiles of the pooled map.
    Bug("tiles begin one late", "statistics.py", "return ((position + 1) * tiles - 1) // max(n, 1)", "return (position * tiles) // max(n, 1)", ("identities",)),
    Bug("pooled map ignores where its part begins", "statistics.py", "return _tile_of(j - self.j0, self.cols, self.j1 - self.j0)", "return _tile_of(j, self.cols, self.j1)", ("identities",)),
    Bug("the reference counts a sink's share twice", "statistics.py", "entropy(w) + entropy(sink.unsqueeze(-1))", "entropy(w) + 2 * entropy(sink.unsqueeze(-1))", ("scores and sinks",)),
    # mask.py: intervals.
    Bug("causal hides the query itself", "mask.py", "return _around(layout, None, 0)", "return _around(layout, None, -1)", ("masks",)),
    Bug("a window ends one early", "mask.py", "return _around(layout, self.before, self.after)", "return _around(layout, self.before, self.after - 1)", ("masks",)),
    Bug("the complement forgets what is before the first interval", "mask.py", "torch.cat([edge, self.hi], 1)", "torch.cat([self.hi[:, :1], self.hi], 1)", ("masks",)),
    Bug("documents out of order are called exact", "mask.py", "exact = sure or bool((hi - lo == end - begin).all())", "exact = True", ("masks",)),
    Bug("what was found out outlives a change of its tensors", "lowered.py", "    if when != now:\n", "    if when is None:\n", ("masks",)),
    Bug("what was found out travels with a copy", "mask.py", "return {name: getattr(self, name) for name in self.parts}  # type: ignore[attr-defined]", "return {**vars(self)}", ("masks",)),
    Bug("a few rows take the keys of all for seen", "lowered.py", "return Intervals(lo, hi, spans.seen(self.keys)[:, None, None], self.keys)", "return Intervals(lo, hi, self.keys_seen, self.keys)", ("masks",)),
    Bug("either of two masks shows a query itself, so both do", "mask.py", "return self.left.sees_itself and self.right.sees_itself", "return True", ("masks",)),
    Bug("one of several intervals is taken for all", "lowered.py", "for r in range(lo.shape[-1])]", "for r in range(1)]", ("masks",)),
    Bug("the opposite of unsure intervals is taken", "mask.py", "return spans.complement(layout.keys) if spans.exact else layout.interval(0, layout.keys, exact=False)", "return spans.complement(layout.keys)", ("masks",)),
    Bug("align end counts from the wrong corner", "door.py", "        return j - i\n", "        return i - j\n", ("scores and sinks", "masks")),
    # score.py.
    Bug("scaled by d, not its root", "score.py", "return 1 / math.sqrt(max(operator.index(size), 1)) if self.scale is None else float(self.scale)", "return 1 / max(size, 1) if self.scale is None else float(self.scale)", ("scores",)),
    Bug("a Gaussian without its key's length", "score.py", "(Bias(row), Bias(key), *self.steps)", "(Bias(row), *self.steps)", ("scores",)),
    Bug("a soft cap that forgets to multiply back", "score.py", "return self.cap * torch.tanh(s / self.cap)", "return torch.tanh(s / self.cap)", ("scores",)),
    Bug("alibi signed", "score.py", "(block.i - block.j).abs()\n", "(block.i - block.j)\n", ("scores",)),
    Bug("modifiers in the opposite order", "score.py", "steps=(*self.steps, step))", "steps=(step, *self.steps))", ("scores",)),
    # factors.py.
    Bug("heads of a group in the wrong order", "factors.py", "return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)", "return x if x.shape[1] == heads else x.repeat(1, heads // x.shape[1], 1, 1)", ("inputs",)),
    Bug("a chosen head looks at the keys of another", "factors.py", "[head // per_key_head for head in chosen]", "[head % k.shape[-3] for head in chosen]", ("indexing",)),
    Bug("a narrowed problem forgets where it stands", "factors.py", "            offset=self.offset + start,\n", "            offset=self.offset,\n", ("indexing",)),
    Bug("poison in keys is let through", "factors.py", "k=blank(self.k, seen, -2), steps=steps)", "steps=steps)", ("edges",)),
    Bug("poison in values is let through", "factors.py", "v = None if request.v is None else blank(request.v, seen, -2)", "v = request.v", ("edges",)),
    # engines/blockwise.py and gradient.py: plain tiles.
    Bug("a tile at the edge counts as whole", "engines/blockwise.py", "full_from <= j and stop <= full_to", "full_from <= j", ("masks",)),
    Bug("the last tile of keys is not visited", "engines/blockwise.py", "for j in range(first, end, width):", "for j in range(first, end - 1, width):", ("masks",)),
    Bug("ranges that overlap are walked twice", "engines/blockwise.py", "if out and first <= out[-1][1]:", "if out and first < out[-1][0]:", ("masks",)),
    Bug("received keeps the last tile only", "engines/blockwise.py", 'total["received"][:, :, cols] += w.sum(2)', 'total["received"][:, :, cols] = w.sum(2)', ("statistics",)),
    Bug("a group's gradients are averaged", "engines/blockwise.py", "x.unflatten(1, (heads, -1)).sum(2)", "x.unflatten(1, (heads, -1)).mean(2)", ("gradients",)),
    Bug("the sink gets no gradient", "engines/blockwise.py", "total.sink.add_(gradient.of_sink(problem.sink, norm))", "pass", ("gradients",)),
    Bug("the gradient of the entropy lacks its log", "engines/gradient.py", "return inside - self.eta[:, :, rows, None] * log_w.clamp(min=-1e5)", "return inside - self.eta[:, :, rows, None]", ("gradients",)),
    Bug("weights made again pivot on −inf", "engines/gradient.py", "above = s - torch.where(m == -torch.inf, 0, m)", "above = s - m", ("edges",)),
    Bug("m and log l become one number", "engines/gradient.py", "w = above.exp() / l", "w = (s - (m + l.log())).exp()", ("edges",)),
    Bug("what is hidden is nan in a row that is nan", "engines/gradient.py", "return w if whole else w.masked_fill(s == -torch.inf, 0), above - l.log()", "return w, above - l.log()", ("edges",)),
    # A weight belongs to its row.
    Bug("cells: the norm comes from another product", "matrix.py", "answers = see(problem.narrow(run.start, run.stop), request, engine, {}, live)", 'answers = see(problem.narrow(run.start, run.stop), request, engine, {}, live) | {"norm": see(problem, Question(("norm",)), engine, {}, live)["norm"][:, :, run.start : run.stop]}', ("belonging",)),
    Bug("cells: whole rows are made with the norm of the tiles", "matrix.py", "w = exactly(problem.q, lambda: softmax(problem.scores(block), problem.sink)[0])", 'w = weights_and_logs(problem.scores(block), see(problem, Question(("norm",)), engines.named(self._engine), {}, False)["norm"][:, :, where(rows)], False)[0]', ("belonging",)),
    Bug("cells: whole rows leave the sink out", "matrix.py", "softmax(problem.scores(block), problem.sink)[0]", "softmax(problem.scores(block), None)[0]", ("belonging",)),
    Bug("cells: the remembered norm is that of other rows", "matrix.py", 'answers["norm"][:, :, asked.rows]', 'answers["norm"][:, :, : len(rows)]', ("belonging",)),
    Bug("cells: a row of −inf is nan in its gradient", "statistics.py", "p = every.masked_fill(hidden.all(-1, keepdim=True), 0).softmax(-1)", "p = every.softmax(-1)", ("edges",)),
    Bug("cells: hidden ones are nan in a row that is nan", "statistics.py", "p = every.softmax(-1).masked_fill_(hidden, 0)", "p = every.softmax(-1)", ("edges",)),
    Bug("cells: their scores get no gradient", "see.py", 'of_scores.append(_cell_gradients(clean, asked, answers["cells"], flowing["cells"]))', "pass", ("gradients of cells",)),
    Bug("cells: hidden ones get a gradient", "see.py", "bare_scores(block), g.masked_fill(hidden, 0)", "bare_scores(block), torch.ones_like(g)", ("gradients of cells",)),
    # see.py: the one backward.
    Bug("the gradient of lse has the wrong sign", "see.py", "c = c - g[..., 0]", "c = c + g[..., 0]", ("gradients",)),
    Bug("the gradient of the output lacks its row's share", "see.py", 'engine.row_dot(g, answers["y"])', 'engine.row_dot(g, answers["y"]) * 0', ("gradients",)),
    Bug("the gradient of received lacks its row's share", "see.py", "c = c + (left * mixed).sum(-1)", "c = c + 0", ("gradients",)),
    Bug("the gradient of the mean distance lacks its row's share", "see.py", 'c = c + rho * answers["mean_distance"]', "c = c + 0", ("gradients",)),
    # memory.py and index.py.
    Bug("a change of a factor is not noticed", "memory.py", "or self._versions != _versions(factors):", "or False:", ("memory of numbers",)),
    Bug("an answer changed in place is handed out again", "memory.py", "if number is not None and number._version == version:", "if number is not None:", ("memory of numbers",)),
    Bug("a number of inference mode is remembered", "memory.py", "is not None and not value.is_inference():", "is not None:", ("memory of numbers",)),
    Bug("the largest are remembered whatever their number", "memory.py", "return name, request.top", "return name", ("ties",)),
    Bug("a pooled map is remembered whatever its tiles", "memory.py", "return name, *vars(request.tiling).values()", "return name", ("memory of numbers",)),
    Bug("a word that occurs twice is its first", "index.py", "            if len(places) > 1:\n", "            if len(places) > 99:\n", ("errors",)),
    Bug("negative numbers count from the wrong end", "index.py", "return n % size if size else n", "return abs(n) % size if size else n", ("indexing",)),
    # What lies where, in a graph and outside it.
    Bug("layouts: the stride of a single head counts", "factors.py", "if several and x.stride(1) <", "if x.stride(1) <", ("layouts",)),
    Bug("layouts: an operator returns another one than its fake", "see.py", "return _room(x, found.shape, found.dtype).copy_(found)", "return found", ("layouts",)),
    # again.py: answers that are done again.
    Bug("again: done on tensors of another form", "again.py", "whole = (key, shared, *forms)", "whole = (key, shared)", ("again",)),
    Bug("again: nobody asks which tensors are one", "again.py", "shared = None if len({*at}) == len(at) else tuple(map(at.index, at))", "shared = None", ("again",)),
    Bug("again: a part is taken for the tensor that lies there", "again.py", "elif of is None or self._place_in(x, of) != self.places[known]:", "elif False:", ("again",)),
    Bug("again: a view begins where its tensor does", "again.py", "at[place[0]] + place[1]", "at[place[0]]", ("again",)),
    Bug("again: what is still needed is dropped", "again.py", "sorted(step.used - needed)", "sorted(step.used)", ("again",)),
    Bug("again: a number that was read back is taken for constant", "again.py", "if -1 in reads or not stays or", "if", ("again",)),
    Bug("again: new room lies in another order", "again.py", "partial(make, tuple(out.shape), out.stride(), out.dtype)", "partial(torch.empty, tuple(out.shape), dtype=out.dtype)", ("again",)),
    Bug("again: users' functions are done again", "again.py", "if known is None and constant(key):", "if known is None:", ("again",)),
    # engines/cpu: compiled tiles.
    Bug("compiled: a new maximum does not shrink the sum", "engines/cpu/forward.py", "    l[r] *= alpha\n", "    pass\n", ("bound",)),
    Bug("compiled: a new maximum does not shift the entropy", "engines/cpu/forward.py", "t[r] = alpha * (t[r] + shift * l[r])", "t[r] = alpha * t[r]", ("bound",)),
    Bug("compiled: a new maximum does not shrink the output", "engines/cpu/forward.py", "scaled(carray(floats_at(T.y + 4 * out * T.E), T.E), T.E, alpha)", "pass", ("bound",)),
    Bug("compiled: the tile to the left leaks into the output", "engines/cpu/forward.py", "                zeroed(row, 0, a)\n", "                pass\n", ("bound",)),
    Bug("compiled: the tile to the right leaks into the output", "engines/cpu/forward.py", "                zeroed(row, z, cols)\n", "                pass\n", ("bound",)),
    Bug("compiled: the sink is left out of the entropy", "engines/cpu/forward.py", "+ one * theirs", "", ("bound",)),
    Bug("compiled: values of the wrong head", "engines/cpu/forward.py", "h * T.V // T.H * T.v_h", "h % T.V * T.v_h", ("bound",)),
    Bug("compiled: sums of columns are not put back to zero", "engines/cpu/reread.py", "    zeroed(column, 0, cols)\n", "    pass\n", ("bound",)),
    Bug("compiled: pooled rows begin one late", "engines/cpu/reread.py", "return ((i - T.i0 + 1) * T.tile_rows - 1) // (T.i1 - T.i0)", "return (i - T.i0) * T.tile_rows // (T.i1 - T.i0)", ("bound",)),
    Bug("compiled: distance without its sign taken off", "engines/cpu/rows.py", "total += p[j] * f32(abs(i32(behind) - i32(j)))", "total += p[j] * f32(i32(behind) - i32(j))", ("bound",)),
    Bug("compiled: an equal score goes before", "engines/cpu/rows.py", "    if not x > score[n - 1]:\n", "    if not x >= score[n - 1]:\n", ("ties",)),
    Bug("compiled: a row that is chosen twice is modified twice", "engines/cpu/cells.py", "T.step_count > 0 and i != last:", "T.step_count > 0:", ("belonging twice",)),
    Bug("compiled: a cell beyond its row's interval is shown", "engines/cpu/cells.py", "if a <= col_at[c] - j0 < z:", "if col_at[c] - j0 < z:", ("belonging to intervals",)),
    Bug("compiled: cells in the order of their keys", "engines/cpu/cells.py", "found[col_place[c]] = row", "found[c] = row", ("belonging",)),
    Bug("compiled: exp is a digit short", "engines/cpu/words.py", "p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5", "p = (((_E2) * r + _E3) * r + _E4) * r + _E5", ("bound",)),
    Bug("compiled: the gradient forgets the slope of a cap", "engines/cpu/backward.py", "        times(d, n, slope)\n", "        pass\n", ("gradients in float32",)),
    Bug("compiled: keys outside an interval get gradients", "engines/cpu/backward.py", "                    zeroed(row, z, cols)\n", "                    pass\n", ("gradients in float32",)),
    Bug("compiled: the gradient of the mean distance is lost", "engines/cpu/backward.py", "    if T.rho != 0:\n", "    if T.rho != 0 and T.rho == 0:\n", ("gradients in float32",)),
]  # fmt: skip


def run(copy: Path, tests: str) -> tuple[bool, float]:
    """Whether these tests pass against the copy, and how long that took."""
    file, chosen = TESTS[tests]
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(ROOT / "tests" / file),
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
    ]
    done = subprocess.run(
        [*command, *(["-k", chosen] if chosen else [])], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(copy.parent), "NUMBA_CACHE_DIR": str(copy.parent / "cache")},
    )  # fmt: skip
    # 1 is a failed test, 2 an error while a file was read; all else is no verdict.
    assert done.returncode in (0, 1, 2), f"{tests}: {done.stdout}\n{done.stderr}"
    return done.returncode == 0, time.monotonic() - began


def plant(copy: Path, bug: Bug, sound: list[str]) -> bool:
    """Whether the bug is caught by tests that pass without it."""
    path, clean = copy / bug.file, copy.parent / "clean" / bug.file
    path.write_text(clean.read_text().replace(bug.old, bug.new, 1))
    try:
        return any(not run(copy, tests)[0] for tests in sound)
    finally:
        shutil.copy2(clean, path)


def main(words: list[str]) -> int:
    bugs = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    survived, broken = [], []
    moved = [f"{bug.name} ({bug.file})" for bug in bugs if bug.old not in (PACKAGE / bug.file).read_text()]
    assert not moved, f"the code has moved on, and so must these patches: {', '.join(moved)}"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "regard"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(copy, Path(folder) / "clean")  # what is worked on meanwhile does not matter
        for tests in dict.fromkeys(tests for bug in bugs for tests in bug.tests):
            passed, seconds = run(copy, tests)
            print(f"{'passes' if passed else 'FAILS':9} {seconds:5.1f} s  nothing planted: {tests}", flush=True)
            broken += [] if passed else [tests]
        for bug in bugs:
            began = time.monotonic()
            sound = [tests for tests in bug.tests if tests not in broken]
            caught = plant(copy, bug, sound)
            verdict = "caught" if caught else "SURVIVED" if sound else "NO TEST"
            print(f"{verdict:9} {time.monotonic() - began:5.1f} s  {bug.file}: {bug.name}", flush=True)
            survived += [] if caught else [bug]
    print(f"{len(bugs) - len(survived)} of {len(bugs)} planted bugs caught")
    return 1 if survived or broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
