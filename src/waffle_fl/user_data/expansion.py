"""A limit on the memory that a compressed file takes, checked before the memory is taken."""

from __future__ import annotations

from math import ceil
from pathlib import Path

from waffle_fl.errors import WaffleError

TIMES = 10.0  # default of the setting max_expansion
FREE = 32 << 20  # bytes that every file may take: small files compress well


def allowance(path: Path, times: float = TIMES) -> int:
    """Return the bytes that a file's content may take in memory."""
    return max(FREE, int(times * path.stat().st_size))


def check_expansion(path: Path, size: int, times: float = TIMES) -> None:
    """Raise WaffleError if a file of this path would take `size` bytes, more than its allowance."""
    on_disk = path.stat().st_size
    if size > allowance(path, times):
        ratio = ceil(size / max(1, on_disk))
        raise WaffleError(
            f"{path} would take {readable_size(size)} in memory, {ratio:,} times its size on disk: expected at most "
            f"{times:g} times, or {readable_size(FREE)}; if this is right, set --max-expansion {ratio}"
        )


def readable_size(size: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1024 or unit == "TB":
            break
        size /= 1024
    return f"{size:,.0f} {unit}" if size >= 10 or unit == "bytes" else f"{size:.1f} {unit}"
