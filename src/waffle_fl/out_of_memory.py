"""One-line errors for running out of memory, on a GPU or on the machine."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from waffle_fl.errors import WaffleError

CPU = ("can't allocate memory", "not enough memory", "is there enough memory")  # torch's allocator, and our own workers
SAVED = "every run is saved up to its last checkpoint: run the same command again to continue"


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn out-of-memory errors into a WaffleError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise WaffleError(
            f"the GPU ran out of memory: train fewer runs at once (--stack) or use --device cpu; {SAVED}"
        ) from None
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_shortage(error):
            raise
        raise WaffleError(
            f"this machine ran out of memory: use fewer --workers, train fewer runs at once (--stack), or lower "
            f"--batch-size; {SAVED}"
        ) from None


def is_shortage(error: BaseException) -> bool:
    """Return whether an error was raised because memory ran out."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or any(text in str(error) for text in CPU)
