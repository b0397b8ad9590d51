"""`name(number, ...)`: schedules, attacks and aggregations as text, the same in TOML, as a flag and in a record."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from waffle_fl.errors import WaffleError, suggest

T = TypeVar("T")


def build(text: str, kinds: Mapping[str, Callable[..., T]], what: str, example: str) -> T:
    """What the text names, made with its numbers; a mistake is told with an example."""
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\(([^()]*)\))?\s*", text)
    if not match:
        raise WaffleError(f"expected {what} such as {example}, got {text!r}")
    kind, inside = match.groups()
    if kind not in kinds:
        raise WaffleError(f"unknown {what.split()[-1]} {kind!r}{suggest(kind, kinds)}")
    try:
        return kinds[kind](*(float(part) for part in (inside or "").split(",") if part.strip()))
    except (TypeError, ValueError):
        raise WaffleError(f"expected numbers in {text!r}, as in {example}") from None
