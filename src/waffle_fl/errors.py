"""What a user can mend: one line that says what was expected, what came, and what to do."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SPELLED_OUT = {"learning_rate": "lr", "lambda": "lam"}


class WaffleError(ValueError):
    """A mistake the user can fix. The command line prints it without a traceback and exits with 2."""


class Diverged(WaffleError):
    """Alice's own training left the finite numbers; the last good checkpoint is kept."""


@dataclass
class Interrupted(Exception):
    """The user asked to stop, or the time is up; every run is checkpointed."""

    signal: int


@contextlib.contextmanager
def writable(runtime: Path) -> Iterator[None]:
    """Turn a refusal of the file system into one line."""
    try:
        yield
    except OSError as error:
        raise WaffleError(f"cannot write {runtime}: {error.strerror}") from None


@contextlib.contextmanager
def readable_errors(folder: Path) -> Iterator[None]:
    """Turn a fault of a run folder's disk into one line that says what is left."""
    try:
        yield
    except OSError as error:
        raise WaffleError(
            f"cannot write to {folder}: {error.strerror}; what was saved before is intact, and the same command goes on"
        ) from None


def suggest(wrong: str, right: Iterable[str]) -> str:
    """Return ', did you mean X?' for the nearest right name, or the list of the choices."""
    choices = list(right)
    plain = {name.lstrip("-").replace("-", "_"): name for name in choices}
    spelled_out = {full: plain[short] for full, short in SPELLED_OUT.items() if short in plain}
    known = {**plain, **spelled_out}
    near = difflib.get_close_matches(wrong.lstrip("-").replace("-", "_"), known, n=1, cutoff=0.5)
    return f", did you mean {known[near[0]]}?" if near else f"; choose one of {', '.join(choices)}"
