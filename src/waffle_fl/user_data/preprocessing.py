"""From tables to numbers. What is fitted is fitted on training rows, from summaries; no row leaves its agent.

Agents tell each other, a column at a time:
    1  how many cells are numbers, texts, and missing;
    2  of a numeric column the count, mean and sum of squared deviations, of a categorical one the names it contains;
    3  the names of the classes, or of a numeric target what a numeric column tells.
With local preprocessing the means and deviations of the columns stay where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.column_values import AS_CLASSES, cells_of, numeric, refuse_commas, refuse_missing, standardised
from waffle_fl.user_data.tables import Cells, Table, names, numbers, read_table

Kind: TypeAlias = Literal["numeric", "categorical"]
Scope: TypeAlias = Literal["federated", "local"]
Task: TypeAlias = Literal["classification", "regression"]
Wish: TypeAlias = Literal["auto", "classification", "regression"]
Floats = NDArray[np.float32]

MOST_CATEGORIES = 100
MOST_CLASSES = 20  # whole numbers with more values than these are quantities, not classes

ROUNDING = 1e-12  # a deviation this small beside the mean is that of a constant


@dataclass(frozen=True)
class Column:
    """One column of the table and what becomes of it."""

    name: str
    kind: Kind
    mean: float = 0.0
    deviation: float = 0.0  # 0: the training data says nothing about this column
    categories: tuple[str, ...] = ()
    missing: bool = False  # was a training value missing anywhere? then a 0/1 column says so
    rows: int = 0  # training values of all agents that the mean and deviation are of

    @property
    def features(self) -> list[str]:
        """The names of the numbers it becomes."""
        values = (
            [f"{self.name}={category}" for category in self.categories] if self.kind == "categorical" else [self.name]
        )
        return values + [f"{self.name} missing"] * self.missing


@dataclass(frozen=True)
class Preprocessing:
    """How one agent's rows become numbers, and its target labels or numbers; saved with a run, used by predict."""

    columns: tuple[Column, ...]
    target: str
    task: Task
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_deviation: float = 1.0  # the unit in which a regression is trained
    scope: Scope = "federated"

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(name for column in self.columns for name in column.features)

    def transform(self, table: Table, unknown: Literal["refuse", "ignore"] = "refuse") -> Floats:
        """(rows, features): standardised numbers, one-hot categories; a category nobody trained on is refused."""
        blocks = [_block(column, table, unknown) for column in self.columns]
        return np.concatenate([np.empty((len(table), 0), np.float32), *blocks], axis=1)

    def strange(self, table: Table) -> int:
        """How many rows have a category that nobody trained on."""
        found = np.zeros(len(table), bool)
        for column in self.columns:
            if column.kind == "categorical":
                found |= _strange(column, names(table.columns[column.name]))
        return int(found.sum())

    def targets(self, table: Table) -> NDArray[Any] | None:
        """Class numbers, or standardised numbers; None where the table has no target."""
        cells = table.columns.get(self.target)
        if cells is None or not (cells != "").any():
            return None
        refuse_missing(table, self.target)
        if self.task == "regression":
            scaled = standardised(table, self.target, self.target_mean, self.target_deviation, AS_CLASSES)
            return scaled.astype(np.float32)
        found = names(cells)
        known = {name: k for k, name in enumerate(self.classes)}
        bad = next((i for i, name in enumerate(found.tolist()) if name not in known), None)
        if bad is not None:
            raise WaffleError(
                f"{table.path}: column {self.target!r} says {str(found[bad])!r} in line {table.lines[bad]}, "
                f"the classes are {', '.join(self.classes)}"
            )
        return np.array([known[name] for name in found.tolist()], np.int64)

    def transform_table(self, path: Path) -> tuple[Floats, NDArray[Any] | None]:
        """The features of a file and, where it has the target column, its targets."""
        table = read_table(path)
        return self.transform(table), self.targets(table)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Preprocessing:
        try:
            columns = tuple(Column(**{**c, "categories": tuple(c["categories"])}) for c in content["columns"])
            found = cls(**{**content, "columns": columns, "classes": tuple(content["classes"])})
        except (KeyError, TypeError) as error:
            raise WaffleError(f"expected a preprocessing as a run folder holds it, it lacks or adds {error}") from None
        if not found._is_typed():
            raise WaffleError("expected a preprocessing as a run folder holds it, a field of it is not of its type")
        return found

    def _is_typed(self) -> bool:
        """Is every field what it should be? It may have come from anywhere."""
        texts = [self.target, *self.classes, *(c.name for c in self.columns)]
        texts += [category for c in self.columns for category in c.categories]
        values = [self.target_mean, self.target_deviation, *(v for c in self.columns for v in (c.mean, c.deviation))]
        return (
            all(type(text) is str for text in texts)
            and all(type(value) in (int, float) for value in values)
            and all(type(c.missing) is bool and type(c.rows) is int for c in self.columns)
            and all(c.kind in get_args(Kind) for c in self.columns)
            and self.task in get_args(Task)
            and self.scope in get_args(Scope)
        )


class Cellcount(NamedTuple):
    """What an agent tells of a column first."""

    numbers: int
    texts: int
    missing: int


class Moments(NamedTuple):
    """What an agent tells of a numeric column: as much as a count, a sum and a sum of squares, but exact."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the agent's own mean

    @property
    def deviation(self) -> float:
        found = sqrt(self.squares / self.n) if self.n else 0.0
        return found if found > ROUNDING * abs(self.mean) else 0.0

    def joined(self, other: Moments) -> Moments:
        """The moments of both together (Chan, Golub and LeVeque 1979)."""
        n = self.n + other.n
        if not n:
            return self
        gap, share = other.mean - self.mean, other.n / n
        return Moments(n, self.mean + gap * share, self.squares + other.squares + gap * gap * self.n * share)


def count_cells(cells: Cells) -> Cellcount:
    missing = int((cells == "").sum())
    found = int(np.isfinite(numbers(cells)).sum())
    return Cellcount(found, len(cells) - found - missing, missing)


def moments(values: NDArray[np.float64]) -> Moments:
    present = values[np.isfinite(values)]
    if not len(present):
        return Moments()
    mean = float(present.mean())
    return Moments(len(present), mean, float(((present - mean) ** 2).sum()))


def aim_of(target: str, tables: Sequence[Table], task: Wish) -> Preprocessing:
    """What is to be predicted, from all rows: classes by name, or a number; the columns are fitted later."""
    found = {name for table in tables for name in target_names(table, target)}
    check_target(target, tables, task)
    return aim_from(target, found, task)


def check_target(target: str, tables: Sequence[Table], task: Wish) -> None:
    """Refuse a text in a target of which most values are numbers: it would make classes of them all."""
    if task == "auto" and kind_of([count_cells(table.columns[target]) for table in tables], named=False) == "numeric":
        for table in tables:
            numeric(table, target, AS_CLASSES)


def target_names(table: Table, target: str) -> list[str]:
    """The different values of a table's target."""
    refuse_missing(table, target)
    refuse_commas(table, target)
    return np.unique(names(table.columns[target])).tolist()  # type: ignore[no-any-return]


def may_be_classes(found: Collection[str], task: Wish) -> bool:
    """Are these values names of classes? Numbers are, if they are few and whole."""
    values = numbers(np.array(sorted(found)))
    few_whole = len(found) <= MOST_CLASSES and bool((values == np.round(values)).all())
    return task == "classification" or (task == "auto" and (few_whole or not np.isfinite(values).all()))


def aim_from(target: str, values: Collection[str], task: Wish) -> Preprocessing:
    """What is to be predicted, from the different values that the target has anywhere."""
    if not may_be_classes(values, task):
        return Preprocessing((), target, "regression")
    found = sorted(values)
    if len(found) > MOST_CATEGORIES:
        raise WaffleError(
            f"the target {target!r} has {len(found)} different values, at most {MOST_CATEGORIES} make classes: "
            "for numbers set task to regression"
        )
    numeric = numbers(np.array(found))
    ordered = [found[i] for i in np.argsort(numeric)] if np.isfinite(numeric).all() else found
    return Preprocessing((), target, "classification", tuple(ordered))


def fit(
    aim: Preprocessing,
    training: Mapping[str, Table],
    categorical: Sequence[str] = (),
    scope: Scope = "federated",
    min_category: int = 1,
) -> dict[str, Preprocessing]:
    """One preprocessing per agent, from summaries of everyone's training rows."""
    tables = list(training.values())
    features = [name for name in tables[0].columns if name != aim.target]
    if not features:
        raise WaffleError(f"{tables[0].path}: expected columns besides the target {aim.target!r}, got none")
    shared = tuple(_shared_column(name, tables, name in categorical, min_category) for name in features)
    goals = tables if aim.task == "regression" else []
    goal = joined_moments(moments(numeric(table, aim.target, AS_CLASSES)) for table in goals)
    common = fit_jointly(aim, shared, goal, scope)
    return {name: fit_locally(common, table) for name, table in training.items()}


def fit_jointly(aim: Preprocessing, columns: tuple[Column, ...], goal: Moments, scope: Scope) -> Preprocessing:
    """What all agents share: the columns and, of a number to predict, its unit."""
    common = replace(aim, columns=columns, scope=scope)
    if aim.task == "classification":
        return common
    return replace(common, target_mean=goal.mean, target_deviation=goal.deviation or 1.0)


def fit_locally(common: Preprocessing, table: Table) -> Preprocessing:
    """One agent's own: with local preprocessing it standardises by its own means and deviations."""
    if common.scope == "federated":
        return common
    return replace(common, columns=tuple(_local(column, table) for column in common.columns))


def joined_moments(told: Iterable[Moments]) -> Moments:
    """The moments of all agents, in their order."""
    joined = Moments()
    for own in told:
        joined = joined.joined(own)
    return joined


def _shared_column(name: str, tables: Sequence[Table], named: bool, min_category: int) -> Column:
    counts = [count_cells(cells_of(table, name)) for table in tables]
    if kind_of(counts, named) == "numeric":
        return numeric_column(name, counts, [column_moments(table, name) for table in tables])
    return categorical_column(name, counts, [column_categories(table, name, min_category) for table in tables])


def kind_of(counts: Sequence[Cellcount], named: bool) -> Kind:
    """A column in which most cells are numbers is numeric, unless it was `named` as one of categories."""
    found, texts = sum(count.numbers for count in counts), sum(count.texts for count in counts)
    return "numeric" if not named and (found > texts or not texts) else "categorical"


def column_moments(table: Table, name: str) -> Moments:
    return moments(numeric(table, name))


def column_categories(table: Table, name: str, at_least: int = 1) -> list[str]:
    """The categories of a column that at least so many rows have."""
    refuse_commas(table, name)
    found, counts = np.unique(names(table.columns[name]), return_counts=True)
    return [c for c, count in zip(found.tolist(), counts.tolist(), strict=True) if c and count >= at_least]


def numeric_column(name: str, counts: Sequence[Cellcount], told: Iterable[Moments]) -> Column:
    joined = joined_moments(told)
    gone = any(count.missing for count in counts)
    return Column(name, "numeric", joined.mean, joined.deviation, missing=gone, rows=joined.n)


def categorical_column(name: str, counts: Sequence[Cellcount], told: Iterable[Collection[str]]) -> Column:
    categories = sorted({category for own in told for category in own})
    if len(categories) > MOST_CATEGORIES:
        raise WaffleError(
            f"column {name!r} has {len(categories)} different texts, at most {MOST_CATEGORIES} make categories: "
            "leave the column out of the files, or group its values"
        )
    return Column(name, "categorical", categories=tuple(categories), missing=any(count.missing for count in counts))


def _local(column: Column, table: Table) -> Column:
    if column.kind == "categorical":
        return column
    own = column_moments(table, column.name)
    return replace(column, mean=own.mean, deviation=own.deviation)


def _block(column: Column, table: Table, unknown: str) -> Floats:
    cells = cells_of(table, column.name)
    gone = (cells == "")[:, None]
    if column.kind == "numeric":
        scaled = standardised(table, column.name, column.mean, column.deviation)
        block = np.where(gone, 0.0, scaled[:, None])
    else:
        found = names(cells)
        bad = np.flatnonzero(_strange(column, found))
        if len(bad) and unknown == "refuse":
            raise WaffleError(
                f"{table.path}: column {column.name!r} says {str(found[bad[0]])!r} in line {table.lines[bad[0]]}, "
                f"which no agent trained on; the categories are {', '.join(column.categories)}"
            )
        block = found[:, None] == np.array(column.categories, np.str_)[None, :]
    return np.concatenate([block, gone], axis=1, dtype=np.float32) if column.missing else block.astype(np.float32)


def _strange(column: Column, found: Cells) -> NDArray[np.bool_]:
    return ~np.isin(found, ["", *column.categories])
