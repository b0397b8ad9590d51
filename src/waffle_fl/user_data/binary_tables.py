"""Tables in Parquet files (with pyarrow) and Excel files (with openpyxl)."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waffle_fl.atomic_files import check_regular
from waffle_fl.errors import WaffleError
from waffle_fl.user_data.cells import Table
from waffle_fl.user_data.expansion import check_expansion
from waffle_fl.user_data.table_builder import build_table, text_of

BATCH = 1024  # rows of a Parquet file that are Python objects at the same time
CELL = 4  # bytes that a cell takes at least


def read_parquet(path: Path, times: float) -> Table:
    """Return the table of a Parquet file, without the index that pandas writes."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise WaffleError(f"{path}: Parquet needs pyarrow: `pip install waffle-fl[parquet]`, or save as CSV") from None
    check_regular(path)
    try:
        with parquet.ParquetFile(path) as content:
            names = content.schema_arrow.names
            content_size = sum(content.metadata.row_group(i).total_byte_size for i in range(content.num_row_groups))
            check_expansion(path, max(content_size, content.metadata.num_rows * len(names) * CELL), times)
        texts = [f.name for f in content.schema_arrow if str(f.type) in ("string", "large_string", "binary")]
        with parquet.ParquetFile(path, read_dictionary=texts) as content:  # each different text once
            index = (content.schema_arrow.pandas_metadata or {}).get("index_columns", [])
            kept = [i for i, name in enumerate(names) if name not in index]
            rows = _parquet_rows(path, content, kept, times)
            return build_table(path, [text_of(names[i]) for i in kept], rows, times)
    except WaffleError:
        raise
    except Exception as error:  # Arrow raises many types for a damaged file or a value that Python cannot represent
        reason = text_of(error) or type(error).__name__
        raise WaffleError(f"cannot read {path} as Parquet: {reason}; save it again, or as CSV") from None


def _parquet_rows(path: Path, content: Any, kept: list[int], times: float) -> Iterator[tuple[int, list[str]]]:
    line = 0
    for batch in content.iter_batches(batch_size=BATCH):
        check_expansion(path, sum(_text_size(batch.column(i)) for i in kept), times)
        for row in zip(*(_texts(batch.column(i)) for i in kept), strict=True):
            line += 1
            yield line, list(row)


def _text_size(column: Any) -> int:
    """Return the bytes of a column's texts, which a dictionary may hold only once."""
    if not hasattr(column, "dictionary"):
        return 0
    lengths = [len(text or "") for text in column.dictionary.to_pylist()]
    return sum(lengths[i] for i in column.indices.to_pylist() if i is not None)


def _texts(column: Any) -> list[str]:
    if not hasattr(column, "dictionary"):
        return ["" if cell is None else text_of(cell) for cell in column.to_pylist()]
    texts = ["" if cell is None else text_of(cell) for cell in column.dictionary.to_pylist()]
    return ["" if i is None else texts[i] for i in column.indices.to_pylist()]


def read_excel(path: Path, times: float) -> Table:
    """Return the table of an Excel file, which must have one sheet with cells; formulas give their stored values."""
    try:
        openpyxl: Any = importlib.import_module("openpyxl")
    except ImportError:
        raise WaffleError(
            f"{path}: Excel files need openpyxl: `pip install waffle-fl[excel]`, or save as CSV"
        ) from None
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            check_expansion(path, sum(member.file_size for member in archive.infolist()), times)
        with path.open("rb") as stream:  # closes the file also if a sheet is not read to its end
            book = openpyxl.load_workbook(stream, read_only=True, data_only=True)
            return _excel_table(path, openpyxl, book, times)
    except WaffleError:
        raise
    except Exception as error:  # openpyxl, zipfile and expat raise many types for a damaged file
        reason = text_of(error) or type(error).__name__
        raise WaffleError(f"cannot read {path} as an Excel file: {reason}; save it again, or as CSV") from None


def _excel_table(path: Path, openpyxl: Any, book: Any, times: float) -> Table:
    sheets = [sheet for sheet in book.worksheets if any(any(_filled(row)) for row in _excel_rows(sheet))]
    if not sheets:
        raise WaffleError(f"{path} is empty: expected a header and at least one row; fill it or remove it")
    if len(sheets) > 1:
        names = ", ".join(repr(sheet.title) for sheet in sheets)
        raise WaffleError(f"{path}: expected one sheet with cells, got {names}: save one sheet per file")
    _check_formulas(path, openpyxl, sheets[0])
    lines = ((line, _filled(row)) for line, row in enumerate(_excel_rows(sheets[0]), 1))
    rows = ((line, row) for line, row in lines if any(row))
    _, header = next(rows)
    width = max(i for i, name in enumerate(header, 1) if name)
    return build_table(path, header[:width], ((line, _fitted(row, width)) for line, row in rows), times)


def _check_formulas(path: Path, openpyxl: Any, sheet: Any) -> None:
    """Raise WaffleError for a formula without a stored value, which would be a missing cell."""
    with zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.startswith("xl/worksheets/sheet")]
        if not any(b"<f" in archive.read(name) for name in members):
            return
    with path.open("rb") as stream:
        formulas = openpyxl.load_workbook(stream, read_only=True)[sheet.title]
        for line, (texts, values) in enumerate(zip(_excel_rows(formulas), _excel_rows(sheet), strict=False), 1):
            for text, value in zip(texts, values, strict=False):
                if value is None and isinstance(text, str) and text.startswith("="):
                    raise WaffleError(
                        f"{path}, line {line}: the formula {text_of(text)[:40]!r} has no stored value: open and save "
                        "the file in a spreadsheet program, or save it as CSV"
                    )


def _excel_rows(sheet: Any) -> Iterator[tuple[Any, ...]]:
    sheet.reset_dimensions()  # the stated size may be wrong
    yield from sheet.iter_rows(values_only=True)


def _filled(row: tuple[Any, ...]) -> list[str]:
    return ["" if cell is None else text_of(cell) for cell in row]


def _fitted(row: list[str], width: int) -> list[str]:
    """Return the row without empty cells beyond the header, and with those that a short row leaves out."""
    return row[: max(width, max((i for i, cell in enumerate(row, 1) if cell), default=0))] + [""] * (width - len(row))
