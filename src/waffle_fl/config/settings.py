"""What a user may set: one run, or a grid of runs, whole."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from waffle_fl import attacks
from waffle_fl.algorithms import SGD, Algorithm, algorithm_of, hyperparameters
from waffle_fl.batches import Remainder, batches_per_epoch
from waffle_fl.config.checking import floats, problems_of, tuples
from waffle_fl.constraints import (
    Parameter,
    at_least,
    check_fields,
    constraint_of,
    each_above,
    fraction,
    parameter,
    parameters_of,
    readable,
)
from waffle_fl.data import NAMES
from waffle_fl.errors import WaffleError
from waffle_fl.shifts import read_shifts

SCHEMA = 1
EARLIER = {"remainder": "keep"}  # how runs were made before these were settings, where that is not the default
ALL_ALICES = "all"  # each agent is Alice once; each method takes part


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that defines a run besides its method's own hyperparameters."""

    data: str = "digits"
    """Data set: digits, mnist, fashion-mnist, cifar10 or synthetic; or a folder of your own, one file an agent."""
    target: str = ""
    """The column to predict, in tables of your own."""
    categorical: tuple[str, ...] = ()
    """Columns of numbers that name categories; columns of text always do."""
    min_category: int = parameter(1, at_least(1))
    """Training rows of an agent that must have a category of your tables before the agent shares its name."""
    preprocessing: Literal["federated", "local"] = "federated"
    """Standardise columns of your tables by the mean and deviation of all agents, or each agent by its own."""
    test_share: float = parameter(0.25, fraction(positive=True))
    """Share of each agent's rows to test on, where your files do not say which."""
    task: Literal["auto", "classification", "regression"] = "auto"
    """Predict classes or a number; auto goes by the target of your data."""
    split: str = "C"
    """How labels are spread over agents: A, B, C as in the paper; a star (A*, B*) shifts concepts too."""
    shift: str = parameter("", readable(read_shifts, "a shift such as rotate(45)"))
    """How agents differ besides, such as rotate(45), dirichlet(0.1) or noise(0.3) + swap(4): docs/shifts.md."""
    shares: tuple[tuple[float, ...], ...] = ()
    """A share matrix of your own (agent x label) in place of the split's."""
    sizes: tuple[float, ...] = parameter((), each_above(0))
    """Relative numbers of samples of the agents, the list repeated as often as needed; empty is equal."""
    direction: Literal["left", "right"] = "left"
    """Which way the split's list is rolled from agent to agent."""
    agents: int = parameter(10, at_least(1))
    """Number of agents."""
    alice: str = "0"
    """The agent the model is for: her number or her name; `all` trains a model for each agent in turn."""
    leave_out: tuple[str, ...] = ()
    """Agents, by name or number, that do not take part: what would the model be without them?"""
    samples_per_agent: int = parameter(0, at_least(0))
    """Training samples an agent; 0 takes all there are."""
    validation: float = parameter(0.0, fraction())
    """Fraction held out to select a round: beside samples_per_agent where there are more samples, else out of them."""
    test: Literal["share", "all"] = "share"
    """Alice's test data: her share of it, or every test sample her distribution allows."""
    split_seed: int = parameter(0, at_least(0))
    """Seed of the split; it does not change with the seed of the run."""
    permutation_seed: int = parameter(0, at_least(0))
    """Seed of the label permutations of A* and B*."""
    shared_permutation: bool = False
    """Give all agents but Alice one and the same permutation."""
    model: str = "auto"
    """Network: lenet5, lenet5-tanh, dla, cnn, cnn-1d, mlp, linear, module:factory, or auto: what suits the data."""
    rounds: int = parameter(100, at_least(1))
    """Communication rounds R."""
    epochs: int = parameter(1, at_least(1))
    """Passes over its data that an agent makes in a round."""
    batch_size: int = parameter(32, at_least(1))
    """Samples in a mini-batch, at most."""
    remainder: Remainder = "spread"
    """Samples that fill no mini-batch: spread them over all batches, keep them as a small last batch, or drop them."""
    lr: float = parameter(0.1, constraint_of(SGD, "lr"))
    """Local step size."""
    momentum: float = parameter(0.0, constraint_of(SGD, "momentum"))
    """Momentum of the local steps."""
    momentum_between_rounds: Literal["reset", "keep"] = "reset"
    """Start each round's momentum at zero, or keep an agent's velocity as part of its state."""
    weight_decay: float = parameter(0.0, constraint_of(SGD, "weight_decay"))
    """Weight decay of the local steps."""
    seed: int = parameter(1, at_least(0))
    """Seed of the initial model and of the order of the samples."""
    augment: bool = False
    """Shift each training image by up to 4 pixels and reflect half of them, anew in every step."""
    guard: Literal["off", "standard"] = "off"
    """Server-side tests of each update besides finiteness."""
    attack: str = parameter(attacks.NONE, readable(attacks.parse, "an attack such as sign-flip"))
    """What malicious agents do, such as sign-flip, alie(1.5) or backdoor; docs/robustness.md lists all."""
    attackers: int = parameter(1, at_least(1))
    """How many agents are malicious where there is an attack: the last ones, never Alice."""
    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    """Arithmetic of training; tf32 and bf16 speed up a GPU. Distances, weights and aggregation are always float64."""

    def __post_init__(self) -> None:
        check_fields(self)

    def steps(self, samples: int) -> int:
        """Return K_i: the mini-batches of one round at an agent with this many samples."""
        return self.epochs * batches_per_epoch(samples, self.batch_size, self.remainder)

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
        sgd = SGD(s.lr, s.momentum, s.weight_decay, s.momentum_between_rounds)
        return algorithm_of(self.method)(sgd=sgd, **self.options)  # type: ignore[call-arg]

    @property
    def label(self) -> str:
        s = self.settings
        split = f"shares{'*' * s.split.endswith('*')}" if s.shares else s.split
        signed = re.sub(r"(?<=[(,=\s])-", "minus-", s.shift)
        shift = f"-{re.sub(r'[^A-Za-z0-9.]+', '-', signed).strip('-')}" if s.shift else ""
        where = s.data_name if s.is_own else f"{s.data}-{split.replace('*', '-star')}{shift}"
        alice = "" if s.alice == "0" else f"-{s.alice}"
        without = "".join(f"-without-{name}" for name in s.leave_out)
        attack = f"-{plain(s.attack).strip('-')}-{s.attackers}" if s.attack != attacks.NONE else ""
        return plain(f"{where}-{self.method}-{s.seed}{alice}{without}{attack}")

    def to_json(self) -> dict[str, Any]:
        given = dataclasses.asdict(self.algorithm())  # type: ignore[call-overload]
        options = {key: given[key] for key in hyperparameters(algorithm_of(self.method))}
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
        values = EARLIER | tuples(content["settings"])
        options = content.get("options") or {}
        return check_run(str(content.get("method")), values, options if isinstance(options, dict) else {})


def plain(text: str) -> str:
    """The text as part of a folder's name; letters beyond ASCII are lost to it, so that a digest tells two apart."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    if text.isascii():
        return name
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()  # a file's name need not be UTF-8
    return f"{name.strip('-')}-{digest[:8]}"


def completed(content: Any, method: str) -> Any:
    """A config of this method as an earlier version wrote it, with the settings that came later at their defaults.

    That of another method is left as it is: to read it could import the code that it names.
    """
    if not isinstance(content, dict) or content.get("method") != method:
        return content
    defaults = RunConfig(method=method, settings=Settings(**EARLIER)).to_json()  # type: ignore[arg-type]
    later = {
        part: {**defaults[part], **content[part]}
        for part in ("settings", "options")
        if isinstance(content.get(part), dict)
    }
    return {**content, **later}


def options_of(method: str) -> dict[str, Parameter]:
    """The hyperparameters of a method; in a config a schedule is a text."""
    kind = algorithm_of(method)
    found = {name: parameters_of(kind)[name] for name in hyperparameters(kind)}
    return {name: kind._replace(hint=str) if _is_schedule(kind.hint) else kind for name, kind in found.items()}


def option_types(method: str) -> dict[str, Any]:
    """The types of a method's hyperparameters."""
    return {name: kind.hint for name, kind in options_of(method).items()}


def _is_schedule(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and str in typing.get_args(hint)


def check_run(method: str, settings: Mapping[str, Any], options: Mapping[str, Any]) -> RunConfig:
    """A run from plain values, or one line with everything that is wrong with them."""
    known, own = parameters_of(Settings), options_of(method)
    problems = problems_of(settings, known) + problems_of(options, own)
    if problems:
        raise WaffleError("; ".join(problems))
    return RunConfig(method=method, settings=Settings(**floats(settings, known)), options=floats(options, own))


def check_name(name: str) -> str:
    """A run's folder name: plain characters only, so that it is a name and nothing else."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise WaffleError(f"expected a run name of letters, digits, '.', '_' and '-', got {name!r}")
    return name


def check_schema(found: Any) -> None:
    if found != SCHEMA:
        raise WaffleError(f"this waffle reads files of schema {SCHEMA}, this one has {found!r}: update waffle-fl")
