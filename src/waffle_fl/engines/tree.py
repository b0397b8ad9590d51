"""States are named tuples of tensors, maybe nested: what an engine does to all tensors of one alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def tree_map(change: Callable[..., Any], state: Any, *others: Any) -> Any:
    """The state with every tensor changed; others of the same build lend theirs as further arguments."""
    if isinstance(state, Tensor):
        return change(state, *others)
    if isinstance(state, dict):
        return {key: tree_map(change, value, *(other[key] for other in others)) for key, value in state.items()}
    return type(state)(*(tree_map(change, *fields) for fields in zip(state, *others, strict=True)))


def stack(states: Sequence[Any]) -> Any:
    """The rows of all these states as one."""
    return tree_map(lambda *fields: torch.cat(fields), *states)


def stack_into(target: Any, states: Sequence[Any]) -> None:
    """The same, in memory that is there already."""
    tree_map(lambda out, *fields: torch.cat(fields, out=out), target, *states)


def rows_of(state: Any, rows: slice) -> Any:
    return tree_map(lambda field: field[rows], state)


def where_rows(mask: Tensor, new: Any, old: Any) -> Any:
    """New rows where the mask holds, old ones elsewhere."""
    return tree_map(lambda n, o: o if n is o else torch.where(mask.view(-1, *[1] * (n.ndim - 1)), n, o), new, old)
