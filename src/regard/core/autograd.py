"""One request, one forward, one backward.

The engines compute numbers; here those numbers become part of PyTorch's autograd. All that is asked of a
matrix at once is one node of the graph: its backward makes the weights once more and results for every output
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

from ..engines import Engine, get_engine, resolve
from ..engines.replay import is_constant, is_replayed_device, replay_or_record
from ..engines.score_grad import ScoreGrad
from .problem import Problem, repeat_kv, strides_like
from .pytree import flatten, split_ints, unflatten
from .scores import upcast
from .stats import GATHERED, NOT_DIFFERENTIATED, OPTIONAL_OUTPUTS, Request, Results, Tiling, required
from .torch_state import in_functorch, is_tracing, without_autocast

__all__ = ["compute_with_autograd"]

#: Answers that stand in their own gradients.
OWN_SHARE = ("y", "mass", "entropy", "mean_distance", "cells")


def compute_with_autograd(problem: Problem, request: Request, engine: Engine, cached: Results, live: bool) -> Results:
    """Every answer that the request names; `known` are numbers that need not be computed again.

    `live` says whether autograd is to know of it.
    """
    followed = is_tracing()
    if not live and not followed and not is_replayed_device(problem.q):
        return without_autocast(problem.q, lambda: compute(problem, request, engine, cached))
    spec, tensors = flatten((problem, request))
    if followed and is_constant(spec):
        spec, numbers = split_ints(spec)
        outputs = torch.ops.regard.ask(tensors, numbers, repr((spec, engine.name, STAMP)))
    elif not live:
        key, given = ("see", spec, engine.name, *cached), [*tensors, *cached.values()]
        return replay_or_record(key, given, lambda: compute(problem, request, engine, cached))
    else:
        _refuse_transforms()
        outputs = _EagerNode.apply(spec, engine, cached, *tensors)
    return dict(zip(request.names, outputs, strict=True))


def compute(problem: Problem, request: Request, engine: Engine, cached: Results) -> Results:
    """The numbers, without gradients."""
    missing = tuple(name for name in request.names if name not in cached)
    results = dict(cached)
    if missing:
        problem, request = problem.zero_invisible_keys(request)
        results |= engine.compute(problem, request, missing, cached)
    if "y" in missing and request.v is not None:
        results["y"] = results["y"].to(request.v.dtype)
    return {name: results[name] for name in (*request.names, *OPTIONAL_OUTPUTS) if name in results}


def vjp(
    problem: Problem, request: Request, engine: Engine, results: Results, flowing: Results, needs: list[bool]
) -> list[Tensor | None]:
    """Gradients of all tensors of (problem, request), in the order of `flatten`; None for those without."""
    clean, asked = problem.zero_invisible_keys(request)
    engine = resolve(engine, clean, asked)
    gradient = _score_grad(clean, asked, engine, results, flowing)
    _, tensors = flatten((problem, request))
    others = request.keys, request.rows, request.cols
    of_question = [x for x in (request.v, request.u, *others) if x is not None]
    count = len(tensors) - len(of_question)
    of_problem, dv, du = engine.backward(clean, asked, results["norm"], gradient, needs[:count])
    of_problem = list(of_problem)
    of_scores = [
        _gathered_grads(clean, results[index], flowing[score]) for score, index in GATHERED if score in flowing
    ]
    if "cells" in flowing:
        of_scores.append(_cell_gradients(clean, asked, results["cells"], flowing["cells"]))
    for gradients in of_scores:
        for n, g in enumerate(gradients):
            had = of_problem[n]
            of_problem[n] = g if had is None else had + g
    own = ((request.v, dv), (request.u, du), *((x, None) for x in others))
    found = [*of_problem, *(g for t, g in own if t is not None)]
    return [
        None if g is None or not t.is_floating_point() else g.to(t.dtype) for g, t in zip(found, tensors, strict=True)
    ]


def _gathered_grads(problem: Problem, index: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Of q, k and the score's tensors, which stand first among the problem's; from scores at a few keys a row."""
    cols = index.unsqueeze(-1) if index.ndim == 3 else index
    g = g.reshape(cols.shape).masked_fill(cols < 0, 0)
    return _score_gradients(problem, lambda bare: bare.picked_scores(cols.clamp(min=0)), g)


def _cell_gradients(problem: Problem, request: Request, cells: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The same, from scores at chosen rows and keys."""
    block, hidden = problem.block(required(request.rows), required(request.cols)), cells == -torch.inf
    # A key that none of the rows sees must not reach them as the nan of 0 · nan.
    seen = (~hidden).any(2).any(1)
    return _score_gradients(
        problem, lambda bare: bare.at(block).blanked(seen).bare_scores(block), g.masked_fill(hidden, 0)
    )


def _score_gradients(problem: Problem, scored: Callable[[Problem], Tensor], g: Tensor) -> tuple[Tensor, ...]:
    """What a gradient of some scores is for q, k and the score's tensors; `scored` makes them of a problem."""
    spec, tensors = flatten(dataclasses.replace(problem, mask=None, sink=None))

    def of_tensors(*parts: Tensor) -> Tensor:
        return scored(unflatten(spec, list(parts)))

    return torch.func.vjp(of_tensors, *map(upcast, tensors))[1](g)


def _score_grad(problem: Problem, request: Request, engine: Engine, results: Results, flowing: Results) -> ScoreGrad:
    """Write everything that is linear in W as one product left · right, the rest as a few numbers a row."""
    b, h, i, j = problem.shape
    # An engine that computes in narrow types takes the output's gradient as it came: a wide copy is slow.
    flowing = {name: g if engine.narrow and name == "y" else g.to(problem.compute_dtype) for name, g in flowing.items()}
    pairs, unfinished = [], []
    if (g := flowing.get("y")) is not None:
        c = engine.row_dot(g, results["y"])
        pairs.append((g, required(request.v) if engine.narrow else upcast(required(request.v))))
    else:
        c = problem.q.new_zeros(b, h, i, dtype=problem.compute_dtype)
    if (g := flowing.get("mass")) is not None:
        c = c + g * results["mass"]
        pairs.append((g.unsqueeze(-1), upcast(required(request.keys)).view(1, 1, j, 1)))
    if (g := flowing.get("z")) is not None:
        unfinished.append((upcast(required(request.u)), g))
    if (g := flowing.get("received")) is not None:
        unfinished.append((torch.ones_like(c).unsqueeze(-1), g.unsqueeze(-1)))
    if (g := flowing.get("pool")) is not None:
        unfinished.append(_pool_factors(g, required(request.tiling), i, j))
    if unfinished:
        # Their share along a row, Σ_j w (left · right), was not computed forward: W applied to `right` gives it.
        left, right = _concat_columns(unfinished, b, h)
        mixed = engine.compute(problem, Request(("y",), v=right), ("y",), {"norm": results["norm"]})["y"]
        c = c + (left * mixed).sum(-1)
    if (g := flowing.get("lse")) is not None:
        c = c - g
    if (g := flowing.get("norm")) is not None:
        # Whoever uses m and l uses them as m + log l: what flows into m is the gradient of lse.
        c = c - g[..., 0]
    if (eta := flowing.get("entropy")) is not None:
        c = c + eta * results["entropy"]
    if (rho := flowing.get("mean_distance")) is not None:
        c = c + rho * results["mean_distance"]
    left, right = (
        _concat_columns([*pairs, *unfinished], b, h)
        if pairs or unfinished
        else (torch.zeros_like(c).unsqueeze(-1), c.new_zeros(1, 1, j, 1))
    )
    return ScoreGrad(left, right, c, eta, rho, dy=flowing.get("y"), dz=flowing.get("z"))


def _concat_columns(pairs: list[tuple[Tensor, Tensor]], b: int, h: int) -> tuple[Tensor, Tensor]:
    if len(pairs) == 1:
        return pairs[0]
    left = torch.cat([l.expand(b, h, -1, -1) for l, _ in pairs], -1)
    return left, torch.cat([repeat_kv(r, h).expand(b, -1, -1, -1) for _, r in pairs], -1)


def _pool_factors(g: Tensor, tiling: Tiling, i: int, j: int) -> tuple[Tensor, Tensor]:
    """The gradient of a pooled map as a product: each row's tiles, times which tile a key is in."""
    b, h, _, cols = g.shape
    left, right = g.new_zeros(b, h, i, cols), g.new_zeros(1, 1, j, cols)
    inside_i = torch.arange(tiling.i0, tiling.i1, device=g.device)
    inside_j = torch.arange(tiling.j0, tiling.j1, device=g.device)
    left[:, :, inside_i] = g[:, :, tiling.row_of(inside_i)]
    right[:, :, inside_j, tiling.col_of(inside_j)] = 1
    return left, right


def _unflatten_request(spec: Any, tensors: list[Tensor], numbers: Sequence[int] = ()) -> tuple[Problem, Request]:
    """Problem and request, put together again."""
    return unflatten(spec, tensors, numbers)


def _output_names(spec: Any) -> tuple[str, ...]:
    """What the request names, in what `flatten` made of problem and request."""
    return spec[2][1][1:]  # ("tuple", problem, ("Question", ("tuple", *names), ...))


def _saved_for(results: Results, flowing: Results) -> Results:
    """Those results whose numbers the gradient of what flows takes."""
    picked = {index for score, index in GATHERED if score in flowing}
    return {n: x for n, x in results.items() if n == "norm" or n in picked or (n in OWN_SHARE and n in flowing)}


class _EagerNode(torch.autograd.Function):
    """The node of the graph in eager code."""

    @staticmethod
    def forward(ctx: Any, spec: Any, engine: Engine, cached: Results, *tensors: Tensor) -> tuple[Tensor, ...]:
        names, key, given = _output_names(spec), ("see", spec, engine.name, *cached), [*tensors, *cached.values()]
        results = replay_or_record(
            key, given, lambda: compute(*_unflatten_request(spec, list(tensors)), engine, cached)
        )
        # A remembered number must not become this node's output: it may be another node's too.
        outputs = tuple(results[n].detach() if n in cached else results[n] for n in names)
        ctx.spec, ctx.engine, ctx.names = spec, engine, names
        ctx.save_for_backward(*tensors, *outputs)
        ctx.mark_non_differentiable(*(results[n] for n in names if n in NOT_DIFFERENTIATED))
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
        results = _saved_for(dict(zip(ctx.names, outputs, strict=True)), flowing)
        needs = list(ctx.needs_input_grad[3:])

        def gradients() -> list[Tensor | None]:
            return vjp(*_unflatten_request(ctx.spec, tensors), ctx.engine, results, flowing, needs)

        key = ("pull back", ctx.spec, ctx.engine.name, *flowing, *needs)
        return None, None, None, *replay_or_record(key, [*tensors, *results.values(), *flowing.values()], gradients)


def _refuse_transforms() -> None:
    if in_functorch():
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
        return zlib.crc32(
            b"".join(Path(__file__).with_name(name).read_bytes() for name in ("autograd.py", "problem.py"))
        )
    except OSError:  # no file of its own
        return 0


#: Part of every request in a graph: PyTorch keeps compiled graphs on disk, and one of another version calls others.
STAMP = _stamp()


def _operator(schema: str, *keys: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        _OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in keys:
            _OPERATORS.impl(schema.split("(")[0], function, key)
        return function

    return define


@lru_cache(maxsize=1024)
def _parse_call(call: str) -> tuple[Any, str]:
    """The constants of a request and the name of an engine; a graph asks the same ones again and again."""
    return ast.literal_eval(call)[:2]


@_operator("see(Tensor[] tensors, SymInt[] numbers, str call) -> Tensor[]", "CompositeExplicitAutograd")
def _forward_op(tensors: list[Tensor], numbers: list[int], call: str) -> list[Tensor]:
    def answer() -> list[Tensor]:
        spec, engine = _parse_call(call)
        problem, request = _unflatten_request(spec, tensors, numbers)
        results = compute(problem, request, get_engine(engine), {})
        return [_to_layout(results[name], request.v if name == "y" else None) for name in _output_names(spec)]

    return replay_or_record(("see", call, *numbers), tensors, answer)


@torch.library.register_fake("regard::see", lib=_OPERATORS)
def _(tensors: list[Tensor], numbers: list[int], call: str) -> list[Tensor]:
    problem, request = _unflatten_request(_parse_call(call)[0], tensors, numbers)
    return [
        _empty_in_layout(required(request.v), shape, dtype) if name == "y" else problem.q.new_empty(shape, dtype=dtype)
        for name, (shape, dtype) in zip(request.names, _output_specs(problem, request), strict=True)
    ]


def _empty_in_layout(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Something new that lies as x does, if that has heads and positions."""
    if x.ndim == 4:
        return x.new_empty_strided(shape, strides_like(x, shape), dtype=dtype)
    return x.new_empty(shape, dtype=dtype)


def _to_layout(found: Tensor, x: Tensor | None) -> Tensor:
    """What an engine found, in the place that `_empty_in_layout` promised."""
    if x is None or x.ndim != 4:
        return found.contiguous()
    promised = zip(found.shape, found.stride(), strides_like(x, found.shape), strict=True)
    if all(n == 1 or has == wanted for n, has, wanted in promised):
        return found
    return _empty_in_layout(x, found.shape, found.dtype).copy_(found)


def _output_specs(problem: Problem, request: Request) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every answer."""
    b, h, i, j = problem.shape
    shapes: dict[str, tuple[int, ...]] = {
        "norm": (b, h, i, 2),
        "received": (b, h, j),
        "topk_scores": (b, h, i, request.topk),
        "topk_indices": (b, h, i, request.topk),
    }
    if request.v is not None:
        shapes["y"] = (b, h, i, request.v.shape[-1])
    if request.u is not None:
        shapes["z"] = (b, h, j, request.u.shape[-1])
    if request.rows is not None and request.cols is not None:
        shapes["cells"] = (b, h, request.rows.shape[0], request.cols.shape[0])
    if request.tiling is not None:
        shapes["pool"] = (b, h, request.tiling.rows, request.tiling.cols)
    types = {"argmax": torch.int64, "topk_indices": torch.int64}
    if request.v is not None:
        types["y"] = request.v.dtype
    return [(shapes.get(name, (b, h, i)), types.get(name, problem.compute_dtype)) for name in request.names]


@_operator(
    "pull_back(Tensor[] tensors, Tensor[] results, Tensor[] grads, SymInt[] numbers, str taken, str flowing, str call)"
    " -> Tensor[]",
    "CompositeExplicitAutograd",
)
def _backward_op(
    tensors: list[Tensor], results: list[Tensor], grads: list[Tensor], numbers: list[int], taken: str, flowing: str,
    call: str,
) -> list[Tensor]:  # fmt: skip
    def gradients() -> list[Tensor]:
        spec, engine = _parse_call(call)
        cached, flow = (dict(zip(n.split(), x, strict=True)) for n, x in ((taken, results), (flowing, grads)))
        needs = [t.is_floating_point() for t in tensors]
        whole = _unflatten_request(spec, tensors, numbers)
        found = zip(vjp(*whole, get_engine(engine), cached, flow, needs), tensors, strict=True)
        live = [(g, t) for g, t in found if t.is_floating_point()]
        return [_empty_in_layout(t, t.shape, t.dtype).zero_() if g is None else _to_layout(g, t) for g, t in live]

    return replay_or_record(("pull back", call, taken, flowing, *numbers), [*tensors, *results, *grads], gradients)


@torch.library.register_fake("regard::pull_back", lib=_OPERATORS)
def _(tensors: list[Tensor], *_: Any) -> list[Tensor]:
    return [_empty_in_layout(t, t.shape, t.dtype) for t in tensors if t.is_floating_point()]


@_operator("ask(Tensor[] tensors, SymInt[] numbers, str call) -> Tensor[]", "Autograd", "CompositeExplicitAutograd")
def _autograd_op(tensors: list[Tensor], numbers: list[int], call: str) -> list[Tensor]:
    """`compute_with_autograd` that autograd knows of. A compiled graph holds only what it calls."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_CompiledNode.apply(call, numbers, *tensors))
    return torch.ops.regard.see(tensors, numbers, call)


class _CompiledNode(torch.autograd.Function):
    """The node of the graph in compiled code."""

    @staticmethod
    def forward(ctx: Any, call: str, numbers: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = torch.ops.regard.see(tensors, numbers, call)
        ctx.call, ctx.numbers, ctx.count = call, numbers, len(tensors)
        ctx.set_materialize_grads(False)  # zeros for what nobody differentiates cost as much as real gradients
        ctx.save_for_backward(*tensors, *outputs)
        names = _output_names(_parse_call(call)[0])
        ctx.mark_non_differentiable(*(x for x, n in zip(outputs, names, strict=True) if n in NOT_DIFFERENTIATED))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        saved = ctx.saved_tensors
        tensors, outputs = list(saved[: ctx.count]), saved[ctx.count :]
        names = _output_names(_parse_call(ctx.call)[0])
        flowing = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
        if not flowing:
            return (None,) * (2 + ctx.count)
        taken = _saved_for(dict(zip(names, outputs, strict=True)), flowing)
        given = list(taken.values()), list(flowing.values()), ctx.numbers
        found = iter(torch.ops.regard.pull_back(tensors, *given, " ".join(taken), " ".join(flowing), ctx.call))
        return None, None, *(next(found) if t.is_floating_point() else None for t in tensors)
