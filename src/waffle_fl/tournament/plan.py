"""Read a tournament file: which tasks, which methods, and how each method is tuned.

    schema = 1
    kind = "tournament"
    methods = ["all"]
    seeds = [1, 2, 3]
    partitions = [1, 2, 3]                    # seeds of the splits and of the label permutations in the tables
    tuning = { partitions = [101], seeds = [1], alices = 10 }   # only for choosing lr and one hyperparameter
    rounds = 50                               # settings of all runs, as in an experiment file
    [shared]                                  # an option that every method gets
    clip = 5.0
    [grid]                                    # one hyperparameter per method, and its values
    ditto = { lam = [0.1, 1.0, 10.0] }
    [variants.kin-latest]                     # another entry: a method with some options or settings fixed
    method = "waffle"
    averaging = 0.0
    [data.digits]                             # a data set: its values of lr, its columns, its own settings
    lr = [0.05, 0.1, 0.2]
    columns = [{ split = "A" }, { split = "A", shift = "rotate(45)" }]
    [data.people]                             # another folder per partition: people-1, people-2, ...
    data = "people-{partition}"

`base = "other.toml"` takes from a tournament file in the same folder what the file itself lacks, except claims.

A method without a hyperparameter of its own has `weight_decay` in the grid, so that every method has the same number of
trials. A variant takes part beside the methods; it has the grid of its method unless [grid] has its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from waffle_fl.algorithms import ALGORITHMS, title_of
from waffle_fl.config import ALL_ALICES, RunConfig, Settings, check_run, read_toml
from waffle_fl.config.checking import floats, problems_of, tuples
from waffle_fl.config.settings import check_schema, options_of, weighting_problems
from waffle_fl.constraints import parameters_of
from waffle_fl.errors import WaffleError, suggest

KIND = "tournament"
PARTITION = "{partition}"  # in the name of a folder of data
Measure: TypeAlias = Literal["accuracy", "auc", "error"]
TOP = ("schema", "kind", "methods", "seeds", "partitions", "tuning", "grid", "data")
MORE = ("shared", "claims", "variants")
OWN = ("lr", "columns", "measure", "alices", "without")  # keys of a data set that are not settings


class TuningTrial(NamedTuple):
    """One choice of lr and of one hyperparameter of a method, or of a setting such as weight_decay."""

    lr: float
    name: str
    value: Any


class Variant(NamedTuple):
    """A method with some options or settings fixed."""

    method: str
    fixed: Mapping[str, Any]


@dataclass(frozen=True)
class TaskSet:
    """A data set with its columns: kinds of heterogeneity under which every agent is Alice once."""

    name: str
    measure: Measure
    lr: tuple[float, ...]
    columns: tuple[Settings, ...]
    alices: int  # at most this many agents are Alice; 0 means all
    without: tuple[str, ...]  # entries that are not defined for this data set


@dataclass(frozen=True)
class Tournament:
    """The content of a tournament file."""

    name: str
    methods: tuple[str, ...]  # the entries: methods and variants
    variants: Mapping[str, Variant]
    seeds: tuple[int, ...]
    partitions: tuple[int, ...]
    tuning_partitions: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    tuning_alices: int
    shared: Mapping[str, Any]
    grid: Mapping[str, tuple[str, tuple[Any, ...]]]  # method -> (hyperparameter, its values)
    data: Mapping[str, TaskSet]

    def entries(self, data: str) -> list[str]:
        """Return the methods and variants that take part on a data set."""
        return [name for name in self.methods if name not in self.data[data].without]

    def trials(self, method: str, tasks: TaskSet) -> list[TuningTrial]:
        """Return the trials of a method on a data set; every method has the same number."""
        name, values = self.grid[method]
        return [TuningTrial(lr, name, value) for lr, value in product(tasks.lr, values)]

    def config(self, method: str, column: Settings, trial: TuningTrial, partition: int, seed: int) -> RunConfig:
        """Return the config of a run; the permutations of labels are drawn anew for each partition."""
        base, fixed = self.entry(method)
        data = column.data.replace(PARTITION, str(partition))
        s = replace(column, data=data, lr=trial.lr, split_seed=partition, seed=seed)
        if not s.is_own:
            s = replace(s, permutation_seed=partition)
        given = {**self.shared, **fixed, trial.name: trial.value}
        options = {key: value for key, value in given.items() if key in options_of(base)}
        settings = {key: value for key, value in given.items() if key not in options and key in parameters_of(Settings)}
        return RunConfig(method=base, settings=replace(s, **settings), options=options)

    def entry(self, name: str) -> Variant:
        """Return the method of an entry and what it fixes."""
        return self.variants.get(name, Variant(name, {}))

    def title(self, name: str) -> str:
        """Return the name of an entry in tables."""
        return name if name in self.variants else title_of(name)


def is_tournament(path: Path) -> bool:
    """Return whether a file is a tournament and not a grid of runs."""
    return read_toml(path)[1].get("kind") == KIND


def load_tournament(path: Path) -> Tournament:
    """Read a tournament file, or raise one error that lists its problems."""
    content = _content(path)
    check_schema(content.get("schema"))
    if content.get("kind") != KIND:
        raise WaffleError(f"{path}: expected kind = {KIND!r}, got {content.get('kind')!r}")
    missing = [key for key in TOP if key not in content]
    if missing:
        raise WaffleError(f"{path}: a tournament needs {', '.join(missing)}")
    _check_lists(path, content)
    variants = {name: _variant(path, name, table) for name, table in content.get("variants", {}).items()}
    named = ALGORITHMS if content["methods"] == [ALL_ALICES] else content["methods"]
    methods = (*named, *variants)
    unknown = next(
        (method for method in (*named, *(v.method for v in variants.values())) if method not in ALGORITHMS), None
    )
    if unknown:
        raise WaffleError(f"{path}: unknown method {unknown!r}{suggest(unknown, ALGORITHMS)}")
    general = {key: value for key, value in content.items() if key not in (*TOP, *MORE)}
    tuning, general_names = content["tuning"], parameters_of(Settings)
    found = Tournament(
        path.stem,
        methods,
        variants,
        tuple(content["seeds"]),
        tuple(content["partitions"]),
        tuple(tuning["partitions"]),
        tuple(tuning["seeds"]),
        int(tuning.get("alices", 0)),
        content.get("shared", {}),
        {name: _choices(path, name, variants.get(name, Variant(name, {})).method, content["grid"]) for name in methods},
        {name: _tasks(path, name, general, table) for name, table in content["data"].items()},
    )
    named_elsewhere = [*content["grid"], *(name for tasks in found.data.values() for name in tasks.without)]
    strange = next((name for name in named_elsewhere if name not in (*ALGORITHMS, *methods)), None)
    if strange:
        raise WaffleError(f"{path}: {strange!r} in [grid] or without is no method{suggest(strange, methods)}")
    if set(found.partitions) & set(found.tuning_partitions):
        raise WaffleError(f"{path}: expected tuning partitions that are not in the tables, got {found.partitions}")
    budgets = {len(values) for _, values in found.grid.values()}
    if len(budgets) > 1:
        raise WaffleError(f"{path}: expected as many values for every method in [grid], got {sorted(budgets)}")
    for name in methods:
        given, known = (
            {**found.shared, **found.entry(name).fixed},
            [*options_of(found.entry(name).method), *general_names],
        )
        odd = next((key for key in given if key not in known), None)
        if odd:
            raise WaffleError(f"{path}: {name}: unknown option {odd!r}{suggest(odd, known)}")
    for method in methods:  # every choice must be valid
        for tasks in found.data.values():
            for trial in found.trials(method, tasks):
                config = found.config(method, tasks.columns[0], trial, 0, 0)
                ignored = weighting_problems(config.settings.weighting, [config.method])
                if ignored:
                    raise WaffleError(f"{path}: {ignored[0]}")
                settings = {name: getattr(config.settings, name) for name in parameters_of(Settings)}
                check_run(config.method, settings, config.options)
    return found


def _content(path: Path) -> dict[str, Any]:
    """Return the content of a file, on top of what its base has apart from claims."""
    _, content = read_toml(path)
    base = content.pop("base", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise WaffleError(f"{path}: base: expected the name of a file in the same folder, got {base!r}")
    _, other = read_toml(path.parent / base)
    if other.get("kind") != KIND or "base" in other:
        raise WaffleError(f"{path}: base: expected a tournament file without a base, got {base!r}")
    inherited = {key: value for key, value in other.items() if key != "claims"}
    return {**inherited, **content}


def _check_lists(path: Path, content: Mapping[str, Any]) -> None:
    """Raise WaffleError unless methods, seeds, partitions and the tuning have the types that a tournament needs."""
    tuning = content["tuning"]
    if not isinstance(tuning, dict) or not {"partitions", "seeds"} <= set(tuning) <= {"partitions", "seeds", "alices"}:
        raise WaffleError(f"{path}: tuning: expected partitions, seeds and perhaps alices, got {tuning!r}")
    if type(tuning.get("alices", 0)) is not int or tuning.get("alices", 0) < 0:
        raise WaffleError(f"{path}: tuning: expected alices of at least 0, got {tuning['alices']!r}")
    for name in ("seeds", "partitions"):
        for values in (content[name], tuning[name]):
            if not isinstance(values, list) or not values or not all(type(v) is int and v >= 0 for v in values):
                raise WaffleError(f"{path}: {name}: expected a list of integers of at least 0, got {values!r}")
    for name in ("grid", "data"):
        if not isinstance(content[name], dict) or not all(isinstance(table, dict) for table in content[name].values()):
            raise WaffleError(f"{path}: expected tables in [{name}], got {content[name]!r}")
    if not isinstance(content["methods"], list) or not all(isinstance(name, str) for name in content["methods"]):
        raise WaffleError(f"{path}: methods: expected a list of names, got {content['methods']!r}")


def _variant(path: Path, name: str, table: Any) -> Variant:
    if not isinstance(table, dict) or not isinstance(table.get("method"), str) or name in ALGORITHMS:
        raise WaffleError(f"{path}: [variants.{name}] expected a new name and method = ..., got {table!r}")
    return Variant(table["method"], {key: value for key, value in table.items() if key != "method"})


def _choices(path: Path, name: str, method: str, grid: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return the hyperparameter of an entry, and its values."""
    table = grid.get(name, grid.get(method))
    if not isinstance(table, dict) or len(table) != 1:
        raise WaffleError(f"{path}: expected one hyperparameter with its values in [grid] for {name}, got {table!r}")
    ((hyper, values),) = table.items()
    known = [*options_of(method), *parameters_of(Settings)]
    if hyper not in known or not isinstance(values, list) or not values:
        raise WaffleError(f"{path}: [grid] {name}: expected a list of values of one of its options, got {table!r}")
    return hyper, tuple(values)


def _tasks(path: Path, name: str, general: Mapping[str, Any], table: Mapping[str, Any]) -> TaskSet:
    missing = [key for key in ("lr", "columns") if not table.get(key)]
    if missing:
        raise WaffleError(f"{path}: [data.{name}] needs {' and '.join(missing)}")
    measure = table.get("measure", "accuracy")
    if measure not in get_args(Measure):
        raise WaffleError(f"{path}: [data.{name}] measure: unknown {measure!r}{suggest(measure, get_args(Measure))}")
    own = {key: value for key, value in table.items() if key not in OWN}
    known = parameters_of(Settings)
    columns = []
    for column in table["columns"]:
        values = tuples({"data": name, **general, **own, **column})
        problems = problems_of(values, known)
        if problems:
            raise WaffleError(f"{path}: [data.{name}] {'; '.join(problems)}")
        settings = Settings(**floats(values, known))
        columns.append(replace(settings, alice=ALL_ALICES) if settings.is_own else settings)
    most, without = int(table.get("alices", 0)), tuple(table.get("without", ()))
    return TaskSet(name, measure, tuple(map(float, table["lr"])), tuple(columns), most, without)
