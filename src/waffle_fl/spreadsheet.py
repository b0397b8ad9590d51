"""CSV for people who open it in a spreadsheet: no text of ours becomes a formula there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # what OWASP lists
SPECIAL = frozenset(',;\t\r\n"')  # the signs that end a cell, in one country or another


def cell(value: object) -> str:
    """A value as a cell: before a text that a spreadsheet would run stands a quote; numbers stay numbers."""
    text = "" if value is None else str(value)
    if isinstance(value, str) and text.startswith(FORMULA):
        text = f"'{text}"
    return '"' + text.replace('"', '""') + '"' if SPECIAL & set(text) else text


def to_csv(rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV, one per line."""
    return "".join(f"{','.join(map(cell, row))}\n" for row in rows)
