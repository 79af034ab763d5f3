"""The folder of a run before training starts: free for a new one, complete and unchanged for one that is resumed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._options import check_options
from . import checkpoint, tasks
from .settings import Settings

__all__ = ["claimed", "open_settings", "verify"]


def open_settings(
    kind: str, out: Path, settings_type: type[Settings], overrides: dict[str, Any], resume: bool
) -> tuple[Settings, tasks.Saved]:
    """The settings of a run; its tokenizer and the digests of its data where it is resumed.

    A resumed run may be extended: more steps, and another patience.
    """
    check_options(f"learn.{kind}(...)", overrides, [spec.name for spec in dataclasses.fields(settings_type)])
    if not resume:
        require_free(out)
        return settings_type(**overrides), tasks.Saved()
    if not checkpoint.is_checkpoint(out):
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
            tensors, fields = checkpoint.read_tensors(path)
            weights = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            checkpoint.check_shapes(weights, kind, settings, vocabulary, path)
            if fields.get("best", "inf") != "inf" and not (out / checkpoint.MODEL).exists():
                raise ValueError(
                    f"{out / checkpoint.MODEL} is missing, the best weights of the run so far: put it back, or start "
                    "another run with another --out."
                )


def require_free(out: Path) -> None:
    """Refuse a folder in which a run would overwrite files: those of a run, damaged or not, or another program's."""
    if checkpoint.is_checkpoint(out):
        raise ValueError(f"{out} holds a run already: add --resume to continue it, or choose another --out.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, and --out names the folder of a run: choose another --out.")
    if existing := [name for name in checkpoint.FILES if (out / name).exists()]:
        raise ValueError(
            f"{out} holds {', '.join(existing)}, and no readable {checkpoint.SETTINGS} of a run: it is another "
            "program's or damaged, and is left alone. Choose another --out."
        )


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """The folder of a new run, made and locked before anything is written there.

    A run that fails before it saved anything leaves nothing there. After a full disk it stays: it can be resumed.
    """
    new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder {out} could not be created: {error.strerror}. Choose another --out.") from None
    with checkpoint.exclusive_lock(out):
        require_free(out)  # again: another run may have begun there meanwhile
        try:
            yield
        except Exception as error:
            stays = isinstance(error, OSError) and checkpoint.is_checkpoint(out)
            if not stays and checkpoint.discard_unsaved(out):
                for folder in new_folders:
                    with contextlib.suppress(OSError):  # something else is in it
                        folder.rmdir()
            raise
