"""The hook that checks commit messages: `git config core.hooksPath .githooks` turns it on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOOK = Path(__file__).parent.parent / ".githooks" / "commit-msg"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Add a score\n\nIt was missing.\n", None),
        (f"{'ß' * 72}\n\nCharacters count, not bytes.\n# a comment\n", None),
        ("Merge branch 'a'\n", None),
        (f"{'x' * 73}\n\nWhy.\n", "at most 72 characters"),
        ("Add a score\nIt was missing.\n", "second line"),
        ("Add a score\n\n# only a comment\n", "a body must say why"),
    ],
)
def test_commit_messages_have_a_short_subject_and_a_body(tmp_path: Path, message: str, error: str | None) -> None:
    path = tmp_path / "message"
    path.write_text(message)
    done = subprocess.run(["sh", str(HOOK), str(path)], capture_output=True, text=True)
    assert (done.returncode == 0) == (error is None), done.stderr
    assert error is None or error in done.stderr
