"""Patterns of every head as it learns: attention over one piece of the validation data, at every validation.

They are in `patterns.safetensors` of a run's folder, in 255 steps of weight, a few hundred numbers a head and look.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..recorder import record
from . import checkpoint

__all__ = ["PatternLog", "read_patterns"]

#: Tokens of the piece, at most, and pieces among which one of that length is looked for.
TOKENS, PIECES = 24, 500
#: Looks that are stored; of more, every second one is left out.
LOOKS = 64


@dataclass
class PatternLog:
    """The patterns of a run: steps, and of every layer its tokens and weights, (look, h, i, j) in 255 steps."""

    steps: list[int] = field(default_factory=list)
    layers: dict[str, list[Tensor]] = field(default_factory=dict)  # a tensor (h, i, j) a look
    tokens: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)

    @torch.no_grad()
    def look(self, model: nn.Module, task: Any, step: int) -> None:
        """Run the model on the piece, in eval mode, and add what its heads give."""
        batch = _piece(task)
        was_training = model.training
        model.eval()
        with record(model) as seen:
            task.loss(model, batch)
        model.train(was_training)
        for layer in seen.layers:
            rows, cols = _tokens(layer, task, batch)
            w = layer.weights[0].dense()[:, : len(rows), : len(cols)].float()
            self.layers.setdefault(layer.name, []).append((255 * w.clamp(0, 1)).round().to(torch.uint8).cpu())
            self.tokens[layer.name] = rows, cols
        self.steps.append(step)
        if len(self.steps) > LOOKS:
            self._keep(lambda n: n % 2 == 0)

    def _keep(self, wanted: Any) -> None:
        places = [n for n in range(len(self.steps)) if wanted(n)]
        self.steps = [self.steps[n] for n in places]
        self.layers = {name: [looks[n] for n in places] for name, looks in self.layers.items()}

    def save(self, folder: Path) -> None:
        """Write the patterns of a run."""
        tensors = {name: torch.stack(looks) for name, looks in self.layers.items() if looks}
        fields = {"steps": json.dumps(self.steps), "layers": json.dumps(self.tokens)}
        checkpoint.save(folder / checkpoint.PATTERNS, tensors, fields)

    def restore(self, folder: Path, step: int) -> None:
        """Read the patterns of a run that is resumed, up to its step."""
        if (folder / checkpoint.PATTERNS).exists():
            stored = read_patterns(folder)
            self.steps, self.layers, self.tokens = stored.steps, stored.layers, stored.tokens
            self._keep(lambda n: stored.steps[n] <= step)


def read_patterns(folder: Path) -> PatternLog:
    """The patterns of a run, verified; none where it has none.

    Args:
        folder: The folder of the run.

    Raises:
        ValueError: The file is damaged.
    """
    path = folder / checkpoint.PATTERNS
    if not path.exists():
        return PatternLog()
    tensors, fields = checkpoint.read_tensors(path)
    try:
        steps = [int(step) for step in json.loads(fields["steps"])]
        tokens = {
            name: (list(map(str, rows)), list(map(str, cols)))
            for name, (rows, cols) in json.loads(fields["layers"]).items()
        }
        for name, (rows, cols) in tokens.items():
            shape = tensors[name].shape
            if len(shape) != 4 or (shape[0], *shape[2:]) != (len(steps), len(rows), len(cols)):
                raise ValueError(f"{name} is {tuple(shape)}")
            if tensors[name].dtype != torch.uint8:
                raise ValueError(f"{name} is {tensors[name].dtype}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: its steps and tokens do not fit ({error}).") from None
    return PatternLog(steps, {name: list(tensors[name]) for name in tokens}, tokens)


def _piece(task: Any) -> tuple[Tensor, ...]:
    """The first piece of the validation data with enough tokens, else the longest of some: the same at every look."""
    longest: tuple[Tensor, ...] = ()
    for batch in itertools.islice(task.valid.all(1), PIECES):
        if not longest or batch[-1].shape[1] > longest[-1].shape[1]:
            longest = batch
        if batch[-1].shape[1] >= TOKENS:
            break
    return tuple(part[:, :TOKENS] for part in longest)


def _tokens(layer: Any, task: Any, batch: tuple[Tensor, ...]) -> tuple[list[str], list[str]]:
    """The tokens of a layer's rows and columns, without padding."""
    name = task.tokenizer.id_to_token
    if task.kind == "lm":
        words = [name(n) or "" for n in batch[0][0].tolist()]
        return words, words
    pad = task.valid.pad
    source, target = ([name(n) or "" for n in part[0].tolist() if n != pad] for part in batch[:2])
    if layer.kind == "cross":
        return target, source
    return (source, source) if layer.name.startswith("encoder") else (target, target)
