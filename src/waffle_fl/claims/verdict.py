"""The result of checking one claim."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A claim, whether it holds, and the numbers that decide it."""

    claim: str
    holds: bool
    numbers: str
