"""One question, one forward, one backward.

The engines compute numbers; here those numbers become part of PyTorch's autograd. All that is asked of a
matrix at once is one node of the graph: its backward makes the weights once more and answers for every output
together, in linear memory. Eager code goes through `torch.autograd.Function`; inside `torch.compile` the same
two functions are the operators `regard::see` and `regard::pull_back`, with `regard::ask` for autograd.
Imports `engines` and what is below them.
"""

from __future__ import annotations

import ast
import dataclasses
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .again import again, constant, kept
from .around import exactly, in_graph, transformed
from .engines import Engine, named, serving
from .engines.gradient import Gradient
from .factors import Problem, lying_as, per_query_head
from .score import wide
from .statistics import AT_HAND, NOT_DIFFERENTIATED, PICKED, Answers, Question, Tiling, given
from .tree import flatten, numbered, rebuild

__all__ = ["see"]

#: Answers that stand in their own gradients.
OWN_SHARE = ("y", "mass", "entropy", "reach")


def see(problem: Problem, question: Question, engine: Engine, known: Answers, live: bool) -> Answers:
    """Every answer that the question names; `known` are numbers that need not be computed again.

    `live` says whether autograd is to know of it.
    """
    followed = in_graph()
    if not live and not followed and not kept(problem.q):
        return exactly(problem.q, lambda: compute(problem, question, engine, known))
    spec, tensors = flatten((problem, question))
    if followed and constant(spec):
        spec, numbers = numbered(spec)
        outputs = torch.ops.regard.ask(tensors, numbers, repr((spec, engine.name, STAMP)))
    elif not live:
        key, given = ("see", spec, engine.name, *known), [*tensors, *known.values()]
        return again(key, given, lambda: compute(problem, question, engine, known))
    else:
        _refuse_transforms()
        outputs = _See.apply(spec, engine, known, *tensors)
    return dict(zip(question.names, outputs, strict=True))


def compute(problem: Problem, question: Question, engine: Engine, known: Answers) -> Answers:
    """The numbers, without gradients."""
    missing = tuple(name for name in question.names if name not in known)
    answers = dict(known)
    if missing:
        problem, question = problem.blank_unseen(question)
        answers |= engine.compute(problem, question, missing, known)
    if "y" in missing and question.v is not None:
        answers["y"] = answers["y"].to(question.v.dtype)
    return {name: answers[name] for name in (*question.names, *AT_HAND) if name in answers}


def pull_back(
    problem: Problem, question: Question, engine: Engine, answers: Answers, flowing: Answers, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of all tensors of (problem, question), in the order of `flatten`; None for those without."""
    clean, asked = problem.blank_unseen(question)
    engine = serving(engine, clean, asked)
    gradient = _gradient(clean, asked, engine, answers, flowing)
    _, tensors = flatten((problem, question))
    of_question = [x for x in (question.v, question.u, question.keys) if x is not None]
    count = len(tensors) - len(of_question)
    of_problem, dv, du = engine.backward(clean, asked, answers["norm"], gradient, needs[:count])
    of_problem = list(of_problem)
    for score, index in PICKED:
        if score in flowing:
            for n, g in enumerate(_picked_gradients(clean, answers[index], flowing[score])):
                had = of_problem[n]
                of_problem[n] = g if had is None else had + g
    own = ((question.v, dv), (question.u, du), (question.keys, None))
    found = [*of_problem, *(g for t, g in own if t is not None)]
    return [
        None if g is None or not t.is_floating_point() else g.to(t.dtype) for g, t in zip(found, tensors, strict=True)
    ]


def _picked_gradients(problem: Problem, index: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Of q, k and the score's tensors, which stand first among the problem's; from scores at a few keys a row."""
    spec, tensors = flatten(dataclasses.replace(problem, mask=None, sink=None))
    cols = index.unsqueeze(-1) if index.ndim == 3 else index

    def picked(*parts: Tensor) -> Tensor:
        return rebuild(spec, list(parts)).picked_scores(cols.clamp(min=0))

    pull = torch.func.vjp(picked, *map(wide, tensors))[1]
    return pull(g.reshape(cols.shape).masked_fill(cols < 0, 0))


def _gradient(problem: Problem, question: Question, engine: Engine, answers: Answers, flowing: Answers) -> Gradient:
    """Write everything that is linear in W as one product left · right, the rest as a few numbers a row."""
    b, h, i, j = problem.shape
    # An engine that computes in narrow types takes the output's gradient as it came: a wide copy is slow.
    flowing = {name: g if engine.narrow and name == "y" else g.to(problem.wide) for name, g in flowing.items()}
    pairs, unfinished = [], []
    if (g := flowing.get("y")) is not None:
        c = engine.row_dot(g, answers["y"])
        pairs.append((g, given(question.v) if engine.narrow else wide(given(question.v))))
    else:
        c = problem.q.new_zeros(b, h, i, dtype=problem.wide)
    if (g := flowing.get("mass")) is not None:
        c = c + g * answers["mass"]
        pairs.append((g.unsqueeze(-1), wide(given(question.keys)).view(1, 1, j, 1)))
    if (g := flowing.get("z")) is not None:
        unfinished.append((wide(given(question.u)), g))
    if (g := flowing.get("received")) is not None:
        unfinished.append((torch.ones_like(c).unsqueeze(-1), g.unsqueeze(-1)))
    if (g := flowing.get("pool")) is not None:
        unfinished.append(_pool_factors(g, given(question.tiling), i, j))
    if unfinished:
        # Their share along a row, Σ_j w (left · right), was not computed forward: W applied to `right` gives it.
        left, right = _side_by_side(unfinished, b, h)
        mixed = engine.compute(problem, Question(("y",), v=right), ("y",), {"norm": answers["norm"]})["y"]
        c = c + (left * mixed).sum(-1)
    if (g := flowing.get("lse")) is not None:
        c = c - g
    if (g := flowing.get("norm")) is not None:
        # Whoever uses m and l uses them as m + log l: what flows into m is the gradient of lse.
        c = c - g[..., 0]
    if (eta := flowing.get("entropy")) is not None:
        c = c + eta * answers["entropy"]
    if (rho := flowing.get("reach")) is not None:
        c = c + rho * answers["reach"]
    left, right = (
        _side_by_side([*pairs, *unfinished], b, h)
        if pairs or unfinished
        else (torch.zeros_like(c).unsqueeze(-1), c.new_zeros(1, 1, j, 1))
    )
    return Gradient(left, right, c, eta, rho, dy=flowing.get("y"), dz=flowing.get("z"))


def _side_by_side(pairs: list[tuple[Tensor, Tensor]], b: int, h: int) -> tuple[Tensor, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    left = torch.cat([l.expand(b, h, -1, -1) for l, _ in pairs], -1)
    return left, torch.cat([per_query_head(r, h).expand(b, -1, -1, -1) for _, r in pairs], -1)


def _pool_factors(g: Tensor, tiling: Tiling, i: int, j: int) -> tuple[Tensor, Tensor]:
    """The gradient of a pooled map as a product: each row's tiles, times which tile a key is in."""
    b, h, _, cols = g.shape
    left, right = g.new_zeros(b, h, i, cols), g.new_zeros(1, 1, j, cols)
    inside_i = torch.arange(tiling.i0, tiling.i1, device=g.device)
    inside_j = torch.arange(tiling.j0, tiling.j1, device=g.device)
    left[:, :, inside_i] = g[:, :, tiling.row_of(inside_i)]
    right[:, :, inside_j, tiling.col_of(inside_j)] = 1
    return left, right


def _whole(spec: Any, tensors: list[Tensor], numbers: Sequence[int] = ()) -> tuple[Problem, Question]:
    """Problem and question, put together again."""
    return rebuild(spec, tensors, numbers)


def _names(spec: Any) -> tuple[str, ...]:
    """What the question names, in what `flatten` made of problem and question."""
    return spec[2][1][1:]  # ("tuple", problem, ("Question", ("tuple", *names), ...))


def _taken(answers: Answers, flowing: Answers) -> Answers:
    """Those answers whose numbers the gradient of what flows takes."""
    picked = {index for score, index in PICKED if score in flowing}
    return {n: x for n, x in answers.items() if n == "norm" or n in picked or (n in OWN_SHARE and n in flowing)}


class _See(torch.autograd.Function):
    """The node of the graph in eager code."""

    @staticmethod
    def forward(ctx: Any, spec: Any, engine: Engine, known: Answers, *tensors: Tensor) -> tuple[Tensor, ...]:
        names, key, given = _names(spec), ("see", spec, engine.name, *known), [*tensors, *known.values()]
        answers = again(key, given, lambda: compute(*_whole(spec, list(tensors)), engine, known))
        # A remembered number must not become this node's output: it may be another node's too.
        outputs = tuple(answers[n].detach() if n in known else answers[n] for n in names)
        ctx.spec, ctx.engine, ctx.names = spec, engine, names
        ctx.save_for_backward(*tensors, *outputs)
        ctx.mark_non_differentiable(*(answers[n] for n in names if n in NOT_DIFFERENTIATED))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        _refuse_second_derivative()
        saved = ctx.saved_tensors  # once: whoever packs what is saved may unpack it only once
        count = len(saved) - len(ctx.names)
        tensors, outputs = list(saved[:count]), saved[count:]
        flowing = {name: g for name, g in zip(ctx.names, grads, strict=True) if g is not None}
        if not flowing:
            return (None,) * (3 + count)
        answers = _taken(dict(zip(ctx.names, outputs, strict=True)), flowing)
        needs = list(ctx.needs_input_grad[3:])

        def gradients() -> list[Tensor | None]:
            return pull_back(*_whole(ctx.spec, tensors), ctx.engine, answers, flowing, needs)

        key = ("pull back", ctx.spec, ctx.engine.name, *flowing, *needs)
        return None, None, None, *again(key, [*tensors, *answers.values(), *flowing.values()], gradients)


def _refuse_transforms() -> None:
    if transformed():
        raise NotImplementedError(
            "torch.func differentiates what it can follow, and regard's engines compute beside it. "
            'engine="reference" is plain PyTorch, in quadratic memory; or take torch.autograd.grad.'
        )


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "regard computes first derivatives; a second one was asked for (create_graph=True). "
            'engine="reference" differentiates as often as you like, in quadratic memory.'
        )


# The same two functions as operators that torch.compile can put into a graph. They are defined by hand: the decorator
# `custom_op` takes a dozen Python calls more for each of theirs, in every layer of every step.

_OPERATORS = torch.library.Library("regard", "FRAGMENT")


def _stamp() -> int:
    try:
        return zlib.crc32(b"".join(Path(__file__).with_name(name).read_bytes() for name in ("see.py", "factors.py")))
    except OSError:  # no file of its own
        return 0


#: Part of every question in a graph: PyTorch keeps compiled graphs on disk, and one of another version calls others.
STAMP = _stamp()


def _operator(schema: str, *keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        _OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in keys:
            _OPERATORS.impl(schema.split("(")[0], function, key)
        return function

    return define


@lru_cache(maxsize=1024)
def _read(call: str) -> tuple[Any, str]:
    """The constants of a question and the name of an engine; a graph asks the same ones again and again."""
    return ast.literal_eval(call)[:2]


@_operator("see(Tensor[] tensors, SymInt[] numbers, str call) -> Tensor[]", "CompositeExplicitAutograd")
def _see_op(tensors: list[Tensor], numbers: list[int], call: str) -> list[Tensor]:
    def answer() -> list[Tensor]:
        spec, engine = _read(call)
        problem, question = _whole(spec, tensors, numbers)
        answers = compute(problem, question, named(engine), {})
        return [_lying(answers[name], question.v if name == "y" else None) for name in _names(spec)]

    return again(("see", call, *numbers), tensors, answer)


@torch.library.register_fake("regard::see", lib=_OPERATORS)
def _(tensors: list[Tensor], numbers: list[int], call: str) -> list[Tensor]:
    problem, question = _whole(_read(call)[0], tensors, numbers)
    return [
        _room(given(question.v), shape, dtype) if name == "y" else problem.q.new_empty(shape, dtype=dtype)
        for name, (shape, dtype) in zip(question.names, _forms(problem, question), strict=True)
    ]


def _room(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Something new that lies as x does, if that has heads and positions."""
    if x.ndim == 4:
        return x.new_empty_strided(shape, lying_as(x, shape), dtype=dtype)
    return x.new_empty(shape, dtype=dtype)


def _lying(found: Tensor, x: Tensor | None) -> Tensor:
    """What an engine found, in the place that `_room` promised."""
    if x is None or x.ndim != 4:
        return found.contiguous()
    promised = zip(found.shape, found.stride(), lying_as(x, found.shape), strict=True)
    if all(n == 1 or has == wanted for n, has, wanted in promised):
        return found
    return _room(x, found.shape, found.dtype).copy_(found)


def _forms(problem: Problem, question: Question) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every answer."""
    b, h, i, j = problem.shape
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (b, h, i, 2),
        "received": (b, h, j),
        "top_score": (b, h, i, question.top),
        "top_index": (b, h, i, question.top),
    }
    if question.v is not None:
        shapes["y"] = (b, h, i, question.v.shape[-1])
    if question.u is not None:
        shapes["z"] = (b, h, j, question.u.shape[-1])
    if question.tiling is not None:
        shapes["pool"] = (b, h, question.tiling.rows, question.tiling.cols)
    types = {"argmax": torch.int64, "top_index": torch.int64}
    if question.v is not None:
        types["y"] = question.v.dtype
    return [(shapes.get(name, (b, h, i)), types.get(name, problem.wide)) for name in question.names]


@_operator(
    "pull_back(Tensor[] tensors, Tensor[] answers, Tensor[] grads, SymInt[] numbers, str taken, str flowing, str call)"
    " -> Tensor[]",
    "CompositeExplicitAutograd",
)
def _pull_back_op(
    tensors: list[Tensor], answers: list[Tensor], grads: list[Tensor], numbers: list[int], taken: str, flowing: str,
    call: str,
) -> list[Tensor]:  # fmt: skip
    def gradients() -> list[Tensor]:
        spec, engine = _read(call)
        known, flow = (dict(zip(n.split(), x, strict=True)) for n, x in ((taken, answers), (flowing, grads)))
        needs = [t.is_floating_point() for t in tensors]
        whole = _whole(spec, tensors, numbers)
        found = zip(pull_back(*whole, named(engine), known, flow, needs), tensors, strict=True)
        live = [(g, t) for g, t in found if t.is_floating_point()]
        return [_room(t, t.shape, t.dtype).zero_() if g is None else _lying(g, t) for g, t in live]

    return again(("pull back", call, taken, flowing, *numbers), [*tensors, *answers, *grads], gradients)


@torch.library.register_fake("regard::pull_back", lib=_OPERATORS)
def _(tensors: list[Tensor], *_: Any) -> list[Tensor]:
    return [_room(t, t.shape, t.dtype) for t in tensors if t.is_floating_point()]


@_operator("ask(Tensor[] tensors, SymInt[] numbers, str call) -> Tensor[]", "Autograd", "CompositeExplicitAutograd")
def _ask_op(tensors: list[Tensor], numbers: list[int], call: str) -> list[Tensor]:
    """`see` that autograd knows of. A compiled graph holds only what it calls."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_Ask.apply(call, numbers, *tensors))
    return torch.ops.regard.see(tensors, numbers, call)


class _Ask(torch.autograd.Function):
    """The node of the graph in compiled code."""

    @staticmethod
    def forward(ctx: Any, call: str, numbers: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = torch.ops.regard.see(tensors, numbers, call)
        ctx.call, ctx.numbers, ctx.count = call, numbers, len(tensors)
        ctx.set_materialize_grads(False)  # zeros for what nobody differentiates cost as much as real gradients
        ctx.save_for_backward(*tensors, *outputs)
        names = _names(_read(call)[0])
        ctx.mark_non_differentiable(*(x for x, n in zip(outputs, names, strict=True) if n in NOT_DIFFERENTIATED))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        saved = ctx.saved_tensors
        tensors, outputs = list(saved[: ctx.count]), saved[ctx.count :]
        names = _names(_read(ctx.call)[0])
        flowing = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
        if not flowing:
            return (None,) * (2 + ctx.count)
        taken = _taken(dict(zip(names, outputs, strict=True)), flowing)
        given = list(taken.values()), list(flowing.values()), ctx.numbers
        found = iter(torch.ops.regard.pull_back(tensors, *given, " ".join(taken), " ".join(flowing), ctx.call))
        return None, None, *(next(found) if t.is_floating_point() else None for t in tensors)
