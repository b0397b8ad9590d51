"""Helpers for tests of data files."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from waffle_fl.errors import WaffleError

MEGABYTE = 1 << 20
FETCH_AGAIN = "delete it and fetch it again"


def result_or_message(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of the call, or the message of its WaffleError."""
    try:
        return call(*args, **options)
    except WaffleError as error:
        return str(error)


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Assert that the block allocates less than `limit` bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were allocated at once"
