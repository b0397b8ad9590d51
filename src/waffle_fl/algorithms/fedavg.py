"""FedAvg (McMahan et al. 2017): average the updates of all agents into one global model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

from waffle_fl.algorithms.contract import (
    SGD,
    Grad,
    Net,
    Round,
    Rows,
    Vector,
    Weights,
    averaged,
    everyone,
    moved,
    normalised,
    server_side,
    uniform,
)
from waffle_fl.algorithms.defences import parse


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


@final
@dataclass(frozen=True)
class FedAvg:
    """One global model: the mean of all agents' updates."""

    sgd: SGD = field(default_factory=SGD)
    clip: float = 0.0
    """Largest norm of a gradient; 0 turns clipping off."""
    weighting: Literal["equal", "samples"] = server_side("equal")
    """Weigh agents equally (the paper's authors) or by their number of samples (McMahan et al.)."""
    aggregation: str = server_side("mean")
    """How updates become one: mean, or a robust rule, which weighs equally: krum(f), multi-krum(f), trimmed-mean(f),
    median, geometric-median or centered-clipping(radius)."""

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(net.params, net.stats), Agents()

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(*everyone(Net(server.x, server.stats), agents))

    def begin(self, down: Down, agents: Agents) -> Local:
        return Local(down.x, down.stats, self.sgd.rest(down.x))

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(local.y, local.stats)
        y, velocity = self.sgd.step(local.y, local.velocity, g, clip=self.clip)
        return Local(y, stats, velocity)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return agents, Up(local.y - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        if self.weighting == "samples":
            weights = normalised(now.heard * now.samples.double(), now.heard)
        else:
            weights = uniform(now.heard)
        rule = parse(self.aggregation)
        if rule:
            dy, weights = rule(up.dy, now.heard)
            x = (server.x.double() + dy).to(server.x.dtype)
        else:
            x = moved(server.x, weights, up.dy)
        stats = averaged(server.stats, normalised(weights, now.heard), up.stats)
        return Server(x, stats), Info(weights)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return everyone(Net(server.x, server.stats), count)
