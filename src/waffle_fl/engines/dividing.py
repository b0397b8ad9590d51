"""Agents whose own models are asked for, and those that only help: these do no more than helping takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm
from waffle_fl.engines.cells import Cell
from waffle_fl.engines.states import mapped
from waffle_fl.engines.training import Training
from waffle_fl.models import FlatModel

Trained = list[tuple[Any, Any]]  # of each federation: what its agents hold then, and what they send


def helping(cells: Sequence[Cell]) -> list[list[int]]:
    """Of each cell the agents that only help; none where all models are asked for, or training has no such part."""
    return [
        [i for i in range(cell.federation.agents) if i not in cell.asked]
        if cell.asked is not None and hasattr(cell.algorithm, "helper")
        else []
        for cell in cells
    ]


class Divided:
    """A training in two parts, for those who are asked for and for their helpers; it is used as one is."""

    def __init__(
        self,
        algorithm: Algorithm,
        helper: Algorithm,
        model: FlatModel,
        sizes: Sequence[int],
        helpers: Sequence[Sequence[int]],
        training: Callable[[Algorithm, Sequence[Sequence[int]]], Training],
    ) -> None:
        asked = [sorted({*range(size)}.difference(some)) for size, some in zip(sizes, helpers, strict=True)]
        self._own, self._helping = training(algorithm, asked), training(helper, helpers)
        self._rows = [_on(model.device, some) for some in asked]
        self._helpers = [_on(model.device, some) for some in helpers]
        self._orders = [torch.cat(pair).argsort() for pair in zip(self._rows, self._helpers, strict=True)]
        self._kept = helper.init(model.init(0), 1)[1]  # what a helper keeps: nothing, or its velocity

    def round(self, given: Sequence[tuple[Any, Any]], r: int, attempt: int, rounds_left: int) -> Trained:
        """What `Training.round` does; of the agents that only help, no more than the helper's own state changes."""
        states = zip(given, self._rows, strict=True)
        asked = [(_picked(down, rows), _picked(agents, rows)) for (down, agents), rows in states]
        states = zip(given, self._helpers, strict=True)
        helping = [(_picked(down, rows), _picked(_common(agents, self._kept), rows)) for (down, agents), rows in states]
        own = self._own.round(asked, r, attempt, rounds_left)
        helped = self._helping.round(helping, r, attempt, rounds_left)
        parts = zip(given, self._rows, self._helpers, self._orders, own, helped, strict=True)
        return [
            (_updated(_replaced(before, rows, agents), others, kept), _joined(order, up, more))
            for (_, before), rows, others, order, (agents, up), (kept, more) in parts
        ]

    def close(self) -> None:
        self._own.close()
        self._helping.close()


def _on(device: torch.device, rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _picked(state: Any, rows: Tensor) -> Any:
    return mapped(lambda field: field.index_select(0, rows), state)


def _replaced(state: Any, rows: Tensor, new: Any) -> Any:
    return mapped(lambda field, some: field.index_copy(0, rows, some), state, new)


def _common(state: Any, like: Any) -> Any:
    """The fields of a state that another type of state has too, as that type."""
    return type(like)(*(getattr(state, name) for name in like._fields))


def _updated(state: Any, rows: Tensor, some: Any) -> Any:
    """The state with rows of some of its fields replaced."""
    new = {name: getattr(state, name).index_copy(0, rows, value) for name, value in some._asdict().items()}
    return state._replace(**new)


def _joined(order: Tensor, *parts: Any) -> Any:
    return mapped(lambda *fields: torch.cat(fields).index_select(0, order), *parts)
