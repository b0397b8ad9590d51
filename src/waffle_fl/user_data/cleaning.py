"""Rules for the cells of a table, set by the user: dropped columns, missing values, decimal commas, letter case."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from waffle_fl.errors import WaffleError, suggest
from waffle_fl.user_data.cells import Cells, Table, number_of

Decimal: TypeAlias = Literal[".", ","]

MISSING = frozenset({"", "?", "NA", "N/A", "NaN", "nan", "NULL", "null"})
COMMA = re.compile(r"[-+]?[\d.]*\d,\d+")  # a number with a decimal comma, or with thousands separators
GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(\.\d{3})+")  # 1.234: 1234 with points between thousands, or 1.234
DECIMAL_COMMA = re.compile(r"[-+]?(\d+|[1-9]\d{0,2}(\.\d{3})+)?,\d+([eE][-+]?\d+)?")
POINT = re.compile(r"[-+]?\d*\.\d+([eE][-+]?\d+)?")


@dataclass(frozen=True)
class CellRules:
    """How the cells of a table are read; the fields have the names of the settings."""

    drop: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    decimal: Decimal = "."
    fold_case: bool = False
    fill_absent: bool = False

    @classmethod
    def from_json(cls, content: Any) -> CellRules:
        lists = {name: tuple(content[name]) for name in ("drop", "missing")}
        found = cls(**{**content, **lists})
        typed = all(type(text) is str for text in (*found.drop, *found.missing))
        if not typed or found.decimal not in (".", ",") or {type(found.fold_case), type(found.fill_absent)} != {bool}:
            raise TypeError("rules")
        return found


def cleaned(table: Table, rules: CellRules) -> Table:
    """Return the table as the rules read it."""
    kept = [name for name in table.columns if name not in rules.drop]
    commas = rules.decimal == "," and has_decimal_commas(table, kept)
    return replace(table, columns={name: _cleaned_column(table, name, rules, commas) for name in kept})


def filled(table: Table, names: Iterable[str]) -> Table:
    """Return the table with columns of missing cells for the names that it lacks."""
    absent = [name for name in names if name not in table.columns]
    return replace(table, columns={**table.columns, **{name: Cells.of([""] * len(table)) for name in absent}})


def all_columns(tables: Sequence[Table]) -> list[str]:
    """Return the columns of all tables, in the order in which they first appear."""
    return list(dict.fromkeys(name for table in tables for name in table.columns))


def check_drop(columns: Sequence[str], target: str, rules: CellRules) -> None:
    """Raise WaffleError if a column to drop is the target or in no table; `columns` are those before dropping."""
    for name in rules.drop:
        if name == target:
            raise WaffleError(f"drop: {name!r} is the target: drop other columns, or choose another target")
        if name not in columns:
            raise WaffleError(f"drop: no table has a column {name!r}{suggest(name, columns)}")


def check_missing(columns: Sequence[str], rules: CellRules) -> None:
    """Raise WaffleError if COLUMN=TEXT in `missing` names a column that no table has."""
    for given in rules.missing:
        name, equals, _ = given.rpartition("=")
        if equals and name and name not in columns:
            raise WaffleError(f"missing: no table has a column {name!r} as in {given!r}{suggest(name, columns)}")


def _cleaned_column(table: Table, name: str, rules: CellRules, commas: bool) -> Cells:
    cells, missing = table.columns[name], _is_missing(name, rules)

    def clean(text: str) -> str:
        if text in MISSING:
            return ""
        if rules.decimal == "," and (DECIMAL_COMMA.fullmatch(text) or (commas and GROUPED.fullmatch(text))):
            text = text.replace(".", "").replace(",", ".")
        if rules.fold_case:
            text = text.lower()
        return "" if missing(text) else text

    return cells.map(clean)


def _is_missing(column: str, rules: CellRules) -> Callable[[str], bool]:
    """Return whether a cell of this column is one of the user's texts for missing; numbers are compared by value."""
    texts = [text for given in rules.missing if (text := text_for(given, column)) is not None]
    if rules.decimal == ",":
        texts = [text.replace(",", ".") if DECIMAL_COMMA.fullmatch(text) else text for text in texts]
    words = {text.lower() if rules.fold_case else text for text in texts}
    values = {value for text in texts if (value := number_of(text)) == value}
    if not words:
        return lambda text: False
    return lambda text: text in words or (bool(values) and number_of(text) in values)


def text_for(given: str, column: str) -> str | None:
    """Return the text that means missing in this column, from TEXT or COLUMN=TEXT; None if it is for another one."""
    name, equals, text = given.rpartition("=")
    if not equals or not name:
        return given
    return text if name == column else None


def has_decimal_commas(table: Table, columns: Sequence[str]) -> bool:
    """Return whether a table writes 1,5 and 1.234,5, and not 1.5; raise WaffleError if its points are unclear."""
    commas: tuple[str, int] | None = None
    points: tuple[str, int] | None = None
    grouped: tuple[str, int] | None = None
    for name in columns:
        for row, text in enumerate(table.columns[name]):
            if "," in text:
                commas = commas or ((name, row) if DECIMAL_COMMA.fullmatch(text) else None)
            elif "." in text and GROUPED.fullmatch(text):
                grouped = grouped or (name, row)
            elif "." in text and not points and POINT.fullmatch(text):
                points = name, row
    if commas and points:
        name, row = commas
        raise _unclear(table, *points, f"but {table.columns[name][row]!r} in line {table.lines[row]} of {name!r}")
    if grouped and not commas and not points:
        whole = table.columns[grouped[0]][grouped[1]].replace(".", "")
        raise _unclear(table, *grouped, f"which may be {whole} or a fraction")
    return commas is not None


def _unclear(table: Table, name: str, row: int, why: str) -> WaffleError:
    return WaffleError(
        f"{table.path}: with --decimal , column {name!r} has {table.columns[name][row]!r} in line {table.lines[row]}, "
        f"{why}: write its numbers without thousands separators and with one kind of decimal sign"
    )
