"""FedRep (Collins et al. 2021): in every round an agent first trains its personal head, then the shared body."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg, partial_sharing
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, Vector, broadcast_to
from waffle_fl.algorithms.fedavg import Info, Up, Weighting
from waffle_fl.algorithms.partial_sharing import Agents, Parts, cut, join
from waffle_fl.constraints import at_least, check_fields, fraction, model_dependent, parameter
from waffle_fl.models.layers import Layers


class Server(NamedTuple):
    x: Vector
    stats: Vector
    tuned: Tensor  # (), bool: whether agents train only their heads


class Down(NamedTuple):
    x: Rows
    stats: Rows
    tuned: Tensor


class Local(NamedTuple):
    body: Rows
    head: Rows
    stats: Rows  # of the whole model
    body_velocity: Rows
    head_velocity: Rows
    tuned: Tensor


@final
@dataclass(frozen=True)
class FedRep:
    """A model for every agent: a shared body and a personal head, trained one after the other."""

    about: ClassVar[About] = About(
        name="fedrep",
        title="FedRep",
        trains_model_for="each agent",
        in_words="a shared network with personal last layers, which are trained first in each round",
        cite="Collins et al., ICML 2021",
        order=130,
    )
    averages_cohorts: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of the head's gradient and of the body's gradient; 0 turns clipping off."""
    head_layers: int = parameter(1, at_least(0))
    """Number of last layers that are personal."""
    head_share: float = parameter(0.5, fraction())
    """Share of a round's steps that train the head, before the body; at least one step, unless it is 0."""
    tuning: int = parameter(0, at_least(0), server_side=True)
    """Number of final rounds that train only the heads; each has as many epochs as a round of training."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples, as the authors do."""
    parts: Parts = model_dependent(Parts())

    def __post_init__(self) -> None:
        check_fields(self)

    def for_model(self, layers: Layers) -> FedRep:
        return replace(self, parts=partial_sharing.parts(layers, layers.head(self.head_layers)))

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        shared, rows = partial_sharing.start(self.parts, net, agents)
        return Server(*shared, torch.zeros((), dtype=torch.bool, device=net.params.device)), rows

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(*broadcast_to(Net(server.x, server.stats), agents), server.tuned.expand(agents))

    def begin(self, down: Down, agents: Agents) -> Local:
        _, stats = partial_sharing.full_model(self.parts, Net(down.x, down.stats), agents)
        velocities = self.sgd.zero_velocity(down.x), self.sgd.zero_velocity(agents.own)
        return Local(down.x, agents.own, stats, *velocities, down.tuned)

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(join(local.body, local.head, self.parts.params), local.stats)
        g_body, g_head = cut(g, self.parts.params)
        body, body_velocity = self.sgd.step(local.body, local.body_velocity, g_body, clip=self.clip)
        head, head_velocity = self.sgd.step(local.head, local.head_velocity, g_head, clip=self.clip)
        if not body.shape[1] or not head.shape[1]:  # the only part is trained in every step
            return Local(body, head, stats, body_velocity, head_velocity, local.tuned)
        on_head = grad.t < self._head_steps(grad.steps)
        single_step = grad.steps == 1  # a single step trains both parts
        trains_head = (on_head | single_step | local.tuned)[:, None]
        trains_body = ((~on_head | single_step) & ~local.tuned)[:, None]
        return Local(
            torch.where(trains_body, body, local.body),
            torch.where(trains_head, head, local.head),
            stats,
            torch.where(trains_body, body_velocity, local.body_velocity),
            torch.where(trains_head, head_velocity, local.head_velocity),
            local.tuned,
        )

    def _head_steps(self, steps: Tensor) -> Tensor:
        turns = (self.head_share * steps).floor()
        return turns.clamp(min=1) if self.head_share else turns

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        stats, own_stats = cut(local.stats, self.parts.stats)
        return Agents(local.head, own_stats), Up(local.body - down.x, stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        shared = fedavg.Server(server.x, server.stats)
        (x, stats), info = fedavg.aggregate(shared, up, now, self.weighting)
        tuned = torch.full_like(server.tuned, self.tuning > 0 and now.r >= now.of - self.tuning)
        return Server(x, stats, tuned), info

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return partial_sharing.full_model(self.parts, broadcast_to(Net(server.x, server.stats), count), agents)
