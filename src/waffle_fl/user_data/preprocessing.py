"""Convert tables to numbers. Preprocessing is fitted on training rows from summaries; no row leaves its agent.

Agents share, per column:
    1  the number of numeric, text and missing cells;
    2  for a numeric column its count, mean and sum of squared deviations; for a categorical one its category names;
    3  for the target its class names or, if it is numeric, the same as for a numeric column.
With local preprocessing the means and deviations of the columns are not shared.
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
from waffle_fl.user_data.ambiguity import check_values
from waffle_fl.user_data.cells import UNKNOWN, Cells, Table, codes_of, count_names, numbers, quoted
from waffle_fl.user_data.cleaning import CellRules, cleaned, filled
from waffle_fl.user_data.column_values import (
    AS_CLASSES,
    cells_of,
    numeric,
    refuse_disguised_numbers,
    refuse_missing,
    standardised,
)
from waffle_fl.user_data.tables import read_raw

Kind: TypeAlias = Literal["numeric", "categorical"]
Scope: TypeAlias = Literal["federated", "local"]
ScopeOption: TypeAlias = Literal["federated", "local", "none"]
Task: TypeAlias = Literal["classification", "regression"]
TaskOption: TypeAlias = Literal["auto", "classification", "regression"]
Floats = NDArray[np.float32]

MOST_CATEGORIES = 100
MOST_CLASSES = 20  # an integer target with more distinct values is a regression target

CLIP = 3.0  # deviations from the mean at which standardised features are clipped: a far value would rule a model
ROUNDING = 1e-12  # relative to the mean: a smaller deviation is that of a constant
NONE_FOR_TABLES = (
    "preprocessing: expected federated or local for tables, got none: their columns must become numbers of one scale"
)


@dataclass(frozen=True)
class Column:
    """One column of the table and its preprocessing."""

    name: str
    kind: Kind
    mean: float = 0.0
    deviation: float = 0.0  # 0: constant or absent in the training data
    categories: tuple[str, ...] = ()
    missing: bool = False  # whether any training value is missing: adds a 0/1 feature
    rows: int = 0  # number of training values, over all agents, behind mean and deviation
    low: float | None = None  # range of the training values; None in a deployment, where it does not leave a site
    high: float | None = None

    @property
    def features(self) -> list[str]:
        """The names of its features."""
        values = (
            [f"{self.name}={category}" for category in self.categories] if self.kind == "categorical" else [self.name]
        )
        return values + [f"{self.name} missing"] * self.missing


@dataclass(frozen=True)
class Preprocessing:
    """Conversion of one agent's rows to features and targets; saved with a run and used by predict."""

    columns: tuple[Column, ...]
    target: str
    task: Task
    classes: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_deviation: float = 1.0  # the unit in which a regression is trained
    scope: Scope = "federated"
    rules: CellRules = CellRules()  # how the cells were read, and are read by predict
    clip: float | None = None  # largest distance of a standardised number from 0; None: unlimited, as in earlier runs

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(name for column in self.columns for name in column.features)

    def transform(self, table: Table, unknown: Literal["refuse", "ignore"] = "refuse") -> Floats:
        """Return (rows, features): standardised numbers and one-hot categories.

        A category that is not in the training data raises WaffleError, or sets all one-hot features to 0 if `unknown`
        is "ignore"."""
        blocks = [_block(column, table, unknown, self.clip) for column in self.columns]
        return np.concatenate([np.empty((len(table), 0), np.float32), *blocks], axis=1)

    def count_unknown(self, table: Table) -> int:
        """Return the number of rows with a category that is not in the training data."""
        found = np.zeros(len(table), bool)
        for column in self.columns:
            if column.kind == "categorical":
                found |= codes_of(table.columns[column.name], column.categories) == UNKNOWN
        return int(found.sum())

    def targets(self, table: Table) -> NDArray[Any] | None:
        """Return class indices or standardised numbers; None if the table has no target."""
        cells = table.columns.get(self.target)
        if cells is None or cells.missing.all():
            return None
        refuse_missing(table, self.target)
        if self.task == "regression":
            scaled = standardised(table, self.target, self.target_mean, self.target_deviation, AS_CLASSES)
            return scaled.astype(np.float32)
        found = codes_of(cells, self.classes)
        bad = np.flatnonzero(found == UNKNOWN)
        if len(bad):
            raise WaffleError(
                f"{table.path}: column {self.target!r} has {quoted(cells[int(bad[0])])} in line {table.lines[bad[0]]}, "
                f"the classes are {', '.join(self.classes)}"
            )
        return found

    def transform_table(self, path: Path) -> tuple[Floats, NDArray[Any] | None]:
        """Return the features of a file and, if it has the target column, its targets."""
        table = self.read(read_raw(path))
        return self.transform(table), self.targets(table)

    def read(self, raw: Table) -> Table:
        """Return a table of a file with its cells read as those of the training tables."""
        table = cleaned(raw, self.rules)
        return filled(table, [column.name for column in self.columns]) if self.rules.fill_absent else table

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Preprocessing:
        try:
            columns = tuple(Column(**{**c, "categories": tuple(c["categories"])}) for c in content["columns"])
            rules = CellRules.from_json(content["rules"]) if "rules" in content else CellRules()
            found = cls(**{**content, "columns": columns, "classes": tuple(content["classes"]), "rules": rules})
        except (KeyError, TypeError) as error:
            raise WaffleError(f"expected a preprocessing as saved in a run folder, fields differ: {error}") from None
        if not found._is_typed():
            raise WaffleError("expected a preprocessing as saved in a run folder, got a field of the wrong type")
        return found

    def _is_typed(self) -> bool:
        """Return whether every field has its type; the JSON may come from an untrusted file."""
        texts = [self.target, *self.classes, *(c.name for c in self.columns)]
        texts += [category for c in self.columns for category in c.categories]
        values = [self.target_mean, self.target_deviation, *(v for c in self.columns for v in (c.mean, c.deviation))]
        return (
            all(type(text) is str for text in texts)
            and all(type(value) in (int, float) for value in values)
            and all(type(c.missing) is bool and type(c.rows) is int for c in self.columns)
            and all(type(v) in (int, float, type(None)) for c in self.columns for v in (c.low, c.high))
            and all(c.kind in get_args(Kind) for c in self.columns)
            and self.task in get_args(Task)
            and self.scope in get_args(Scope)
            and is_bound(self.clip)
        )


def is_bound(clip: Any) -> bool:
    """Return whether this can be the bound of standardised inputs; it may come from an untrusted file."""
    return clip is None or (type(clip) in (int, float) and clip > 0)


class Cellcount(NamedTuple):
    """The number of numeric, text and missing cells of a column."""

    numbers: int
    texts: int
    missing: int


class Moments(NamedTuple):
    """The count, mean and squared deviations of a numeric column; more exact than count, sum and sum of squares."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the agent's own mean

    @property
    def deviation(self) -> float:
        found = sqrt(self.squares / self.n) if self.n else 0.0
        return found if found > ROUNDING * abs(self.mean) else 0.0

    def joined(self, other: Moments) -> Moments:
        """Return the moments of both together (Chan, Golub and LeVeque 1979)."""
        n = self.n + other.n
        if not n:
            return self
        gap, share = other.mean - self.mean, other.n / n
        return Moments(n, self.mean + gap * share, self.squares + other.squares + gap * gap * self.n * share)


def count_cells(cells: Cells) -> Cellcount:
    missing = int(cells.missing.sum())
    found = int(np.isfinite(numbers(cells)).sum())
    return Cellcount(found, len(cells) - found - missing, missing)


def moments(values: NDArray[np.float64]) -> Moments:
    present = values[np.isfinite(values)]
    if not len(present):
        return Moments()
    mean = float(present.mean())
    return Moments(len(present), mean, float(((present - mean) ** 2).sum()))


def aim_of(target: str, tables: Sequence[Table], task: TaskOption, named: bool = False) -> Preprocessing:
    """Return a preprocessing with the target, task and classes found in all rows; its columns are fitted later.

    `named`: the target is listed in `categorical`, so that values that look alike are different classes.
    """
    found = {name for table in tables for name in target_names(table, target)}
    if may_be_classes(found, task) and not named:
        check_values("the target", target, found)
    check_target(target, tables, task)
    return aim_from(target, found, task, named)


def check_target(target: str, tables: Sequence[Table], task: TaskOption) -> None:
    """Raise WaffleError for a text in a mostly numeric target, which would turn every number into a class."""
    if task == "auto" and kind_of([count_cells(table.columns[target]) for table in tables], named=False) == "numeric":
        for table in tables:
            numeric(table, target, AS_CLASSES)


def target_names(table: Table, target: str) -> list[str]:
    """Return the distinct values of a table's target."""
    refuse_missing(table, target)
    refuse_disguised_numbers(table, target)
    return sorted(count_names(table.columns[target]))


def may_be_classes(found: Collection[str], task: TaskOption) -> bool:
    """Return whether these values are class names; numbers are if they are few integers."""
    values = numbers(sorted(found))
    few_integers = len(found) <= MOST_CLASSES and bool((values == np.round(values)).all())
    return task == "classification" or (task == "auto" and (few_integers or not np.isfinite(values).all()))


def aim_from(target: str, values: Collection[str], task: TaskOption, named: bool = False) -> Preprocessing:
    """Return a preprocessing with the target, task and classes, from the distinct target values of all agents."""
    if not may_be_classes(values, task):
        return Preprocessing((), target, "regression")
    found = sorted(values)
    if not named:
        check_values("the target", target, found)
    if len(found) > MOST_CATEGORIES:
        raise WaffleError(
            f"the target {target!r} has {len(found)} different values, expected at most {MOST_CATEGORIES} classes: "
            "for numbers set task to regression"
        )
    numeric = numbers(found)
    ordered = [found[i] for i in np.argsort(numeric)] if np.isfinite(numeric).all() else found
    return Preprocessing((), target, "classification", tuple(ordered))


def fit(
    aim: Preprocessing,
    training: Mapping[str, Table],
    categorical: Sequence[str] = (),
    scope: Scope = "federated",
    min_category: int = 1,
) -> dict[str, Preprocessing]:
    """Return one preprocessing per agent, fitted on summaries of all agents' training rows."""
    tables = list(training.values())
    features = [name for name in tables[0].columns if name != aim.target]
    if not features:
        raise WaffleError(f"{tables[0].path}: expected columns besides the target {aim.target!r}, got none")
    shared = tuple(_shared_column(name, tables, name in categorical, min_category) for name in features)
    goals = tables if aim.task == "regression" else []
    goal = joined_moments(moments(numeric(table, aim.target, AS_CLASSES)) for table in goals)
    common = fit_jointly(aim, tuple(_with_range(column, tables) for column in shared), goal, scope)
    return {name: fit_locally(common, table) for name, table in training.items()}


def _with_range(column: Column, tables: Sequence[Table]) -> Column:
    """Return a numeric column with the smallest and the largest training value, which predict compares with."""
    values = [numbers(table.columns[column.name]) for table in tables] if column.kind == "numeric" else []
    found = np.concatenate([np.empty(0), *(own[np.isfinite(own)] for own in values)])
    return replace(column, low=float(found.min()), high=float(found.max())) if len(found) else column


def table_scope(preprocessing: ScopeOption) -> Scope:
    """Return whose means and deviations standardise the columns of tables; raise WaffleError for none."""
    if preprocessing == "none":
        raise WaffleError(NONE_FOR_TABLES)
    return preprocessing


def fit_jointly(aim: Preprocessing, columns: tuple[Column, ...], goal: Moments, scope: Scope) -> Preprocessing:
    """Return the preprocessing common to all agents: the columns and, for regression, the scale of the target."""
    common = replace(aim, columns=columns, scope=scope, clip=CLIP)
    if aim.task == "classification":
        return common
    return replace(common, target_mean=goal.mean, target_deviation=goal.deviation or 1.0)


def fit_locally(common: Preprocessing, table: Table) -> Preprocessing:
    """Return one agent's preprocessing; with scope "local" it uses the agent's own means and deviations."""
    if common.scope == "federated":
        return common
    return replace(common, columns=tuple(_local(column, table) for column in common.columns))


def joined_moments(summaries: Iterable[Moments]) -> Moments:
    """Return the moments of all agents together, added in their order."""
    joined = Moments()
    for own in summaries:
        joined = joined.joined(own)
    return joined


def _shared_column(name: str, tables: Sequence[Table], named: bool, min_category: int) -> Column:
    counts = [count_cells(cells_of(table, name)) for table in tables]
    if kind_of(counts, named) == "numeric":
        return numeric_column(name, counts, [column_moments(table, name) for table in tables])
    found = [column_categories(table, name, min_category) for table in tables]
    return categorical_column(name, counts, found, named)


def kind_of(counts: Sequence[Cellcount], named: bool) -> Kind:
    """Return numeric if most cells are numbers and the column is not `named` as categorical, else categorical."""
    found, texts = sum(count.numbers for count in counts), sum(count.texts for count in counts)
    return "numeric" if not named and (found > texts or not texts) else "categorical"


def column_moments(table: Table, name: str) -> Moments:
    return moments(numeric(table, name))


def column_categories(table: Table, name: str, at_least: int = 1) -> list[str]:
    """Return the categories of a column that occur in at least `at_least` rows."""
    refuse_disguised_numbers(table, name)
    counts = count_names(table.columns[name])
    return sorted(category for category, count in counts.items() if count >= at_least)


def numeric_column(name: str, counts: Sequence[Cellcount], summaries: Iterable[Moments]) -> Column:
    joined = joined_moments(summaries)
    missing = any(count.missing for count in counts)
    return Column(name, "numeric", joined.mean, joined.deviation, missing=missing, rows=joined.n)


def categorical_column(
    name: str, counts: Sequence[Cellcount], found: Iterable[Collection[str]], named: bool = False
) -> Column:
    categories = sorted({category for own in found for category in own})
    if len(categories) > MOST_CATEGORIES:
        raise WaffleError(
            f"column {name!r} has {len(categories)} different texts, at most {MOST_CATEGORIES} are allowed: "
            f"set --drop {name}, or group its values"
        )
    if not named:
        check_values("column", name, categories)
    return Column(name, "categorical", categories=tuple(categories), missing=any(count.missing for count in counts))


def _local(column: Column, table: Table) -> Column:
    if column.kind == "categorical":
        return column
    own = column_moments(table, column.name)
    return replace(column, mean=own.mean, deviation=own.deviation)


def clipped(scaled: NDArray[np.float64], clip: float | None) -> NDArray[np.float64]:
    """Return standardised inputs with those beyond the bound moved to it; missing ones stay NaN."""
    return scaled if clip is None else np.clip(scaled, -clip, clip)


def _block(column: Column, table: Table, unknown: str, clip: float | None) -> Floats:
    cells = cells_of(table, column.name)
    missing = cells.missing[:, None]
    if column.kind == "numeric":
        scaled = clipped(standardised(table, column.name, column.mean, column.deviation), clip)
        block = np.where(missing, 0.0, scaled[:, None])
    else:
        found = codes_of(cells, column.categories)
        bad = np.flatnonzero(found == UNKNOWN)
        if len(bad) and unknown == "refuse":
            raise WaffleError(
                f"{table.path}: column {column.name!r} has {quoted(cells[int(bad[0])])} in line {table.lines[bad[0]]}, "
                f"which is not in the training data; the categories are {', '.join(column.categories)}"
            )
        block = found[:, None] == np.arange(len(column.categories))[None, :]
    return np.concatenate([block, missing], axis=1, dtype=np.float32) if column.missing else block.astype(np.float32)
