"""CoBo (Hashemi et al. 2024): agents learn with whom to collaborate from the agreement of their gradients.

min over x_i of sum_i F_i(x_i) + rho / 2 sum_{i<j} W_ij |x_i - x_j|^2, where W_ij in [0, 1] maximises
W_ij <grad F_i(z), grad F_j(z)> at the midpoint z = (x_i + x_j) / 2. Both problems are solved alternately, by SGD on x
and projected ascent on W. In every round the weights of some random pairs are updated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

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
    gradients,
    unless_absent,
)
from waffle_fl.algorithms.model_offers import Offer, packed, spread
from waffle_fl.constraints import at_least, between, check_fields, parameter
from waffle_fl.randomness import noise


class Server(NamedTuple):
    x: Rows  # the server's copy of each agent's model
    W: Tensor  # (N, N), float64, symmetric
    present: Tensor  # (N,), bool: agents whose last update was received
    paired: Tensor  # (N,), bool: agents that are put on the ring of the next round
    r: Tensor


class Agents(NamedTuple):
    x: Rows
    stats: Rows  # normalisation statistics of its own data; not mixed


class Down(NamedTuple):
    mean: Rows  # sum_j W_ij x_j / sum_j W_ij over the other agents
    total: Tensor  # (N,), float64: sum_j W_ij
    z: Tensor  # (N, 2 pairs, P): midpoints between the agent's model and those of its partners of this round


class Local(NamedTuple):
    x: Rows
    stats: Rows
    velocity: Rows
    mean: Rows  # this and the two following fields: constant during the round
    total: Tensor
    z: Tensor
    g: Tensor  # (N, 2 pairs, P): mean gradient at the midpoints, measured before training


class Up(NamedTuple):
    dy: Rows
    g: Rows  # (N, 2 pairs * P)


class Info(NamedTuple):
    pass


def partners(present: Tensor, pairs: int, r: Tensor) -> tuple[Offer, Tensor]:
    """Put the present agents on a random ring; return the partners of each, and the place where each partner has it.

    Partners are the next `pairs` agents of both directions, in the places +1, -1, +2, -2, ... The ring does not depend
    on absent agents.
    """
    count = present.sum()
    draws = noise(r.view(1), len(present))[0].gather(0, (present.cumsum(0) - 1).clamp(min=0))
    order = torch.where(present, draws, torch.iinfo(draws.dtype).max).argsort(stable=True)
    place = order.argsort(stable=True)
    distance = torch.arange(1, pairs + 1, device=order.device).repeat_interleave(2)
    forward = torch.arange(2 * pairs, device=order.device) % 2 == 0
    at = (place[:, None] + torch.where(forward, distance, -distance)) % count.clamp(min=1)
    opposite = 2 * distance == count  # the same partner in both directions counts once
    ids = order.gather(0, at.flatten()).view(at.shape)
    offered = present[:, None] & ((2 * distance < count) | (opposite & forward))
    places = torch.arange(2 * pairs, device=order.device)
    return Offer(ids, offered), torch.where(opposite, places, places ^ 1)


@final
@dataclass(frozen=True)
class CoBo:
    """A model for every agent, pulled towards the models of agents whose gradients agree with its own."""

    about: ClassVar[About] = About(
        name="cobo",
        title="CoBo",
        trains_model_for="each agent",
        in_words="a personal model, pulled towards the models of agents whose gradients agree",
        cite="Hashemi et al., NeurIPS 2024",
        order=220,
    )

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient, with the pull; 0 turns clipping off."""
    rho: float = parameter(0.05, at_least(0), search={"low": 0.005, "high": 0.5, "log": True})
    """Strength of the pull towards each partner: 0 is Local; lr * rho * (agents - 1) must be below 2."""
    gamma: float = parameter(0.01, at_least(0), server_side=True)
    """Step size of the weights W, per mini-batch step of the round; 0 keeps all weights at 1."""
    pairs: int = parameter(1, at_least(1))
    """Random pairs per agent whose weight is updated in a round; an agent receives 2 * pairs midpoints."""
    rehearsed: float = parameter(0.1, between(0, 1))
    """Share of an epoch's mini-batches on which the gradients at the midpoints are measured, before training."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = broadcast_to(net, agents)
        W = torch.ones(agents, agents, dtype=torch.float64, device=net.params.device)
        absent = torch.zeros(agents, dtype=torch.bool, device=W.device)
        r = torch.zeros((), dtype=torch.int64, device=W.device)
        return Server(rows.clone(), W, absent, absent, r), Agents(rows, stats)

    def expect(self, server: Server, asked: Tensor) -> Server:
        return server._replace(paired=asked)

    def broadcast(self, server: Server, agents: int) -> Down:
        weights = self._others(server)
        total = weights.sum(dim=1)
        mean = (weights / total.clamp(min=TINY)[:, None]) @ server.x.double()
        offer, _ = partners(server.paired, self.pairs, server.r)
        z = packed(server.x, offer)
        z = torch.where(offer.offered[:, :, None], (server.x[:, None] + z) / 2, 0.0)
        return Down(mean.to(server.x.dtype), total, z)

    def _others(self, server: Server) -> Tensor:
        """Return W for the other agents that are present; 0 on the diagonal."""
        own = torch.eye(len(server.W), dtype=torch.bool, device=server.W.device)
        return torch.where(server.present & ~own, server.W, 0.0)

    def begin(self, down: Down, agents: Agents) -> Local:
        velocity = self.sgd.zero_velocity(agents.x)
        return Local(agents.x, agents.stats, velocity, down.mean, down.total, down.z, torch.zeros_like(down.z))

    def rehearse(self, local: Local, grad: Grad) -> Local:
        nets = [Net(z, local.stats) for z in local.z.unbind(1)]
        g = torch.stack([net.params for net in gradients(grad, *nets)], dim=1)
        return local._replace(g=local.g + (g - local.g) / (grad.t + 1))

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(local.x, local.stats)
        pull = (self.rho * local.total).to(g.dtype)[:, None] * (local.x - local.mean)
        x, velocity = self.sgd.step(local.x, local.velocity, g, correction=pull, clip=self.clip)
        return local._replace(x=x, stats=stats, velocity=velocity)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.x, local.stats), Up(local.x - agents.x, local.g.flatten(1))

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        offer, place = partners(server.paired, self.pairs, server.r)
        g = up.g.view(len(up.g), 2 * self.pairs, -1)
        # The partner's gradient at the same midpoint is in another of its places.
        products = [
            (g[:, s].double() * g[offer.ids[:, s]].gather(1, _at(place[s], g))[:, 0].double()).sum(dim=1)
            for s in range(2 * self.pairs)
        ]
        # Differs from the authors' code: W is updated once per round, for as many steps as both agents made.
        steps = torch.minimum(now.steps[:, None], now.steps[offer.ids])
        ascent = self.gamma * steps.double() * torch.stack(products, dim=1)
        measured = now.received[:, None] & now.received[offer.ids]
        W = (server.W + spread(torch.where(measured, ascent, 0.0), offer)).clamp(0, 1)
        x = torch.where(now.intact[:, None], server.x + up.dy, server.x)
        present = unless_absent(now, now.received, server.present)
        return Server(x, W, present, present, server.r + 1), Info()

    def relations(self, server: Server) -> Tensor:
        weights = self._others(server) + torch.eye(len(server.W), dtype=torch.float64, device=server.W.device)
        return weights / weights.sum(dim=1, keepdim=True)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.x, agents.stats)


def _at(place: Tensor, g: Tensor) -> Tensor:
    """Return an index that selects one place of every row of (N, places, P)."""
    return place.expand(len(g), 1, g.shape[2])
