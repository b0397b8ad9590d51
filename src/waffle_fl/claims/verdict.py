"""The result of checking one claim."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A claim, whether it holds, and the numbers that decide it."""

    claim: str
    holds: bool
    numbers: str
    undecided: bool = False  # it does not hold, but the difference is within what seeds explain
    main: bool = False  # `waffle reproduce --strict` demands it

    @property
    def word(self) -> str:
        """Return holds, does not hold, or undecided."""
        return "holds" if self.holds else "undecided" if self.undecided else "does not hold"
