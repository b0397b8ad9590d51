"""Operations on states, which are named tuples or dicts of tensors, possibly nested."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LARGE = 1 << 25  # bytes from which the C library gives freed memory back to the system, so that a copy is in new pages
SPARE = 1 << 30  # bytes of freed memory that are kept for further copies
PRIVATE: Any = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_spare: list[mmap.mmap] = []


def tree_map(change: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Apply a function to every tensor of a state; the tensors of `others` (same structure) are further arguments."""
    if isinstance(state, Tensor):
        return change(state, *others)
    if isinstance(state, dict):
        return {key: tree_map(change, value, *(other[key] for other in others)) for key, value in state.items()}
    return type(state)(*(tree_map(change, *fields) for fields in zip(state, *others, strict=True)))


def stack(states: Sequence[Any]) -> Any:
    """Concatenate the rows of these states."""
    return tree_map(lambda *fields: torch.cat(fields), *states)


def stack_into(target: Any, states: Sequence[Any]) -> None:
    """Concatenate the rows of these states into `target`."""
    tree_map(lambda out, *fields: torch.cat(fields, out=out), target, *states)


def rows_of(state: Any, rows: slice) -> Any:
    return tree_map(lambda field: field[rows], state)


def pick_rows(state: Any, rows: Tensor) -> Any:
    """Return the rows with these numbers."""
    return tree_map(lambda field: field.index_select(0, rows), state)


def replace_rows(state: Any, rows: Tensor, new: Any) -> Any:
    """Return the state with the rows of these numbers replaced."""
    return tree_map(lambda field, some: _copied(field).index_copy_(0, rows, some), state, new)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy; a large one in the memory of an earlier copy that is not used any more, if there is one.

    To get new memory from the system takes five times as long as to copy it.
    """
    if tensor.device.type != "cpu" or not tensor.nbytes or tensor.nbytes < LARGE:
        return tensor.clone()
    memory = next((spare for spare in _spare if len(spare) == tensor.nbytes), None)
    if memory is None:
        memory = mmap.mmap(-1, tensor.nbytes, **PRIVATE)
    else:
        _spare.remove(memory)
    block = (ctypes.c_byte * tensor.nbytes).from_buffer(memory)  # the tensor keeps it
    weakref.finalize(block, _keep, memory).atexit = False
    return torch.frombuffer(block, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


def _keep(memory: mmap.mmap) -> None:
    """Keep memory that is not used any more, as long as it is not too much."""
    if sum(map(len, _spare)) + len(memory) <= SPARE:
        _spare.append(memory)


def release_memory() -> None:
    """Give spare memory back to the system."""
    _spare.clear()


def where_rows(mask: Tensor, new: Any, old: Any) -> Any:
    """Return the new rows where the mask is true, the old ones elsewhere."""
    return tree_map(lambda n, o: o if n is o else torch.where(mask.view(-1, *[1] * (n.ndim - 1)), n, o), new, old)
