"""What a user can mend: one line that says what was expected, what came, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WaffleError(Exception):
    """A mistake the user can mend. The command line prints it without a traceback and exits with 2."""


class Diverged(WaffleError):
    """Alice's own training left the finite numbers; the last good checkpoint is kept."""


def suggest(wrong: str, right: Iterable[str]) -> str:
    """Return ', did you mean X?' for the nearest right name, or the list of the choices."""
    choices = list(right)
    near = difflib.get_close_matches(wrong, choices, n=1, cutoff=0.5)
    return f", did you mean {near[0]}?" if near else f"; choose one of {', '.join(choices)}"
