"""CSV that is safe to open in a spreadsheet: no text is interpreted as a formula."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # the list of OWASP
SPECIAL = frozenset(',;\t\r\n"')  # separators in different locales, and quotes


def cell(value: object) -> str:
    """Return a value as a CSV cell. Text that looks like a formula is prefixed with a quote; numbers are unchanged."""
    text = "" if value is None else str(value)
    if isinstance(value, str) and text.startswith(FORMULA):
        text = f"'{text}"
    return '"' + text.replace('"', '""') + '"' if SPECIAL & set(text) else text


def to_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV, one per line."""
    return "".join(f"{','.join(map(cell, row))}\n" for row in rows)
