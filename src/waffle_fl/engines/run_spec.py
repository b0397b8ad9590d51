"""Inputs and outputs of a simulation: a RunSpec is one run, an Outcome is the result of one of its rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

from waffle_fl.algorithms import Algorithm, Net, for_model
from waffle_fl.algorithms.hooks import ValidationDependent
from waffle_fl.batches import Remainder
from waffle_fl.constraints import above, at_least, check_fields, each_above, fraction, parameter, share
from waffle_fl.engines.row_store import RowStore, fresh, initial_rows
from waffle_fl.errors import Diverged, WaffleError
from waffle_fl.federation import Federation
from waffle_fl.guard import Guard
from waffle_fl.models import FlatModel

Tamper = Callable[[Any, int], Any]  # (updates of a federation, round) -> updates that arrive at the server
Transport = Callable[[int, int, bytes], Iterable[bytes]]  # (agent, round, its reply) -> replies that arrive from it


Privacy: TypeAlias = Literal["off", "masked", "dp", "masked+dp"]
"""Whether the server sees each update, or only distances and weighted sums; and whether updates are noised."""

MaskedDistances: TypeAlias = Literal["sketch", "dealer"]
"""How private rounds compute distances: from secret sketches, or exactly with another agent as dealer."""

Presence: TypeAlias = Literal["by-method", "always"]
"""When Alice takes part in a round: where the method's training depends on her, or always."""


ATTEMPTS = 3  # how often a round is tried when Alice's own update is not finite


class State(NamedTuple):
    """Everything that a run keeps from round to round."""

    server: Any
    agents: Any


@dataclass(frozen=True)
class RoundSettings:
    """Settings of the rounds, shared by all runs of a simulation."""

    rounds: int = parameter(MISSING, at_least(1))
    batch_size: int = parameter(32, at_least(1))
    epochs: int = parameter(1, at_least(1))
    augment: bool = False
    flips: bool = True
    guard: Guard = "off"
    remainder: Remainder = "spread"
    participation: float = parameter(1.0, share())
    alice_takes_part: Presence = "by-method"
    steps_per_round: int = parameter(0, at_least(0))
    privacy: Privacy = "off"
    masked_distances: MaskedDistances = "sketch"
    sketch_size: int = parameter(4096, at_least(2))
    min_contributors: float = parameter(1.0, at_least(1))
    epsilon: float = parameter(8.0, above(0))
    delta: float = parameter(1e-5, fraction(positive=True))
    sample_clip: float = parameter(1.0, above(0))
    noise_multipliers: tuple[float, ...] = parameter((), each_above(0))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def masks(self) -> bool:
        """Whether the server sees distances and weighted sums only."""
        return self.privacy in ("masked", "masked+dp")

    @property
    def adds_noise(self) -> bool:
        """Whether gradients are clipped per sample and noised."""
        return self.privacy in ("dp", "masked+dp")

    @property
    def attempts(self) -> int:
        """How often a round is tried when Alice's own update is not finite; each try would spend privacy budget."""
        return 1 if self.adds_noise else ATTEMPTS

    @property
    def shares_training(self) -> bool:
        """Whether a training may serve several runs: noise depends on the method, and checks on Alice."""
        return not (self.needs_alice or self.adds_noise)

    @property
    def needs_alice(self) -> bool:
        """Whether Alice takes part in every round of every method, so that no method trains once for all Alices."""
        always = self.participation < 1 and self.alice_takes_part == "always"
        return always or self.guard != "off"  # the guard compares updates with hers


@dataclass(frozen=True)
class RunSpec:
    """One run: a federation, an algorithm, a seed."""

    algorithm: Algorithm
    federation: Federation
    seed: int
    state: State | None = None  # the state to resume from; None starts from a random model
    tamper: Tamper | None = None  # changes the updates in transit, as tensors
    transport: Transport | None = None  # changes them as bytes: every update is packed, passed through it and unpacked
    attackers: tuple[int, ...] = ()  # agents whose summed weight is recorded
    requested: frozenset[int] | None = None  # the agents whose own models are needed; None: all
    everyone: bool = False  # score each agent's model on its own held-out data, not only Alice's
    store: RowStore | None = None  # where the agents' states are kept; None: in memory

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, type) or not hasattr(self.algorithm, "aggregate"):
            raise WaffleError(f"algorithm: expected an instance such as Waffle(), got {self.algorithm!r}")
        if not isinstance(self.federation, Federation):
            raise WaffleError(f"federation: expected a Federation, got {type(self.federation).__name__}")
        if type(self.seed) is not int or self.seed < 0:
            raise WaffleError(f"seed: expected an integer of at least 0, got {self.seed!r}")
        if not 0 <= self.federation.alice < self.federation.agents:
            last = self.federation.agents - 1
            raise WaffleError(f"alice: expected an agent from 0 to {last}, got {self.federation.alice}")
        if isinstance(self.algorithm, ValidationDependent):
            validated = len(self.federation.validation[self.federation.alice]) > 0
            object.__setattr__(self, "algorithm", self.algorithm.for_validation(validated))


class Measured(TypedDict, total=False):
    """The measurements of one round, as in `rounds.jsonl` and `Outcome.measured`; None means not finite."""

    round: int  # 1-based
    accuracy: float  # of Alice's model on her test data (classification)
    rmse: float | None  # the same for regression, in the target's unit
    loss: float | None  # mean loss on Alice's test data
    by_agent: list[float]  # if everyone is scored: accuracy (RMSE) of each agent with test data; the others are means
    validation_accuracy: float  # the same on her validation data, if she has any
    validation_rmse: float | None
    validation_loss: float | None
    backdoor: float  # share of stamped samples that are classified as the backdoor attack intends
    weights: list[float]  # each agent's weight in Alice's model; with states on disk, each participant's
    alpha: list[float]  # WAFFLE: this round's own weights, before smoothing
    distances: list[float]  # WAFFLE: d_i of Algorithm 1; 0 for agents that take no part
    omega: float  # WAFFLE: degree of personalisation
    psi: float
    norms: list[float]  # norm of each agent's update
    participants: list[str]  # the agents that took part, if not all
    contributors: float  # masked rounds: effective number of agents in the sum
    uploaded: float  # masked rounds: bytes that all agents have sent
    screened: dict[str, str]  # agents whose update was rejected or clipped, and why
    refused: list[list[str]]  # messages that could not be read: agent, reason
    attackers_weight: float  # sum of the attackers' weights
    seconds: float  # computing time of this round


@dataclass(frozen=True)
class Outcome:
    """The result of one round of one run."""

    index: int  # of the run in the list given to `simulate`
    round: int
    measured: Measured
    state: State  # after this round; a RunSpec with this state resumes here
    attempt: int = 0  # rejected attempts before this one
    error: Diverged | None = None  # why the run ends here


def prepared(model: FlatModel, federation: Federation) -> FlatModel:
    """Return the model after `FlatModel.prepared` with two samples of the federation."""
    some = federation.train[federation.alice][:2]
    return model.prepared(federation.x[some], federation.y[some]) if len(some) else model


def fitted(spec: RunSpec, model: FlatModel) -> RunSpec:
    """Return the spec with its algorithm prepared for the model's layers."""
    return replace(spec, algorithm=for_model(spec.algorithm, model.layers))


def own_net(spec: RunSpec, state: State, model: FlatModel) -> Net:
    """Return Alice's model in this state."""
    if spec.store:
        algorithm, agents = fitted(spec, model).algorithm, spec.federation.agents
        _, initial = initial_rows(algorithm, model.init(spec.seed), agents)
        own = spec.store.read(state.agents, [spec.federation.alice], initial)
        return Net(*(field[0] for field in algorithm.personal(state.server, own, 1)))
    alice, net = spec.federation.alice, all_nets(spec, state, model)
    return Net(net.params[alice], net.stats[alice])


def all_nets(spec: RunSpec, state: State, model: FlatModel) -> Net:
    """Return the models of all agents in this state, one per row."""
    return fitted(spec, model).algorithm.personal(state.server, state.agents, spec.federation.agents)


def scored_net(spec: RunSpec, state: State, model: FlatModel) -> Net:
    """Return the model that the run is scored by: Alice's, or one row per agent if everyone is scored."""
    return (all_nets if spec.everyone else own_net)(spec, state, model)


def on_device(specs: Sequence[RunSpec], model: FlatModel) -> list[RunSpec]:
    """Return the specs with their data on the model's device; shared tensors are moved once and stay shared."""
    moved: dict[int, Any] = {}
    return [replace(spec, federation=spec.federation.to(model.device, model.dtype, moved)) for spec in specs]


def initial_state(spec: RunSpec, model: FlatModel) -> State:
    """A2.1: one random model for all agents."""
    if spec.store:
        server, _ = initial_rows(fitted(spec, model).algorithm, model.init(spec.seed), spec.federation.agents)
        return State(server, fresh(spec.federation.agents))
    server, agents = fitted(spec, model).algorithm.init(model.init(spec.seed), spec.federation.agents)
    return State(server, agents)
