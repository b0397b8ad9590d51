"""What would be read from a folder of tables: agents, columns, classes, and all problems at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from waffle_fl.errors import WaffleError
from waffle_fl.user_data.agent_data import CollectedData, ReadOptions
from waffle_fl.user_data.cells import Cells, Table, count_names, numbers
from waffle_fl.user_data.cleaning import all_columns, check_drop, check_missing, cleaned
from waffle_fl.user_data.column_values import DECIMAL_ADVICE, numeric, refuse_disguised_numbers
from waffle_fl.user_data.folder_reader import (
    agents_in,
    column_problems,
    goal_of,
    passed_over,
    passed_over_note,
    read_folder,
    table_files,
)
from waffle_fl.user_data.preprocessing import (
    Kind,
    aim_of,
    categorical_column,
    count_cells,
    kind_of,
    may_be_classes,
    target_names,
)
from waffle_fl.user_data.suspicions import column_suspicions
from waffle_fl.user_data.tables import read_raw

Agents = dict[str, list[Table]]
T = TypeVar("T")


@dataclass(frozen=True)
class AgentReport:
    """One agent's files, its rows and, if the folder can be read, their split and classes."""

    name: str
    files: tuple[str, ...]
    rows: int
    classes: Mapping[str, int]  # rows per class; empty for regression
    train: int | None = None
    test: int | None = None


@dataclass(frozen=True)
class ColumnReport:
    """One column: how it is read, its values, and where they are missing."""

    name: str
    kind: str  # numeric, categorical, target or dropped
    counts: Mapping[str, int]  # rows per category or class
    low: float | None  # range and mean of a numeric column
    high: float | None
    mean: float | None
    cells: int
    missing: Mapping[str, int]  # missing cells by agent
    absent: tuple[str, ...]  # agents whose tables lack the column


@dataclass(frozen=True)
class FolderReport:
    """What would be read from a folder of tables."""

    folder: str
    target: str
    task: str  # empty if it cannot be decided
    agents: tuple[AgentReport, ...]
    columns: tuple[ColumnReport, ...]
    problems: tuple[str, ...]  # a run stops at the first of these
    notes: tuple[str, ...]  # a run prints these
    passed_over: tuple[str, ...]


def report_tables(folder: Path, options: ReadOptions) -> FolderReport:
    """Return what would be read from a folder of tables, with all its problems."""
    problems = Problems()
    raw = _read_all(folder, options, problems)
    tables = [table for own in raw.values() for table in own]
    target, categorical = goal_of(tables, options) if tables else (options.target, options.categorical)
    before = all_columns(tables)
    problems.catch(check_drop, before, target, options.rules)
    problems.catch(check_missing, before, options.rules)
    agents = {name: [_cleaned(table, options, problems) for table in own] for name, own in raw.items()}
    tables = [table for own in agents.values() for table in own]
    if tables:
        problems.lines += column_problems(tables, target, categorical, options.fill_absent)
    kinds = _kinds(tables, target, categorical, options)
    for name in kinds:
        having = [table for table in tables if name in table.columns]
        if name == target:
            _find_target_problems(name, having, name in categorical, options, problems)
        else:
            _find_problems(name, kinds[name], having, name in categorical, problems)
    if options.rules.decimal == ",":  # columns whose decimal signs are unclear have a line of their own
        problems.lines = [line for line in problems.lines if DECIMAL_ADVICE not in line]
    read = problems.catch(read_folder, folder, options) if not problems.lines else None
    if read and len(agents) > 1 and not any(len(agent.test) for agent in read.agents.values()):
        problems.lines.append(NO_TEST)
    suspicions = [
        line
        for name, kind in kinds.items()
        for line in column_suspicions(agents, name, kind, name in categorical, name == target)
    ]
    notes = read.notes if read else (*passed_over_note(folder), *suspicions)
    columns = [_column(name, kinds[name], agents, target) for name in kinds]
    columns += [_column(name, None, raw, target) for name in before if name in options.drop]
    task = {"numeric": "regression", "categorical": "classification"}.get(kinds.get(target, ""), "")
    return FolderReport(
        folder=str(folder),
        target=target,
        task=read.task if read else task,
        agents=tuple(_agent(name, own, target, task, read) for name, own in agents.items()),
        columns=tuple(columns),
        problems=tuple(problems.lines),
        notes=tuple(notes),
        passed_over=tuple(path.name for path in passed_over(folder)),
    )


NO_TEST = "no agent has test samples left, so that no result can be measured: hold some out, or keep them"


class Problems:
    """The messages of all errors, without duplicates."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def catch(self, call: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of a call, or None after an error, whose message is kept."""
        try:
            return call(*arguments)
        except WaffleError as error:
            if str(error) not in self.lines:
                self.lines.append(str(error))
            return None


def _read_all(folder: Path, options: ReadOptions, problems: Problems) -> Agents:
    found: Agents = {}
    for name, (_, path) in agents_in(folder).items():
        files = problems.catch(table_files, path)
        tables = [problems.catch(read_raw, file, options.max_expansion) for file in files or ()]
        readable = [table for table in tables if table is not None]
        if readable and len(readable) == len(tables):
            found[name] = readable
    return found


def _cleaned(table: Table, options: ReadOptions, problems: Problems) -> Table:
    """Return the table as the rules read it; with the file's decimal signs if they are unclear."""
    found = problems.catch(cleaned, table, options.rules)
    return found or cleaned(table, replace(options.rules, decimal="."))


def _kinds(tables: Sequence[Table], target: str, categorical: Sequence[str], options: ReadOptions) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for name in all_columns(tables):
        having = [table for table in tables if name in table.columns]
        kinds[name] = kind_of([count_cells(table.columns[name]) for table in having], name in categorical)
        if name == target:
            values = {value for table in having for value in count_names(table.columns[name])}
            kinds[name] = "categorical" if may_be_classes(values, options.task) else "numeric"
    return kinds


def _find_target_problems(
    target: str, tables: Sequence[Table], named: bool, options: ReadOptions, problems: Problems
) -> None:
    before = len(problems.lines)
    for table in tables:
        problems.catch(target_names, table, target)
    if len(problems.lines) == before:
        problems.catch(aim_of, target, tables, options.task, named)


def _find_problems(name: str, kind: Kind, tables: Sequence[Table], named: bool, problems: Problems) -> None:
    """Collect the problems of one column: at most one per table, or one of all tables together."""
    before = len(problems.lines)
    for table in tables:
        problems.catch(numeric if kind == "numeric" else refuse_disguised_numbers, table, name)
    if kind == "categorical" and len(problems.lines) == before:
        counts = [count_cells(table.columns[name]) for table in tables]
        problems.catch(categorical_column, name, counts, [count_names(t.columns[name]) for t in tables], named)


def _agent(name: str, own: Sequence[Table], target: str, task: str, read: CollectedData | None) -> AgentReport:
    classes: Counter[str] = Counter()
    if task == "classification":
        classes = sum((count_names(table.columns[target]) for table in own if target in table.columns), Counter())
    split = read.agents[name] if read else None
    return AgentReport(
        name,
        tuple(table.path.name for table in own),
        sum(map(len, own)),
        _ordered(classes),
        len(split.train) + len(split.validation) if split else None,
        len(split.test) if split else None,
    )


def _column(name: str, kind: Kind | None, agents: Mapping[str, Sequence[Table]], target: str) -> ColumnReport:
    columns = {n: [t.columns[name] for t in own if name in t.columns] for n, own in agents.items()}
    cells = list(_flat(columns))
    counts: Counter[str] = sum(map(count_names, cells), Counter()) if kind == "categorical" else Counter()
    values = np.concatenate([np.empty(0), *(numbers(c) for c in cells)] if kind == "numeric" else [np.empty(0)])
    values = values[np.isfinite(values)]
    low, high, mean = (float(f(values)) for f in (np.min, np.max, np.mean)) if len(values) else (None, None, None)
    return ColumnReport(
        name=name,
        kind="target" if name == target else kind or "dropped",
        counts=_ordered(counts),
        low=low,
        high=high,
        mean=mean,
        cells=sum(map(len, cells)),
        missing={n: sum(int(c.missing.sum()) for c in own) for n, own in columns.items() if own},
        absent=tuple(n for n, own in columns.items() if not own),
    )


def _ordered(counts: Counter[str]) -> dict[str, int]:
    """Return the counts in alphabetical order, in which Yes and yes are neighbours."""
    return dict(sorted(counts.items(), key=lambda item: (item[0].lower(), item[0])))


def _flat(columns: Mapping[str, Sequence[Cells]]) -> Iterator[Cells]:
    for own in columns.values():
        yield from own
