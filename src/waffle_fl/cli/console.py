"""Where the commands print."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDEST = 10_000  # characters: wider than any table


def console_for(stderr: bool = False) -> Console:
    """A console for stdout or stderr; without a terminal and without $COLUMNS nothing is cut or wrapped to a width."""
    stream = sys.stderr if stderr else sys.stdout
    known = stream.isatty() or os.environ.get("COLUMNS")
    return Console(stderr=stderr) if known else Console(stderr=stderr, width=WIDEST)
