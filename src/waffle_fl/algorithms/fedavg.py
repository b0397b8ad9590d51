"""FedAvg (McMahan et al. 2017): average the updates of all agents into one global model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, TypeAlias, final

from torch import Tensor

from waffle_fl.algorithms import robust_aggregation
from waffle_fl.algorithms.contract import (
    CLIP,
    SGD,
    About,
    Grad,
    Net,
    Optimiser,
    Round,
    Rows,
    Seen,
    Vector,
    Weights,
    averaged,
    broadcast_to,
    normalised,
    shifted,
    sums_of,
    uniform,
)
from waffle_fl.algorithms.robust_aggregation import Rule, parse
from waffle_fl.constraints import at_least, check_fields, parameter, readable


class Server(NamedTuple):
    x: Vector
    stats: Vector


class Agents(NamedTuple):
    pass


class Down(NamedTuple):
    x: Rows
    stats: Rows


class Local(NamedTuple):
    y: Rows
    stats: Rows
    velocity: Rows


class Up(NamedTuple):
    dy: Rows
    stats: Rows


class Info(NamedTuple):
    weights: Weights


Weighting: TypeAlias = Literal["equal", "samples"]


def send(server: Server, agents: int) -> Down:
    return Down(*broadcast_to(Net(server.x, server.stats), agents))


def begin(sgd: Optimiser, net: Net | Down) -> Local:
    params, stats = net
    return Local(params, stats, sgd.zero_velocity(params))


def step(sgd: Optimiser, clip: float, local: Local, grad: Grad) -> Local:
    g, stats = grad(local.y, local.stats)
    y, velocity = sgd.step(local.y, local.velocity, g, clip=clip)
    return Local(y, stats, velocity)


def shares(weighting: Weighting, counted: Tensor, samples: Tensor) -> Weights:
    """Return the weights of the counted agents: equal, or by their number of samples."""
    return uniform(counted) if weighting == "equal" else normalised(counted * samples.double(), counted)


def aggregate(
    server: Server, up: Up, now: Round, weighting: Weighting = "equal", rule: Rule | None = None
) -> tuple[Server, Info]:
    """Apply the mean of the received updates, weighted equally or by samples, or the aggregate of a robust rule."""
    if rule:
        dy, weights = rule(up.dy, now.received)
        stats = averaged(server.stats, normalised(weights, now.received), up.stats)
        return Server((server.x.double() + dy).to(server.x.dtype), stats), Info(weights)
    weights = shares(weighting, now.received, now.samples)
    return combine(server, sums_of({"dy": weights, "stats": weights}, up._asdict(), now.cohort)), Info(weights)


def combine(server: Server, sums: Mapping[str, Vector]) -> Server:
    """Return the model moved by the weighted mean update, with the mean of the normalisation statistics."""
    return Server(shifted(server.x, sums["dy"]), sums["stats"].to(server.stats.dtype))


@final
@dataclass(frozen=True)
class FedAvg:
    """One global model, updated by the mean of all agents' updates."""

    about: ClassVar[About] = About(
        name="fedavg",
        title="FedAvg",
        trains_model_for="all agents",
        in_words="one shared global model, updated by the mean of all updates",
        cite="McMahan et al., AISTATS 2017",
        order=10,
    )
    averages_momentum: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0), search=CLIP)
    """Largest norm of a gradient; 0 turns clipping off."""
    weighting: Weighting = parameter("equal", server_side=True, search=["equal", "samples"])
    """Weight agents equally (as the WAFFLE authors do) or by their number of samples (McMahan et al.)."""
    aggregation: str = parameter("mean", readable(parse, "an aggregation"), server_side=True)
    """Aggregation rule: mean, or a robust rule, which ignores weighting: krum(f), multi-krum(f), trimmed-mean(f),
    median, geometric-median or centered-clipping(radius)."""

    def __post_init__(self) -> None:
        check_fields(self)

    def check_agents(self, agents: int) -> None:
        robust_aggregation.check_agents(self.aggregation, agents)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(net.params, net.stats), Agents()

    def broadcast(self, server: Server, agents: int) -> Down:
        return send(server, agents)

    def begin(self, down: Down, agents: Agents) -> Local:
        return begin(self.sgd, down)

    def step(self, local: Local, grad: Grad) -> Local:
        return step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return agents, Up(local.y - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return aggregate(server, up, now, self.weighting, parse(self.aggregation))

    def needs_updates(self) -> str:
        return "" if self.aggregation == "mean" else f"aggregation = {self.aggregation}"

    def compared_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        return {}

    def summed_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        return up._asdict()

    def weigh(self, server: Server, seen: Seen, now: Round) -> tuple[Server, dict[str, Weights], Info]:
        weights = shares(self.weighting, now.received, now.samples)
        return server, {"dy": weights, "stats": weights}, Info(weights)

    def combine(self, server: Server, sums: Mapping[str, Vector], now: Round) -> Server:
        return combine(server, sums)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return broadcast_to(Net(server.x, server.stats), count)
