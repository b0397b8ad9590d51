"""Read one column of a table as numbers; errors name the file, column and line."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.ambiguity import PERCENT
from waffle_fl.user_data.cells import Cells, Table, number_of, numbers, quoted
from waffle_fl.user_data.cleaning import COMMA

LARGEST = float(np.finfo(np.float32).max)
AS_CATEGORIES = "repair it, leave it empty if missing, or name the column in `categorical`"
AS_CLASSES = "repair it, drop the row, or set task to classification"
DECIMAL_ADVICE = "set --decimal , if this is a decimal comma"


def cells_of(table: Table, name: str) -> Cells:
    if name not in table.columns:
        raise WaffleError(f"{table.path} lacks the column {name!r}: it has {', '.join(table.columns)}")
    return table.columns[name]


def numeric(table: Table, name: str, remedy: str = AS_CATEGORIES) -> NDArray[np.float64]:
    """Return a column as numbers, NaN for missing cells. The error for a text cell ends with `remedy`."""
    cells = cells_of(table, name)
    values = numbers(cells)
    bad = np.flatnonzero(np.isnan(values) & ~cells.missing)
    if len(bad):
        text = cells[int(bad[0])]
        if COMMA.fullmatch(text) or PERCENT.fullmatch(text):
            raise _no_number(table, name, int(bad[0]))
        raise WaffleError(
            f"{table.path}: column {name!r} holds numbers, but line {table.lines[bad[0]]} has {quoted(text)}: {remedy}"
        )
    _refuse_huge(values, table, name)
    return values


def standardised(
    table: Table, name: str, mean: float, deviation: float, remedy: str = AS_CATEGORIES
) -> NDArray[np.float64]:
    """Return a column standardised with `mean` and `deviation`, NaN for missing cells; all 0 if the deviation is 0."""
    values = numeric(table, name, remedy)
    scaled = (values - mean) / deviation if deviation else np.zeros(len(values))
    _refuse_huge(scaled, table, name)
    return scaled


def refuse_missing(table: Table, name: str) -> None:
    bad = np.flatnonzero(cells_of(table, name).missing)
    if len(bad):
        raise WaffleError(
            f"{table.path}: the target {name!r} is missing in line {table.lines[bad[0]]}: fill it or drop the row"
        )


def refuse_disguised_numbers(table: Table, name: str) -> None:
    """Raise WaffleError if most texts are numbers with a decimal comma or a percent sign; each would be a category."""
    texts, first = 0, {COMMA: -1, PERCENT: -1}
    found = dict.fromkeys(first, 0)
    for row, text in enumerate(cells_of(table, name)):
        if not text or number_of(text) - number_of(text) == 0:
            continue
        texts += 1
        for pattern in first:
            if pattern.fullmatch(text):
                found[pattern] += 1
                first[pattern] = row if first[pattern] < 0 else first[pattern]
    for pattern, count in found.items():
        if 2 * count > texts:
            raise _no_number(table, name, first[pattern])


def _no_number(table: Table, name: str, row: int) -> WaffleError:
    text, line = table.columns[name][row], table.lines[row]
    where = f"{table.path}: column {name!r} has {quoted(text)} in line {line}: "
    if PERCENT.fullmatch(text):
        return WaffleError(
            f"{where}write numbers without percent signs and with the same unit at every agent, or set --drop {name}"
        )
    return WaffleError(
        f"{where}{DECIMAL_ADVICE}; otherwise "
        "write numbers with a decimal point and without thousands separators, as 1234.5"
    )


def _refuse_huge(values: NDArray[np.float64], table: Table, name: str) -> None:
    bad = np.flatnonzero(np.abs(values) > LARGEST)
    if len(bad):
        raise WaffleError(
            f"{table.path}: column {name!r} has {quoted(table.columns[name][int(bad[0])])} in line "
            f"{table.lines[bad[0]]}, too large for float32: repair it or drop the row"
        )
