"""The receiver of intercepted calls: one thread of a recording, or one look of a watch."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from ..calls import AttentionCall
    from .call_site import CallSite
    from .eager_attention import EagerTracker

__all__ = ["Listener"]


class Listener(Protocol):
    """The receiver of intercepted calls: one thread of `regard.record`, or one look of `regard.watch`."""

    eager: EagerTracker
    wants_ids: bool  # whether token ids are reported
    wants_scores: bool  # whether eager attention is reported with its scores
    wants_values: bool  # whether value vectors are reported
    wants_grad: bool  # whether reported tensors are part of the autograd graph
    hears_products: bool  # whether products are to be intercepted now, and sums that may be scores

    def covers(self, model: nn.Module | None) -> bool:
        """Whether it is a recording of the model that this thread itself opened."""

    def call_site(self, frame: FrameType) -> CallSite | None:
        """The module a call came from; None if it is not part of the model."""

    def batch_size(self, rows: int, keys: int | None = None, count: int | None = None) -> int | None:
        """The number of sequences of the running pass, if it is known; see `model_hooks.batch_size`."""

    def attention_again(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, frame: FrameType) -> bool:
        """A call of scaled_dot_product_attention; whether it was recorded as one of a known form."""

    def attention(self, site: CallSite, call: AttentionCall, submodule: str | None = None) -> None:
        """An attention call of `site`, or of its submodule of that name."""

    def read_number(self, number: Any) -> None:
        """The model has read a number from a tensor, or the size of a result that depends on numbers."""

    def embedding(self, table: Tensor, ids: Tensor, frame: FrameType) -> None:
        """Token ids that were looked up in a table of embeddings."""

    def refuse(self, name: str, reason: str) -> None:
        """Attention of the module `name` cannot be recorded."""

    def retract(self, site: CallSite, reason: str) -> None:
        """The last call of `site` was no attention after all."""

    def refuse_at(self, frame: FrameType, reason: str) -> None:
        """The same for the module that stands on the stack of `frame`."""

    def distrust(self) -> None:
        """Scores were computed where no product was intercepted."""

    def compiling(self, frame: FrameType) -> None:
        """A compiler is tracing attention; the code it makes may not call intercepted operators."""
