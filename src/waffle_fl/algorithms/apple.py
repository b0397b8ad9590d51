"""APPLE (Luo & Wu 2022): each agent learns how to mix the core models of all agents.

Agent i uses w = sum_j p_ij core_j. Per mini-batch, with g = grad F_i(w):
core_i -= lr p_ii g;  p_ij -= eta_p (<g, core_j> + lambda(r) mu (p_ij - p0_j)). p0 are the agents' shares of samples;
lambda falls from 1 to 0 over the first rounds, so training starts global and becomes personal.
"""

from __future__ import annotations

import math
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
    inner,
    unless_absent,
)
from waffle_fl.algorithms.model_offers import Offer, best_others, mixed, packed, spread
from waffle_fl.constraints import at_least, between, check_fields, parameter


class Server(NamedTuple):
    core: Rows
    shift: Tensor  # (N, N), float64: row i is p_i - p0
    taken: Tensor  # (N, N), float64: row i is p_i of the last round
    samples: Tensor  # (N,), float64: registered sample counts; 0 before the first round
    received: Tensor  # (N,), bool: agents whose core model is available to others
    pull: Tensor  # lambda(r) mu of the next round
    r: Tensor


class Agents(NamedTuple):
    core: Rows  # sent to other agents
    w: Rows  # the mixture, which is the agent's model
    stats: Rows  # normalisation statistics of the mixture


class Down(NamedTuple):
    theta: Tensor  # (N, M, P): other agents' core models
    offered: Tensor  # (N, M), bool
    p0: Tensor  # (N, 1 + M), float64: for the agent's own core model and the offered ones
    p: Tensor  # (N, 1 + M), float64
    pull: Tensor  # (N,), float64


class Local(NamedTuple):
    core: Rows
    stats: Rows
    velocity: Rows
    p: Tensor
    theta: Tensor
    available: Tensor  # (N, 1 + M): 1 for available models, 0 for unused places
    p0: Tensor
    pull: Tensor


class Up(NamedTuple):
    dy: Rows
    p: Tensor


class Info(NamedTuple):
    pass


@final
@dataclass(frozen=True)
class APPLE:
    """A model for every agent: a mixture of all agents' core models with learned weights."""

    about: ClassVar[About] = About(
        name="apple",
        title="APPLE",
        trains_model_for="each agent",
        in_words="a mixture of all agents' models, with weights that the agent learns",
        cite="Luo & Wu, IJCAI 2022",
        order=170,
    )

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(2.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off, and then core models may diverge from each other."""
    eta_p: float = parameter(0.001, at_least(0))
    """Step size of the mixing weights p; 0 keeps them at p0, the agents' shares of all samples."""
    mu: float = parameter(0.1, at_least(0))
    """Strength of the penalty that pulls p towards p0 in the first rounds."""
    global_share: float = parameter(0.1, between(0, 1))
    """Share of the rounds over which this penalty falls to 0."""
    core_step: Literal["paper", "lr"] = "paper"
    """Gradient of the core model: paper (p_ii g), or lr (p_ii g / p0_i, so that its first steps have size lr)."""
    models: int = parameter(9, at_least(1))
    """Number of other agents' models that an agent receives per round; each needs the memory of one model."""
    explore: float = parameter(0.3, between(0, 1))
    """Share of these models that is drawn at random if there are more agents; the others are those with largest |p|."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = broadcast_to(net, agents)
        zeros = torch.zeros(agents, agents, dtype=torch.float64, device=net.params.device)
        r = torch.zeros((), dtype=torch.int64, device=zeros.device)
        pull = torch.full((), self.mu if self.global_share else 0.0, dtype=torch.float64, device=zeros.device)
        return Server(rows.clone(), zeros, zeros, zeros[0], zeros[0] > 0, pull, r), Agents(rows, rows, stats)

    def offer(self, server: Server) -> Offer:
        return best_others(server.taken.abs(), server.received, self.models, self.explore, server.r)

    def broadcast(self, server: Server, agents: int) -> Down:
        offer = self.offer(server)
        p0 = self._shares(server, offer)
        offset = torch.cat([server.shift.diagonal()[:, None], server.shift.gather(1, offer.ids)], dim=1)
        p = p0 + torch.where(p0 > 0, offset, 0.0)
        return Down(packed(server.core, offer), offer.offered, p0, p, server.pull.expand(agents))

    def _shares(self, server: Server, offer: Offer) -> Tensor:
        """Return p0: sample shares of the agent and of the agents offered to it; 1 if none is offered."""
        others = torch.where(offer.offered, server.samples[offer.ids], 0.0)
        samples = torch.cat([server.samples[:, None].clamp(min=1), others], dim=1)
        return samples / samples.sum(dim=1, keepdim=True)

    def begin(self, down: Down, agents: Agents) -> Local:
        available = torch.cat([torch.ones_like(down.offered[:, :1]), down.offered], dim=1).double()
        velocity = self.sgd.zero_velocity(agents.core)
        return Local(agents.core, agents.stats, velocity, down.p * available, down.theta, available, down.p0, down.pull)

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(mixed(local.p, local.core, local.theta), local.stats)
        products = [inner(g, core).double() for core in (local.core, *local.theta.unbind(1))]
        slope = torch.stack(products, dim=1) + local.pull[:, None] * (local.p - local.p0)
        own = local.p[:, :1] / (local.p0[:, :1] if self.core_step == "lr" else 1)
        core, velocity = self.sgd.step(local.core, local.velocity, own.to(g.dtype) * g, clip=self.clip)
        p = local.p - self.eta_p * local.available * slope
        return local._replace(core=core, stats=stats, velocity=velocity, p=p)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        w = mixed(local.p, local.core, local.theta)
        return Agents(local.core, w, local.stats), Up(local.core - agents.core, local.p)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        offer, intact = self.offer(server), now.intact[:, None]
        core = torch.where(intact, server.core + up.dy, server.core)
        taken = torch.where(intact, spread(up.p[:, 1:], offer) + torch.diag(up.p[:, 0]), server.taken)
        offset = up.p - self._shares(server, offer)
        reported = spread(torch.ones_like(up.p[:, 1:]), offer) + torch.eye(
            len(core), dtype=up.p.dtype, device=core.device
        )
        shift = spread(offset[:, 1:], offer) + torch.diag(offset[:, 0])
        shift = torch.where(intact & (reported > 0), shift, server.shift)
        pull = torch.full_like(server.pull, self.mu * self.loss_schedule(now.r, now.of))
        received = unless_absent(now, now.received, server.received)  # absent agents: their last model stays
        return Server(core, shift, taken, now.samples.double(), received, pull, server.r + 1), Info()

    def loss_schedule(self, r: int, rounds: int) -> float:
        """Return lambda(r): half a cosine from 1 to 0 over the first rounds, with r counted from 0."""
        last = self.global_share * rounds
        return (math.cos(math.pi * r / last) + 1) / 2 if r < last else 0.0

    def relations(self, server: Server) -> Tensor:
        size = server.taken.abs() * server.received
        return size / size.sum(dim=1, keepdim=True).clamp(min=TINY)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.w, agents.stats)
