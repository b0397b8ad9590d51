"""Text cells of a table in one buffer per column: the memory is that of the text and four bytes per cell."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

CHUNK = 1024  # cells that are Python objects at the same time
WIDE = 1 << 32  # bytes of text in a column from which positions take eight bytes
SHOWN = 40  # characters of a cell that a message shows
UNKNOWN = -1  # code of a category that is not in the list
ABSENT = -2  # code of a missing cell
TRAILING_ZEROS = re.compile(r"(?<=\d)\.0+$")


class Cells:
    """The text cells of one column, in UTF-8; an empty cell is a missing value."""

    __slots__ = ("_data", "_ends", "_starts")

    def __init__(self, data: bytes | bytearray, starts: NDArray[Any], ends: NDArray[Any]) -> None:
        self._data, self._starts, self._ends = data, starts, ends

    @classmethod
    def of(cls, texts: Iterable[str], wide: bool = False) -> Cells:
        builder = CellsBuilder(wide)
        for text in texts:
            builder.add(text)
        return builder.cells()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, row: int) -> str:
        return self._data[self._starts[row] : self._ends[row]].decode()

    def __iter__(self) -> Iterator[str]:
        for texts in self.chunks():
            yield from texts

    def chunks(self) -> Iterator[list[str]]:
        """Yield the cells in lists of limited length."""
        data = self._data
        for first in range(0, len(self), CHUNK):
            part = slice(first, first + CHUNK)
            edges = zip(self._starts[part].tolist(), self._ends[part].tolist(), strict=True)
            yield [data[start:end].decode() for start, end in edges]

    def tolist(self) -> list[str]:
        return list(self)

    def select(self, rows: Rows) -> Cells:
        """Return some of the cells; the buffer is shared."""
        return Cells(self._data, self._starts[rows], self._ends[rows])

    def map(self, function: Callable[[str], str]) -> Cells:
        return Cells.of(map(function, self), self._ends.itemsize > 4)

    @property
    def missing(self) -> Mask:
        """Which cells are missing."""
        return np.asarray(self._starts == self._ends)


class CellsBuilder:
    """A growing column; `size` is the memory it takes."""

    def __init__(self, wide: bool = False) -> None:
        self._data = bytearray()
        self._bounds = array("Q" if wide else "I", [0])

    def add(self, text: str) -> None:
        self._data += text.encode(errors="surrogatepass")
        self._bounds.append(len(self._data))

    @property
    def size(self) -> int:
        return len(self._data) + len(self._bounds) * self._bounds.itemsize

    def cells(self) -> Cells:
        bounds = np.frombuffer(self._bounds, self._bounds.typecode)
        return Cells(self._data, bounds[:-1], bounds[1:])


@dataclass(frozen=True)
class Table:
    """The path of a table, its columns of text cells, and the line number of each row in the file."""

    path: Path
    columns: dict[str, Cells]
    lines: Rows

    def __len__(self) -> int:
        return len(self.lines)

    def select(self, rows: Rows) -> Table:
        return Table(self.path, {name: cells.select(rows) for name, cells in self.columns.items()}, self.lines[rows])

    def row_text(self, row: int) -> bytes:
        """Return the text of one row, regardless of the order of the columns."""
        return "\x1f".join(self.columns[name][row] for name in sorted(self.columns)).encode()

    def row_keys(self) -> Iterator[bytes]:
        """Yield the content of each row, where 1, 1.0 and 1e0 are equal."""
        for row in zip(*(map(_plain, self.columns[name]) for name in sorted(self.columns)), strict=True):
            yield "\x1f".join(row).encode()


def numbers(cells: Iterable[str]) -> NDArray[np.float64]:
    """Return the cells as numbers, NaN for text, infinity and missing cells."""
    chunks = cells.chunks() if isinstance(cells, Cells) else [list(cells)]
    values = np.concatenate([np.empty(0), *map(_chunk_numbers, chunks)])
    values[np.isinf(values)] = np.nan
    return values


def _chunk_numbers(texts: Sequence[str]) -> NDArray[np.float64]:
    try:
        return np.array([text or "nan" for text in texts], np.float64)
    except ValueError:
        return np.array([number_of(text) for text in texts], np.float64)


def number_of(text: str) -> float:
    """Return the text as a number, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def shortened(text: str) -> str:
    """Return the beginning of a long cell, or the cell."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def quoted(text: str) -> str:
    """Return the beginning of a cell in quotes, for a message."""
    return repr(shortened(text))


def _plain(text: str) -> str:
    """Return the cell with a number in one notation."""
    try:
        value = float(text) + 0.0  # -0 is 0
    except ValueError:
        return text
    return repr(value) if isfinite(value) else text


def name_of(text: str) -> str:
    """Return the cell as a category name, where 1.0 and 1 are equal."""
    return TRAILING_ZEROS.sub("", text)


def count_names(cells: Cells) -> Counter[str]:
    """Return the number of cells per category name, without missing cells."""
    found: Counter[str] = Counter()
    for texts in cells.chunks():
        for text, count in Counter(texts).items():
            if text:
                found[name_of(text)] += count
    return found


def codes_of(cells: Cells, known: Sequence[str]) -> NDArray[np.int64]:
    """Return the position of each cell's name in `known`, UNKNOWN or ABSENT."""
    index = {"": ABSENT, **{name: i for i, name in enumerate(known)}}
    return np.fromiter((index.get(name_of(text), UNKNOWN) for text in cells), np.int64, len(cells))
