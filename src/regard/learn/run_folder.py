"""The folder of a run before training starts: free for a new one, complete and unchanged for one that is resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .._options import check_options
from . import checkpoint, tasks
from .settings import Settings

__all__ = ["make_folder", "open_settings", "verify"]


def open_settings(
    kind: str, out: Path, settings_type: type[Settings], overrides: dict[str, Any], resume: bool
) -> tuple[Settings, tasks.Saved]:
    """The settings of a run; its tokenizer and the digests of its data where it is resumed.

    A resumed run may be extended: more steps, and another patience.
    """
    check_options(f"learn.{kind}(...)", overrides, [spec.name for spec in dataclasses.fields(settings_type)])
    started = checkpoint.is_checkpoint(out)
    if not resume:
        if started:
            raise ValueError(f"{out} holds a run already: add --resume to continue it, or choose another --out.")
        require_free(out)
        return settings_type(**overrides), tasks.Saved()
    if not started:
        require_free(out)
        raise ValueError(f"{out} holds no run to resume; leave --resume out to start one.")
    saved_kind, settings, digest = checkpoint.read_settings(out)
    if saved_kind != kind:
        raise ValueError(f"the run in {out} is of the kind {saved_kind!r}, not {kind!r}.")
    for name, value in overrides.items():
        before = getattr(settings, name)
        extends = name == "patience" or (name == "steps" and isinstance(value, int) and value > before)
        if value != before and not extends:
            flag = f"--{name.replace('_', '-')}"
            more = "; it can only be extended, by more --steps" if name == "steps" else ""
            raise ValueError(
                f"the run in {out} has {flag} {before}, got {value}: a resumed run keeps its settings{more}. "
                f"Leave {flag} out, or start another run with another --out."
            )
    saved = tasks.Saved(checkpoint.read_tokenizer(out, kind), digest, checkpoint.tokens_digest(out))
    return dataclasses.replace(settings, **overrides), saved


def verify(out: Path, kind: str, settings: Settings, vocabulary: int) -> None:
    """Verify the tensors of a run before it is resumed, also of the best model, which is not read otherwise."""
    if checkpoint.began_pretrained(out) and not (out / checkpoint.LAST).exists():
        raise ValueError(f"the run in {out} ended before its pretrained weights were saved: start another --out.")
    for name, prefix in ((checkpoint.MODEL, ""), (checkpoint.LAST, "weights/")):
        if (path := out / name).exists():
            tensors, _ = checkpoint.read_tensors(path)
            weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            checkpoint.check_shapes(weights, kind, settings, vocabulary, path)


def require_free(out: Path) -> None:
    """Refuse a folder in which a run would overwrite files: another program's, or a run without settings."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, and --out names the folder of a run: choose another --out.")
    if existing := [name for name in checkpoint.FILES if (out / name).exists()]:
        raise ValueError(
            f"{out} holds {', '.join(existing)}, and no readable {checkpoint.SETTINGS} of a run: it is another "
            "program's or damaged, and is left alone. Choose another --out."
        )


def make_folder(out: Path) -> None:
    """Create the folder of a new run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder {out} could not be created: {error.strerror}. Choose another --out.") from None
