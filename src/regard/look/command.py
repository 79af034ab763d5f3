"""The verbs of this room on the command line."""

from __future__ import annotations

import argparse


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this room's verbs."""
