"""The common result of all readers: samples, targets, and the rows for training, validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.array_scaling import ArrayScaling
from waffle_fl.user_data.cleaning import CellRules, Decimal
from waffle_fl.user_data.duplicates import Duplicates
from waffle_fl.user_data.expansion import TIMES
from waffle_fl.user_data.preprocessing import Preprocessing, ScopeOption, Task, TaskOption
from waffle_fl.user_data.splitting import Rows, SelectedKeys, hold_out

Array: TypeAlias = NDArray[Any]
CHOICES = (("task", TaskOption), ("preprocessing", ScopeOption), ("decimal", Decimal), ("duplicates", Duplicates))


@dataclass(frozen=True)
class ReadOptions:
    """How to read the data; the fields have the names of the settings."""

    target: str = ""
    categorical: tuple[str, ...] = ()
    preprocessing: ScopeOption = "federated"
    task: TaskOption = "auto"
    test_share: float = 0.25
    validation: float = 0.0
    split_seed: int = 0
    min_category: int = 1
    drop: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    decimal: Decimal = "."
    fold_case: bool = False
    fill_absent: bool = False
    duplicates: Duplicates = "error"
    max_expansion: float = TIMES

    def __post_init__(self) -> None:
        if not (0 < self.test_share < 1 and 0 <= self.validation < 1):
            given = f"{self.test_share} and {self.validation}"
            raise WaffleError(f"expected test_share above 0 and validation from 0, both below 1, got {given}")
        for name, choices in CHOICES:
            value, known = getattr(self, name), choices.__args__  # type: ignore[attr-defined]
            if value not in known:
                raise WaffleError(f"{name}: expected {' or '.join(map(repr, known))}, got {value!r}")

    @property
    def rules(self) -> CellRules:
        """How the cells of a table are read."""
        return CellRules(**{f.name: getattr(self, f.name) for f in fields(CellRules)})


class AgentData(NamedTuple):
    """One agent's samples, and its rows for training, for selecting a round, and for testing."""

    x: Array
    y: Array
    train: Rows
    validation: Rows
    test: Rows


class CollectedData(NamedTuple):
    """The data of all agents, from which a Federation is built."""

    agents: dict[str, AgentData]
    task: Task
    class_names: tuple[str, ...]
    preparations: tuple[Preprocessing, ...] = ()  # of tables, one per agent
    notes: tuple[str, ...] = ()
    scalings: tuple[ArrayScaling, ...] = ()  # of arrays and images, one per agent


class RowSplit(NamedTuple):
    """The training, validation and test rows of one agent."""

    train: Rows
    validation: Rows
    test: Rows


def divide(keys: Sequence[bytes], classes: Array | None, given: int | None, options: ReadOptions) -> RowSplit:
    """Return the training, validation and test rows.

    The rows before `given` are for training, the others for testing. If it is None, a share of each class is held out.
    """
    if given is None:
        test, rest = hold_out(keys, classes, options.test_share, options.split_seed, "test")
    else:
        rest, test = np.arange(given), np.arange(given, len(keys))
    inner = None if classes is None else classes[rest]
    validation, train = hold_out(SelectedKeys(keys, rest), inner, options.validation, options.split_seed, "validation")
    return RowSplit(rest[train], rest[validation], test)


def check_classes(task: Task, classes: Sequence[str]) -> None:
    if task == "classification" and len(classes) < 2:
        found = f"only {classes[0]!r}" if classes else "none"
        raise WaffleError(
            f"expected at least two classes among all agents, got {found}: check the target column or the labels"
        )
