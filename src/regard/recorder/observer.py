"""`regard.record`: the context manager, and the listener that is active while it is open.

The observer receives every attention call of its thread, saves the requested parts, and at the end names the attention
that it could not record.
"""

from __future__ import annotations

import fnmatch
import os
import warnings
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .calls import AttentionCall, LayerKind, MaskCache, Overwritten, SavedCall, save_call
from .detached import as_detached
from .first_rank import is_first_rank
from .hooks import seams, tap, transformers
from .hooks.call_site import CAPTURED, CallSite, called_by, calling_module, module_stack, runs_code_of
from .hooks.eager_attention import EagerTracker
from .hooks.model_hooks import ModelHooks
from .kv_cache import CannotStitch
from .layer import Layer, row_statistics
from .passes import Call, OpenPass, with_encoders
from .recording import Pass, Recording
from .spill import Spill
from .tokens import EmbeddedIds, TokensLike, label

__all__ = ["Observer", "RefusedWarning", "record"]


class RefusedWarning(UserWarning):
    """Some attention of the model could not be recorded.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():  # a recording that lacks something is then an error
        ...     warnings.simplefilter("error", RefusedWarning)
    """


def record(
    model: nn.Module | None,
    *,
    tokens: TokensLike | None = None,
    keep: Literal["factors", "statistics"] = "factors",
    values: bool = False,
    device: str | torch.device | None = None,
    path: str | os.PathLike[str] | None = None,
    layers: int | str | Iterable[int | str] | None = None,
    grad: bool = False,
) -> Observer:
    """Record the attention of any PyTorch model while it runs, unchanged and on its own kernels.

    Args:
        model: The model; None records every attention call of this thread.
        tokens: A tokenizer, a function id -> text, a list of tokens, a list of such lists (one a sequence), or a tuple
            (source, target) of lists for encoder and decoder. Default: positions have no text.
        keep: `"factors"` saves queries and keys, from which every weight follows; `"statistics"` saves row
            statistics only, for long runs.
        values: Save the value vectors too.
        device: Where saved tensors go, such as `"cpu"`. Default: they stay where they are.
        path: A .regard file: tensors go to disk layer by layer, and the file is written when the block ends; of a
            model under DistributedDataParallel or FSDP2 by its first rank alone.
        layers: The layers to record: numbers in the order of calls, module names, patterns such as `"*.self_attn"`.
            Default: all. Layers keep their numbers.
        grad: Leave recorded weights part of the autograd graph: `seen[0].entropy().sum().backward()` reaches the
            parameters of the model. Attention that has no graph (under `torch.no_grad` or `inference_mode`, on
            PyTorch's C++ path, compiled, or in an activation checkpoint) is then refused by name.

    Returns:
        A context manager whose value is the `Recording`. It fills when the block ends, and works for one block.

    Example:
        >>> model = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 3, 8)
        >>> with record(model, tokens=["the", "cat", "sat"]) as seen:
        ...     y = model(x, x, x)
        >>> seen[0, 1]["cat", "the"].shape
        torch.Size([])
        >>> with record(model, grad=True) as seen:
        ...     y = model(x, x, x)
        >>> seen[0].entropy().sum().backward()
        >>> model.in_proj_weight.grad.shape
        torch.Size([24, 8])
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"record(model) needs an nn.Module, or None for all of this thread; got {type(model).__name__}."
        )
    if keep not in ("factors", "statistics"):
        raise ValueError(f'keep is "factors" or "statistics"; got {keep!r}.')
    if grad and path is not None:
        raise ValueError(
            "grad=True keeps tensors in the autograd graph, and a file has none; got path=. Drop one of them."
        )
    only = _as_list(layers)
    if model is not None and only is not None:
        _check_names(only, model)
    return Observer(model, tokens, keep, values, _as_device(device, path), _as_path(path), only, bool(grad))


class Observer:
    """The block of a recording: active between `__enter__` and `__exit__`."""

    wants_scores = False
    _started = True  # until `__init__` is through: an object that failed there warns of nothing

    def __init__(
        self,
        model: nn.Module | None,
        tokens: TokensLike | None,
        keep: str,
        values: bool,
        device: str | None,
        path: str | None,
        only: list[int | str] | None,
        grad: bool,
    ) -> None:
        self.source, self.keep, self.wants_values, self.device, self.path, self.only, self.wants_grad = (
            tokens, keep, values, device, path, only, grad
        )  # fmt: skip
        self.spill = None if path is None else Spill(path)
        self.hooks = ModelHooks(model)
        self.names = None if model is None else {id(module): name for name, module in self.hooks.modules}
        self.wants_ids = tokens is not None and not isinstance(tokens, list | tuple)
        self.seen = Recording()
        self.eager = EagerTracker(by_name=model is not None)
        self.masks: MaskCache = {}  # masks of the running pass that were parsed
        self._pass: OpenPass | None = None
        self._done: list[OpenPass] = []
        self._most_calls = 0  # attention calls of a pass, those that were not requested included
        self._beams = self._started = False
        self._reports = is_first_rank(model)  # the other ranks of a wrapped model neither warn nor write a file
        self._undo: Any = None

    # The block.

    def __enter__(self) -> Recording:
        if self._started:
            raise RuntimeError("a recording is one block; call regard.record(model) again for another.")
        self._started = True
        seams.install()
        transformers.install(self.hooks)
        # Undone when the block ends, or with this object where Ctrl-C came into `__exit__` itself.
        self._undo = weakref.finalize(self, _undo, self.hooks)
        for name, reason in self.hooks.announced_refusals():
            self.refuse(name, reason)
        self.hooks.attach(self._end_pass, self._pause)
        if not self.hooks.is_fully_compiled():
            tap.activate(self)
        return self.seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            tap.deactivate(self)
            self._end_pass()
            with tap.suspended(), torch.set_grad_enabled(self.wants_grad):
                self._finish()
        finally:
            self._undo()
        if kind is None and self._reports:
            self._warn()
            if self.path is not None:
                self.seen.save(self.path)

    def __repr__(self) -> str:
        state = "open or done" if self._started else "not started: write `with regard.record(model) as seen:`"
        return f"<regard.record, {state}>"

    def __getitem__(self, key: Any) -> Any:
        raise TypeError("regard.record(model) is a block: `with regard.record(model) as seen:`, then ask `seen`.")

    def __del__(self) -> None:
        if not self._started:
            text = "regard.record(model) recorded nothing: it is a block, `with regard.record(model) as seen:`."
            warnings.warn(text, RefusedWarning, stacklevel=2)

    def _pause(self, on: bool) -> None:
        (tap.deactivate if on else tap.activate)(self)

    def _finish(self) -> None:
        """Make layers of calls, join and label passes, and name the attention that was not intercepted."""
        recorded = {name for name, _ in self.seen.refused}
        counts = [self._most_calls]
        for one in with_encoders(self._done):
            finished = Pass([], one.steps)
            counts.append(one.count)
            for call in one.calls:
                recorded.add(call.name)
                if (layer := self._layer(call)) is not None:
                    layer.parent = finished
                    finished.layers.append(layer)
            label(finished.layers, one.embedded, self.source, self.hooks.model)
            if finished.layers:
                self.seen.passes.append(finished)
        for name, reason in self.hooks.unheard_modules(recorded):
            if self.only is None or any(isinstance(w, str) and fnmatch.fnmatchcase(name, w) for w in self.only):
                self.refuse(name, reason)
        self._drop_needless_refusals()
        self._check_request(max(counts))
        self._done, self.names, self.masks = [], None, {}

    def _layer(self, call: Call) -> Layer | None:
        try:
            saved = call.finished()
        except (CannotStitch, Overwritten) as error:
            self.refuse(call.name, str(error))
            return None
        return Layer(call.name, call.number, call.kind, saved, call.statistics, call.shape)

    def _drop_needless_refusals(self) -> None:
        """A compiled module that still called PyTorch's kernels is recorded, not refused."""
        names = {layer.name for one in self.seen.passes for layer in one.layers}
        self.seen.refused[:] = [(name, why) for name, why in self.seen.refused if why != CAPTURED or name not in names]

    def _check_request(self, calls: int) -> None:
        """Name layers that were requested and never called, and tokens that fit no layer."""
        missing = [w for w in self.only or () if isinstance(w, int) and w >= calls]
        if missing and calls:
            self.refuse("layers", f"layers {missing} were requested, and a pass has {calls} attention calls")
        layers = [layer for one in self.seen.passes for layer in one.layers]
        if isinstance(self.source, list | tuple) and layers and all(x.tokens == (None, None) for x in layers):
            sizes = sorted({(layer.shape[0], *layer.shape[2:]) for layer in layers})[:4]
            shapes = ", ".join(f"{b} × {i} × {j}" for b, i, j in sizes)
            self.refuse(
                "tokens",
                f"{_describe(self.source)} fit no layer; layers have batch × queries × keys {shapes}. Pass one list of "
                "tokens, or one list for each sequence",
            )

    def _warn(self) -> None:
        if refused := self.seen.refused:
            named = "; ".join(f"{name or '(the model)'}: {reason}" for name, reason in refused[:4])
            more = f"; and {len(refused) - 4} more" if len(refused) > 4 else ""
            warnings.warn(f"not recorded (all in seen.refused): {named}{more}.", RefusedWarning, stacklevel=3)

    # The listener: see `tap.Listener`.

    def call_site(self, frame: FrameType) -> CallSite | None:
        return calling_module(frame, self.names)

    def batch_size(self, rows: int) -> int | None:
        return self.hooks.batch_size(rows)

    def refuse_at(self, frame: FrameType, reason: str) -> None:
        if (site := self.call_site(frame)) is not None:
            self.refuse(site.name, reason)

    def compiling(self, frame: FrameType) -> None:
        site = self.call_site(frame)
        if site is not None and site.module is not None:
            self.hooks.compiling(site.name, site.module)

    def refuse(self, name: str, reason: str) -> None:
        if (name, reason) not in self.seen.refused:
            self.seen.refused.append((name, reason))

    def embedding(self, table: Tensor, ids: Tensor, frame: FrameType) -> None:
        stack = module_stack(frame, self.names)
        if stack and self.call_site(frame) is not None:  # not of another model, such as an assistant
            entry = EmbeddedIds(stack, table.shape[0], table.data_ptr(), ids.detach().cpu().clone())
            self._running().embedded.append(entry)

    def attention(self, site: CallSite, call: AttentionCall, submodule: str | None = None) -> None:
        name = site.name
        if site.hides_modules:
            self.refuse(name, CAPTURED)
            return
        if submodule is not None and hasattr(site.module, submodule):
            name = f"{name}.{submodule}" if name else submodule
        one = self._running(name)
        number, nth = one.number_call(name)
        if not self._is_wanted(name, number):
            return
        if self.wants_grad and (reason := _no_graph(site, call)) is not None:
            self.refuse(name, f"grad=True, and {reason}")
            return
        call.parse_mask(self.masks)
        saved = save_call(call, self.wants_values, self.device, copy=site.compiled, grad=self.wants_grad)
        if one.fresh and self.keep == "factors" and self._continue_generation(one, site, name, nth, call, saved):
            return
        one.fresh = False
        if one.step_of is not None:
            self._add_step(one.step_of, one.before, name, nth, call, saved)
            return
        entry = Call(name, number, nth, _kind(site, call), saved, call.shape)
        if self.keep == "statistics":
            statistics = row_statistics(saved.weights())
            entry.statistics = {n: as_detached(x) for n, x in statistics.items()} if saved.detached else statistics
            entry.saved = None
        elif self.spill is not None:
            entry.saved = self.spill.put(saved)
        one.calls.append(entry)

    def _is_wanted(self, name: str, number: int) -> bool:
        if self.only is None:
            return True
        return any(w == number if isinstance(w, int) else fnmatch.fnmatchcase(name, w) for w in self.only)

    # Passes.

    def _running(self, name: str | None = None) -> OpenPass:
        """The running pass; a new one if a call outside any forward starts it over."""
        one = self._pass
        if one is not None and name is not None and self.hooks.depth == 0 and one.restarts_with(name):
            self._end_pass()
        if self._pass is None:
            self._pass = OpenPass(loose=self.hooks.depth == 0)
        return self._pass

    def _end_pass(self) -> None:
        one, self._pass = self._pass, None
        self.eager.clear()
        self.eager, self.masks = EagerTracker(self.eager.by_name), {}
        if one is None:
            return
        self._most_calls = max(self._most_calls, one.count)
        if one.step_of is not None:
            for ids in one.embedded:
                ids.before = one.before
            one.step_of.embedded += one.embedded
            one.step_of.steps += 1
        elif one.calls or one.embedded:
            self._done.append(one)

    def _continue_generation(
        self, one: OpenPass, site: CallSite, name: str, nth: int, call: AttentionCall, saved: SavedCall
    ) -> bool:
        """Whether the pass that begins with this call is the next step of the last one; then add the step."""
        before = self._done[-1] if self._done else None
        entry = None if before is None else before.find(name, nth)
        if before is None or entry is None or not entry.is_continued_by(call):
            return False
        if self._beams or called_by(site.frames[0] if site.frames else None, "beam_search"):
            self._beams = True
            self.refuse("generate", "beam search reorders the cache between steps; record with num_beams=1")
            one.step_of, one.fresh = OpenPass(loose=True), False  # a pass that is thrown away
            return True
        if called_by(site.frames[0] if site.frames else None, "assisted_decoding"):
            one.before = call.shape[3] - call.shape[2]
        try:
            entry.extend(call, saved, one.before)
        except CannotStitch as error:  # a pass of its own
            if call.w is not None:  # weights without keys cannot prove that they are something else
                self.refuse(name, f"its steps are passes of their own: {error}")
            return False
        one.step_of, one.fresh = before, False
        return True

    def _add_step(
        self, generation: OpenPass, before: int | None, name: str, nth: int, call: AttentionCall, saved: SavedCall
    ) -> None:
        entry = generation.find(name, nth)
        if entry is None:
            if not self._beams:
                self.refuse(name, "it ran in a later step of a generation and not in the first")
            return
        try:
            entry.extend(call, saved, before)
        except CannotStitch as error:
            self.refuse(name, str(error))
            generation.calls.remove(entry)


def _undo(hooks: ModelHooks) -> None:
    """Leave the model and transformers as they were before the block."""
    hooks.detach()
    transformers.uninstall(hooks)


def _kind(site: CallSite, call: AttentionCall) -> LayerKind:
    """ "self" if keys come from the sequence of the queries, else "cross"."""
    if call.is_self is not None:
        return "self" if call.is_self else "cross"
    *_, i, j = call.shape
    if site.other_sequence(j):
        return "cross"
    cached = any(hasattr(site.module, mark) for mark in ("layer_idx", "is_causal")) or "self" in site.name
    return "self" if i == j or cached else "cross"


def _no_graph(site: CallSite, call: AttentionCall) -> str | None:
    """The reason why a call has no autograd graph that outlives it; None if it has one."""
    if site.compiled:
        return "torch.compile made its code, whose intermediate tensors have no graph; record the plain module"
    if runs_code_of(site.frames, "torch.utils.checkpoint"):
        return "it runs in an activation checkpoint, which throws the graph away; switch checkpointing off"
    if not torch.is_grad_enabled():
        return "gradients are off (torch.no_grad or inference_mode); run the model with gradients"
    if call.native:
        return "PyTorch's C++ path has no gradients; parameters that require them, or model.train(), avoid it"
    return None


def _as_device(device: Any, path: Any) -> str | None:
    """The device of saved tensors; with a path they pass through the CPU."""
    if device is None:
        return None if path is None else "cpu"
    try:
        return str(torch.device(device))
    except (TypeError, RuntimeError) as error:
        hint = " A file goes to path=." if isinstance(device, str | os.PathLike) else ""
        raise TypeError(f'device must be a device such as "cpu"; got {device!r}.{hint}') from error


def _as_path(path: Any) -> str | None:
    if path is None:
        return None
    try:
        return os.fspath(path)
    except TypeError:
        raise TypeError(f"path must be a path of a .regard file; got {type(path).__name__}.") from None


def _as_list(layers: Any) -> list[int | str] | None:
    if layers is None:
        return None
    listed = isinstance(layers, Sequence | range | set) and not isinstance(layers, str)
    chosen = list(layers) if listed else [layers]
    if not all(isinstance(which, int | str) and not isinstance(which, bool) for which in chosen):
        raise TypeError(f"layers are numbers in the order of calls, module names or patterns; got {layers!r}.")
    return chosen


def _check_names(layers: list[int | str], model: nn.Module) -> None:
    """Every name or pattern must fit a module of the model."""
    names = [name for name, _ in model.named_modules()]
    for pattern in layers:
        if isinstance(pattern, str) and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            some = ", ".join(repr(name) for name in names if name)
            raise ValueError(
                f"layers: no module of the model is named {pattern!r}; there are {some[:300]}. "
                'Patterns such as "*.self_attn" work too.'
            )


def _describe(tokens: Any) -> str:
    if all(isinstance(token, str) for token in tokens):
        return f"{len(tokens)} tokens"
    return f"{len(tokens)} lists of {', '.join(str(len(line)) for line in tokens[:6])} tokens"
