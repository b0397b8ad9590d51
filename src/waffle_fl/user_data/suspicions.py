"""Columns that can be read but may not mean what they seem to: codes for missing values, identifiers, dates."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from waffle_fl.user_data.ambiguity import DATE, case_variants, mixed_pairs
from waffle_fl.user_data.cells import Table, count_names, number_of, numbers
from waffle_fl.user_data.preprocessing import Kind, Preprocessing

Floats = NDArray[np.float64]

CODES = (-9, -99, -999, -9999, 99, 999, 9999, 99999)  # numbers that often mean missing
IDENTIFIER = re.compile(r"(^|[^a-z])(id|ids|uid|uuid|guid|mrn|ssn|index|idx|row|nr)($|[^a-z])|[a-z]I[dD]$", re.ASCII)
FEW = 10  # rows below which distinct or consecutive values may be chance


def suspicions_of(
    agents: Mapping[str, Sequence[Table]], fitted: Preprocessing, categorical: Collection[str] = ()
) -> tuple[str, ...]:
    """Return one line per column that may be misread, with the setting that settles it."""
    kinds: dict[str, Kind] = {column.name: column.kind for column in fitted.columns}
    goal: dict[str, Kind] = {fitted.target: "categorical" if fitted.task == "classification" else "numeric"}
    return tuple(
        line
        for name, kind in {**kinds, **goal}.items()
        for line in column_suspicions(agents, name, kind, name in categorical, name == fitted.target)
    )


def column_suspicions(
    agents: Mapping[str, Sequence[Table]], name: str, kind: Kind, named: bool = False, target: bool = False
) -> Iterator[str]:
    """Yield one line per suspicion about a column; `named` columns are categories by the user's wish."""
    if kind == "numeric":
        values = [_values(own, name) for own in agents.values()]
        yield from _codes(name, np.concatenate([np.empty(0), *values]), target)
        if not target:
            yield from _identifier(name, values)
        return
    counts = [_counts(own, name) for own in agents.values()]
    pooled: Counter[str] = sum(counts, Counter())
    if target:
        yield from _class_codes(name, pooled)
    elif not named:
        yield from _texts(name, pooled, counts)
    if named:
        yield from _kept_apart(name, pooled)


def _values(own: Sequence[Table], name: str) -> Floats:
    found = np.concatenate([numbers(table.columns[name]) for table in own if name in table.columns] or [np.empty(0)])
    return np.asarray(found[np.isfinite(found)])


def _counts(own: Sequence[Table], name: str) -> Counter[str]:
    return sum((count_names(table.columns[name]) for table in own if name in table.columns), Counter())


def _codes(name: str, values: Floats, target: bool) -> Iterator[str]:
    """Numbers such as -9 or 999, far from all other values of the column."""
    present = [code for code in CODES if (values == code).any()]
    others = values[~np.isin(values, present)]
    if not present or len(np.unique(others)) < 3:
        return
    low, high = float(others.min()), float(others.max())
    odd = [code for code in present if (code < 0 <= low) or _is_far(code, values, low, high)]
    if odd:
        counted = " and ".join(f"{code} in {_rows(int((values == code).sum()))}" for code in odd)
        they, mean = ("it", "means") if len(odd) == 1 else ("they", "mean")
        then = "drop those rows" if target else f"set --missing {' '.join(map(str, odd))}"
        yield f"column {name!r} has {counted}, and else {low:g} to {high:g}: if {they} {mean} missing, {then}"


def _is_far(code: int, values: Floats, low: float, high: float) -> bool:
    """Whether a number is as far from the range of all others as this is wide, or half as far and the most frequent."""
    gap, width = max(low - code, code - high), high - low
    if gap < width / 2:
        return False
    counts = np.unique(values[values != code], return_counts=True)[1]
    return gap >= width or int((values == code).sum()) > int(counts.max())


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def _class_codes(name: str, counts: Counter[str]) -> Iterator[str]:
    found = [text for text in counts if number_of(text) in CODES]
    if found and len(counts) > len(found) + 1:
        yield f"the target {name!r} has the class {', '.join(sorted(found))}: if it means missing, drop those rows"


def _identifier(name: str, values: Sequence[Floats]) -> Iterator[str]:
    """A different integer in every row, in a column named like an identifier or without gaps."""
    some = [own for own in values if len(own)]
    if not some or max(map(len, some)) < FEW or any((own != np.round(own)).any() for own in some):
        return
    if any(len(np.unique(own)) < len(own) for own in some):
        return
    gapless = all(own.max() - own.min() + 1 == len(own) for own in some)
    if gapless or _is_identifier(name):
        why = "consecutive numbers" if gapless else "a different number in every row"
        yield f"column {name!r} has {why}: if it is an identifier, set --drop {name}"


def _is_identifier(name: str) -> bool:
    return bool(IDENTIFIER.search(name) or IDENTIFIER.search(name.lower()))


def _texts(name: str, pooled: Counter[str], counts: Sequence[Counter[str]]) -> Iterator[str]:
    texts = [text for text in pooled if not np.isfinite(number_of(text))]
    dates = [text for text in texts if DATE.fullmatch(text)]
    if 2 * len(dates) > len(texts):
        yield (
            f"column {name!r} has dates such as {dates[0]!r}, and each is a category: set --drop {name}, or write a "
            "number such as days or years"
        )
    elif any(len(own) >= FEW and own.total() == len(own) for own in counts) and pooled.total() == len(pooled):
        yield f"column {name!r} has a different text in every row: if it is an identifier, set --drop {name}"
    odd = sorted(set(pooled) - set(texts))
    if texts and odd:
        cells = sum(pooled[text] for text in odd)
        yield (
            f"column {name!r} has numbers such as {odd[0]!r} in {_rows(cells)} among its texts, and each is a "
            f"category: write one kind of values, or set --categorical {name} if this is right"
        )


def _kept_apart(name: str, pooled: Counter[str]) -> Iterator[str]:
    for group in case_variants(pooled):
        yield f"column {name!r} has {' and '.join(map(repr, group))}, kept apart since it is listed in categorical"
    if pairs := mixed_pairs(pooled):
        shown = " beside ".join("/".join(pair) for pair in pairs)
        yield f"column {name!r} has {shown}, kept apart since it is listed in categorical"
