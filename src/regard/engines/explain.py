"""Which engine and kernels serve a request, in how many passes, and why not faster ones."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ..core.problem import Factors, Problem
from ..core.stats import ONE_PASS, SECOND_PASS, Request
from . import Engine, FusedEngine, fused_engine, numba, replay, resolve, triton

__all__ = ["explain"]


def explain(engine: Engine, factors: Factors, request: Request) -> str:
    """A few lines of text about a request to these factors."""
    if engine.plain:
        return "\n".join(
            (
                f"engine: {engine.name}",
                "kernels: plain PyTorch, all cells at once, quadratic memory",
                'why not a faster one: engine="reference" was chosen, or the weights were passed to from_dense',
            )
        )
    engine = fused_engine(engine)
    problem = engine.prepare(factors).with_lowered_mask()
    chosen = resolve(engine, problem, request)
    if chosen is triton.ENGINE and (reason := triton.unsupported_reason(problem, request)) is not None:
        return f"engine: none. engine={engine.name!r} was chosen and cannot serve: {reason}"
    lines = [f"engine: {chosen.name}" + (f" (picked by {engine.name!r})" if engine is not chosen else "")]
    lines.append(f"kernels: {_kernels(chosen, problem)}")
    lines.append(f"passes over the keys: {_passes(chosen, problem, request)}")
    lines += [f"why not {name}: {reason}" for name, reason in _reasons(engine, chosen, problem, request)]
    if problem.q.device.type in replay.DEVICES:
        state = "on: a third call of the same shapes replays the second" if replay.enabled else "off (REGARD_REPLAY=0)"
        lines.append(f"replay: {state}")
    return "\n".join(lines)


def _kernels(chosen: FusedEngine, problem: Problem) -> str:
    if chosen is triton.ENGINE:
        from .triton import tile_config

        gluon = "Hopper's where they fit" if tile_config._runs_gluon(problem.q.device) else "the plain ones"
        return f"Triton {triton_version()}, {gluon}"
    return "tiles compiled by numba" if numba.serves(problem) else "tiles in plain PyTorch"


def _passes(chosen: FusedEngine, problem: Problem, request: Request) -> str:
    rows = [name for name in request.names if name in ONE_PASS]
    columns = [name for name in request.names if name in SECOND_PASS]
    if columns and chosen is not triton.ENGINE and numba.serves(problem):
        return f"1: rows ({', '.join(rows or ['norm'])}) and columns ({', '.join(columns)})"
    passes = [f"rows ({', '.join(rows or ['norm'])})"]
    if chosen is triton.ENGINE and request.topk:
        passes.append("largest weights (topk)")
    if columns:
        passes.append(f"columns ({', '.join(columns)})")
    return f"{len(passes)}: {', '.join(passes)}"


def _reasons(engine: FusedEngine, chosen: FusedEngine, problem: Problem, request: Request) -> list[tuple[str, str]]:
    """For each faster choice, why it does not serve."""
    reasons = []
    if chosen is not triton.ENGINE:
        if engine is chosen:
            reasons.append(("triton", f"engine={engine.name!r} was chosen"))
        elif (reason := triton.unsupported_reason(problem, request)) is not None:
            reasons.append(("triton", reason))
        if (reason := numba.unsupported_reason(problem)) is not None:
            reasons.append(("compiled tiles", reason))
    else:
        from .triton import tile_config

        if not tile_config.HOPPER_KERNELS:
            reasons.append(("Hopper's kernels", "REGARD_HOPPER=0 turns them off"))
        elif not triton_version().startswith(tile_config.GLUON_VERSIONS):
            tested = ", ".join(f"{v}x" for v in tile_config.GLUON_VERSIONS)
            reasons.append(("Hopper's kernels", f"they are tested with Triton {tested}; got {triton_version()}"))
    return reasons


def triton_version() -> str:
    """The version of Triton, without importing it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "(unknown version)"
