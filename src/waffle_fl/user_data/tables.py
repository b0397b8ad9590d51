"""Tables of text cells in named columns, read from CSV, TSV, Parquet or UCI files; an empty cell is a missing value."""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waffle_fl.atomic_files import check_regular
from waffle_fl.errors import WaffleError

Cells = NDArray[np.str_]
Rows = NDArray[np.int64]

SUFFIXES = (".csv", ".tsv", ".parquet")
MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "NULL", "null")
UCI_HEART = re.compile(r"processed\.(?P<name>.+)\.data")
HEART_COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
)
HEART_TARGET = "disease"
HEART_CATEGORICAL = ("cp", "restecg", "slope", "thal")


@dataclass(frozen=True)
class Table:
    """The path of a table, its columns of text cells, and the line number of each row in the file."""

    path: Path
    columns: dict[str, Cells]
    lines: Rows

    def __len__(self) -> int:
        return len(self.lines)

    def select(self, rows: Rows) -> Table:
        return Table(self.path, {name: cells[rows] for name, cells in self.columns.items()}, self.lines[rows])

    def row_texts(self) -> list[bytes]:
        """Return the text of each row, regardless of the order of the columns."""
        return _joined([self.columns[name] for name in sorted(self.columns)])

    def row_keys(self) -> list[bytes]:
        """Return the content of each row, where 1, 1.0 and 1e0 are equal."""
        return _joined([_plain(self.columns[name]) for name in sorted(self.columns)])


def read_table(path: Path) -> Table:
    """Return the table in a file; `processed.*.data` is UCI Heart Disease, which has no header."""
    if UCI_HEART.fullmatch(path.name):
        return _heart_disease(path)
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    header, *rows = _lines(path)
    return _table(path, header[1], rows)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Return (line number, cells) of every non-blank line; the first line shows the delimiter, except in .tsv."""
    check_regular(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            first = stream.readline()
            stream.seek(0)
            delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            rows = [(reader.line_num, [_text(cell) for cell in row]) for row in reader]
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise WaffleError(f"cannot read {path} as a table of UTF-8 text: {error}; save it as CSV again") from None
    lines = [(number, row) for number, row in rows if any(row)]
    if not lines:
        raise WaffleError(f"{path} is empty: expected a header and at least one row; fill it or remove it")
    return lines


def _table(path: Path, header: Sequence[str], rows: Sequence[tuple[int, list[str]]]) -> Table:
    doubled = next((name for name in header if header.count(name) > 1 or not name), None)
    if doubled is not None:
        what = f"two columns are called {doubled!r}" if doubled else "a column has no name"
        raise WaffleError(f"{path}: {what}: expected a first line with a different name for each column")
    if not rows:
        raise WaffleError(f"{path} has a header but no rows: fill it or remove it")
    for number, row in rows:
        if len(row) != len(header):
            raise WaffleError(
                f"{path}, line {number}: expected {len(header)} cells as in the header, got {len(row)}; repair the line"
            )
    columns = {name: np.array([row[i] for _, row in rows]) for i, name in enumerate(header)}
    for cells in columns.values():
        cells[np.isin(cells, MISSING)] = ""
    lines = np.array([number for number, _ in rows], np.int64)
    return Table(path, columns, lines)


def _heart_disease(path: Path) -> Table:
    """Read the official file: 14 columns, `?` for missing values; the last, 0 to 4, becomes disease: no or yes."""
    table = _table(path, HEART_COLUMNS, _lines(path))
    num = table.columns.pop("num")
    grades = numbers(num)
    bad = np.flatnonzero(np.isnan(grades))
    if len(bad):
        line = table.lines[bad[0]]
        raise WaffleError(f"{path}, line {line}: expected 0 to 4 in the last column, got {str(num[bad[0]])!r}")
    return replace(table, columns={**table.columns, HEART_TARGET: np.where(grades > 0, "yes", "no")})


def _parquet(path: Path) -> Table:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise WaffleError(f"{path}: Parquet needs pyarrow: `pip install waffle-fl[parquet]`, or save as CSV") from None
    check_regular(path)
    try:
        found = parquet.ParquetFile(path).read()
        index = (found.schema.pandas_metadata or {}).get("index_columns", [])
        columns = [
            (_text(name), column.to_pylist())
            for name, column in zip(found.column_names, found.columns, strict=True)
            if name not in index
        ]
    except Exception as error:  # Arrow raises many types for a damaged file or a value that Python cannot represent
        reason = _text(error) or type(error).__name__
        raise WaffleError(f"cannot read {path} as Parquet: {reason}; save it again, or as CSV") from None
    rows = [
        (i, ["" if cell is None else _text(cell) for cell in row])
        for i, row in enumerate(zip(*(cells for _, cells in columns), strict=True), 1)
    ]
    return _table(path, [name for name, _ in columns], rows)


def _joined(columns: Sequence[Cells]) -> list[bytes]:
    return ["\x1f".join(row).encode() for row in zip(*columns, strict=True)]


def _plain(cells: Cells) -> Cells:
    """Return the cells with every number in the same notation."""
    values = numbers(cells) + 0.0  # -0 is 0
    return np.where(np.isnan(values), cells, values.astype(np.str_))


def _text(value: Any) -> str:
    """Return the value as one line, with single blanks between words."""
    return " ".join(str(value).split())


def numbers(cells: Cells) -> NDArray[np.float64]:
    """Return the cells as numbers, NaN for text, infinity and missing cells."""
    try:
        values = np.where(cells == "", "nan", cells).astype(np.float64)
    except ValueError:
        values = np.array([_number(cell) for cell in cells.tolist()], np.float64)
    return np.where(np.isinf(values), np.nan, values)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def names(cells: Cells) -> Cells:
    """Return the cells as category names, where 1.0 and 1 are equal."""
    distinct, back = np.unique(cells, return_inverse=True)
    return np.array([re.sub(r"(?<=\d)\.0+$", "", cell) for cell in distinct.tolist()], np.str_)[back]
