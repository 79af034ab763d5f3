"""The law of files: a write is complete or leaves the old file, permissions and links stay, and text is UTF-8."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from regard import _io


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    _io.atomic_write(path, [b"old"])

    def chunks():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _io.atomic_write(path, chunks())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    assert not list(_io.partial_files(path))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444])
def test_permissions_of_the_old_file_stay(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    seen = []

    def chunks():
        yield b"new"
        (partial,) = _io.partial_files(path)
        seen.append(stat.S_IMODE(partial.stat().st_mode))

    before = os.umask(0o022)
    try:
        _io.atomic_write(path, chunks())
    finally:
        os.umask(before)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", mode)
    assert not seen[0] & ~mode, "others may not read it while it is written"


def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        _io.atomic_write(tmp_path / "file", [b"new"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    _io.atomic_write(link, [b"new"])
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_pipes_and_devices_are_neither_written_nor_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="a pipe or a device"):
        _io.atomic_write(pipe, [b"new"])
    with pytest.raises(OSError, match=r"pipe cannot be read \(it is a pipe\)"):
        _io.read_text(pipe)
    with pytest.raises(OSError, match="a pipe or a device"):
        _io.atomic_write(Path(os.devnull), [b"new"])
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_text_is_utf8_without_a_mark_and_with_plain_line_ends(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfB\xc3\xa4r\r\nx\n")
    assert _io.read_text(tmp_path / "text") == "Bär\nx\n"
    with pytest.raises(ValueError, match="stdin is not UTF-8 text: byte 1"):
        _io.decode(b"B\xe4r", "stdin")


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder; make it first: .*'.*missing'$"):
        _io.atomic_write(tmp_path / "missing" / "file", [b"new"])
