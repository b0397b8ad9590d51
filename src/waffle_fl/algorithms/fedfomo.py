"""FedFomo (Zhang et al. 2021): each agent mixes the models it receives, weighted by their gain on its own data.

Per round agent i receives up to M other agents' models. Each of them, and its own, is weighted by its gain over the
model with which the agent started the previous round, (L_i(before) - L_i(theta_n)) / |theta_n - before|. Negative
weights are set to 0, the others scaled to sum to 1. The agent trains the mixture and sends it to the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import (
    SGD,
    TINY,
    About,
    Grad,
    Net,
    Optimiser,
    Round,
    Rows,
    broadcast_to,
    unless_absent,
)
from waffle_fl.algorithms.model_offers import Offer, best_others, mixed, packed, spread
from waffle_fl.constraints import at_least, between, check_fields, parameter


class Server(NamedTuple):
    y: Rows  # the server's copy of each agent's model
    stats: Rows
    affinity: Tensor  # (N, N), float64: row i holds the gains of the others reported by agent i, summed over the rounds
    taken: Tensor  # (N, N), float64: row i holds the mixing weights of agent i in its last round
    received: Tensor  # (N,), bool: agents whose model is available to others
    r: Tensor


class Agents(NamedTuple):
    y: Rows
    stats: Rows
    before: Rows  # the model with which it started its last training
    before_stats: Rows


class Down(NamedTuple):
    theta: Tensor  # (N, M, P)
    stats: Tensor  # (N, M, S)
    offered: Tensor  # (N, M), bool
    losses: Tensor  # (N, 2 + M), float64, filled in by the agent: for the model before, its own, and the others


class Local(NamedTuple):
    y: Rows
    stats: Rows
    velocity: Rows
    before: Rows
    before_stats: Rows
    gains: Tensor


class Up(NamedTuple):
    dy: Rows
    stats: Rows
    gains: Tensor  # (N, 1 + M), float64: for its own model and the received ones


class Info(NamedTuple):
    pass


def gains(down: Down, agents: Agents) -> Tensor:
    """Return (N, 1 + M): decrease in loss against the model before, per distance from it; 0 for unused places."""
    thetas = torch.cat([agents.y[:, None], down.theta], dim=1)
    distance = torch.stack([(theta - agents.before).double().norm(dim=1) for theta in thetas.unbind(1)], dim=1)
    gain = (down.losses[:, :1] - down.losses[:, 1:]) / distance.clamp(min=TINY)
    available = torch.cat([torch.ones_like(down.offered[:, :1]), down.offered], dim=1)
    return torch.where(available & (distance > 0) & torch.isfinite(gain), gain, 0.0)


def weights(gain: Tensor) -> Tensor:
    """Return (N, 1 + M): positive gains scaled to sum to 1; if there are none, the agent keeps its own model."""
    gain = gain.clamp(min=0)
    total = gain.sum(dim=1, keepdim=True)
    own_only = (torch.arange(gain.shape[1], device=gain.device) == 0).to(gain)
    return torch.where(total > 0, gain / total.clamp(min=TINY), own_only)


@final
@dataclass(frozen=True)
class FedFomo:
    """A model for every agent: a mixture of the models with low loss on its validation data."""

    about: ClassVar[About] = About(
        name="fedfomo",
        title="FedFomo",
        trains_model_for="each agent",
        in_words="a personal model, mixed with the models that do well on the agent's data",
        cite="Zhang et al., ICLR 2021",
        order=160,
    )
    scored_on: ClassVar[Literal["training", "validation"]] = "validation"

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    models: int = parameter(5, at_least(1))
    """Number of other agents' models, M, that an agent receives per round; each needs the memory of one model."""
    explore: float = parameter(0.3, between(0, 1))
    """Share of these models that is drawn at random; the others are those with the highest gains so far."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = broadcast_to(net, agents)
        device = net.params.device
        zeros = torch.zeros(agents, agents, dtype=torch.float64, device=device)
        received, r = (
            torch.zeros(agents, dtype=torch.bool, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )
        return Server(rows.clone(), stats.clone(), zeros, zeros, received, r), Agents(rows, stats, rows, stats)

    def offer(self, server: Server) -> Offer:
        return best_others(server.affinity, server.received, self.models, self.explore, server.r)

    def broadcast(self, server: Server, agents: int) -> Down:
        offer = self.offer(server)
        unknown = torch.zeros(agents, 2 + self.models, dtype=torch.float64, device=server.y.device)
        return Down(packed(server.y, offer), packed(server.stats, offer), offer.offered, unknown)

    def candidates(self, down: Down, agents: Agents) -> Net:
        own = torch.stack([agents.before, agents.y], dim=1), torch.stack([agents.before_stats, agents.stats], dim=1)
        return Net(torch.cat([own[0], down.theta], dim=1), torch.cat([own[1], down.stats], dim=1))

    def begin(self, down: Down, agents: Agents) -> Local:
        gain = gains(down, agents)
        weight = weights(gain)
        y, stats = mixed(weight, agents.y, down.theta), mixed(weight, agents.stats, down.stats)
        return Local(y, stats, self.sgd.zero_velocity(y), y, stats, gain)

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(local.y, local.stats)
        y, velocity = self.sgd.step(local.y, local.velocity, g, clip=self.clip)
        return local._replace(y=y, stats=stats, velocity=velocity)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        after = Agents(local.y, local.stats, local.before, local.before_stats)
        return after, Up(local.y - agents.y, local.stats, local.gains)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        offer, intact = self.offer(server), now.intact[:, None]
        weight = weights(up.gains) * now.received[:, None]
        taken = spread(weight[:, 1:], offer) + torch.diag(weight[:, 0])
        taken = unless_absent(now, taken, server.taken)
        y = torch.where(intact, server.y + up.dy, server.y)
        stats = torch.where(intact, up.stats, server.stats)
        affinity = server.affinity + spread(up.gains[:, 1:], offer)
        received = unless_absent(now, now.received, server.received)  # absent agents: their last model stays
        return Server(y, stats, affinity, taken, received, server.r + 1), Info()

    def relations(self, server: Server) -> Tensor:
        return server.taken

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.y, agents.stats)
