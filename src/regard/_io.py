"""Files of the user: written as a unit or not at all, and read as UTF-8 text with errors that name the file."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["as_path", "atomic_write", "decode", "partial_files", "read_text", "why_unwritten"]

#: Name of a file while it is written: the final name, then the writer's process and a random number.
PARTIAL = ".{}.{}.part"


def as_path(path: Any, call: str) -> Path:
    """A user's path of a file.

    Args:
        path: The path.
        call: The call that takes it, for the error, such as "seen.save(path)".

    Raises:
        TypeError: It is neither text nor a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{call} takes the path of a file, as text or a pathlib.Path; got {type(path).__name__}.")
    return Path(path)


def atomic_write(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file completely, or leave the old one untouched.

    The bytes go to a temporary file in the same folder, which is synced and renamed: a writer that is killed, or runs
    out of disk, leaves the old file or the new one. The permissions of an old file stay (a private file never becomes
    readable to others), and a symbolic link stays a link: the file it points to is replaced.

    Args:
        path: The file.
        chunks: Its content, piece by piece.

    Raises:
        OSError: The file cannot be written, or `path` is a pipe or a device.
    """
    target = Path(os.path.realpath(path))
    mode = _mode_of(target)
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder; make it first", str(target.parent))
    partial = target.with_name(PARTIAL.format(target.name, f"{os.getpid()}-{secrets.token_hex(4)}"))
    try:
        # Created with the final permissions: fchmod after the write would leave a moment in which others may read.
        with open(
            partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o666 if mode is None else mode)
        ) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            if mode is not None:  # the umask may have taken bits away
                os.chmod(partial, mode)
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:  # of a full disk
            raise OSError(error.errno, os.strerror(error.errno), str(target)) from error
        raise
    _sync_folder(target.parent)


def why_unwritten(error: OSError) -> tuple[str, str]:
    """Why a file could not be written, in the user's words, and what helps.

    Args:
        error: What `atomic_write` raised.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full", "Free some space"
    refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return error.strerror or str(error), "Make the folder writable" if refused else "Check the disk"


def partial_files(path: Path) -> Iterator[Path]:
    """Temporary files that killed writers of `path` have left behind."""
    return path.parent.glob(PARTIAL.format(path.name, "*"))


def _mode_of(target: Path) -> int | None:
    """Permissions of an existing file; None where there is none."""
    try:
        mode = target.stat().st_mode
    except OSError:
        return None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # os.replace refuses a folder by itself
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(target))
    return stat.S_IMODE(mode)


def _sync_folder(folder: Path) -> None:
    """Sync a folder's entries: the rename itself must reach the disk."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_text(path: Any, purpose: str = "a text to learn from") -> str:
    """Read a UTF-8 text file that is not empty.

    Args:
        path: The file.
        purpose: What the text is for, named in the error for an empty file.

    Returns:
        The text, without a byte order mark and with ``\\n`` as line ends.

    Raises:
        OSError: The file cannot be read, or is a folder, pipe or device.
        ValueError: The file is empty or not UTF-8.
    """
    file = Path(path)
    try:
        if file.is_fifo():  # reading one would wait for a writer, possibly for ever
            raise OSError(errno.EINVAL, "it is a pipe")
        data = file.read_bytes()
    except OSError as error:
        reason = "is a folder" if file.is_dir() else f"cannot be read ({error.strerror})"
        raise type(error)(f"{path} {reason}; a text file is needed.") from None
    text = decode(data, path)
    if not text.strip():
        raise ValueError(f"{path} is empty; {purpose} is needed.")
    return text


def decode(data: bytes, name: Any) -> str:
    """Decode UTF-8, drop a byte order mark, and turn ``\\r\\n`` into ``\\n``.

    Args:
        data: The bytes.
        name: Where they come from, for the error.

    Raises:
        ValueError: The bytes are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: byte {error.start} cannot be read. Convert it first.") from None
