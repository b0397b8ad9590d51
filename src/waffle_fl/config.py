"""What a user may set, where it is checked, and how an experiment file is read. Every mistake is told at once."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from waffle_fl import attacks
from waffle_fl.algorithms import ALGORITHMS, SGD, Algorithm, defences, hyperparameters
from waffle_fl.algorithms.schedules import ADAPTIVE, parse
from waffle_fl.data import NAMES
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.shifts import read_shifts

SCHEMA = 1
GRID = ("methods", "splits", "shifts", "seeds")
EVERYONE = "all"  # each agent is Alice once; each method takes part


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that defines a run besides its method's own hyperparameters."""

    data: str = "digits"
    """Data set: digits, mnist, fashion-mnist, cifar10 or synthetic; or a folder of your own, one file an agent."""
    target: str = ""
    """The column to predict, in tables of your own."""
    categorical: tuple[str, ...] = ()
    """Columns of numbers that name categories; columns of text always do."""
    preprocessing: Literal["federated", "local"] = "federated"
    """Standardise columns of your tables by the mean and deviation of all agents, or each agent by its own."""
    test_share: float = 0.25
    """Share of each agent's rows to test on, where your files do not say which."""
    task: Literal["auto", "classification", "regression"] = "auto"
    """Predict classes or a number; auto goes by the target of your data."""
    split: str = "C"
    """How labels are spread over agents: A, B, C as in the paper; a star (A*, B*) shifts concepts too."""
    shift: str = ""
    """How agents differ besides, such as rotate(45), dirichlet(0.1) or noise(0.3) + swap(4): docs/shifts.md."""
    shares: tuple[tuple[float, ...], ...] = ()
    """A share matrix of your own (agent x label) in place of the split's."""
    sizes: tuple[float, ...] = ()
    """Relative numbers of samples of the agents, the list repeated as often as needed; empty is equal."""
    direction: Literal["left", "right"] = "left"
    """Which way the split's list is rolled from agent to agent."""
    agents: int = 10
    """Number of agents."""
    alice: str = "0"
    """The agent the model is for: her number or her name; `all` trains a model for each agent in turn."""
    leave_out: tuple[str, ...] = ()
    """Agents, by name or number, that do not take part: what would the model be without them?"""
    samples_per_agent: int = 0
    """Training samples an agent; 0 takes all there are."""
    validation: float = 0.0
    """Fraction held out to select a round: beside samples_per_agent where there are more samples, else out of them."""
    test: Literal["share", "all"] = "share"
    """Alice's test data: her share of it, or every test sample her distribution allows."""
    split_seed: int = 0
    """Seed of the split; it does not change with the seed of the run."""
    permutation_seed: int = 0
    """Seed of the label permutations of A* and B*."""
    shared_permutation: bool = False
    """Give all agents but Alice one and the same permutation."""
    model: str = "auto"
    """Network: lenet5, lenet5-tanh, dla, cnn, cnn-1d, mlp, linear, module:factory, or auto: what suits the data."""
    rounds: int = 100
    """Communication rounds R."""
    epochs: int = 1
    """Passes over its data that an agent makes in a round."""
    batch_size: int = 32
    """Samples in a mini-batch."""
    lr: float = 0.1
    """Local step size."""
    momentum: float = 0.0
    """Momentum of the local steps, fresh each round."""
    weight_decay: float = 0.0
    """Weight decay of the local steps."""
    seed: int = 1
    """Seed of the initial model and of the order of the samples."""
    augment: bool = False
    """Shift each training image by up to 4 pixels and reflect half of them, anew in every step."""
    guard: Literal["off", "standard"] = "off"
    """Server-side tests of each update besides finiteness."""
    attack: str = attacks.NONE
    """What malicious agents do, such as sign-flip, alie(1.5) or backdoor; docs/robustness.md lists all."""
    attackers: int = 1
    """How many agents are malicious where there is an attack: the last ones, never Alice."""
    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    """Arithmetic of training; tf32 and bf16 speed up a GPU. Distances, weights and aggregation are always float64."""

    @property
    def is_own(self) -> bool:
        """Is the data a folder of the user's own, and no data set by name?"""
        return self.data not in NAMES

    @property
    def data_name(self) -> str:
        return Path(self.data).resolve().name if self.is_own else self.data

    @property
    def column(self) -> str:
        """Split and shift: what a table of results tells apart."""
        return f"{self.split} {self.shift}" if self.shift else self.split


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A grid of runs: methods x splits x shifts x seeds, the settings they share, and each method's hyperparameters."""

    methods: tuple[str, ...]
    splits: tuple[str, ...] = ("C",)
    shifts: tuple[str, ...] = ()  # none: that of the settings
    seeds: tuple[int, ...] = (1,)
    settings: Settings = field(default_factory=Settings)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str = "experiment"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, whole: method, settings, and the method's hyperparameters as far as they were given."""

    method: str
    settings: Settings
    options: Mapping[str, Any] = field(default_factory=dict)

    def algorithm(self) -> Algorithm:
        s = self.settings
        return ALGORITHMS[self.method](sgd=SGD(s.lr, s.momentum, s.weight_decay), **self.options)  # type: ignore[call-arg]

    @property
    def label(self) -> str:
        s = self.settings
        split = f"shares{'*' * s.split.endswith('*')}" if s.shares else s.split
        shift = f"-{re.sub(r'[^A-Za-z0-9.]+', '-', s.shift).strip('-')}" if s.shift else ""
        where = s.data_name if s.is_own else f"{s.data}-{split.replace('*', '-star')}{shift}"
        alice = "" if s.alice == "0" else f"-{s.alice}"
        without = "".join(f"-without-{name}" for name in s.leave_out)
        attack = f"-{plain(s.attack).strip('-')}-{s.attackers}" if s.attack != attacks.NONE else ""
        return plain(f"{where}-{self.method}-{s.seed}{alice}{without}{attack}")

    def to_json(self) -> dict[str, Any]:
        given = dataclasses.asdict(self.algorithm())  # type: ignore[call-overload]
        options = {key: given[key] for key in hyperparameters(ALGORITHMS[self.method])}
        return {
            "schema": SCHEMA,
            "method": self.method,
            "settings": dataclasses.asdict(self.settings),
            "options": options,
        }

    @classmethod
    def from_json(cls, content: Any) -> RunConfig:
        """Read back a run folder's config, with the same checks as a user's."""
        if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
            raise WaffleError("expected a run's config with `schema`, `method` and `settings`")
        check_schema(content.get("schema"))
        values = _tuples(content["settings"])
        options = content.get("options") or {}
        return check_run(str(content.get("method")), values, options if isinstance(options, dict) else {})


def plain(text: str) -> str:
    """The text as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


def completed(content: Any) -> Any:
    """A run's config as an earlier version wrote it, with the settings that came later at their defaults."""
    method = content.get("method") if isinstance(content, dict) else None
    if method not in ALGORITHMS:
        return content
    defaults = RunConfig(method=method, settings=Settings()).to_json()
    later = {
        part: {**defaults[part], **content[part]}
        for part in ("settings", "options")
        if isinstance(content.get(part), dict)
    }
    return {**content, **later}


def option_types(method: str) -> dict[str, Any]:
    """The hyperparameters of a method and their types; a schedule is written as text."""
    hints = typing.get_type_hints(ALGORITHMS[method])
    names = hyperparameters(ALGORITHMS[method])
    return {name: str if _is_schedule(hints[name]) else hints[name] for name in names}


def _is_schedule(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and str in typing.get_args(hint)


def check_run(method: str, settings: Mapping[str, Any], options: Mapping[str, Any]) -> RunConfig:
    """A run from plain values, or one line with everything that is wrong with them."""
    if method not in ALGORITHMS:
        raise WaffleError(f"unknown method {method!r}{suggest(method, ALGORITHMS)}")
    hints = typing.get_type_hints(Settings)
    problems = _problems(settings, hints) + _problems(options, option_types(method))
    if problems:
        raise WaffleError("; ".join(problems))
    return RunConfig(method=method, settings=Settings(**_floats(settings, hints)), options=dict(options))


def check_name(name: str) -> str:
    """A run's folder name: plain characters only, so that it is a name and nothing else."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise WaffleError(f"expected a run name of letters, digits, '.', '_' and '-', got {name!r}")
    return name


def check_schema(found: Any) -> None:
    if found != SCHEMA:
        raise WaffleError(f"this waffle reads files of schema {SCHEMA}, this one has {found!r}: update waffle-fl")


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file: settings at the top, one table a method; an option may be a table keyed by split.

    methods = ["all"] are all there are, also those that come later.
    """
    first, *more = load_experiments(path)
    if more:
        raise WaffleError(f"{path}: expected one experiment, it has variants")
    return first


def load_experiments(path: Path) -> list[Experiment]:
    """The experiment of a file, or one for each of its [variants.NAME], which change what stands above them.

    A table [vary] of lists, at the top or in a variant, makes one of every combination of their values.
    """
    text, content = read_toml(path)
    content.pop("claims", None)
    if "variants" not in content:
        return [_experiment(path, name, varied, text) for name, varied in _varied(path, path.stem, content)]
    variants = content.pop("variants")
    if not isinstance(variants, dict) or not variants or not all(isinstance(v, dict) for v in variants.values()):
        raise WaffleError(f"{path}: expected tables [variants.NAME], got {_shown(variants)}")
    return [
        _experiment(path, name, varied, text)
        for variant, changes in variants.items()
        for name, varied in _varied(path, f"{path.stem}/{check_name(variant)}", _changed(content, changes))
    ]


def _varied(path: Path, name: str, content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The content itself, or one for each combination of the values in its [vary]; `method.option` names an option."""
    lists = content.pop("vary", {})
    if not isinstance(lists, dict) or not all(isinstance(values, list) and values for values in lists.values()):
        raise WaffleError(f"{path}: expected lists of values in [vary], got {_shown(lists)}")
    for chosen in itertools.product(*lists.values()):
        changes: dict[str, Any] = {}
        for key, value in zip(lists, chosen, strict=True):
            method, _, option = key.rpartition(".")
            changes |= {method: {**changes.get(method, {}), option: value}} if method else {key: value}
        yield "/".join([name, *(plain(str(value)).strip("-") for value in chosen)]), _changed(content, changes)


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """A file's text and what it says."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise WaffleError(f"{path} is not valid TOML: {error}") from None


def _changed(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A variant: its values in place of the file's, its tables laid over the file's."""
    laid = {
        k: {**content[k], **v} for k, v in changes.items() if isinstance(v, dict) and isinstance(content.get(k), dict)
    }
    return {**content, **changes, **laid}


def _experiment(path: Path, name: str, content: dict[str, Any], text: str) -> Experiment:
    check_schema(content.pop("schema", SCHEMA))
    tables = {key: content.pop(key) for key in list(content) if isinstance(content[key], dict)}
    grid: dict[str, Any] = {key: content.pop(key) for key in GRID if key in content}
    if grid.get("methods") == [EVERYONE]:
        grid["methods"] = list(ALGORITHMS)
    problems = _grid_problems(grid)
    hints = typing.get_type_hints(Settings)
    known = [*hints, *GRID, "schema", "variants", "vary", "claims", *ALGORITHMS]
    problems += [
        f"{key}{_line(text, key)}: a grid takes {key}s = [...]" for key in ("split", "shift", "seed") if key in content
    ]
    values = _tuples(content)
    problems += _problems(values, hints, known, text)
    methods, splits = _texts(grid.get("methods")), _texts(grid.get("splits", ["C"]))
    for method, table in tables.items():
        if method in ALGORITHMS and method not in methods:
            problems.append(f"[{method}]{_line(text, method)}: this method is not among the experiment's methods")
        if method not in ALGORITHMS:
            problems.append(f"unknown key {method!r}{_line(text, method)}{suggest(method, known)}")
        else:
            problems += _option_problems(method, table, splits, _from_table(text, method))
    if problems:
        raise WaffleError(f"{path}: " + "; ".join(problems))
    return Experiment(
        name=name,
        settings=Settings(**_floats(values, hints)),
        options=tables,
        **{key: tuple(value) for key, value in grid.items()},
    )


def _texts(value: Any) -> list[str]:
    """The names in a list; what is none has been complained of already."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _grid_problems(grid: Mapping[str, Any]) -> list[str]:
    problems = []
    if not grid.get("methods"):
        problems.append(f"expected methods = [...], from {', '.join(ALGORITHMS)}")
    for key, kind in (("methods", str), ("splits", str), ("shifts", str), ("seeds", int)):
        value = grid.get(key, [])
        if not isinstance(value, list) or not all(type(v) is kind for v in value) or (key in grid and not value):
            problems.append(f"{key}: expected a list of {kind.__name__}, got {_shown(value)}")
        elif len(set(value)) < len(value):
            problems.append(f"{key}: {value!r} names one twice")
        elif key == "methods":
            problems += [f"unknown method {m!r}{suggest(m, ALGORITHMS)}" for m in value if m not in ALGORITHMS]
        elif key == "shifts":
            problems += [problem for text in value for problem in _unreadable(read_shifts, text)]
        elif key == "seeds":
            problems += [f"seeds: expected integers >= 0, got {v}" for v in value if v < 0]
    return problems


def _option_problems(method: str, table: Mapping[str, Any], splits: Iterable[str], text: str) -> list[str]:
    """An option is a value, or a table with one value a split."""
    kinds, problems = option_types(method), []
    for name, value in table.items():
        if isinstance(value, dict):
            strangers = [key for key in value if key not in splits]
            problems += [f"{method}.{name}: no split {key!r} in this experiment" for key in strangers]
            problems += [f"{method}.{name}: no value for split {split}" for split in splits if split not in value]
            for inner in value.values():
                problems += _problems({name: inner}, kinds, kinds, text)
        else:
            problems += _problems({name: value}, kinds, kinds, text)
    return problems


def _problems(
    values: Mapping[str, Any], kinds: Mapping[str, Any], known: Iterable[str] | None = None, text: str = ""
) -> list[str]:
    problems = []
    for name, value in values.items():
        if name not in kinds:
            problems.append(f"unknown key {name!r}{_line(text, name)}{suggest(name, known or kinds)}")
        elif not _fits(value, kinds[name]):
            problems.append(f"{name}{_line(text, name)}: expected {_described(kinds[name])}, got {_shown(value)}")
        else:
            rule = RULES.get(name)
            if rule and not rule[1](value):
                problems.append(f"{name}{_line(text, name)}: expected {rule[0]}, got {_shown(value)}")
            elif name in TEXTS:
                problems += _unreadable(TEXTS[name], value)
    return problems


def _unreadable(read: Callable[[str], Any], text: str) -> list[str]:
    try:
        read(text)
    except WaffleError as error:
        return [str(error)]
    return []


def _read_degree(text: str) -> None:
    if text != ADAPTIVE:
        parse(text)


TEXTS: dict[str, Callable[[str], Any]] = {
    "omega": _read_degree,
    "psi": _read_degree,
    "shift": read_shifts,
    "attack": attacks.parse,
    "aggregation": defences.parse,
}


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, arguments[0]) for v in value)
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is hint


def _described(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    simple = {float: "a finite number", int: "an integer", str: "text", bool: "true or false"}
    lists = {tuple[float, ...]: "a list of numbers", tuple[str, ...]: "a list of texts"}
    return simple.get(hint) or lists.get(hint, "a matrix of numbers")


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except (RecursionError, ValueError):
        return "something too deep to print"


def _line(text: str, key: str) -> str:
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(rf"\s*\[?\s*[\"']?{re.escape(key)}\b", line):
            return f" (line {number})"
    return ""


def _from_table(text: str, method: str) -> str:
    """The text from a method's table on, its line numbers kept."""
    start = re.search(rf"^\s*\[\s*[\"']?{re.escape(method)}[\"']?\s*\]", text, re.MULTILINE)
    at = start.start() if start else 0
    return "\n" * text[:at].count("\n") + text[at:]


def _tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    def frozen(value: Any) -> Any:
        return tuple(frozen(v) for v in value) if isinstance(value, list | tuple) else value

    given = {key: frozen(value) for key, value in content.items()}
    return {**given, "alice": str(given["alice"])} if type(given.get("alice")) is int else given


def _floats(values: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    return {key: float(value) if hints[key] is float else value for key, value in values.items()}


def at_least(bound: int) -> tuple[str, Any]:
    return f"at least {bound}", lambda value: value >= bound


POSITIVE = "a number above 0", lambda value: value > 0
NOT_NEGATIVE = at_least(0)
RULES: dict[str, tuple[str, Any]] = {
    "agents": at_least(1),
    "attackers": at_least(1),
    "sizes": ("numbers above 0", lambda value: all(size > 0 for size in value)),
    "samples_per_agent": NOT_NEGATIVE,
    "validation": ("a fraction from 0 to below 1", lambda value: 0 <= value < 1),
    "test_share": ("a fraction above 0 and below 1", lambda value: 0 < value < 1),
    "rounds": at_least(1),
    "epochs": at_least(1),
    "batch_size": at_least(1),
    "lr": POSITIVE,
    "momentum": ("a number from 0 to below 1", lambda value: 0 <= value < 1),
    "weight_decay": NOT_NEGATIVE,
    "seed": NOT_NEGATIVE,
    "split_seed": NOT_NEGATIVE,
    "permutation_seed": NOT_NEGATIVE,
    "clip": NOT_NEGATIVE,
    "eta_g": POSITIVE,
    "p_d": NOT_NEGATIVE,
    "p_s": NOT_NEGATIVE,
    "mix": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "lam": NOT_NEGATIVE,
    "mu": NOT_NEGATIVE,
    "tuning": at_least(1),
    "inner_lr": NOT_NEGATIVE,
    "inner_steps": at_least(1),
    "delta": POSITIVE,
    "eta": POSITIVE,
    "beta": POSITIVE,
    "head_layers": NOT_NEGATIVE,
    "yielding": NOT_NEGATIVE,
    "head_share": ("a fraction from 0 to below 1", lambda value: 0 <= value < 1),
    "alpha": POSITIVE,
    "sigma": POSITIVE,
    "clusters": at_least(1),
    "eps_mean": NOT_NEGATIVE,
    "eps_max": NOT_NEGATIVE,
    "models": at_least(1),
    "eta_p": NOT_NEGATIVE,
    "eta_w": NOT_NEGATIVE,
    "rehearsed": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "global_share": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "k": at_least(1),
    "scale": POSITIVE,
    "explore": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
}
