"""One request, one forward, one backward: the engines' results as a node of PyTorch's autograd graph.

All statistics of a request are one node. Its backward recomputes the weights once and returns the gradients of every
output together, in linear memory. Eager code goes through `torch.autograd.Function`; inside `torch.compile` the same
two functions are the operators `regard::attention` and `regard::attention_backward`, and
`regard::attention_autograd` connects them to autograd.
"""

from __future__ import annotations

import ast
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..engines import Engine, FusedEngine, fused_engine, get_engine, resolve
from ..engines.replay import is_constant, is_replayed_device, replay_or_record
from ..engines.score_grad import InputGrads, ScoreGrad
from .distance_grads import distances_cancel, in_float64
from .problem import Problem, repeat_kv, strides_like
from .pytree import flatten, replace_fields, split_ints, unflatten
from .scores.kinds import upcast
from .stats import (
    FREE_OUTPUTS,
    GATHERED,
    NOT_DIFFERENTIATED,
    OPTIONAL_OUTPUTS,
    Request,
    Results,
    Tiling,
    lse_of,
    required,
)
from .tensor_kinds import materialized, refuse_transforms
from .torch_state import in_functorch, is_tracing, without_autocast

__all__ = ["cell_grads", "compute_with_autograd", "gathered_grads"]

#: Results that occur in their own gradients.
IN_OWN_GRADIENT = ("y", "mass", "entropy", "mean_distance", "cells")


def compute_with_autograd(
    problem: Any, request: Request, engine: Engine, cached: Results, requires_grad: bool, remember: bool = False
) -> Results:
    """Every result that the request names.

    Args:
        problem: The attention matrix, as the engine prepared it.
        request: Names of the results, and the tensors they need.
        engine: Who computes.
        cached: Results that need not be computed again, detached.
        requires_grad: Whether the results become outputs of an autograd node.
        remember: Whether to return, detached and beside the named results, what the pass has for nothing; eager only.
    """
    if engine.plain:
        return engine.compute(problem, request, request.names, cached)
    engine = fused_engine(engine)
    tracing = is_tracing()
    if not tracing:
        refuse_transforms((problem, request))
        problem = problem.with_lowered_mask()
    if not requires_grad and not tracing and not is_replayed_device(problem.q):
        return without_autocast(problem.q, lambda: compute(problem, request, engine, cached, remember))
    spec, tensors = flatten((problem, request))
    if tracing and is_constant(spec):
        spec, ints = split_ints(spec)
        outputs = torch.ops.regard.attention_autograd(tensors, ints, repr((spec, engine.name, STAMP)))
    elif not requires_grad:
        key, inputs = ("forward", spec, engine.name, remember, *cached), [*tensors, *cached.values()]
        return replay_or_record(key, inputs, lambda: compute(problem, request, engine, cached, remember))
    else:
        _refuse_functorch()
        free: Results | None = {} if remember else None
        outputs = _EagerNode.apply(spec, engine, cached, free, *tensors)
        return {**(free or {}), **dict(zip(request.names, outputs, strict=True))}
    return dict(zip(request.names, outputs, strict=True))


def compute(
    problem: Problem, request: Request, engine: FusedEngine, cached: Results, remember: bool = False
) -> Results:
    """The results, without gradients; with `remember` also the engine's free outputs, if this is the first pass."""
    results, free = dict(cached), tuple[str, ...]()
    if "norm" in cached and "lse" in request.names and "lse" not in cached:
        results["lse"] = lse_of(cached["norm"])
    missing = tuple(name for name in request.names if name not in results)
    if missing:
        problem, request = problem.zero_invisible_keys(request)
        if remember and "norm" not in cached:  # a pass that is not the first computes nothing twice
            free = tuple(name for name in engine.free_outputs(problem, request) if name not in missing)
        results |= engine.compute(problem, request, (*missing, *free), cached)
    if "y" in missing and request.v is not None:
        results["y"] = results["y"].to(request.v.dtype)
    return {name: results[name] for name in (*request.names, *OPTIONAL_OUTPUTS, *free) if name in results}


def vjp(
    problem: Problem,
    request: Request,
    engine: FusedEngine,
    results: Results,
    grad_outputs: Results,
    needs_input_grad: list[bool],
) -> list[Tensor | None]:
    """Gradients of all tensors of (problem, request), in the order of `flatten`; None for those without."""
    visible, visible_request = problem.zero_invisible_keys(request)
    engine = resolve(engine, visible, visible_request)
    _, tensors = flatten((problem, request))
    indices = request.keys, request.rows, request.cols
    count = len(tensors) - sum(x is not None for x in (request.v, request.u, *indices))
    gradients = in_float64(_gradients) if distances_cancel(visible, engine) else _gradients
    grads, dv, du = gradients(visible, visible_request, engine, results, grad_outputs, needs_input_grad[:count])
    of_request = ((request.v, dv), (request.u, du), *((x, None) for x in indices))
    grads += [g for t, g in of_request if t is not None]
    return [
        None if g is None or not t.is_floating_point() else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)
    ]


def _gradients(
    problem: Problem, request: Request, engine: FusedEngine, results: Results, grad_outputs: Results, needs: list[bool]
) -> InputGrads:
    """Gradients of the problem's tensors in their order, of v and of u, from those of all results."""
    gradient = _score_grad(problem, request, engine, results, grad_outputs)
    grads, dv, du = engine.backward(problem, request, results["norm"], gradient, needs)
    grads = list(grads)
    more = [
        gathered_grads(problem, _indices(problem, engine, results, index), grad_outputs[score])
        for score, index in GATHERED
        if score in grad_outputs
    ]
    if "cells" in grad_outputs:
        more.append(cell_grads(problem, request, results["cells"], grad_outputs["cells"]))
    for addends in more:
        for n, addend in enumerate(addends):
            total = grads[n]
            grads[n] = addend if total is None else total if addend is None else total + addend
    return InputGrads(grads, dv, du)


def _indices(problem: Problem, engine: FusedEngine, results: Results, name: str) -> Tensor:
    """Positions of the scores whose gradient arrived.

    The forward pass of a maximum omits them: they take 5 % of a pass on a CPU, and are seldom needed.
    """
    if (index := results.get(name)) is None:
        index = engine.compute(problem, Request((name,)), (name,), {})[name]
    return index


def gathered_grads(problem: Problem, index: Tensor, g: Tensor) -> list[Tensor | None]:
    """Gradients of q, k and the modifiers' tensors, the first of the problem's, from scores at a few keys a row."""
    cols = index.unsqueeze(-1) if index.ndim == 3 else index
    g = g.reshape(cols.shape).masked_fill(cols < 0, 0)
    return _grads_of_scores(problem, lambda unmasked: unmasked.picked_scores(cols.clamp(min=0)), g)


def cell_grads(problem: Problem, request: Request, cells: Tensor, g: Tensor) -> list[Tensor | None]:
    """The same, from scores at chosen rows and keys."""
    block, hidden = problem.block(required(request.rows), required(request.cols)), cells == -torch.inf
    # A key that none of the rows sees must not reach them as the nan of 0 · nan.
    visible = (~hidden).any(2)
    return _grads_of_scores(
        problem, lambda unmasked: unmasked.at(block).blanked(visible).bare_scores(block), g.masked_fill(hidden, 0)
    )


def _grads_of_scores(problem: Problem, scores: Callable[[Problem], Tensor], g: Tensor) -> list[Tensor | None]:
    """Gradients of q, k and the modifiers' tensors, from the gradient g of `scores(problem)`."""
    exact = problem.in_float64() if problem.distances_cancel else problem
    spec, tensors = flatten(replace_fields(exact, mask=None, sink=None))
    _, pull_back = torch.func.vjp(lambda *parts: scores(unflatten(spec, list(parts))), *map(upcast, tensors))[:2]
    grads = pull_back(g.to(exact.compute_dtype))
    return list(grads) if exact is problem else exact.with_own_grads(grads, problem.compute_dtype)


def _score_grad(
    problem: Problem, request: Request, engine: FusedEngine, results: Results, grad_outputs: Results
) -> ScoreGrad:
    """All terms that are linear in W as one product left · right, the rest as a few numbers a row."""
    b, h, i, j = problem.shape
    # An engine that computes in 16 bits takes y's gradient as it is: a float32 copy is slow.
    grads = {
        n: g if engine.keeps_grad_dtype and n == "y" else g.to(problem.compute_dtype) for n, g in grad_outputs.items()
    }
    pairs, without_row_term = [], []
    if (g := grads.get("y")) is not None:
        delta = engine.row_dot(g, results["y"])
        pairs.append((g, required(request.v) if engine.keeps_grad_dtype else upcast(required(request.v))))
    else:
        delta = problem.q.new_zeros(b, h, i, dtype=problem.compute_dtype)
    if (g := grads.get("mass")) is not None:
        delta = delta + g * results["mass"]
        pairs.append((g.unsqueeze(-1), upcast(required(request.keys)).view(1, 1, j, 1)))
    if (g := grads.get("z")) is not None:
        without_row_term.append((upcast(required(request.u)), g))
    if (g := grads.get("received")) is not None:
        without_row_term.append((torch.ones_like(delta).unsqueeze(-1), g.unsqueeze(-1)))
    if (g := grads.get("pool")) is not None:
        without_row_term.append(_pool_factors(g, required(request.tiling), i, j))
    if without_row_term:
        # Their row term Σ_j w (left · right) was not computed in forward: it is left · (W right).
        left, right = _concat_columns(without_row_term, b, h)
        mixed = engine.compute(problem, Request(("y",), v=right), ("y",), {"norm": results["norm"]})["y"]
        delta = delta + (left * mixed).sum(-1)
    if (g := grads.get("lse")) is not None:
        delta = delta - g
    if (g := grads.get("norm")) is not None:
        # m and l are only used as lse = m + log l, so ∂/∂m is the gradient of lse.
        delta = delta - g[..., 0]
    if (d_entropy := grads.get("entropy")) is not None:
        delta = delta + d_entropy * results["entropy"]
    if (d_distance := grads.get("mean_distance")) is not None:
        delta = delta + d_distance * results["mean_distance"]
    left, right = (
        _concat_columns([*pairs, *without_row_term], b, h)
        if pairs or without_row_term
        else (torch.zeros_like(delta).unsqueeze(-1), delta.new_zeros(1, 1, j, 1))
    )
    return ScoreGrad(left, right, delta, d_entropy, d_distance, dy=grads.get("y"), dz=grads.get("z"))


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


def _unflatten_request(spec: Any, tensors: list[Tensor], ints: Sequence[int] = ()) -> tuple[Problem, Request]:
    return unflatten(spec, tensors, ints)


def _output_names(spec: Any) -> tuple[str, ...]:
    """`Request.names`, from the spec that `flatten` returned for (problem, request)."""
    return spec[2][1][1:]  # ("tuple", problem, ("Request", ("tuple", *names), ...))


def _needed_in_backward(results: Results, grad_outputs: Results) -> Results:
    """Those results whose values the backward reads."""
    gathered = {index for score, index in GATHERED if score in grad_outputs}
    return {
        n: x for n, x in results.items() if n == "norm" or n in gathered or (n in IN_OWN_GRADIENT and n in grad_outputs)
    }


#: Gradients of the saved inputs, from those inputs, the results that backward reads, and the outputs' gradients.
_NodeBackward = Callable[[list[Tensor], Results, Results], Sequence[Tensor | None]]


def _save(ctx: Any, names: tuple[str, ...], tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """The state that the forward of both nodes saves for `_backward`."""
    ctx.names = names
    ctx.save_for_backward(*tensors, *outputs)
    ctx.mark_non_differentiable(*(x for x, n in zip(outputs, names, strict=True) if n in NOT_DIFFERENTIATED))
    ctx.set_materialize_grads(False)  # zeros for outputs without a gradient cost as much as real gradients


def _backward(ctx: Any, grads: Sequence[Tensor | None], input_grads: _NodeBackward) -> Sequence[Tensor | None]:
    """The backward of both nodes."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "regard computes first derivatives; got create_graph=True, which asks for a second one. "
            'engine="reference" differentiates any number of times, in quadratic memory.'
        )
    saved = ctx.saved_tensors  # read once: a pack hook may unpack a saved tensor only once
    count = len(saved) - len(ctx.names)
    tensors, outputs = list(saved[:count]), saved[count:]
    grad_outputs = {name: materialized(g) for name, g in zip(ctx.names, grads, strict=True) if g is not None}
    if not grad_outputs:
        return [None] * count
    return input_grads(
        tensors, _needed_in_backward(dict(zip(ctx.names, outputs, strict=True)), grad_outputs), grad_outputs
    )


class _EagerNode(torch.autograd.Function):
    """The autograd node of eager code."""

    @staticmethod
    def forward(
        ctx: Any, spec: Any, engine: FusedEngine, cached: Results, free: Results | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """`free` is None, or receives the free outputs: as outputs of the node they would be saved for its backward."""
        names, remember, inputs = _output_names(spec), free is not None, [*tensors, *cached.values()]
        key = ("forward", spec, engine.name, remember, *cached)
        results = replay_or_record(
            key, inputs, lambda: compute(*_unflatten_request(spec, list(tensors)), engine, cached, remember)
        )
        if free is not None:
            free.update({n: results[n] for n in FREE_OUTPUTS if n in results and n not in names})
        # A cached tensor must not become this node's output: it may be the output of another node.
        outputs = tuple(results[n].detach() if n in cached else results[n] for n in names)
        ctx.spec, ctx.engine = spec, engine
        _save(ctx, names, tensors, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs_input_grad = list(ctx.needs_input_grad[4:])

        def input_grads(tensors: list[Tensor], results: Results, grad_outputs: Results) -> Sequence[Tensor | None]:
            key = ("backward", ctx.spec, ctx.engine.name, *grad_outputs, *needs_input_grad)

            def gradients() -> list[Tensor | None]:
                problem, request = _unflatten_request(ctx.spec, tensors)
                return vjp(problem, request, ctx.engine, results, grad_outputs, needs_input_grad)

            return replay_or_record(key, [*tensors, *results.values(), *grad_outputs.values()], gradients)

        return None, None, None, None, *_backward(ctx, grads, input_grads)


def _refuse_functorch() -> None:
    if in_functorch():
        raise NotImplementedError(
            "torch.func cannot follow regard's engines, which compute outside of PyTorch's operators. "
            'engine="reference" is plain PyTorch, in quadratic memory; or use torch.autograd.grad.'
        )


# The same two functions as operators that torch.compile can put into a graph. They are defined by hand: the decorator
# `custom_op` takes a dozen Python calls more for each call, in every layer of every step.

_OPERATORS = torch.library.Library("regard", "FRAGMENT")


def _stamp() -> int:
    try:
        return zlib.crc32(
            b"".join(Path(__file__).with_name(name).read_bytes() for name in ("autograd.py", "problem.py"))
        )
    except OSError:  # imported from an archive
        return 0


#: A part of every call in a graph: PyTorch caches compiled graphs on disk, and those of another version of these files
#: must not be used.
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
    """Spec of (problem, request) and name of the engine. Cached: a graph makes the same calls in every step."""
    return ast.literal_eval(call)[:2]


@_operator("attention(Tensor[] tensors, SymInt[] ints, str call) -> Tensor[]", "CompositeExplicitAutograd")
def _forward_op(tensors: list[Tensor], ints: list[int], call: str) -> list[Tensor]:
    def outputs() -> list[Tensor]:
        spec, engine = _parse_call(call)
        problem, request = _unflatten_request(spec, tensors, ints)
        results = compute(problem, request, fused_engine(get_engine(engine)), {})
        return [_to_layout(results[name], request.v if name == "y" else None) for name in _output_names(spec)]

    return replay_or_record(("forward", call, *ints), tensors, outputs)


@torch.library.register_fake("regard::attention", lib=_OPERATORS)
def _(tensors: list[Tensor], ints: list[int], call: str) -> list[Tensor]:
    problem, request = _unflatten_request(_parse_call(call)[0], tensors, ints)
    return [
        _empty_in_layout(required(request.v), shape, dtype) if name == "y" else problem.q.new_empty(shape, dtype=dtype)
        for name, (shape, dtype) in zip(request.names, _output_specs(problem, request), strict=True)
    ]


def _empty_in_layout(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Empty tensor in x's memory layout (contiguous unless x is 4-D)."""
    if x.ndim == 4:
        return x.new_empty_strided(shape, strides_like(x, shape), dtype=dtype)
    return x.new_empty(shape, dtype=dtype)


def _to_layout(result: Tensor, x: Tensor | None) -> Tensor:
    """An engine's result in the layout that the fake implementation promised: that of x, contiguous without one."""
    if x is None or x.ndim != 4:
        return result.contiguous()
    strides = zip(result.shape, result.stride(), strides_like(x, result.shape), strict=True)
    if all(n == 1 or has == expected for n, has, expected in strides):
        return result
    return _empty_in_layout(x, result.shape, result.dtype).copy_(result)


def _output_specs(problem: Problem, request: Request) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every result."""
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
    "attention_backward(Tensor[] tensors, Tensor[] results, Tensor[] grads, SymInt[] ints, str saved,"
    " str grad_outputs, str call) -> Tensor[]",
    "CompositeExplicitAutograd",
)
def _backward_op(
    tensors: list[Tensor], results: list[Tensor], grads: list[Tensor], ints: list[int], saved: str, grad_outputs: str,
    call: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the floating-point tensors; `saved` and `grad_outputs` name what `results` and `grads` are."""

    def gradients() -> list[Tensor]:
        spec, engine = _parse_call(call)
        problem, request = _unflatten_request(spec, tensors, ints)
        values = dict(zip(saved.split(), results, strict=True))
        incoming = dict(zip(grad_outputs.split(), grads, strict=True))
        needs_input_grad = [t.is_floating_point() for t in tensors]
        pairs = zip(
            vjp(problem, request, fused_engine(get_engine(engine)), values, incoming, needs_input_grad),
            tensors,
            strict=True,
        )
        return [
            _empty_in_layout(t, t.shape, t.dtype).zero_() if g is None else _to_layout(g, t)
            for g, t in pairs
            if t.is_floating_point()
        ]

    return replay_or_record(("backward", call, saved, grad_outputs, *ints), [*tensors, *results, *grads], gradients)


@torch.library.register_fake("regard::attention_backward", lib=_OPERATORS)
def _(tensors: list[Tensor], *_: Any) -> list[Tensor]:
    return [_empty_in_layout(t, t.shape, t.dtype) for t in tensors if t.is_floating_point()]


@_operator(
    "attention_autograd(Tensor[] tensors, SymInt[] ints, str call) -> Tensor[]", "Autograd", "CompositeExplicitAutograd"
)
def _autograd_op(tensors: list[Tensor], ints: list[int], call: str) -> list[Tensor]:
    """`regard::attention` with an autograd node where a gradient is needed."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_CompiledNode.apply(call, ints, *tensors))
    return torch.ops.regard.attention(tensors, ints, call)


class _CompiledNode(torch.autograd.Function):
    """The autograd node of compiled code."""

    @staticmethod
    def forward(ctx: Any, call: str, ints: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = torch.ops.regard.attention(tensors, ints, call)
        ctx.call, ctx.ints = call, ints
        _save(ctx, _output_names(_parse_call(call)[0]), tensors, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        def input_grads(tensors: list[Tensor], results: Results, grad_outputs: Results) -> Sequence[Tensor | None]:
            values = list(results.values()), list(grad_outputs.values()), ctx.ints
            names = " ".join(results), " ".join(grad_outputs)
            of_floats = iter(torch.ops.regard.attention_backward(tensors, *values, *names, ctx.call))
            return [next(of_floats) if t.is_floating_point() else None for t in tensors]

        return None, None, *_backward(ctx, grads, input_grads)
