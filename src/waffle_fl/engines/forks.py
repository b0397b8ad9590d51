"""Rows on several cores: Python's threads get in each other's way, so a round's rows are shared out among processes.

A child is forked for the round: it inherits all it needs to read, writes its rows into shared memory and is gone.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def can_fork() -> bool:
    """Autograd cannot be forked once it has threads for a GPU."""
    return hasattr(os, "fork") and not torch.cuda.is_available()


def shared_like(tensor: Tensor, rows: int) -> Tensor:
    """Memory for so many rows like this tensor's, which a child and its parent both see."""
    shape = (rows, *tensor.shape[1:])
    count = math.prod(shape)
    if not count:
        return tensor.new_empty(shape)
    return torch.frombuffer(mmap.mmap(-1, count * tensor.element_size()), dtype=tensor.dtype).view(shape)


def in_processes(
    work: Callable[[slice], Sequence[Tensor]], chunks: Sequence[slice], results: Sequence[Tensor], processes: int
) -> None:
    """Do `work` for every chunk and put the tensors it returns into the chunk's rows of `results`."""

    def share(k: int) -> None:
        for chunk in chunks[k::processes]:
            for result, rows in zip(results, work(chunk), strict=True):
                result[chunk] = rows

    children = [_forked(share, k) for k in range(1, processes)]
    share(0)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"a training process ended with status {status}: is there enough memory?")


def _forked(work: Callable[[int], None], k: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child touches nothing that a thread could hold
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(k)
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(code)
