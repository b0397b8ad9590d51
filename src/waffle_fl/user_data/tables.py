"""Read a table from a CSV, TSV, Parquet, Excel or UCI file, with the user's rules for its cells."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from waffle_fl.atomic_files import check_regular
from waffle_fl.errors import WaffleError
from waffle_fl.user_data.binary_tables import read_excel, read_parquet
from waffle_fl.user_data.cells import Cells, Rows, Table, numbers
from waffle_fl.user_data.cleaning import CellRules, cleaned
from waffle_fl.user_data.expansion import TIMES
from waffle_fl.user_data.table_builder import build_table, text_of

__all__ = ["Cells", "Rows", "Table", "is_table", "numbers", "read_raw", "read_table"]

SUFFIXES = (".csv", ".tsv", ".parquet", ".xlsx")
UCI_HEART = re.compile(r"processed\.(?P<name>.+)\.data")
HEART_COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
)
HEART_TARGET = "disease"
HEART_CATEGORICAL = ("cp", "restecg", "slope", "thal")


def is_table(path: Path) -> bool:
    """Return whether the name of a file is that of a table."""
    return path.suffix.lower() in SUFFIXES or bool(UCI_HEART.fullmatch(path.name))


def read_table(path: Path, rules: CellRules | None = None, times: float = TIMES) -> Table:
    """Return the table in a file, read by the rules; a missing cell is empty."""
    return cleaned(read_raw(path, times), rules or CellRules())


def read_raw(path: Path, times: float = TIMES) -> Table:
    """Return the table with the cells of the file; `processed.*.data` is UCI Heart Disease, which has no header."""
    if UCI_HEART.fullmatch(path.name):
        return _heart_disease(path, times)
    if path.suffix.lower() == ".parquet":
        return read_parquet(path, times)
    if path.suffix.lower() == ".xlsx":
        return read_excel(path, times)
    return _read_text(path, None, times)


def _read_text(path: Path, header: tuple[str, ...] | None, times: float) -> Table:
    check_regular(path)
    try:
        rows = _lines(path)
        first = next(rows, None)
        if first is None:
            raise WaffleError(f"{path} is empty: expected a header and at least one row; fill it or remove it")
        if header is None:
            return build_table(path, first[1], rows, times)
        return build_table(path, header, _with_first(first, rows), times)
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        if "field limit" in str(error):
            most = f"{csv.field_size_limit():,}"
            raise WaffleError(f"{path}: expected cells of at most {most} characters: shorten the longer ones") from None
        raise WaffleError(f"cannot read {path} as a table of UTF-8 text: {error}; save it as CSV again") from None


def _with_first(first: tuple[int, list[str]], rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    yield first
    yield from rows


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of every non-blank line; the first line shows the delimiter, except in .tsv."""
    with path.open(newline="", encoding="utf-8-sig") as stream:
        first = stream.readline()
        stream.seek(0)
        delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
        reader = csv.reader(stream, delimiter=delimiter, strict=True)
        for row in reader:
            cells = [text_of(cell) for cell in row]
            if any(cells):
                yield reader.line_num, cells


def _heart_disease(path: Path, times: float) -> Table:
    """Read the official file: 14 columns, `?` for missing values; the last, 0 to 4, becomes disease: no or yes."""
    table = _read_text(path, HEART_COLUMNS, times)
    num = table.columns.pop("num")
    grades = numbers(num)
    bad = np.flatnonzero(np.isnan(grades))
    if len(bad):
        line = table.lines[bad[0]]
        raise WaffleError(f"{path}, line {line}: expected 0 to 4 in the last column, got {num[int(bad[0])]!r}")
    disease = Cells.of("yes" if grade > 0 else "no" for grade in grades.tolist())
    return replace(table, columns={**table.columns, HEART_TARGET: disease})
