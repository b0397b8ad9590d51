"""A site's data: summaries for the survey before the first round, and the federation with this site as only agent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from waffle_fl.config import ALL_ALICES, Settings
from waffle_fl.data import NAMES
from waffle_fl.deploy.policy import Policy, Refused
from waffle_fl.deploy.site_arrays import FEWEST, array_summary, check_clip, check_scaling, impossible, scaling_of
from waffle_fl.experiment import federation_of
from waffle_fl.federation import Federation
from waffle_fl.user_data import CollectedData, Preprocessing, ReadOptions, gather
from waffle_fl.user_data.ambiguity import check_values
from waffle_fl.user_data.arrays import read_npz, with_scaling
from waffle_fl.user_data.cells import count_names, numbers
from waffle_fl.user_data.cleaning import filled
from waffle_fl.user_data.duplicates import settle
from waffle_fl.user_data.folder_reader import (
    agent_rows,
    check_columns,
    divided,
    goal_of,
    layout_of,
    parts_of,
    raw_tables_at,
    tables_at,
)
from waffle_fl.user_data.preprocessing import (
    CLIP,
    MOST_CATEGORIES,
    NONE_FOR_TABLES,
    Column,
    check_target,
    column_categories,
    column_moments,
    count_cells,
    fit_locally,
    kind_of,
    may_be_classes,
    target_names,
)
from waffle_fl.user_data.tables import HEART_CATEGORICAL, HEART_TARGET, UCI_HEART, Table

NO_DROP = (
    "duplicates = drop compares the rows of different agents, which do not leave their sites: remove them from the "
    "files, or set --duplicates keep"
)
LATER = (  # settings that a site's stored questions lack if an earlier version asked them
    *("drop", "missing", "decimal", "fold_case", "fill_absent", "duplicates", "max_expansion"),
)
MOST_NUMBERS = 10  # maximum different numbers of a target that counts as classes without being listed in `targets`


@dataclass(frozen=True)
class SiteData:
    """A site's data source: its own file or folder, or, for trials, its share of a named data set."""

    name: str
    source: str
    policy: Policy
    data_dir: str = ""

    @property
    def by_name(self) -> bool:
        return self.source in NAMES

    def answer_survey(self, s: Settings, agent: int, stage: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one stage of the survey: summaries, never a row."""
        self._check(s)
        if self.by_name:
            return {"kind": "data set", **_facts(self.federation(s, agent, known))}
        layout = layout_of(Path(self.source))
        if layout == "arrays":
            return self._answer_about_arrays(s, agent, stage)
        if layout != "tables":
            raise Refused("this site's data is neither a table nor a .npz file")
        options = _reading(s)
        if options.preprocessing == "none":
            raise Refused(NONE_FOR_TABLES)
        tables = tables_at(Path(self.source), options)
        stages: dict[str, Callable[[Rules, Sequence[Table], ReadOptions, Mapping[str, Any]], dict[str, Any]]] = {
            "hello": _target_summary,
            "counts": _counts_summary,
            "columns": _columns_summary,
        }
        if stage not in stages:
            raise Refused(f"this site has a table, which has no stage {stage!r}")
        answer = stages[stage](Rules.of(self.policy, tables), tables, options, known)
        return answer | ({"dropped": self._dropped(options)} if stage == "hello" and options.drop else {})

    def _answer_about_arrays(self, s: Settings, agent: int, stage: str) -> dict[str, Any]:
        """Return counts, shape and classes, or in the second stage the moments that the preprocessing needs."""
        (found,) = self._gathered(s, ())
        if stage == "hello":
            return {"kind": "arrays", **_facts(Federation.from_gathered(found, 0))}
        if stage != "moments":
            raise Refused(f"this site has arrays, which have no stage {stage!r}")
        return array_summary(found.agents[self.name], found.task == "regression", s.preprocessing)

    def _dropped(self, options: ReadOptions) -> list[str]:
        """Return which of the columns to drop this site has."""
        return [name for name in options.drop if name in raw_tables_at(Path(self.source), options)[0].columns]

    def check_names(self, s: Settings) -> None:
        """Refuse columns that this site does not have, before any budget is charged."""
        if self.by_name or layout_of(Path(self.source)) != "tables":
            return
        columns = raw_tables_at(Path(self.source), _reading(s))[0].columns
        for name in (s.target, *(() if s.fill_absent else s.categorical)):
            if name and name not in columns:
                raise Refused(f"this site has no column {name!r}")

    def questions(self, s: Settings, stage: str = "", known: Any = None) -> dict[str, str]:
        """Return a hash of each question that a request asks about the data, by kind.

        Empty for a named data set, which is public.
        """
        if self.by_name:
            return {}
        chosen, usual = asdict(_reading(s)), asdict(ReadOptions())
        reading = {k: v for k, v in chosen.items() if k not in LATER or v != usual[k]}
        return {"reading": _hash(reading)} | ({stage: _hash([reading, known])} if stage else {})

    def digest(self, s: Settings, agent: int, key: bytes) -> str:
        """Return a keyed hash of the data."""
        if self.by_name:
            content = self.federation(s, agent, {}).digest().encode()
        elif layout_of(Path(self.source)) == "arrays":
            content = Path(self.source).read_bytes()
        else:
            tables = tables_at(Path(self.source), _reading(s))
            content = b"\n".join(row for table in tables for row in table.row_keys())
        return hashlib.blake2b(content, key=key, digest_size=16).hexdigest()

    def federation(self, s: Settings, agent: int, known: Mapping[str, Any]) -> Federation:
        """Return the federation as seen by this site: itself as the only agent."""
        self._check(s)
        if self.by_name:
            alice = "0" if s.alice == ALL_ALICES else s.alice
            return federation_of(replace(s, alice=alice), self.data_dir).only(agent)
        if layout_of(Path(self.source)) == "arrays":
            return self._from_arrays(s, agent, known)
        return self._from_tables(s, agent, Preprocessing.from_json(known["prepared"]))

    def _check(self, s: Settings) -> None:
        if s.test == "none":
            raise Refused("a site scores models on its test data: set test to share")
        if s.duplicates == "drop":
            raise Refused(NO_DROP)
        if self.by_name != (not s.is_own) or (self.by_name and self.source != s.data):
            raise Refused(f"this site has {self.source if self.by_name else 'its own data'}, not {s.data}")

    def _gathered(self, s: Settings, *classes: tuple[str, ...]) -> list[CollectedData]:
        """Return this site's arrays as they are in its file, once for each of these lists of classes."""
        arrays = [(self.name, read_npz(Path(self.source), s.max_expansion))]
        return [gather(arrays, replace(_reading(s), preprocessing="none"), names) for names in classes]

    def _from_arrays(self, s: Settings, agent: int, known: Mapping[str, Any]) -> Federation:
        found, own = self._gathered(s, tuple(map(str, known["classes"])), ())
        if found.task != own.task or len(found.class_names) > max(2 * len(own.class_names), MOST_CATEGORIES):
            raise Refused("the server's classes do not match those of this site's arrays")
        common = scaling_of(known, s.preprocessing)
        if common:
            check_scaling(common, found.agents[self.name], found.task == "regression", self.policy.max_rows)
            found = with_scaling(found, common)
        return replace(Federation.from_gathered(found, 0), ids=(agent,))

    def _from_tables(self, s: Settings, agent: int, common: Preprocessing) -> Federation:
        options = _reading(s)
        tables = tables_at(Path(self.source), options)
        rules = Rules.of(self.policy, tables)
        _check_aim(common, _goal(rules, tables, options), options)
        rows = divided(tables, common, options)
        tables = _with_absent(tables, [column.name for column in common.columns], options)
        _check_prepared(common, rules, tables, tables[0].select(rows.train), options)
        settle({self.name: agent_rows(tables, rows)}, len(tables) == 2, options.duplicates)
        fitted = fit_locally(common, tables[0].select(rows.train))
        made = CollectedData({self.name: parts_of(tables, fitted, rows)}, common.task, common.classes, (fitted,))
        return replace(Federation.from_gathered(made, 0), ids=(agent,))


def _with_absent(tables: Sequence[Table], names: Sequence[str], options: ReadOptions) -> list[Table]:
    """Return the tables with the columns of other sites, if the run fills them."""
    return [filled(table, names) if options.fill_absent else table for table in tables]


def _reading(s: Settings) -> ReadOptions:
    return ReadOptions(**{f.name: getattr(s, f.name) for f in fields(ReadOptions)})


def _hash(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Rules:
    """The site's rules for its columns; the settings of a run do not change them."""

    targets: tuple[str, ...]
    categorical: tuple[str, ...]
    min_count: int
    max_rows: int

    @classmethod
    def of(cls, policy: Policy, tables: Sequence[Table]) -> Rules:
        """Return the rules; those of UCI Heart Disease are built in, and its files are recognised by name."""
        heart = all(UCI_HEART.fullmatch(table.path.name) for table in tables)
        targets, categorical = ((HEART_TARGET,), HEART_CATEGORICAL) if heart else ((), ())
        counts = policy.min_count, policy.max_rows
        return cls((*policy.targets, *targets), (*policy.categorical, *categorical), *counts)

    def check_categorical(self, name: str, table: Table) -> None:
        """Refuse to share the values of a numeric column, unless this site lists it under categorical."""
        if table.columns[name].missing.all():
            return
        if name not in self.categorical and kind_of([count_cells(table.columns[name])], named=False) == "numeric":
            raise Refused(
                f"column {name!r} holds numbers, and their values do not leave this site: to allow it, list the column "
                "under categorical in its site.toml"
            )

    def check_classes(self, target: str, tables: Sequence[Table]) -> None:
        """Refuse to share classes with few rows, unless this site lists the target."""
        if target in self.targets:
            return
        counts: dict[str, int] = {}
        for table in tables:
            for name, count in count_names(table.columns[target]).items():
                counts[name] = counts.get(name, 0) + count
        if len(counts) > MOST_NUMBERS and np.isfinite(numbers(sorted(counts))).all():
            raise Refused(
                f"column {target!r} has more than {MOST_NUMBERS} different numbers, which do not leave this site"
            )
        if min(counts.values(), default=self.min_count) < self.min_count:
            raise Refused(
                f"a class of column {target!r} has fewer than {self.min_count} rows here: to allow it, list the column "
                "under targets in this site's site.toml"
            )


def _check_prepared(
    common: Preprocessing, rules: Rules, tables: Sequence[Table], train: Table, options: ReadOptions
) -> None:
    """Refuse a common preprocessing that cannot follow from summaries that include this site's."""
    columns = [*(column.name for column in common.columns), common.target]
    if common.scope != options.preprocessing or sorted(columns) != sorted(tables[0].columns):
        raise Refused("the server's preprocessing does not match this site's columns and this run's target")
    check_clip(common.clip, CLIP)
    for column in common.columns:
        if column.kind == "categorical":
            _check_texts(column.name, column.categories)
            rules.check_categorical(column.name, train)
            lacking = set(column_categories(train, column.name, options.min_category)).difference(column.categories)
            if lacking:
                raise Refused(f"the server's preprocessing of {column.name!r} lacks categories that this site reported")
        elif common.scope == "federated":
            _check_moments(column, train, rules.max_rows)


def _check_moments(column: Column, train: Table, most: int) -> None:
    """Refuse a common mean and deviation of a column that are impossible for rows that include this site's."""
    here = column_moments(train, column.name)
    if not here.n:
        return
    if not here.n <= column.rows <= most or not np.isfinite([column.mean, column.deviation]).all():
        raise Refused(
            f"the server's preprocessing of {column.name!r} covers {column.rows} rows; this site has {here.n} and "
            f"allows {most} in total (max_rows)"
        )
    if impossible(here, column.mean, column.deviation, column.rows).any():
        raise Refused(
            f"the server's mean and deviation of {column.name!r} cannot be those of rows that include this site's"
        )


def _check_texts(name: str, texts: Sequence[str], cells: int = 0) -> None:
    """Refuse to share identifiers: columns with very many different texts, or a different text in every cell."""
    if len(texts) > MOST_CATEGORIES:
        raise Refused(f"column {name!r} has more than {MOST_CATEGORIES} different texts, which do not leave this site")
    if FEWEST < len(texts) == cells:
        raise Refused(f"column {name!r} has a different text in every row, which do not leave this site")


def _facts(f: Federation) -> dict[str, Any]:
    """Summary of one agent's samples: counts, shape, classes, task."""
    return {
        "samples": len(f.train[0]),
        "test": len(f.test[0]),
        "validation": len(f.validation[0]),
        "shape": list(f.shape),
        "classes": list(f.class_names),
        "task": f.task,
    }


class Goal(NamedTuple):
    """The target of a run, as derived from this site's own rows and rules."""

    target: str
    categorical: tuple[str, ...]
    values: list[str]
    as_classes: bool  # whether this site's values may be shared as classes


def _goal(rules: Rules, tables: Sequence[Table], options: ReadOptions) -> Goal:
    """Return the goal of a run, or refuse it. Every request is checked against it."""
    target, categorical = goal_of(tables, options)
    check_columns(tables, target, () if options.fill_absent else categorical)
    if rules.targets and target not in rules.targets:
        raise Refused(f"this site lets runs predict {', '.join(rules.targets)}, not {target!r}")
    values = sorted({name for table in tables for name in target_names(table, target)})
    if may_be_classes(values, options.task) and target not in categorical:
        check_values("the target", target, values)
    check_target(target, tables, options.task)
    as_classes = may_be_classes(values, options.task)
    if as_classes:
        _check_texts(target, values, sum(map(len, tables)))
        rules.check_classes(target, tables)
    return Goal(target, categorical, values, as_classes)


def _check_aim(aim: Preprocessing, goal: Goal, options: ReadOptions) -> None:
    """Reject a target, task or set of classes that cannot follow from what this site reported."""
    if aim.rules != options.rules:
        raise Refused("the server's preprocessing reads cells by other rules than this run's settings")
    if aim.target != goal.target:
        raise Refused("the server requests a target other than this run's")
    if aim.task == "regression":
        if aim.classes:
            raise Refused("the server sent classes for a numeric target")
    elif not goal.as_classes:
        raise Refused(f"column {goal.target!r} holds numbers here, which cannot be classes")
    elif len(aim.classes) > MOST_CATEGORIES or not set(goal.values) <= set(aim.classes):
        raise Refused("the server's classes are not those reported by the sites")


def _target_summary(
    rules: Rules, tables: Sequence[Table], options: ReadOptions, known: Mapping[str, Any]
) -> dict[str, Any]:
    goal = _goal(rules, tables, options)
    return {
        "kind": "tables",
        "columns": list(tables[0].columns),
        "target": goal.target,
        "categorical": list(goal.categorical),
        "values": goal.values if goal.as_classes else None,
        "numeric": bool(np.isfinite(numbers(goal.values)).all()),
    }


def _training(
    rules: Rules, tables: Sequence[Table], options: ReadOptions, known: Mapping[str, Any]
) -> tuple[Table, dict[str, int]]:
    aim = Preprocessing.from_json(known["aim"])
    _check_aim(aim, _goal(rules, tables, options), options)
    rows = divided(tables, aim, options)
    if 0 < len(rows.train) < FEWEST:
        raise Refused(f"this site has fewer than {FEWEST} training rows, too few to summarise")
    counts = {"samples": len(rows.train), "test": len(rows.test), "validation": len(rows.validation)}
    return tables[0].select(rows.train), counts


def _counts_summary(
    rules: Rules, tables: Sequence[Table], options: ReadOptions, known: Mapping[str, Any]
) -> dict[str, Any]:
    table, samples = _training(rules, tables, options, known)
    return {**samples, "counts": {name: list(count_cells(cells)) for name, cells in table.columns.items()}}


def _columns_summary(
    rules: Rules, tables: Sequence[Table], options: ReadOptions, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Moments and categories of the training rows; with local preprocessing only the target's moments leave."""
    if options.min_category < rules.min_count:
        raise Refused(
            f"a category with fewer than {rules.min_count} rows does not leave this site: "
            f"run with --min-category {rules.min_count}"
        )
    kinds: Mapping[str, str] = known["kinds"]
    table, _ = _training(rules, tables, options, known)
    (table,) = _with_absent([table], list(kinds), options)
    numeric = [name for name, kind in kinds.items() if kind == "numeric"]
    local = options.preprocessing == "local"
    shared = [name for name in numeric if not local or name == known["aim"]["target"]]
    categorical = [name for name, kind in kinds.items() if kind == "categorical"]
    for name in categorical:
        rules.check_categorical(name, table)
        _check_texts(name, column_categories(table, name), int((~table.columns[name].missing).sum()))
    categories = {name: column_categories(table, name, options.min_category) for name in categorical}
    return {"moments": {name: list(column_moments(table, name)) for name in shared}, "categories": categories}
