"""The loop: AdamW, warm-up and cosine, clipping, validation, checkpoints; interrupted and resumed at any moment.

Everything random in a step follows from the seed and the number of the step, so a run that was killed and resumed
draws the same batches and drops the same branches as one that was not: on a CPU it ends with the same bits.
Imports the other rooms of `learn`, and `regard.watch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..recorder import watch
from . import checkpoint as disk
from . import tasks
from . import tokenizer as texts
from .data import drawn
from .progress import Silent
from .settings import LMSettings, Settings, TranslateSettings

__all__ = ["Diverged", "Result", "chosen_device", "lm", "translate"]

#: Steps between two looks at the loss and at the heads.
LOOK = 50


class Diverged(ArithmeticError):  # noqa: N818  a fact about a run
    """The loss is no number any more."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    step: int
    steps: int
    best: float  # the smallest validation loss
    val_loss: float  # the last one
    seconds: float

    @property
    def finished(self) -> bool:
        return self.step == self.steps


def lm(file: Any, out: Any, *, resume: bool = False, progress: Silent | None = None, **settings: Any) -> Result:
    """Train a language model on a text file; settings are those of `LMSettings`."""
    return _run("lm", (Path(file),), None, Path(out), LMSettings, settings, resume, progress)


def translate(
    source: Any, target: Any, out: Any, *, held: tuple[Any, Any] | None = None, resume: bool = False,
    progress: Silent | None = None, **settings: Any,
) -> Result:  # fmt: skip
    """Train a translator on two files, line by line; `held` are two files for validation."""
    files = (Path(source), Path(target))
    return _run("translate", files, held, Path(out), TranslateSettings, settings, resume, progress)


def _run(
    kind: str, files: tuple[Path, ...], held: Any, out: Path, among: type[Settings], given: dict[str, Any],
    resume: bool, progress: Silent | None,
) -> Result:  # fmt: skip
    disk.safetensors()
    settings, tokenizer = _settings(kind, out, among, given, resume)
    device = chosen_device(settings.device)
    with contextlib.ExitStack() as around:
        if resume:
            around.enter_context(disk.alone(out))
        digest = disk.read_json(out / disk.SETTINGS)["data"] if resume else None
        task = tasks.make(kind, files, held, settings, tokenizer, device, digest)
        interrupted = around.enter_context(_Interrupted())
        on_gpu = [torch.cuda.current_device()] if device.type == "cuda" else []
        around.enter_context(torch.random.fork_rng(on_gpu))  # the caller's chance is not ours to change
        training = _built(task, out, device, progress or Silent(), interrupted, resume)
        if resume:
            disk.sweep(out)
        else:
            _made(out)
            around.enter_context(disk.alone(out))
            _begin(task, out)
        try:
            return training.run()
        except Diverged:
            if training.saved < 0 and not resume:  # nothing that is worth keeping, and it would be in the way
                for name in (disk.SETTINGS, disk.TOKENIZER):
                    (out / name).unlink(missing_ok=True)
            raise


def _built(task: tasks.Task, out: Path, *more: Any) -> _Training:
    try:
        return _Training(task, out, *more)
    except (RuntimeError, MemoryError) as wrong:
        if isinstance(wrong, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(wrong):
            raise MemoryError(
                "the model does not fit into memory: take a smaller --dim, --hidden, --layers or vocabulary."
            ) from None
        raise


def _settings(kind: str, out: Path, among: type[Settings], given: dict[str, Any], resume: bool) -> tuple[Settings, Any]:
    """The settings of the run, and its tokenizer if it has begun already."""
    begun = disk.is_checkpoint(out)
    if not resume:
        if begun:
            raise ValueError(f"{out} holds a run already: add --resume to go on with it, or choose another --out.")
        _need_free(out)
        return among(**given), None
    if not begun:
        _need_free(out)
        raise ValueError(f"{out} holds no run to resume; leave --resume out to begin one.")
    own, settings = disk.read_settings(out)
    if own != kind:
        raise ValueError(f"the run in {out} is of the kind {own!r}, not {kind!r}.")
    for name, value in given.items():
        if value != (had := getattr(settings, name)):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"the run in {out} has {flag} {had}, and {value} came: a resumed run goes on as it began. "
                f"Leave {flag} out, or begin another with another --out."
            )
    return settings, texts.load(out / disk.TOKENIZER)


def _need_free(out: Path) -> None:
    """That a run would overwrite nothing: what is there may be another program's, or a run whose settings are gone."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, and --out names the folder of a run: choose another --out.")
    if there := [name for name in disk.FILES if (out / name).exists()]:
        raise ValueError(
            f"{out} holds {', '.join(there)}, and no {disk.SETTINGS} of a run that could be read: it is another "
            "program's or damaged, and stays as it is. Choose another --out."
        )


def _made(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise OSError(f"the folder {out} could not be made: {wrong.strerror}. Choose another --out.") from None


def _begin(task: tasks.Task, out: Path) -> None:
    """The tokenizer and then the settings: a folder with settings is a run."""
    told = {"format": disk.FORMAT, "kind": task.kind, "settings": task.settings.json(), "data": task.digest}
    try:
        disk.save_json(out / disk.TOKENIZER, json.loads(task.tokenizer.to_str()))
        disk.save_json(out / disk.SETTINGS, told)
    except OSError:
        (out / disk.TOKENIZER).unlink(missing_ok=True)  # it would be in the way of the next attempt
        raise


def chosen_device(name: str) -> torch.device:
    """A device from its name; "auto" is a GPU where there is one."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: PyTorch finds no GPU here; take --device cpu or auto.")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


class _Training:
    """One run, from where it stands to its end."""

    def __init__(
        self, task: tasks.Task, out: Path, device: torch.device, progress: Silent, interrupted: _Interrupted,
        resume: bool,
    ) -> None:  # fmt: skip
        self.task, self.out, self.device, self.progress, self.interrupted = task, out, device, progress, interrupted
        self.settings: Settings = task.settings
        torch.manual_seed(drawn(self.settings.seed, -1))
        self.model = tasks.build(task.kind, self.settings, task.tokenizer.get_vocab_size()).to(device)
        self.weights = dict(self.model.named_parameters())
        self.optimizer = self._made_optimizer()
        self.averaged = {name: p.detach().clone() for name, p in self.weights.items()} if self.settings.average else {}
        self.loss_of: Any = self._compiled() if self.settings.compile else task.loss
        self.step, self.best, self.val_loss, self.saved = 0, math.inf, math.inf, -1
        self.history: list[dict[str, Any]] = []
        if resume and (out / disk.LAST).exists():  # without it the run was killed before its first checkpoint
            self._restore()

    def _compiled(self) -> Any:
        """A GPU computes a small model faster than the host starts its kernels: where it can, they are replayed."""
        replayed = self.device.type == "cuda" and self.task.steady
        return torch.compile(self.task.loss, mode="reduce-overhead" if replayed else "default")

    def _made_optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self.weights.values() if p.ndim >= 2]
        others = [p for p in self.weights.values() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.settings.lr, betas=(0.9, 0.99), fused=True)

    # The loop.

    def run(self) -> Result:
        began = time.perf_counter()
        self.progress.begin(self.step, self.settings.steps)
        try:
            self._steps()
        finally:
            self.progress.close()
        seconds = time.perf_counter() - began
        return Result(self.out, self.step, self.settings.steps, self.best, self.val_loss, seconds)

    def _steps(self) -> None:
        sound = torch.ones((), dtype=torch.bool, device=self.device)
        since, taught = time.perf_counter(), 0
        while self.step < self.settings.steps:
            looking = self.step % LOOK == 0
            batch = self.task.batch(self.step)
            loss, norm, heads = self._step(batch, looking)
            taught += self.task.tokens(batch)
            # A number that is none is looked for on the device, so that it need not be waited for.
            sound = sound & loss.isfinite() & norm.isfinite()
            self.step += 1
            last = self.step == self.settings.steps
            due = last or self.step % self.settings.check == 0
            if looking or due or self.interrupted:
                self._need_sound(sound)
                numbers = {"loss": float(loss), "lr": self._rate(self.step - 1)}
                if looking and self.step > 1:
                    numbers["tokens_per_second"] = taught / (time.perf_counter() - since)
                    since, taught = time.perf_counter(), 0
                self._tell(numbers, heads, keep=looking or due)
            if due:
                began = time.perf_counter()
                self._check()
                since += time.perf_counter() - began  # nothing is taught meanwhile
            elif self.interrupted:
                self._save_last()
            if self.interrupted:
                return

    def _step(self, batch: tuple[Tensor, ...], looking: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
        torch.manual_seed(drawn(self.settings.seed, self.step))  # what is dropped in this step
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)  # first: what is replayed writes where the last gradients lie
        heads: dict[str, Any] = {}
        with self._precision():
            if looking:  # captured code cannot be overheard: this one pass runs as it is written
                with watch(self.model, every=1) as watching:
                    loss = self.task.loss(self.model, batch)
                heads = {
                    name: {what: [round(v, 4) for v in values.tolist()] for what, values in found.items()}
                    for name, found in watching.layers.items()
                }
            else:
                torch.compiler.cudagraph_mark_step_begin()
                loss = self.loss_of(self.model, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.weights.values(), self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(self.step)
        self.optimizer.step()
        if self.averaged:
            # Early on the average remembers little: it would remember the beginning.
            memory = min(self.settings.average, (1 + self.step) / (10 + self.step))
            torch._foreach_lerp_(list(self.averaged.values()), [p.detach() for p in self.weights.values()], 1 - memory)
        return loss.detach(), norm.detach(), heads

    def _rate(self, step: int) -> float:
        """Up in a straight line, then down as half a cosine. A short run would never reach the top: it rises faster."""
        s = self.settings
        rise = min(s.warmup, s.steps // 5)
        if step < rise:
            return s.lr * (step + 1) / rise
        return s.lr * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, s.steps - rise)))

    def _precision(self) -> Any:
        name = self.settings.precision
        narrow = name == "bfloat16" or (name == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, torch.bfloat16) if narrow else contextlib.nullcontext()

    def _need_sound(self, sound: Tensor) -> None:
        if bool(sound):
            return
        s = self.settings
        stands = (
            f"the checkpoint of step {self.saved} stands in {self.out}" if self.saved >= 0 else "nothing was saved yet"
        )
        raise Diverged(
            f"the loss is no number any more at step {self.step}; {stands}. "
            f"Try a smaller --lr (it is {s.lr:g}), a longer --warmup ({s.warmup}), "
            f"a smaller --clip ({s.clip:g}) or --precision float32{', with another --out' if self.saved >= 0 else ''}."
        )

    def _tell(self, numbers: dict[str, Any], heads: dict[str, Any], keep: bool = True) -> None:
        """Show the numbers; an interruption is no reason to keep them, so that the history does not tell of it."""
        if heads:
            numbers = {**numbers, "heads": heads}
        if keep:
            self.history.append({"step": self.step, **numbers})
        self.progress.tell(self.step, numbers)

    # Checkpoints.

    def _check(self) -> None:
        """Validate, keep the weights if they are the best, and save all that is needed to go on."""
        with self._judged():
            self.model.eval()
            with torch.no_grad(), self._precision():
                self.val_loss = self.task.validate(self.model)
            if not math.isfinite(self.val_loss):
                self._need_sound(torch.tensor(False))
            if self.val_loss < self.best:
                self.best = self.val_loss
                told = {"step": str(self.step), "val_loss": repr(self.val_loss)}
                disk.save(self.out / disk.MODEL, dict(self.model.state_dict()), told)
        self._tell({"val_loss": self.val_loss, "best": self.best}, {})
        self._save_last()

    @contextlib.contextmanager
    def _judged(self) -> Iterator[None]:
        """The averaged weights in the model, where there are some."""
        if not self.averaged:
            yield
            return
        own = {name: p.detach().clone() for name, p in self.weights.items()}
        self._load(self.averaged)
        try:
            yield
        finally:
            self._load(own)

    @torch.no_grad()
    def _load(self, values: dict[str, Tensor]) -> None:
        for name, p in self.weights.items():
            p.copy_(values[name])

    def _save_last(self) -> None:
        tensors: dict[str, Tensor] = {f"weights/{name}": p for name, p in self.weights.items()}
        tensors |= {f"averaged/{name}": p for name, p in self.averaged.items()}
        for name, p in self.weights.items():
            tensors |= {f"optimizer/{key}/{name}": value for key, value in self.optimizer.state[p].items()}
        told = {"step": str(self.step), "best": repr(self.best), "val_loss": repr(self.val_loss)}
        disk.save_json(self.out / disk.HISTORY, self.history)
        disk.save(self.out / disk.LAST, tensors, told)
        self.saved = self.step

    def _restore(self) -> None:
        tensors, told = disk.read_tensors(self.out / disk.LAST)
        try:
            self._load({name: tensors[f"weights/{name}"] for name in self.weights})
            for name in self.averaged:
                self.averaged[name].copy_(tensors[f"averaged/{name}"])
            for name, p in self.weights.items():
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimizer.state[p] = {key: tensors[f"optimizer/{key}/{name}"].to(p.device) for key in keys}
        except KeyError as wrong:
            raise ValueError(f"{self.out / disk.LAST} does not fit its settings: {wrong} is missing.") from None
        self.step = self.saved = int(told["step"])
        self.best, self.val_loss = float(told["best"]), float(told["val_loss"])
        if (self.out / disk.HISTORY).exists():  # it may be newer than the checkpoint
            self.history = [row for row in disk.read_json(self.out / disk.HISTORY) if row["step"] <= self.step]


class _Interrupted:
    """True once Ctrl-C or a polite kill came; the step in hand is finished first. A second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.came = False
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.came

    def __enter__(self) -> _Interrupted:
        if threading.current_thread() is threading.main_thread():
            for kind in (signal.SIGINT, signal.SIGTERM):
                self._before[kind] = signal.signal(kind, self._take)
        return self

    def __exit__(self, *_: Any) -> None:
        for kind, before in self._before.items():
            signal.signal(kind, before)

    def _take(self, kind: int, frame: Any) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
