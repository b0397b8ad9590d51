"""Build a table row by row, with a check of its header, of the length of each row and of its memory."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.cells import CHUNK, WIDE, CellsBuilder, Table
from waffle_fl.user_data.expansion import allowance, check_expansion


def text_of(value: Any) -> str:
    """Return the value as one line, with single blanks between words."""
    return " ".join(str(value).split())


def build_table(path: Path, header: Sequence[str], rows: Iterable[tuple[int, Sequence[str]]], times: float) -> Table:
    """Return the table of (line number, cells); blank rows are skipped."""
    _check_header(path, header)
    most = allowance(path, times)
    columns = [CellsBuilder(most >= WIDE) for _ in header]
    lines, ragged = array("Q"), []
    for line, row in rows:
        if not any(row):
            continue
        if len(row) != len(header):
            ragged.append((line, len(row)))
            continue
        for column, cell in zip(columns, row, strict=True):
            column.add(cell)
        lines.append(line)
        if len(lines) % CHUNK == 0:
            check_expansion(path, sum(column.size for column in columns), times)
    if ragged:
        line, length = ragged[0]
        others = f" (and {len(ragged) - 1} more line{'s' * (len(ragged) > 2)})" if len(ragged) > 1 else ""
        raise WaffleError(
            f"{path}, line {line}: expected {len(header)} cells as in the header, got {length}{others}; repair the line"
        )
    if not lines:
        raise WaffleError(f"{path} has a header but no rows: fill it or remove it")
    check_expansion(path, sum(column.size for column in columns), times)
    cells = {name: column.cells() for name, column in zip(header, columns, strict=True)}
    return Table(path, cells, np.frombuffer(lines, np.uint64).astype(np.int64))


def _check_header(path: Path, header: Sequence[str]) -> None:
    times = Counter(header)
    doubled = next((name for name in header if times[name] > 1 or not name), None)
    if doubled is None:
        return
    what = f"two columns are called {doubled!r}" if doubled else "a column has no name"
    hint = "; pandas writes its index so, unless index=False" if not header[0] else ""
    raise WaffleError(f"{path}: {what}: expected a first line with a different name for each column{hint}")
