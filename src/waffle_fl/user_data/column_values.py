"""Read one column of a table as numbers; errors name the file, column and line."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.tables import Cells, Table, numbers

COMMA = re.compile(r"[-+]?[\d.]*\d,\d+")
LARGEST = float(np.finfo(np.float32).max)
AS_CATEGORIES = "repair it, leave it empty if missing, or name the column in `categorical`"
AS_CLASSES = "repair it, drop the row, or set task to classification"


def cells_of(table: Table, name: str) -> Cells:
    if name not in table.columns:
        raise WaffleError(f"{table.path} lacks the column {name!r}: it has {', '.join(table.columns)}")
    return table.columns[name]


def numeric(table: Table, name: str, remedy: str = AS_CATEGORIES) -> NDArray[np.float64]:
    """Return a column as numbers, NaN for missing cells. The error for a text cell ends with `remedy`."""
    cells = cells_of(table, name)
    values = numbers(cells)
    bad = np.flatnonzero(np.isnan(values) & (cells != ""))
    if len(bad):
        text = str(cells[bad[0]])
        if COMMA.fullmatch(text):
            raise _comma(table, name, int(bad[0]))
        raise WaffleError(
            f"{table.path}: column {name!r} holds numbers, but line {table.lines[bad[0]]} has {text!r}: {remedy}"
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
    bad = np.flatnonzero(cells_of(table, name) == "")
    if len(bad):
        raise WaffleError(
            f"{table.path}: the target {name!r} is missing in line {table.lines[bad[0]]}: fill it or drop the row"
        )


def refuse_commas(table: Table, name: str) -> None:
    """Raise WaffleError if most texts are numbers with a decimal comma; each would become a category."""
    cells = cells_of(table, name)
    texts = np.flatnonzero(np.isnan(numbers(cells)) & (cells != "")).tolist()
    commas = [i for i in texts if COMMA.fullmatch(cells[i])]
    if 2 * len(commas) > len(texts):
        raise _comma(table, name, commas[0])


def _comma(table: Table, name: str, row: int) -> WaffleError:
    return WaffleError(
        f"{table.path}: column {name!r} has {str(table.columns[name][row])!r} in line {table.lines[row]}: "
        "write numbers with a decimal point and without thousands separators, as 1234.5"
    )


def _refuse_huge(values: NDArray[np.float64], table: Table, name: str) -> None:
    bad = np.flatnonzero(np.abs(values) > LARGEST)
    if len(bad):
        raise WaffleError(
            f"{table.path}: column {name!r} has {str(table.columns[name][bad[0]])!r} in line {table.lines[bad[0]]}, "
            "too large for float32: repair it or drop the row"
        )
