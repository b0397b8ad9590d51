"""Context managers that fix how an engine computes: one thread per row, matrix products in the given precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread, so that a row's bits do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Compute matrix products in the given precision, and deterministically."""
    flags = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic)
    fast = precision in ("tf32", "bf16")
    _set_products(fast, fast, True)
    try:
        yield
    finally:
        _set_products(*flags)


def _set_products(matmul: bool, cudnn: bool, deterministic: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = cudnn
    torch.backends.cudnn.deterministic = deterministic
