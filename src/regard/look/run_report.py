"""The report of a training run as one page: losses, samples of what the model writes, every head over the steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["REPORT", "run_numbers", "write_report"]

#: Name of the page in the folder of a run.
REPORT = "report.html"
#: Numbers of a run that the page draws over the steps.
CURVES = ("loss", "val_loss", "lr")
SAMPLE_TOKENS = 200


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Write the report of a run of `regard learn` into its folder.

    Args:
        folder: The folder of a run that is finished: its best model writes the samples.

    Returns:
        The page, ``report.html`` in the folder; it needs no network and no other file.

    Raises:
        ValueError: The folder holds no run, or damaged files.
        OSError: The page cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from regard.learn import lm
        >>> place = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (place / "text").write_text("the cat sat on the mat. " * 20)
        >>> _ = lm(place / "text", place / "run", steps=2, dim=8, heads=2, layers=1, context=8, device="cpu")
        >>> write_report(place / "run").name
        'report.html'
    """
    from ..learn import checkpoint, open_model
    from ..learn.patterns import read_patterns
    from .page.html import html
    from .page.training import pack_history

    run = Path(folder)
    trained = open_model(run)
    rows = checkpoint.read_history(run)
    best = min((row["val_loss"] for row in rows if "val_loss" in row), default=float("nan"))
    sizes = trained.settings
    notes = [
        f"{rows[-1]['step']:,} steps, best validation loss {best:.4f}; {sizes.layers} layers of {sizes.heads} heads, "
        f"vectors of {sizes.dim} numbers, {sum(p.numel() for p in trained.model.parameters()):,} parameters, seed "
        f"{sizes.seed}."
    ]
    samples = _samples(trained, rows)
    page = html(pack_history(run_numbers(rows), f"Training of {run.name}", notes, samples, read_patterns(run)))
    checkpoint.write(run / REPORT, page.encode())
    return run / REPORT


def run_numbers(rows: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """The rows of a history as steps with numbers by name; rows of one step are joined."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        numbers = steps.setdefault(row["step"], {})
        numbers |= {name: float(row[name]) for name in CURVES if name in row}
        for layer, statistics in row.get("heads", {}).items():
            for measure, values in statistics.items():
                numbers |= {f"{layer}/{measure}/{head}": value for head, value in enumerate(values)}
    return sorted(steps.items())


def _samples(trained: Any, rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Headings and texts: what the best model writes for the examples of the run."""
    from ..learn.generate import sample

    examples: list[dict[str, str]] = next((row["examples"] for row in reversed(rows) if "examples" in row), [])
    if trained.kind == "translate":
        written = trained.translate_all([one["source"] for one in examples])
        return [
            (one["source"], f"{text}\n(reference: {one['reference']})")
            for one, text in zip(examples, written, strict=True)
        ]
    samples = []
    for one in examples:
        ids = trained.ids(one["prompt"])
        new = list(sample(trained.model, ids, SAMPLE_TOKENS, seed=0))
        text = trained.tokenizer.decode(ids[0].tolist() + new)
        samples.append((f"Sample: the first {ids.shape[1]} tokens are of the validation text", text))
    return samples
