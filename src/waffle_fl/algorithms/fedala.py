"""FedALA (Zhang et al. 2023): each agent learns, number by number, how much of the global model to take into its own.

A round begins at y = own + (x - own) * W, W elementwise in [0, 1]. On a part of its mini-batches the agent first learns
W -= eta grad F(y) * (x - own), then it trains y as in FedAvg. W starts at 1 and goes on from round to round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

import torch

from waffle_fl.algorithms.contract import SGD, Grad, Net, Round, Rows, everyone, server_side
from waffle_fl.algorithms.fedavg import Down, FedAvg, Info, Server, Up


class Agents(NamedTuple):
    y: Rows  # as the agent's last training left it
    stats: Rows
    W: Rows


class Local(NamedTuple):
    y: Rows
    stats: Rows
    velocity: Rows
    W: Rows
    own: Rows  # constant through the round, as is
    x: Rows


@final
@dataclass(frozen=True)
class FedALA:
    """A model for every agent, begun each round at a learned elementwise mixture of its own and the global one."""

    sgd: SGD = field(default_factory=SGD)
    clip: float = 0.0
    """Largest norm of a gradient in training; 0 turns clipping off."""
    eta: float = 30.0
    """Step size of the elementwise weights W; 0 keeps them at 1, and the global model is FedAvg's."""
    rehearsed: float = 0.8
    """Share of an epoch's mini-batches on which the weights are learned before each training."""
    weighting: Literal["equal", "samples"] = server_side("equal")
    """Weigh agents equally in the global model, or by their number of samples (Zhang et al.)."""

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = everyone(net, agents)
        return Server(*net), Agents(rows, stats, torch.ones_like(rows))

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(*everyone(Net(server.x, server.stats), agents))

    def begin(self, down: Down, agents: Agents) -> Local:
        y = torch.lerp(agents.y, down.x, agents.W)
        return Local(y, down.stats, self.sgd.rest(y), agents.W, agents.y, down.x)

    def rehearse(self, local: Local, grad: Grad) -> Local:
        g, _ = grad(local.y, local.stats)
        W = (local.W - self.eta * g * (local.x - local.own)).clamp(0, 1)
        return local._replace(y=torch.lerp(local.own, local.x, W), W=W)

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(local.y, local.stats)
        y, velocity = self.sgd.step(local.y, local.velocity, g, clip=self.clip)
        return local._replace(y=y, stats=stats, velocity=velocity)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.y, local.stats, local.W), Up(local.y - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return FedAvg(weighting=self.weighting).aggregate(server, up, now)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.y, agents.stats)
