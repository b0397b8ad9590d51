"""The settings of a run, and of a grid of runs."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from waffle_fl import attacks
from waffle_fl.algorithms import ALGORITHMS, SGD, Adam, Algorithm, algorithm_of, hyperparameters
from waffle_fl.algorithms.contract import AS_METHOD, AsMethod, BetweenRounds
from waffle_fl.algorithms.hooks import ValidationDependent
from waffle_fl.batches import Remainder, steps_of
from waffle_fl.config.checking import floats, problems_of, tuples
from waffle_fl.constraints import (
    Parameter,
    above,
    at_least,
    between,
    check_fields,
    constraint_of,
    each_above,
    fraction,
    parameter,
    parameters_of,
    readable,
    share,
    unless,
)
from waffle_fl.data import NAMES
from waffle_fl.errors import WaffleError
from waffle_fl.shifts import read_shifts

SCHEMA = 1
EARLIER = {"remainder": "keep"}  # settings of runs made before the setting existed, if not the default
COMMON = (
    "clip",
    "averaging",
    "weighting",
)  # settings of all methods; a method's hyperparameter of the same name comes first
ALL_ALICES = "all"  # alice = "all": each agent is Alice once; methods = ["all"]: every method


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run except the hyperparameters of its method."""

    data: str = "digits"
    """Data set: digits, mnist, fashion-mnist, cifar10 or synthetic; or your own folder with one file per agent."""
    target: str = ""
    """Column to predict, for your own tables."""
    categorical: tuple[str, ...] = ()
    """Numeric columns to treat as categories. Text columns always are."""
    min_category: int = parameter(1, at_least(1))
    """An agent shares the name of a category only if at least this many of its training rows have it."""
    drop: tuple[str, ...] = ()
    """Columns of your own tables that are not used, such as an identifier."""
    missing: tuple[str, ...] = ()
    """Texts or numbers that mean missing, such as -9; COLUMN=-9 for one column. Empty cells and NA always do."""
    decimal: Literal[".", ","] = "."
    """Decimal sign of the numbers in your own tables. With a comma, 1,5 and 1.234,5 are read as 1.5 and 1234.5."""
    fold_case: bool = False
    """Ignore case in the cells of tables: Yes and yes are the same class, M and m the same category."""
    fill_absent: bool = False
    """Read a column that some agents' tables lack as missing there."""
    duplicates: Literal["error", "keep", "drop"] = "error"
    """Test samples that are also training data, and agents with the same training data: stop, keep or drop them."""
    max_expansion: float = parameter(10.0, at_least(1))
    """Most memory that a compressed file (.npz, .parquet, .xlsx, an image) takes, in multiples of its size or 32 MB."""
    preprocessing: Literal["federated", "local", "none"] = "federated"
    """Standardise inputs with the mean and deviation of all agents, or of each alone; none: use arrays as given."""
    test_share: float = parameter(0.25, fraction(positive=True))
    """Fraction of each agent's rows used for testing, unless your files mark the test rows."""
    task: Literal["auto", "classification", "regression"] = "auto"
    """Predict classes or a number. auto decides by the target column."""
    split: str = "C"
    """How labels are distributed over agents: A, B or C of the paper. A* and B* add concept shift."""
    shift: str = parameter("", readable(read_shifts, "a shift such as rotate(45)"))
    """Additional heterogeneity, such as rotate(45), dirichlet(0.1) or noise(0.3) + swap(4). See docs/shifts.md."""
    shares: tuple[tuple[float, ...], ...] = ()
    """Your own share matrix (agent x label), used instead of the split's."""
    sizes: tuple[float, ...] = parameter((), each_above(0))
    """Relative sample counts of the agents. A shorter list is repeated; an empty list means equal sizes."""
    direction: Literal["left", "right"] = "left"
    """Direction in which the split's list of shares is rotated from agent to agent."""
    agents: int = parameter(10, at_least(1))
    """Number of agents."""
    alice: str = "0"
    """Number or name of the agent the model is trained for. `all` trains one model per agent."""
    leave_out: tuple[str, ...] = ()
    """Names or numbers of agents to exclude from training."""
    newcomers: tuple[str, ...] = ()
    """Names or numbers of agents that take no part in training and join after the last round."""
    newcomer_rounds: int = parameter(1, at_least(1))
    """Rounds of local training of an agent that joins after training, while the server does not change."""
    samples_per_agent: int = parameter(0, at_least(0))
    """Training samples per agent. 0 means all."""
    division: Literal["disjoint", "drawn"] = "disjoint"
    """No sample belongs to two agents; or each draws samples_per_agent of all, with more agents than samples."""
    validation: float = parameter(0.0, fraction())
    """Fraction held out to select a round. Added to samples_per_agent if more samples exist, else taken from them."""
    scored: Literal["alice", "all"] = "alice"
    """Score Alice's model on her test data, or the model of every agent on its own: the mean over all test samples."""
    test: Literal["share", "all", "none"] = "share"
    """Alice's test data: her share of the test set, every test sample of her distribution, or none: validation data."""
    split_seed: int = parameter(0, at_least(0))
    """Seed of the split. Independent of the seed of the run."""
    permutation_seed: int = parameter(0, at_least(0))
    """Seed of the label permutations of A* and B*."""
    shared_permutation: bool = False
    """Use the same label permutation for all agents except Alice."""
    model: str = "auto"
    """Network: lenet5, lenet5-tanh, dla, cnn, cnn-pooled-gn, cnn-gn, cnn-1d, cnn-1d-gn, mlp, linear, module:factory, or
    auto."""
    rounds: int = parameter(100, at_least(1))
    """Number of communication rounds R."""
    epochs: int = parameter(1, at_least(1))
    """Local epochs per round."""
    steps_per_round: int = parameter(0, at_least(0))
    """Mini-batches per round at every agent, from epochs that follow one another. 0: as many as the epochs have."""
    batch_size: int = parameter(32, at_least(1))
    """Most samples per mini-batch."""
    remainder: Remainder = "spread"
    """Samples that fill no mini-batch: spread them over all batches, keep them as a small last batch, or drop them."""
    participation: float = parameter(1.0, share())
    """Share of the agents that take part in each round. At least two do; see docs/how-to/participation.md."""
    alice_takes_part: Literal["by-method", "always"] = "by-method"
    """With participation below 1: Alice takes part where the method's training depends on her, or always."""
    states: Literal["memory", "disk"] = "memory"
    """Where the states of the agents are kept. disk, with participation below 1: only a cohort is in memory."""
    lr: float = parameter(0.1, constraint_of(SGD, "lr"))
    """Local learning rate."""
    lr_decay: float = parameter(1.0, constraint_of(SGD, "lr_decay"))
    """Factor by which lr is multiplied after every round; 1 keeps it constant."""
    optimiser: Literal["sgd", "adam"] = "sgd"
    """Optimiser of the agents. adam uses the usual moments 0.9 and 0.999 and decoupled weight decay."""
    momentum: float = parameter(0.0, constraint_of(SGD, "momentum"))
    """Momentum of local SGD."""
    momentum_between_rounds: BetweenRounds = "reset"
    """Momentum (adam: moments) after a round: reset to zero, kept in the agent's state, or averaged by the server."""
    weight_decay: float = parameter(0.0, constraint_of(SGD, "weight_decay"))
    """Weight decay of the local steps."""
    clip: float | AsMethod = parameter(AS_METHOD, constraint_of(SGD, "clip"))
    """Largest norm of a gradient, for every method; 0 turns clipping off, method uses the default of each method."""
    averaging: float | AsMethod = parameter(AS_METHOD, unless(AS_METHOD, between(0, 1)))
    """Share of the rounds so far over which an agent's model is averaged; 0: the latest; method: as the method does."""
    weighting: Literal["method", "equal", "samples"] = AS_METHOD
    """Weight agents equally or by their number of samples, in methods whose server averages; method: as it does."""
    final_model: Literal["last", "selected"] = "last"
    """Model that a run saves and predicts with: of the last round, or of the round with the best validation score."""
    selected_by: Literal["accuracy", "loss"] = "accuracy"
    """Validation score that selects a round: the accuracy, then the loss; or the loss alone, for rare classes."""
    final_round: int = parameter(0, at_least(0))
    """With final_model = selected: the round whose model is saved, at most rounds. 0: the best validation score."""
    seed: int = parameter(1, at_least(0))
    """Seed of the initial model and of the order of the samples."""
    augment: bool = False
    """Augment training images: random shifts by up to an eighth of the image and random reflections, in every step."""
    flips: bool = True
    """With augment: reflect half of the images from left to right. Turn it off for digits and text."""
    privacy: Literal["off", "masked", "dp", "masked+dp"] = "off"
    """masked: the server sees distances and weighted sums alone. dp: gradients are noised. See docs/privacy.md."""
    masked_distances: Literal["sketch", "dealer"] = "sketch"
    """With privacy = masked: distances from secret sketches, or exact ones with another agent as dealer."""
    sketch_size: int = parameter(4096, at_least(2))
    """With privacy = masked: numbers of a sketch, from which distances are computed. More are more accurate."""
    min_contributors: float = parameter(1.0, at_least(1))
    """With privacy = masked: smallest effective number of agents in a weighted sum; Alice trains alone below it."""
    epsilon: float = parameter(8.0, above(0))
    """With privacy = dp: what a whole run may reveal about one sample of an agent. Smaller is more private."""
    delta: float = parameter(1e-5, fraction(positive=True))
    """With privacy = dp: probability with which epsilon may be exceeded; below 1 / the samples of any agent."""
    sample_clip: float = parameter(1.0, above(0))
    """With privacy = dp: largest norm of the gradient of one sample."""
    noise_multipliers: tuple[float, ...] = parameter((), each_above(0))
    """With privacy = dp: noise multipliers of the agents. Empty: computed from epsilon. A shorter list is repeated."""
    guard: Literal["off", "standard"] = "off"
    """Server-side checks of each update, in addition to the check that it is finite."""
    attack: str = parameter(attacks.NONE, readable(attacks.parse, "an attack such as sign-flip"))
    """Attack by malicious agents, such as sign-flip, alie(1.5) or backdoor. docs/robustness.md lists all."""
    attackers: int = parameter(1, at_least(1))
    """Number of malicious agents if an attack is set: the last agents, never Alice."""
    precision: Literal["float32", "float64", "tf32", "bf16"] = "float32"
    """Precision of training. tf32 and bf16 are faster on a GPU. Distances, weights, aggregation always use float64."""

    def __post_init__(self) -> None:
        check_fields(self)

    def steps(self, samples: int) -> int:
        """Return K_i: the mini-batches of one round at an agent with this many samples."""
        return steps_of(samples, self.batch_size, self.epochs, self.remainder, self.steps_per_round)

    @property
    def guarantee(self) -> str:
        """The differential privacy of a run in words; empty without."""
        if self.privacy not in ("dp", "masked+dp"):
            return ""
        return f"epsilon {self.epsilon:g} at delta {self.delta:g} for each training sample of an agent"

    @property
    def is_own(self) -> bool:
        """Whether the data is the user's own folder and not a named data set."""
        return self.data not in NAMES

    @property
    def data_name(self) -> str:
        return Path(self.data).resolve().name if self.is_own else self.data

    @property
    def column(self) -> str:
        """Split and shift, as shown in tables of results."""
        return f"{self.split} {self.shift}" if self.shift else self.split


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A grid of runs: methods x splits x shifts x seeds, shared settings, and each method's hyperparameters."""

    methods: tuple[str, ...]
    splits: tuple[str, ...] = ("C",)
    shifts: tuple[str, ...] = ()  # empty: the shift of the settings
    seeds: tuple[int, ...] = (1,)
    settings: Settings = field(default_factory=Settings)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str = "experiment"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The config of one run: method, settings, and the method's hyperparameters that were given."""

    method: str
    settings: Settings
    options: Mapping[str, Any] = field(default_factory=dict)

    def algorithm(self) -> Algorithm:
        """Return the method with its optimiser. A common setting becomes the method's hyperparameter of that name.

        Where the method has no such hyperparameter, the setting is an option of the optimiser; `weighting` then has no
        effect, because the method does not average.
        """
        s, kind = self.settings, algorithm_of(self.method)
        common = {name: getattr(s, name) for name in COMMON if getattr(s, name) != AS_METHOD}
        own = {name: value for name, value in common.items() if name in hyperparameters(kind)}
        shared = {name: getattr(s, name) for name in ("weight_decay", "momentum_between_rounds", "lr_decay")}
        shared |= {name: value for name, value in common.items() if name not in own and name != "weighting"}
        sgd: SGD | Adam
        if s.optimiser == "adam":
            if s.momentum:
                raise WaffleError(f"momentum: expected 0 with the optimiser adam, got {s.momentum}: leave it out")
            sgd = Adam(s.lr, **shared)
        else:
            sgd = SGD(s.lr, s.momentum, **shared)
        algorithm = kind(sgd=sgd, **{**own, **self.options})  # type: ignore[call-arg]
        if isinstance(algorithm, ValidationDependent):
            return algorithm.for_validation(s.validation > 0 and s.privacy == "off")
        return algorithm

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
            "settings": {name: getattr(self.settings, name) for name in parameters_of(Settings)},
            "options": options,
        }

    @cached_property
    def contents(self) -> Mapping[str, Any]:
        """The dictionary of `to_json`, computed once and shared: not to be changed."""
        return self.to_json()

    @classmethod
    def from_json(cls, content: Any) -> RunConfig:
        """Read the config of a run folder, with the same checks as for a user's config."""
        if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
            raise WaffleError("expected a run's config with `schema`, `method` and `settings`")
        check_schema(content.get("schema"))
        values = EARLIER | tuples(content["settings"])
        options = content.get("options") or {}
        return check_run(*_with_present_name(str(content.get("method")), values, options))


def _with_present_name(method: str, settings: Any, options: Any) -> tuple[str, Any, dict[str, Any]]:
    """Return method, settings and options of a config; before RESULTS_VERSION 8 two methods had other names."""
    given = options if isinstance(options, dict) else {}
    if method == "waffle" and "omega" in given:
        return "waffle-paper", settings, given
    if method == "waffle-kin":
        return "waffle", settings, {"prediction": "model", **given}
    return method, settings, given


def plain(text: str) -> str:
    """Return the text as part of a folder name. Non-ASCII letters are replaced, and a digest keeps the name unique."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    if text.isascii():
        return name
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()  # file names may not be UTF-8
    return f"{name.strip('-')}-{digest[:8]}"


def completed(content: Any, method: str) -> Any:
    """Return a config written by an earlier version, with defaults for settings that it lacks.

    A config of another method is returned unchanged, because reading it could import code.
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
    """Return the hyperparameters of a method. In a config a schedule is a string."""
    kind = algorithm_of(method)
    found = {name: parameters_of(kind)[name] for name in hyperparameters(kind)}
    return {name: kind._replace(hint=str) if _is_schedule(kind.hint) else kind for name, kind in found.items()}


def option_types(method: str) -> dict[str, Any]:
    """Return the types of a method's hyperparameters."""
    return {name: kind.hint for name, kind in options_of(method).items()}


def _is_schedule(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and str in typing.get_args(hint)


def weighting_problems(weighting: str, methods: Iterable[str]) -> list[str]:
    """Return the problem of a `weighting` that some of the methods would ignore."""
    odd = [name for name in methods if name in ALGORITHMS and "weighting" not in options_of(name)]
    if weighting == AS_METHOD or not odd:
        return []
    return [f"weighting: {', '.join(odd)} would ignore it: set it for the methods that average, as in fedavg.weighting"]


def check_run(method: str, settings: Mapping[str, Any], options: Mapping[str, Any]) -> RunConfig:
    """Return the config of a run from plain values, or raise one error that lists all problems."""
    known, own, options = parameters_of(Settings), options_of(method), tuples(options)
    problems = problems_of(settings, known) + problems_of(options, own)
    if problems:
        raise WaffleError("; ".join(problems))
    return RunConfig(method=method, settings=Settings(**floats(settings, known)), options=floats(options, own))


def check_name(name: str) -> str:
    """Return the name of a run folder after checking that it has only safe characters."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise WaffleError(f"expected a run name of letters, digits, '.', '_' and '-', got {name!r}")
    return name


def check_schema(found: Any) -> None:
    if found != SCHEMA:
        raise WaffleError(f"expected a file of schema {SCHEMA}, got schema {found!r}: update waffle-fl")
