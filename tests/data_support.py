"""What tests of data files share."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from waffle_fl.errors import WaffleError

MEGABYTE = 1 << 20
AGAIN = "delete it and fetch it again"


def answer(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the call returns, or the text with which it is refused, where either may be right."""
    try:
        return call(*args, **options)
    except WaffleError as error:
        return str(error)


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """What happens inside allocates less than so many bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were allocated at once"
