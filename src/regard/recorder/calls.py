"""An attention call while the model runs (`AttentionCall`), and the part of it that is saved (`SavedCall`).

A handler reads queries and keys in the layout (b, h, i, d), or weights that the model computed itself. A saved call
holds detached tensors, copied where the model may write over them; `Weights` are made from it on request.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..core.api import weights
from ..core.masks.kinds import Geometry, Mask
from ..core.pytree import tree_map
from ..core.scores.kinds import ScaledDot, Score
from ..core.types import Align
from ..core.weights import Weights
from .detached import ConstantWeights, DetachedWeights, RecordedWeights
from .mask_recognition import ParsedMask, parse_mask

__all__ = [
    "AttentionCall",
    "LayerKind",
    "MaskCache",
    "Overwritten",
    "SavedCall",
    "save_again",
    "save_call",
    "visible_counts",
    "without_tensors",
]

#: Whether keys and queries come from one sequence.
LayerKind: TypeAlias = Literal["self", "cross"]

#: Masks of a pass that were parsed: address and form → (mask, its version or a copy of it, the result).
MaskCache = dict[Any, tuple[Tensor | None, Tensor | int, ParsedMask]]


class Overwritten(RuntimeError):  # noqa: N818  a fact about a tensor
    """The model changed a recorded tensor in place after the call."""


@dataclass
class AttentionCall:
    """One attention call as a handler reads it."""

    q: Tensor | None = None  # b h i d
    k: Tensor | None = None  # b g j d
    v: Tensor | None = None  # b g j e
    w: Tensor | None = None  # b h i j : weights that the model computed; q and k are None then
    s: Tensor | None = None  # b h i j : the scores of those weights, where the listener wants them
    scale: float | None = None
    mask: Tensor | None = None  # a bool or additive mask, as the model passed it
    is_causal: bool = False
    softcap: float | None = None
    sink: Tensor | None = None  # h
    full_score: Score | None = None  # replaces scale, softcap and sink where the handler has the score itself
    parsed_mask: ParsedMask | None = None  # replaces `mask` where the handler has a structured one
    is_self: bool | None = None  # whether queries and keys come from one sequence, where the handler knows
    native: bool = False  # whether PyTorch's C++ path computed it, which has no gradients
    matrix: Weights | None = None  # the matrix that computed it, where regard did
    is_direct: bool = False  # whether q and k are what the operator took, by the layout of its operands alone
    _shape: tuple[int, int, int, int] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, i, j)"""
        if self._shape is None:
            if self.w is not None:
                self._shape = tuple(self.w.shape)  # type: ignore[assignment]
            else:
                assert self.q is not None
                assert self.k is not None
                self._shape = *self.q.shape[:3], self.k.shape[2]  # type: ignore[assignment]
        return self._shape  # type: ignore[return-value]

    def parse_mask(self, cache: MaskCache | None = None) -> ParsedMask:
        """The mask in structured form; parsed once for all layers of a pass that share one tensor."""
        if self.parsed_mask is not None:
            return self.parsed_mask
        mask = self.mask
        if cache is None:
            self.parsed_mask = parse_mask(mask, self.is_causal, self.shape)
            return self.parsed_mask
        if mask is None:
            if (plain := (self.is_causal, self.shape)) not in cache:
                cache[plain] = None, 0, parse_mask(None, self.is_causal, self.shape)
            self.parsed_mask = cache[plain][2]
            return self.parsed_mask
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, self.is_causal, self.shape)
        if key in cache and _unchanged(mask, cache[key][1]):
            self.parsed_mask = cache[key][2]
        else:
            self.parsed_mask = parse_mask(mask, self.is_causal, self.shape)
            # The cache holds the tensor itself, so that its address is not reused for another mask.
            cache[key] = mask, mask.clone() if mask.is_inference() else mask._version, self.parsed_mask
        return self.parsed_mask

    def score(self) -> Score:
        """The score with its modifiers, the bias of the mask among them."""
        if self.full_score is not None:
            return self.full_score
        score: Score = ScaledDot(self.scale)
        if self.softcap:
            score = score.softcap(self.softcap)
        if self.parsed_mask is not None and self.parsed_mask.bias is not None:
            score = score.bias(self.parsed_mask.bias)
        return score if self.sink is None else score.sink(self.sink)


@dataclass
class SavedCall:
    """The factors of a call, or its weights where the model computed them."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    w: Tensor | None
    score: Score | None
    mask: Mask | None
    align: Align | None
    versions: list[tuple[Tensor, int]] = field(default_factory=list)  # of tensors shared with the model
    row_results: dict[str, Tensor] = field(default_factory=dict)  # of the pass that computed it, where regard did
    matrix: type[RecordedWeights] = RecordedWeights  # by whether it is cut from a graph of the model

    def weights(self) -> Weights:
        """The attention matrix of this call."""
        self.check()
        with torch.inference_mode(False):
            if self.w is not None:
                matrix = Weights.from_dense(self.w)
            else:
                assert self.q is not None
                assert self.score is not None
                matrix = weights(self.q, self.k, score=self.score, mask=self.mask, align=self.align)
            recorded = self.matrix(matrix._factors, matrix._engine, one_head=matrix._one_head)
            recorded._adopt(self.row_results)
            return recorded

    def loaded(self) -> SavedCall:
        """The same with its tensors in memory."""
        return self

    def check(self) -> None:
        """Raise `Overwritten` if a tensor that is shared with the model has changed."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise Overwritten("the model changed its queries, keys or weights in place after this call")

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: the copy has tensors of its own, so their versions no longer matter."""
        self.check()
        return {**vars(self), "versions": [], "row_results": {}}

    def __copy__(self) -> SavedCall:
        return dataclasses.replace(self)  # a shallow copy shares the tensors, and their versions still matter


def _unchanged(mask: Tensor, before: Tensor | int) -> bool:
    """Whether a mask is as it was when it was parsed; inference tensors count no versions."""
    return torch.equal(mask, before) if isinstance(before, Tensor) else mask._version == before


def save_call(
    call: AttentionCall, values: bool, device: str | None, copy: bool = False, grad: bool = False
) -> SavedCall:
    """Detach the tensors of a call, unless gradients are wanted; copy those that the model may write over.

    Args:
        call: The call.
        values: Whether to save the value vectors.
        device: Where the tensors go; None: they stay.
        copy: Copy all of them: compiled code reuses buffers without counting versions.
        grad: Leave them part of the autograd graph.
    """
    parsed = call.parse_mask()
    saved = SavedCall(None, None, None, None, None, parsed.mask, parsed.align)
    q, k, v, w = call.q, call.k, call.v, call.w
    if not grad:
        had_graph = any(t is not None and t.requires_grad for t in (q, k, w))
        saved.matrix = DetachedWeights if had_graph else ConstantWeights
        q, k, w, v = _detached(q), _detached(k), _detached(w), _detached(v) if values else None
    if w is not None:
        saved.w = _saved_tensor(w, saved.versions, device, copy)
    else:
        assert q is not None
        assert k is not None
        q = q if parsed.uniform_rows is None else q.masked_fill(parsed.uniform_rows, 0)
        saved.q = _saved_tensor(q, saved.versions, device, copy)
        saved.k = _saved_tensor(k, saved.versions, device, copy)
        saved.score = _saved_score(call, parsed, device, grad)
        saved.mask = _mask_on(parsed.mask, device)
        if call.matrix is not None and parsed.uniform_rows is None and device is None:
            saved.row_results = call.matrix._row_results()
    if values and v is not None:
        saved.v = _saved_tensor(v, saved.versions, device, copy)
    return saved


def without_tensors(saved: SavedCall) -> SavedCall:
    """The score and the mask of a call alone; for those that have no tensors."""
    return SavedCall(None, None, None, None, saved.score, saved.mask, saved.align)


def save_again(q: Tensor, k: Tensor, v: Tensor | None, like: SavedCall) -> SavedCall:
    """Detach the tensors of a call with the score and the mask of another one, which have no tensors of their own."""
    saved = SavedCall(None, None, None, None, like.score, like.mask, like.align)
    saved.matrix = DetachedWeights if q.requires_grad or k.requires_grad else ConstantWeights
    saved.q = _saved_tensor(q.detach(), saved.versions, None, False)
    saved.k = _saved_tensor(k.detach(), saved.versions, None, False)
    if v is not None:
        saved.v = _saved_tensor(v.detach(), saved.versions, None, False)
    return saved


def _saved_tensor(x: Tensor, versions: list[tuple[Tensor, int]], device: str | None, copy: bool) -> Tensor:
    if device is not None and x.device != torch.device(device):
        return x.to(device)
    # A tensor that was written to before will be again: caches are. An inference tensor counts no versions.
    if copy or x.is_inference() or x._version > 0:
        with torch.inference_mode(False):
            return x.clone()
    versions.append((x, x._version))
    return x


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _saved_score(call: AttentionCall, parsed: ParsedMask, device: str | None, grad: bool) -> Score:
    score = call.score()
    if call.full_score is None and call.sink is None and parsed.bias is None:  # it has no tensors
        return score
    if not grad:
        score = tree_map(score, lambda t: t.detach().clone() if t.is_inference() else t.detach())
    return score if device is None else tree_map(score, lambda t: t.to(device))


def _mask_on(mask: Any, device: str | None) -> Any:
    return mask if device is None or mask is None else tree_map(mask, lambda t: t.to(device))


def visible_counts(call: AttentionCall) -> Tensor:
    """The number of keys each row may see, (b|1, i)."""
    parsed = call.parse_mask()
    *_, i, j = call.shape
    device = (call.q if call.q is not None else call.w).device  # type: ignore[union-attr]
    if call.w is not None:
        return (call.w > 0).sum(-1).amax(1).float()
    if parsed.mask is None:
        return torch.full((1, i), float(j), device=device)
    intervals = parsed.mask.intervals(Geometry(i, j, j - i if parsed.align == "end" else 0, device))
    return (intervals.hi - intervals.lo).clamp(min=0).sum(1).float()
