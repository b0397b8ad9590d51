"""Consoles on which the commands print."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDEST = 10_000  # characters: wider than any table


def console_for(stderr: bool = False) -> Console:
    """Return a console for stdout or stderr. Without a terminal and without $COLUMNS it never wraps or cuts lines."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or os.environ.get("COLUMNS")
    return Console(stderr=stderr) if known else Console(stderr=stderr, width=WIDEST)
