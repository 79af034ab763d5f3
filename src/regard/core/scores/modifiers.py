"""Modifiers of scores: bias, ALiBi, soft cap, functions of users; and the checks of what users pass to a score."""

from __future__ import annotations

import dis
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..block import MatrixBlock, PickedCells, take
from ..broadcast import MatrixShape, per_cell, per_head
from ..pytree import register_node, tree_map
from ..stored import check_broadcasts, check_positive
from ..tensor_kinds import readable

__all__ = [
    "Alibi", "Bias", "Modifier", "Modify", "Softcap", "described", "need_axes", "need_finite", "need_floats",
    "open_function", "refuse_captures",
]  # fmt: skip


class Modifier:
    """A change of scores before softmax."""

    #: Whether the modifier compares positions, so that `align` matters when lengths differ.
    positional: ClassVar[bool] = False
    #: Whether the modifier adds to the score, whose gradient it then leaves as it is.
    additive: ClassVar[bool] = False

    @property
    def kernel_op(self) -> str | None:
        """Its name in the kernels of engines; None for a Python function, which only plain PyTorch tiles can call."""
        return None

    @property
    def operand(self) -> Tensor | None:
        """The tensor that kernels read, (b|1, h|1, i|1, j|1), if there is one."""
        return None

    @property
    def constant(self) -> float:
        """The number that kernels read beside the tensor."""
        return 0.0

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        """The scores (b, h, i, j) of a block, modified; this modifier's tensors are cut to the block already."""
        raise NotImplementedError

    def check_function(self, heads: int, like: Tensor) -> None:
        """Raise ValueError where a function of the user would lose a gradient; `like` has the dtype of scores."""

    def broadcast_to(self, matrix: MatrixShape) -> Modifier:
        """The same for one matrix: tensors checked, and with the axes (*batch|1, h|1, i|1, j|1)."""
        return self

    def crop(self, rows: slice, cols: slice) -> Modifier:
        """The same for adjacent rows and keys, of a modifier that is broadcast to a matrix."""
        return tree_map(self, lambda t: take(take(t, -2, rows), -1, cols))

    def check_stored(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless the fields, read from a file, are those of a modifier broadcast to (b, h, i, j)."""
        raise ValueError(f"a file cannot hold the modifier {type(self).__name__}: it has no check_stored")


@register_node(storable=True)
class Bias(Modifier):
    """s + tensor."""

    tensor: Tensor  # the user's; (*batch|1, h|1, i|1, j|1) once broadcast to a matrix
    additive = True

    @property
    def kernel_op(self) -> str:
        """A bias that is constant along rows or along keys is not read cell by cell."""
        return "bias_rows" if self.tensor.shape[3] == 1 else "bias_keys" if self.tensor.shape[2] == 1 else "bias"

    @property
    def operand(self) -> Tensor:
        return self.tensor

    def broadcast_to(self, matrix: MatrixShape) -> Modifier:
        return Bias(per_cell(self.tensor, matrix, "bias(tensor)"))

    def check_stored(self, shape: tuple[int, ...]) -> None:
        check_broadcasts(self.tensor, shape, "a bias")

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        return s + self.tensor.to(s.dtype)


@register_node(storable=True)
class Alibi(Modifier):
    """s − slope · |distance|."""

    slopes: Tensor  # the user's; (*batch|1, h|1, 1, 1) once broadcast to a matrix
    positional = True
    additive = True

    @property
    def kernel_op(self) -> str:
        return "alibi"

    @property
    def operand(self) -> Tensor:
        return self.slopes

    def broadcast_to(self, matrix: MatrixShape) -> Modifier:
        return Alibi(per_head(self.slopes, matrix, "alibi(slopes)"))

    def check_stored(self, shape: tuple[int, ...]) -> None:
        check_broadcasts(self.slopes, (*shape[:2], 1, 1), "slopes")

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        return s - self.slopes.to(s.dtype) * (block.i - block.j).abs()


@register_node(storable=True)
class Softcap(Modifier):
    """cap · tanh(s / cap): scores stay within ±cap."""

    cap: float

    @property
    def kernel_op(self) -> str:
        return "softcap"

    @property
    def constant(self) -> float:
        return self.cap

    def check_stored(self, shape: tuple[int, ...]) -> None:
        check_positive(self.cap, "a soft cap")

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        return self.cap * torch.tanh(s / self.cap)


@register_node
class Modify(Modifier):
    """A user's function f(s, i, j, *parameters) of a block of scores and its positions."""

    function: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()
    positional = True

    def crop(self, rows: slice, cols: slice) -> Modifier:
        return Modify(_Shifted(self.function, cols.start), self.parameters) if cols.start else self

    def apply(self, s: Tensor, block: MatrixBlock | PickedCells) -> Tensor:
        changed = self.function(s, block.i, block.j, *self.parameters)
        if not isinstance(changed, Tensor) or changed.shape != s.shape or not changed.is_floating_point():
            raise ValueError(
                f"modify(f): f(s, i, j) must return scores of the shape of s, {tuple(s.shape)}, in floating point; "
                f"got {described(changed)}."
            )
        return changed

    def check_function(self, heads: int, like: Tensor) -> None:
        position = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        refuse_captures(self.function, (like.new_zeros(1, heads, 1, 1), position, position), self.parameters, "modify")


@dataclass(frozen=True, eq=False)
class _Shifted:
    """A user's function of scores and positions, called at the positions of the matrix that was cropped."""

    function: Callable[..., Tensor]
    start: int

    def __call__(self, s: Tensor, i: Tensor, j: Tensor, *parameters: Tensor) -> Tensor:
        return self.function(s, i + self.start, j + self.start, *parameters)


# Users' arguments of a score.


def described(result: Any) -> str:
    """The result of a user's function in a few words, for a message."""
    return f"{tuple(result.shape)} of {result.dtype}" if isinstance(result, Tensor) else type(result).__name__


def refuse_captures(
    function: Callable[..., Tensor], block: tuple[Tensor, ...], parameters: tuple[Any, ...], what: str
) -> None:
    """Raise ValueError where a user's function reaches a tensor with gradients that is no parameter of it.

    It is called with one cell, and nothing that it was passed needs a gradient: what it returns must need none.
    """
    fixed = [p.detach() if isinstance(p, Tensor) else p for p in parameters]
    with torch.random.fork_rng([x.device for x in block[:1] if x.is_cuda]):
        try:
            result = function(*block, *fixed)
        except Exception:  # which it may raise, or not, for a block
            return
    if isinstance(result, Tensor) and result.requires_grad:
        raise ValueError(
            f"{what}: the function captures a tensor or module which needs gradients; they would be lost. "
            + _PASS_ON.format(what)
        )


@dataclass(frozen=True, eq=False)
class _ModuleCall:
    """A module as a function of its inputs and its parameters."""

    module: nn.Module
    names: tuple[str, ...]

    def __call__(self, *args: Tensor) -> Tensor:
        inputs, parameters = args[: len(args) - len(self.names)], args[len(args) - len(self.names) :]
        return torch.func.functional_call(self.module, dict(zip(self.names, parameters, strict=True)), inputs)


#: What to do with a tensor that a function captures.
_PASS_ON = "Pass such tensors on: {0}(f, tensor) calls f(..., tensor). A module can be passed as it is."


def open_function(
    function: Any, parameters: tuple[Tensor, ...] | Tensor, what: str
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A user's function and its parameters, where every tensor with a gradient is a parameter and none is captured."""
    if not callable(function):
        raise TypeError(f"{what}: a function was expected; got {type(function).__name__}.")
    parameters = (parameters,) if isinstance(parameters, Tensor) else tuple(parameters)
    if isinstance(function, nn.Module) and not parameters:
        named = dict(function.named_parameters())
        return _ModuleCall(function, tuple(named)), tuple(named.values())
    if captured := _captured(function):
        raise ValueError(
            f"{what}: the function captures {captured}, which needs gradients; they would be lost. "
            + _PASS_ON.format(what)
        )
    return function, parameters


def _captured(function: Any) -> str | None:
    """The name of a tensor or module with gradients that a function reaches through its closure or globals."""
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    reached: list[tuple[str, Any]] = [(name, _content(cell)) for name, cell in cells]
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}  # not attributes
    reached += [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    for name, value in reached:
        if isinstance(value, Tensor) and value.requires_grad:
            return f"the tensor {name!r}"
        if isinstance(value, nn.Module) and any(p.requires_grad for p in value.parameters()):
            return f"the module {name!r}"
    return None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return None


#: The largest number that scores are computed with: float32 holds no larger one.
LARGEST = float(torch.finfo(torch.float32).max)


def need_finite(value: Any, name: str) -> float:
    """A user's number, which float32 must hold."""
    if not isinstance(value, (int, float, numbers.Real)) or not abs(value) <= LARGEST:  # type: ignore[operator]
        hint = " Use .item(); a learned factor multiplies q." if isinstance(value, Tensor) else ""
        raise ValueError(f"{name} must be a finite number of float32; got {value!r}.{hint}")
    return value if type(value) is int else float(value)


def need_floats(tensor: Any, name: str) -> Tensor:
    """The tensor of a user, floating point and readable by engines."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}. Use torch.tensor(...).")
    tensor = readable(tensor, name)
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor; got dtype {tensor.dtype}. Convert with .float().")
    return tensor


def need_axes(tensor: Tensor, axes: int, name: str, shapes: str) -> None:
    """Raise ValueError unless a user's tensor has at least so many axes."""
    if tensor.ndim < axes:
        raise ValueError(f"{name} must be {shapes}; got shape {tuple(tensor.shape)}.")
