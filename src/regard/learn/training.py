"""The training loop: AdamW, warm-up and cosine, clipping, validation, checkpoints, resuming at any step.

Everything random in a step follows from the seed and the number of the step, so a run that was killed and resumed
draws the same batches and the same dropout as an uninterrupted one: on a CPU it ends with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..recorder import watch
from . import checkpoint, run_folder, tasks
from .captured import CapturedGradients, CudaGraphs
from .data import step_seed
from .interruption import Interrupted
from .optimizer import averaging_decay, make_optimizer, zero_state
from .parallel import Replicas, choose_device, joined
from .patterns import PatternLog
from .pretrained import Pretrained, read_pretrained
from .progress import TrainingProgress
from .settings import LMChoices, LMSettings, Settings, TranslateChoices, TranslateSettings

__all__ = ["Diverged", "Result", "lm", "translate"]

#: Steps between two reports of the loss and of the heads.
WATCH_EVERY = 50
#: Sequences of the batch that the heads are reported for.
WATCHED_SEQUENCES = 8
#: Settings that decide how much memory a step takes.
PARTS = "--batch, --context or --max-length, or compute the batch in more parts by --accumulate"


class Diverged(ArithmeticError):  # noqa: N818  a fact about a run
    """The loss became NaN or infinite; the last good checkpoint is kept.

    Example:
        >>> issubclass(Diverged, ArithmeticError)
        True
    """


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a run.

    Attributes:
        folder: Where its files are.
        step: Steps done.
        steps: Steps of the whole run; `step` is smaller where it was interrupted.
        best: Smallest validation loss; infinite before the first validation.
        val_loss: Last validation loss.
        seconds: Time of this call.
        stopped_early: Whether the validation loss had not fallen for `patience` validations.

    Example:
        >>> Result(Path("run"), step=5, steps=10, best=1.5, val_loss=1.6, seconds=3.0).finished
        False
    """

    folder: Path
    step: int
    steps: int
    best: float
    val_loss: float
    seconds: float
    stopped_early: bool = False

    @property
    def finished(self) -> bool:
        """Whether all steps were done, or the run stopped early.

        Example:
            >>> Result(Path("run"), step=10, steps=10, best=1.5, val_loss=1.6, seconds=3.0).finished
            True
        """
        return self.step == self.steps or self.stopped_early


def lm(
    file: str | os.PathLike[str], out: str | os.PathLike[str], *, resume: bool = False,
    pretrained: str | os.PathLike[str] | None = None, progress: TrainingProgress | None = None,
    **settings: Unpack[LMChoices],
) -> Result:  # fmt: skip
    """Train a language model on a text file; under torchrun by all processes together, `batch` in all.

    Ctrl-C and SIGTERM finish the step, save and return; `resume=True` continues with the same result. With more
    `steps` it also extends a run, finished or not: from there on the learning rate follows the longer run's schedule.

    Args:
        file: The text, UTF-8. One of more than 32 MB is turned into token ids once, in a file that is mapped.
        out: Folder of the run: settings, tokenizer, checkpoints and history.
        resume: Continue the run in `out`.
        pretrained: Begin from this GPT-2, a folder that transformers' ``save_pretrained`` wrote, with its tokenizer. It
            decides the sizes; `context` may be shorter, and the default of `lr` is 1e-4.
        progress: A `regard.learn.progress.TrainingProgress`, called with the run's numbers. Default: nothing is shown.
        settings: The fields of `LMSettings`: steps, layers, dim, context, …

    Returns:
        Where the run ended, and its losses.

    Raises:
        ValueError: A setting or the text does not fit; nothing is written then.
        Diverged: The loss became NaN or infinite.
        OSError: A file cannot be read or written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "text").write_text("the cat sat on the mat. " * 20)
        >>> result = lm(folder / "text", folder / "run", steps=4, dim=8, heads=2, layers=1, context=8, device="cpu")
        >>> result.finished, result.step
        (True, 4)
    """
    return _run("lm", (Path(file),), None, Path(out), LMSettings, {**settings}, resume, progress, pretrained)


def translate(
    source: str | os.PathLike[str], target: str | os.PathLike[str], out: str | os.PathLike[str], *,
    validation: tuple[str | os.PathLike[str], str | os.PathLike[str]] | None = None, resume: bool = False,
    progress: TrainingProgress | None = None, **settings: Unpack[TranslateChoices],
) -> Result:  # fmt: skip
    """Train a translator on two files; line n of one is the translation of line n of the other.

    Args:
        source: Sentences to read, UTF-8.
        target: Their translations.
        out: Folder of the run: settings, tokenizer, checkpoints and history.
        validation: Two files for validation. Default: the last pairs of the data.
        resume: Continue the run in `out`, or extend it by more `steps`.
        progress: A `regard.learn.progress.TrainingProgress`, called with the run's numbers. Default: nothing is shown.
        settings: The fields of `TranslateSettings`: steps, layers, dim, vocabulary, …

    Returns:
        Where the run ended, and its losses.

    Raises:
        ValueError: A setting or the data does not fit; nothing is written then.
        Diverged: The loss became NaN or infinite.
        OSError: A file cannot be read or written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "en").write_text("a red cat\\na blue dog\\n" * 9)
        >>> _ = (folder / "de").write_text("eine rote Katze\\nein blauer Hund\\n" * 9)
        >>> small = {"dim": 8, "heads": 2, "layers": 1, "vocabulary": 30, "batch": 4, "device": "cpu"}
        >>> translate(folder / "en", folder / "de", folder / "run", steps=2, **small).finished
        True
    """
    files = (Path(source), Path(target))
    return _run("translate", files, validation, Path(out), TranslateSettings, {**settings}, resume, progress)


def _run(
    kind: str, files: tuple[Path, ...], validation: Any, out: Path, settings_type: type[Settings],
    overrides: dict[str, Any], resume: bool, progress: TrainingProgress | None, pretrained: Any = None,
) -> Result:  # fmt: skip
    checkpoint.safetensors()
    start = None
    if pretrained is not None and not resume:  # a resumed run has its weights
        start = read_pretrained(pretrained, overrides)
        overrides = start.overrides
    settings, saved = run_folder.open_settings(kind, out, settings_type, overrides, resume)
    if start is not None:
        saved = tasks.Saved(start.tokenizer)
    with contextlib.ExitStack() as stack:
        replicas = stack.enter_context(joined(choose_device(settings.device)))
        device = replicas.device
        if replicas.first:
            stack.enter_context(checkpoint.exclusive_lock(out) if resume else run_folder.claimed(out))
        if resume:
            run_folder.verify(out, kind, settings, saved.tokenizer.get_vocab_size())
        task = tasks.make_task(kind, files, validation, settings, saved, device, out)
        interrupted = stack.enter_context(Interrupted())
        on_gpu = [torch.cuda.current_device()] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(on_gpu))  # the caller's random state must not change
        with _fitting("the model", "--dim, --hidden, --layers or vocabulary"):
            training = _Training(task, out, replicas, progress or TrainingProgress(), interrupted, resume, start)
        replicas.barrier()  # the others have read the folder before the first one writes there
        stack.push(replicas.finish)
        if not replicas.first:
            return training.run()
        if resume:
            checkpoint.sweep(out)
            checkpoint.update_settings(out, settings)
        else:
            description = checkpoint.Description(kind, settings, task.digest, task.tokens_digest, start is not None)
            checkpoint.save_settings(out, description, task.tokenizer.to_str())
            if start is not None:
                training.save_start()
        return training.run()


@contextlib.contextmanager
def _fitting(what: str, smaller: str) -> Iterator[None]:
    """Say what does not fit into memory, and what makes it smaller."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
            raise MemoryError(f"{what} does not fit into memory: use a smaller {smaller}.") from None
        raise


class _Training:
    """One run, from its current step to the end."""

    def __init__(
        self, task: tasks.Task, out: Path, replicas: Replicas, progress: TrainingProgress, interrupted: Interrupted,
        resume: bool, start: Pretrained | None,
    ) -> None:  # fmt: skip
        self.task, self.out, self.progress, self.interrupted = task, out, progress, interrupted
        self.replicas, self.device = replicas, replicas.device
        self.settings: Settings = task.settings
        torch.manual_seed(step_seed(self.settings.seed, -1))
        self.model = tasks.build(task.kind, self.settings, task.tokenizer.get_vocab_size()).to(self.device)
        self.weights = dict(self.model.named_parameters())
        if start is not None:
            self._load(start.weights)
        self.optimizer = make_optimizer(self.settings, self.weights)
        self.ema = {name: p.detach().clone() for name, p in self.weights.items()} if self.settings.ema else {}
        self.graphs = CudaGraphs() if self.settings.compile and self._captures() else None
        capture = self.graphs
        self.captured = CapturedGradients(self._eager_loss, self.weights.values(), capture) if capture else None
        self.compiled_loss: Any = self._compiled() if self.settings.compile and not self.captured else task.loss
        self.step, self.best, self.val_loss, self.saved = 0, math.inf, math.inf, -1
        self.stale = 0  # validations since the best one
        self.history: list[dict[str, Any]] = []
        self.patterns = PatternLog()
        if resume and (out / checkpoint.LAST).exists():  # absent: the run was killed before its first checkpoint
            self._restore()
        self.replica = replicas.wrap(self.model)

    def _captures(self) -> bool:
        """Whether steps become CUDA graphs: where batches have several shapes, and the compiler takes long for each."""
        in_parts = self.settings.accumulate > 1 or self.replicas.size > 1
        return self.device.type == "cuda" and not self.task.static_shapes and not in_parts

    def _compiled(self) -> Any:
        """The compiled loss, as CUDA graphs where shapes allow: a small model's launches cost more than its kernels."""
        # A graph writes the gradients of every part into the same memory, where they cannot be added.
        graphs = self.device.type == "cuda" and self.task.static_shapes and self.settings.accumulate == 1
        return torch.compile(self.task.loss, mode="reduce-overhead" if graphs else "default")

    # The loop.

    def run(self) -> Result:
        """Train to the last step or an interruption."""
        began = time.perf_counter()
        self.progress.begin(self.step, self.settings.steps)
        try:
            with self.graphs.on_stream() if self.graphs else contextlib.nullcontext(), _fitting("a step", PARTS):
                self._steps()
        finally:
            self.progress.close()
        seconds = time.perf_counter() - began
        stopped_early = self._stops_early()
        return Result(self.out, self.step, self.settings.steps, self.best, self.val_loss, seconds, stopped_early)

    def _stops_early(self) -> bool:
        return 0 < self.settings.patience <= self.stale

    def _steps(self) -> None:
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        timed_from, trained = time.perf_counter(), 0
        while self.step < self.settings.steps and not self._stops_early():
            watching = self.step % WATCH_EVERY == 0 or not self.history
            batch = self.task.batch(self.step)
            loss, norm, heads = self._step(batch, watching)
            trained += self.task.tokens(batch)
            # Accumulated on the device: no sync per step.
            finite = finite & loss.isfinite() & norm.isfinite()
            self.step += 1
            last = self.step == self.settings.steps
            due = last or self.step % self.settings.eval_every == 0
            if watching or due:
                self._require_finite(finite)
                numbers = {"loss": float(loss), "lr": self._rate(self.step - 1)}
                if watching and self.step > 1:
                    numbers["tokens_per_second"] = trained / (time.perf_counter() - timed_from)
                    timed_from, trained = time.perf_counter(), 0
                self._report(numbers, heads, keep=True)
            if due:
                began = time.perf_counter()
                self._evaluate()
                timed_from += time.perf_counter() - began  # validation does not count as training time
            # Read last: a signal that came while the step was reported ends the run at this step.
            if self.replicas.any(bool(self.interrupted)):
                if not (watching or due):
                    self._require_finite(finite)
                    self._report({"loss": float(loss), "lr": self._rate(self.step - 1)}, heads, keep=False)
                if not due:
                    self._save_last()
                return

    def _step(self, batch: tuple[Tensor, ...], watching: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
        self.model.train()
        heads = self._heads(batch) if watching and self.replicas.first else {}
        self._seed_dropout()
        # Before forward: a CUDA graph writes its gradients into the same memory.
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._gradients(batch)
        norm = nn.utils.clip_grad_norm_(self.weights.values(), self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(self.step)
        self.optimizer.step()
        if self.ema:
            update = get_ema_multi_avg_fn(averaging_decay(self.settings.ema, self.step))
            update(list(self.ema.values()), [p.detach() for p in self.weights.values()], None)
        return loss, norm.detach(), heads

    def _gradients(self, batch: tuple[Tensor, ...]) -> Tensor:
        """The loss of a batch, which leaves its gradients in the parameters."""
        if self.captured is not None:
            return self.captured(batch)
        loss: Any = 0.0
        parts = tasks.split_batch(self.task, batch, self.settings.accumulate * self.replicas.size)
        for part, share, travels in self.replicas.own_parts(parts):
            with self.replicas.syncing(self.replica, travels):
                with self._precision():
                    torch.compiler.cudagraph_mark_step_begin()
                    partial = self.compiled_loss(self.replica, part)
                (partial * share).backward()
            loss = loss + partial.detach() * share
        return self.replicas.mean(loss)

    def _eager_loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        with self._precision():
            return self.task.loss(self.model, batch)

    def _seed_dropout(self) -> None:
        torch.manual_seed(step_seed(self.settings.seed, self.step) + self.replicas.rank)

    def _heads(self, batch: tuple[Tensor, ...]) -> dict[str, Any]:
        """Statistics of every head on some sequences: a pass of its own, so that each step can be a compiled one."""
        self._seed_dropout()
        with watch(self.model, every=1) as monitor, self._precision():
            self.task.loss(self.model, tuple(tensor[:WATCHED_SEQUENCES] for tensor in batch))
        return {
            name: {what: [round(v, 4) for v in values.tolist()] for what, values in statistics.items()}
            for name, statistics in monitor.layers.items()
        }

    def _rate(self, step: int) -> float:
        """Linear warm-up, at most a fifth of the run so that a short one reaches the top, then half a cosine."""
        s = self.settings
        rise = min(s.warmup, s.steps // 5)
        if step < rise:
            return s.lr * (step + 1) / rise
        return s.lr * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, s.steps - rise)))

    def _precision(self) -> Any:
        name = self.settings.precision
        narrow = name == "bfloat16" or (name == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, torch.bfloat16) if narrow else contextlib.nullcontext()

    def _require_finite(self, finite: Tensor) -> None:
        if bool(finite):
            return
        s = self.settings
        saved = f"the checkpoint of step {self.saved} is in {self.out}" if self.saved >= 0 else "nothing was saved yet"
        raise Diverged(
            f"the loss is NaN or infinite at step {self.step}; {saved}. "
            f"Try a smaller --lr (it is {s.lr:g}), a longer --warmup ({s.warmup}), "
            f"a smaller --clip ({s.clip:g}) or --precision float32{', with another --out' if self.saved >= 0 else ''}."
        )

    def _report(self, numbers: dict[str, Any], heads: dict[str, Any], keep: bool = True) -> None:
        """Show the numbers, and add them to the history. Not at an interruption: it must leave no trace there."""
        if heads:
            numbers = {**numbers, "heads": heads}
        if keep:
            self.history.append({"step": self.step, **numbers})
        self.progress.update(self.step, numbers)

    # Checkpoints.

    def _evaluate(self) -> None:
        """Validate, save the weights if they are the best so far, and save everything to resume from."""
        with self._ema_weights():
            self.model.eval()
            with torch.no_grad(), self._precision():
                self.val_loss = self.replicas.from_first(self.task.validate(self.model) if self.replicas.first else 0.0)
                self.patterns.look(self.model, self.task, self.step)
            if not math.isfinite(self.val_loss):
                self._require_finite(torch.tensor(False))
            self.stale += 1
            if self.val_loss < self.best:
                self.best, self.stale = self.val_loss, 0
                fields = {"step": str(self.step), "val_loss": repr(self.val_loss)}
                if self.replicas.first:
                    checkpoint.save(self.out / checkpoint.MODEL, dict(self.model.state_dict()), fields)
        ends = self.step == self.settings.steps or self._stops_early()
        self._report({"val_loss": self.val_loss, "best": self.best}, {})
        if ends:  # for the report
            self.history[-1]["examples"] = self.task.examples()
        self._save_last()

    @contextlib.contextmanager
    def _ema_weights(self) -> Iterator[None]:
        """The moving average in the model, where there is one."""
        if not self.ema:
            yield
            return
        own = {name: p.detach().clone() for name, p in self.weights.items()}
        self._load(self.ema)
        try:
            yield
        finally:
            self._load(own)

    @torch.no_grad()
    def _load(self, values: dict[str, Tensor]) -> None:
        for name, p in self.weights.items():
            p.copy_(values[name])

    def save_start(self) -> None:
        """Save the pretrained weights: a run that is killed before its first validation begins from them again."""
        for p in self.weights.values():
            self.optimizer.state[p] = zero_state(self.optimizer, p)
        self._save_last()

    def _save_last(self) -> None:
        tensors: dict[str, Tensor] = {f"weights/{name}": p for name, p in self.weights.items()}
        tensors |= {f"ema/{name}": p for name, p in self.ema.items()}
        for name, p in self.weights.items():
            tensors |= {f"optimizer/{key}/{name}": value for key, value in self.optimizer.state[p].items()}
        fields = {
            "step": str(self.step), "best": repr(self.best), "val_loss": repr(self.val_loss), "stale": str(self.stale),
        }  # fmt: skip
        if self.replicas.first:
            checkpoint.save_history(self.out, self.history)
            self.patterns.save(self.out)
            checkpoint.save(self.out / checkpoint.LAST, tensors, fields)
        self.saved = self.step

    def _restore(self) -> None:
        path = self.out / checkpoint.LAST
        tensors, fields = checkpoint.read_tensors(path)

        def take(name: str, like: Tensor) -> Tensor:
            if name not in tensors:
                raise ValueError(f"{path} does not fit its settings: {name} is missing.")
            if tensors[name].shape != like.shape or tensors[name].dtype != like.dtype:
                raise ValueError(f"{path} does not fit its settings: {name} differs.")
            return tensors[name].to(like.device)

        self._load({name: take(f"weights/{name}", p) for name, p in self.weights.items()})
        for name, average in self.ema.items():
            average.copy_(take(f"ema/{name}", average))
        for name, p in self.weights.items():
            zeros = zero_state(self.optimizer, p)
            state = {key: take(f"optimizer/{key}/{name}", like) for key, like in zeros.items()}
            self.optimizer.state[p] = state
        try:
            self.step = self.saved = int(fields["step"])
            self.best, self.val_loss = float(fields["best"]), float(fields["val_loss"])
            self.stale = int(fields.get("stale", "0"))  # older runs have none
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path} is damaged: its step and losses cannot be read ({error}).") from None
        if not 0 <= self.step <= self.settings.steps:
            raise ValueError(f"{path} is damaged: its step must be at most {self.settings.steps}, got {self.step}.")
        self.patterns.restore(self.out, self.step)
        if (self.out / checkpoint.HISTORY).exists():  # it may be newer than the checkpoint
            self.history = [row for row in checkpoint.read_history(self.out) if row["step"] <= self.step]
