"""FedALA (Zhang et al. 2023): each agent learns, parameter by parameter, how to mix the global model into its own.

A round starts at y = own + (x - own) * W, with W elementwise in [0, 1]. On a part of its mini-batches the agent first
learns W -= eta_w grad F(y) * (x - own), then it trains y as in FedAvg. W starts at 1 and is kept between rounds. Layers
before the last `head_layers` are copied from the global model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, final

import torch

from waffle_fl.algorithms import fedavg, partial_sharing
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, broadcast_to
from waffle_fl.algorithms.fedavg import Down, Info, Server, Up, Weighting
from waffle_fl.algorithms.partial_sharing import Runs, cut, join
from waffle_fl.constraints import at_least, between, check_fields, model_dependent, parameter
from waffle_fl.models.layers import Layers


class Agents(NamedTuple):
    y: Rows  # the agent's model after its last training
    stats: Rows
    W: Rows  # for the head only


class Local(NamedTuple):
    y: Rows
    stats: Rows
    velocity: Rows
    W: Rows
    own: Rows  # the agent's head and (x) the global one, constant during the round
    x: Rows


@final
@dataclass(frozen=True)
class FedALA:
    """A model for every agent; each round starts at a learned elementwise mixture of it and the global model."""

    about: ClassVar[About] = About(
        name="fedala",
        title="FedALA",
        trains_model_for="each agent",
        in_words="a personal model, mixed with a shared global model by weights learned for each parameter",
        cite="Zhang et al., AAAI 2023",
        order=180,
    )
    averages_cohorts: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient in training; 0 turns clipping off."""
    eta_w: float = parameter(30.0, at_least(0))
    """Step size of the elementwise weights W; 0 keeps W at 1, which makes the global model that of FedAvg."""
    rehearsed: float = parameter(0.8, between(0, 1))
    """Share of an epoch's mini-batches on which W is learned before training, in each round."""
    head_layers: int = parameter(0, at_least(0))
    """Number of last layers that are mixed; the others are copied from the global model. 0 mixes all layers."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally in the global model, or by their number of samples as in the paper."""
    runs: Runs = model_dependent(())

    def __post_init__(self) -> None:
        check_fields(self)

    def for_model(self, layers: Layers) -> FedALA:
        head = layers.head(self.head_layers) if self.head_layers else frozenset(layers.names)
        return replace(self, runs=partial_sharing.parts(layers, head).params)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = broadcast_to(net, agents)
        return Server(*net), Agents(rows, stats, torch.ones_like(cut(rows, self.runs)[1]))

    def broadcast(self, server: Server, agents: int) -> Down:
        return fedavg.send(server, agents)

    def begin(self, down: Down, agents: Agents) -> Local:
        (body, x), (_, own) = cut(down.x, self.runs), cut(agents.y, self.runs)
        y = join(body, torch.lerp(own, x, agents.W), self.runs)
        return Local(y, down.stats, self.sgd.zero_velocity(y), agents.W, own, x)

    def rehearse(self, local: Local, grad: Grad) -> Local:
        (body, _), (_, g) = cut(local.y, self.runs), cut(grad(local.y, local.stats).params, self.runs)
        W = (local.W - self.eta_w * g * (local.x - local.own)).clamp(0, 1)
        return local._replace(y=join(body, torch.lerp(local.own, local.x, W), self.runs), W=W)

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(local.y, local.stats)
        y, velocity = self.sgd.step(local.y, local.velocity, g, clip=self.clip)
        return local._replace(y=y, stats=stats, velocity=velocity)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.y, local.stats, local.W), Up(local.y - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return fedavg.aggregate(server, up, now, self.weighting)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.y, agents.stats)
