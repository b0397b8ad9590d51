"""Errors that a user can fix: one line that says what was expected, what came, and what to do."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SPELLED_OUT = {"learning_rate": "lr", "lambda": "lam"}


class WaffleError(ValueError):
    """An error that the user can fix. The command line prints it without a traceback and exits with 2."""


class Diverged(WaffleError):
    """Alice's update is no longer finite. The last finite checkpoint is kept."""


@dataclass
class Interrupted(Exception):
    """The user stopped the training, or the time limit was reached. Every run is saved."""

    signal: int


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn an error of writing to this path into a WaffleError."""
    try:
        yield
    except OSError as error:
        raise WaffleError(f"cannot write {path}: {error.strerror}") from None


@contextlib.contextmanager
def readable_errors(folder: Path) -> Iterator[None]:
    """Turn an error of writing to a run folder into a WaffleError that says how to continue."""
    try:
        yield
    except OSError as error:
        raise WaffleError(
            f"cannot write to {folder}: {error.strerror}; earlier checkpoints are intact: fix this and run the same "
            "command again to continue"
        ) from None


def suggest(wrong: str, right: Iterable[str]) -> str:
    """Return ', did you mean X?' for the nearest right name, or the list of choices."""
    choices = list(right)
    plain = {name.lstrip("-").replace("-", "_"): name for name in choices}
    spelled_out = {full: plain[short] for full, short in SPELLED_OUT.items() if short in plain}
    known = {**plain, **spelled_out}
    near = difflib.get_close_matches(wrong.lstrip("-").replace("-", "_"), known, n=1, cutoff=0.5)
    return f", did you mean {known[near[0]]}?" if near else f"; choose one of {', '.join(choices)}"
