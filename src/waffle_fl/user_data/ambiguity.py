"""Texts of one column that probably mean the same: a difference of case, or 0 and 1 beside yes and no."""

from __future__ import annotations

import re
from collections.abc import Collection

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.cells import quoted

PAIRS = (  # two ways to write no and yes; a column should use one pair
    ("0", "1"),
    ("no", "yes"),
    ("n", "y"),
    ("false", "true"),
    ("f", "t"),
    ("-", "+"),
    ("neg", "pos"),
    ("negative", "positive"),
    ("absent", "present"),
)
PERCENT = re.compile(r"[-+]?\d+([.,]\d+)?\s?%")
DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([ T]\d{1,2}:\d{2}.*)?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})( \d{1,2}:\d{2}.*)?"
)


def case_variants(values: Collection[str]) -> list[tuple[str, ...]]:
    """Return the groups of values that differ only in case."""
    groups: dict[str, list[str]] = {}
    for value in sorted(values):
        groups.setdefault(value.lower(), []).append(value)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def mixed_pairs(values: Collection[str]) -> list[tuple[str, str]]:
    """Return the ways to write no and yes that a column mixes; empty if it has one, or other values."""
    folded = {value.lower() for value in values}
    found = [pair for pair in PAIRS if folded & set(pair)]
    return found if len(found) > 1 and folded <= {word for pair in PAIRS for word in pair} else []


def check_values(what: str, name: str, values: Collection[str]) -> None:
    """Raise WaffleError for categories or classes that probably mean the same."""
    found = []
    if variants := case_variants(values):
        shown = ", ".join(" and ".join(map(quoted, group)) for group in variants[:3])
        found.append(
            f"has {shown}, which differ only in case: set --fold-case to read them as one value, or --categorical "
            f"{name} to keep them apart"
        )
    if pairs := mixed_pairs(values):
        shown = " beside ".join("/".join(pair) for pair in pairs)
        found.append(
            f"has {shown}, expected one way to write no and yes: use the same words at every agent, or set "
            f"--categorical {name} to keep them apart"
        )
    if found:
        raise WaffleError(f"{what} {name!r} {'; it also '.join(found)}")
