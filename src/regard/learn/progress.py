"""Progress of a training run: a live panel with `rich` on a terminal, plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .sparkline import sparkline

__all__ = ["PlainProgress", "RichProgress", "TrainingProgress", "open_progress"]

#: Share of the largest entropy below which a head looks at one token alone.
COLLAPSED = 0.02


class TrainingProgress:
    """The events of a training run. They show nothing here: the other classes override them."""

    def begin(self, step: int, steps: int) -> None:
        """Training starts at a step."""

    def update(self, step: int, numbers: dict[str, Any]) -> None:
        """Newest numbers: loss, val_loss, tokens_per_second, heads (layer → statistic → a number per head)."""

    def note(self, text: str) -> None:
        """Print a line."""

    def close(self) -> None:
        """Training ended."""


class PlainProgress(TrainingProgress):
    """One line per validation, on stderr."""

    def __init__(self) -> None:
        self.steps = 0
        self.latest: dict[str, Any] = {}

    def begin(self, step: int, steps: int) -> None:
        self.steps = steps

    def update(self, step: int, numbers: dict[str, Any]) -> None:
        self.latest |= numbers
        if "val_loss" in numbers:
            self.note(f"step {step:,}/{self.steps:,}  {_numbers(self.latest)}  {_heads(self.latest.get('heads', {}))}")

    def note(self, text: str) -> None:
        print(text.rstrip(), file=sys.stderr, flush=True)


class RichProgress(TrainingProgress):
    """A progress bar with the newest numbers, their curves, and a table of every head's entropy and largest score."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, TextColumn("{task.description}"), console=self.console)
        self.live = Live(console=self.console, refresh_per_second=4)
        self.latest: dict[str, Any] = {}
        self.curves: dict[str, list[float]] = {"loss": [], "lowest entropy": [], "largest score": []}
        self.heads_step = 0  # when the heads' numbers were measured

    def begin(self, step: int, steps: int) -> None:
        self.task = self.bar.add_task("", total=steps, completed=step)
        self.live.start()

    def update(self, step: int, numbers: dict[str, Any]) -> None:
        from rich.console import Group

        self.latest |= numbers
        self.bar.update(self.task, completed=step, description=_numbers(self.latest))
        if "loss" in numbers:
            self.curves["loss"].append(numbers["loss"])
        if heads := numbers.get("heads"):
            self.heads_step = step
            self.curves["lowest entropy"].append(_extreme(min, heads, "entropy_share"))
            self.curves["largest score"].append(_extreme(max, heads, "max_score"))
        heads, width = self.latest.get("heads", {}), self.live.console.width
        table = _table(heads, width, self.heads_step)
        self.live.update(Group(self.bar, *_curve_lines(self.curves, width), table, *_warnings(heads)))

    def note(self, text: str) -> None:
        self.console.print(text.rstrip(), markup=False, highlight=False)

    def close(self) -> None:
        self.live.stop()


def open_progress() -> TrainingProgress:
    """`RichProgress` on a terminal with rich installed, else `PlainProgress`."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return RichProgress()
    return PlainProgress()


def _numbers(latest: dict[str, Any]) -> str:
    parts = [("loss", "loss", ".4f"), ("val_loss", "val", ".4f"), ("best", "best", ".4f")]
    text = [f"{label} {latest[name]:{digits}}" for name, label, digits in parts if name in latest]
    if "tokens_per_second" in latest:
        text.append(f"{latest['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(text)


def _heads(heads: dict[str, dict[str, list[float]]]) -> str:
    """The lowest entropy and the largest score over all heads, and the heads that have them."""
    if not heads:
        return ""
    low = min((value, f"{name} head {n}") for name, of in heads.items() for n, value in enumerate(of["entropy_share"]))
    text = f"entropy ≥ {low[0]:.2f} ({_short(low[1])})"
    scores = [(v, f"{name} head {n}") for name, of in heads.items() for n, v in enumerate(of.get("max_score", []))]
    if scores:
        high = max(scores)
        text += f"  max score ≤ {high[0]:.1f} ({_short(high[1])})"
    return text


def _extreme(extreme: Callable[..., float], heads: dict[str, dict[str, list[float]]], name: str) -> float:
    """The smallest or largest finite number of all heads; NaN where there is none."""
    return float(extreme((x for of in heads.values() for x in of.get(name, []) if math.isfinite(x)), default=math.nan))


def _curve_lines(curves: dict[str, list[float]], width: int) -> Iterator[str]:
    """Every number since the start as a line of bars, with its first and its newest value."""
    for name, values in curves.items():
        if len(values) > 1:
            ends = f"{values[0]:.3g} → {values[-1]:.3g}"
            yield f"{name:<15} {sparkline(values, max(4, width - 18 - len(ends)))} {ends}"


def _warnings(heads: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """The heads that collapsed, in words."""
    for name, of in heads.items():
        for n, share in enumerate(of["entropy_share"]):
            if share < COLLAPSED:
                yield f"{_short(name)} head {n} has collapsed: it looks at one token alone"


def _table(heads: dict[str, dict[str, list[float]]], width: int, step: int | None = None) -> Any:
    """A table of all heads in one or two lines per layer; where it is too wide, only each layer's extremes."""
    from rich.table import Table

    count = max((len(of["entropy_share"]) for of in heads.values()), default=0)
    one_line, two_lines = 8 + 12 * count <= width, 16 + 7 * count <= width
    title = "entropy / largest score, per head" if one_line or two_lines else None
    if title and step is not None:
        title += f", step {step:,}"
    table = Table(box=None, padding=(0, 1), title=title, title_style="dim")
    table.add_column("layer", style="dim", no_wrap=True)
    for title in map(str, range(count)) if one_line or two_lines else ("lowest entropy", "largest score"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, of in heads.items():
        entropy, scores = of["entropy_share"], of.get("max_score", [float("nan")] * len(of["entropy_share"]))
        if one_line:
            table.add_row(_short(name), *[f"{e:.2f}/{s:.1f}" for e, s in zip(entropy, scores, strict=True)])
        elif two_lines:
            table.add_row(f"{_short(name)} entropy", *[f"{e:.2f}" for e in entropy])
            table.add_row("score", *[f"{s:.3g}" for s in scores])
        else:
            low, high = min(range(count), key=entropy.__getitem__), max(range(count), key=scores.__getitem__)
            table.add_row(_short(name), f"{entropy[low]:.2f} head {low}", f"{scores[high]:.1f} head {high}")
    return table


def _short(name: str) -> str:
    return name.replace("body.", "").replace("blocks.", "").replace(".attention", "")
