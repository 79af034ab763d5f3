"""One attention call as it was overheard, and what is kept of it.

`AttentionCall` is what a seam found: queries and keys in the layout (b, h, i, d), or weights that the model wrote out
itself. `SavedCall` is what outlives the call: detached tensors, copied where the model may write over them, from which
`Weights` are made when somebody asks. Imports `recognise`, the door and what is below it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.api import weights
from ..core.masks import Mask
from ..core.scores import ScaledDot, Score
from ..core.weights import Weights
from .mask_recognition import ParsedMask, parse_mask

__all__ = ["AttentionCall", "Overwritten", "SavedCall", "save_call"]


class Overwritten(RuntimeError):  # noqa: N818  a fact about a tensor
    """The model changed a recorded tensor in place after the call."""


@dataclass
class AttentionCall:
    """What a seam found in one call."""

    q: Tensor | None = None  # b h i d
    k: Tensor | None = None  # b g j d
    v: Tensor | None = None  # b g j e
    w: Tensor | None = None  # b h i j : weights the model wrote out; then q and k are not needed
    s: Tensor | None = None  # b h i j : the scores those weights were made of, where they are wanted
    scale: float | None = None
    given: Tensor | None = None  # a bool or additive mask, as the model gave it
    causal: bool = False
    softcap: float | None = None
    sink: Tensor | None = None  # h
    scored: Score | None = None  # the whole score, where the seam knows it: scale, softcap and sink are in it
    said: ParsedMask | None = None  # the mask in few words, where the seam knows it better than `given`
    same: bool | None = None  # whether queries and keys come from one sequence, where the seam knows

    @property
    def shape(self) -> tuple[int, int, int, int]:
        if self.w is not None:
            return tuple(self.w.shape)  # type: ignore[return-value]
        assert self.q is not None
        assert self.k is not None
        return (*self.q.shape[:3], self.k.shape[2])  # type: ignore[return-value]

    def read_mask(self, known: dict[Any, tuple[Tensor, Tensor | int, ParsedMask]] | None = None) -> ParsedMask:
        """What the mask says; read once, and once for all layers of a pass that are given the same one."""
        if self.said is not None:
            return self.said
        given = self.given
        if known is None or given is None:
            self.said = parse_mask(given, self.causal, self.shape)
            return self.said
        key = (given.data_ptr(), given.shape, given.stride(), given.dtype, self.causal, self.shape)
        if key in known and _unchanged(given, known[key][1]):
            self.said = known[key][2]
        else:
            self.said = parse_mask(given, self.causal, self.shape)
            # The tensor is held so that its place in memory cannot be given to another.
            known[key] = given, given.clone() if given.is_inference() else given._version, self.said
        return self.said

    def score(self) -> Score:
        if self.scored is not None:
            return self.scored
        score = ScaledDot(self.scale)
        if self.softcap:
            score = score.softcap(self.softcap)
        if self.said is not None and self.said.bias is not None:
            score = score.bias(self.said.bias)
        return score if self.sink is None else score.sink(self.sink)


@dataclass
class SavedCall:
    """What is kept of a call: factors, or weights as the model wrote them."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    w: Tensor | None
    score: Score | None
    mask: Mask | None
    align: str | None
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def weights(self) -> Weights:
        """The attention matrix of this call."""
        self.check()
        with torch.inference_mode(False):
            if self.w is not None:
                return Weights.from_dense(self.w)
            assert self.q is not None
            return weights(self.q, self.k, score=self.score, mask=self.mask, align=self.align)

    def loaded(self) -> SavedCall:
        """The same with its tensors in memory."""
        return self

    def check(self) -> None:
        """That nobody wrote over what was kept without a copy."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise Overwritten("the model changed its queries, keys or weights in place after this call")


def _unchanged(given: Tensor, before: Tensor | int) -> bool:
    """Whether a mask is as it was when it was read; inference tensors do not count their changes."""
    return torch.equal(given, before) if isinstance(before, Tensor) else given._version == before


def save_call(found: AttentionCall, values: bool, to: str | None) -> SavedCall:
    """Detach what was found; copy what the model may write over."""
    said = found.read_mask()
    kept = SavedCall(None, None, None, None, None, said.mask, said.align)
    if found.w is not None:
        kept.w = _own(found.w, kept.versions, to)
    else:
        assert found.q is not None
        assert found.k is not None
        q = found.q if said.uniform_rows is None else found.q.masked_fill(said.uniform_rows, 0)
        kept.q, kept.k = _own(q, kept.versions, to), _own(found.k, kept.versions, to)
        kept.score = _moved_score(found, to)
        kept.mask = _moved(said.mask, to)
    if values and found.v is not None:
        kept.v = _own(found.v, kept.versions, to)
    return kept


def _own(x: Tensor, versions: list[tuple[Tensor, int]], to: str | None) -> Tensor:
    x = x.detach()
    if to is not None and x.device != torch.device(to):
        return x.to(to)
    # A tensor that was written to before will be again: caches are. An inference tensor does not count its writes.
    if x.is_inference() or x._version > 0:
        with torch.inference_mode(False):
            return x.clone()
    versions.append((x, x._version))
    return x


def _moved_score(found: AttentionCall, to: str | None) -> Score:
    from ..core.pytree import tree_map

    score = tree_map(found.score(), lambda t: t.detach().clone() if t.is_inference() else t.detach())
    return score if to is None else tree_map(score, lambda t: t.to(to))


def _moved(mask: Any, to: str | None) -> Any:
    from ..core.pytree import tree_map

    return mask if to is None or mask is None else tree_map(mask, lambda t: t.to(to))
