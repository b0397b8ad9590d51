"""FedCollab (Bao et al. 2023): agents form coalitions by the distance of their data and the size of their data sets.

The coalitions minimise the mean over agents i of C / sqrt(n_c) + sum_{j in c} n_j / n_c D_ij, where c is the coalition
of i, n_c its number of samples and D_ij the distance between the data of i and j. Each coalition then trains with
FedAvg. Here D is measured in the first rounds: agents train alone, evaluate each other's models, and report the errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, Vector, broadcast_to
from waffle_fl.algorithms.fedavg import Agents, Local
from waffle_fl.algorithms.model_offers import Offer, packed, spread
from waffle_fl.constraints import at_least, check_fields, parameter
from waffle_fl.randomness import noise

RESTARTS, SWEEPS = 100, 10  # of the greedy search for coalitions
FORBIDDEN = 1e9  # a distance that no coalition accepts
GAIN = 1e-12  # an agent moves only if the cost falls by more than rounding


class Server(NamedTuple):
    x: Rows  # row i: the model of agent i's coalition
    stats: Rows
    x_0: Vector
    stats_0: Vector
    gap: Tensor  # (N, N), float64: |error of model j at agent i - error of model j at agent j|; 1 if unknown
    label: Tensor  # (N,): the coalition of each agent, named by the index of its first agent
    weights: Tensor  # (N, N), float64: row i holds the weights of the updates in x_i
    r: Tensor


class Down(NamedTuple):
    x: Rows
    stats: Rows
    theta: Tensor  # (N, M, P): other agents' models, in the rounds in which models are exchanged
    theta_stats: Tensor  # (N, M, S)
    losses: Tensor  # (N, 1 + M), float64, filled in by the agent: share of errors of its own model and of the others


class Up(NamedTuple):
    dy: Rows
    stats: Rows
    errors: Tensor


class Info(NamedTuple):
    coalitions: Tensor  # number of coalitions


def form_coalitions(distance: Tensor, samples: Tensor, present: Tensor, C: float) -> Tensor:
    """Return the coalition of each agent, by the authors' greedy search: agents move to where the mean bound is least.

    All restarts are computed at once. They differ in the order of the agents; half of them begin with all agents alone,
    half with random coalitions. Absent agents stay alone.
    """
    agents, device = len(samples), samples.device
    n = torch.where(present, samples.double(), 1.0)
    own = torch.eye(agents, dtype=torch.float64, device=device)
    distance = torch.where(present & present[:, None], distance, FORBIDDEN) * (1 - own)
    restart, rank = torch.arange(RESTARTS, device=device), (present.cumsum(0) - 1).clamp(min=0)
    draws, others = (noise(2 * restart + k, agents)[:, rank] for k in range(2))
    order = torch.where(present, draws, torch.iinfo(draws.dtype).max).argsort(dim=1, stable=True)
    groups = 1 + restart[:, None] % present.sum().clamp(min=1)
    alone = ~present | (restart % 2 == 0)[:, None]
    label = torch.where(alone, torch.arange(agents, device=device), order.gather(1, others % groups))
    member = F.one_hot(label, agents).double()  # (restart, agent, coalition)
    size, count = member.sum(dim=1), (n[:, None] * member).sum(dim=1)
    shift = (member * ((n * distance) @ member)).sum(dim=1)  # sum of n_j D_ij within each coalition

    def cost(size: Tensor, count: Tensor, shift: Tensor) -> Tensor:
        return torch.where(size > 0, (C * size * count.clamp(min=1).sqrt() + shift) / count.clamp(min=1), 0.0)

    for step in range(SWEEPS * agents):
        mover = order[:, step % agents, None]
        here, n_q, row = label.gather(1, mover), n[mover], distance[mover[:, 0]]
        added = torch.zeros_like(shift).scatter_add(1, label, (n + n_q) * row)
        one = torch.ones_like(n_q)
        size, count = size.scatter_add(1, here, -one), count.scatter_add(1, here, -n_q)
        shift = shift.scatter_add(1, here, -added.gather(1, here))
        change = cost(size + 1, count + n_q, shift + added) - cost(size, count, shift)
        least = change.min(dim=1, keepdim=True)
        there = torch.where(change.gather(1, here) <= least.values + GAIN, here, least.indices)
        size, count = size.scatter_add(1, there, one), count.scatter_add(1, there, n_q)
        shift, label = shift.scatter_add(1, there, added.gather(1, there)), label.scatter(1, mover, there)
    best = label.index_select(0, cost(size, count, shift).sum(dim=1).argmin().view(1)).squeeze(0)
    return (best == best[:, None]).double().argmax(dim=1)


@final
@dataclass(frozen=True)
class FedCollab:
    """A model for every coalition of agents; coalitions are formed once, by distances and sizes of the data."""

    about: ClassVar[About] = About(
        name="fedcollab",
        title="FedCollab",
        trains_model_for="each agent",
        in_words="one model per group of agents; groups are formed by how similar and how large the data sets are",
        cite="Bao et al., ICML 2023",
        order=240,
    )
    scored_on: ClassVar[Literal["training", "validation"]] = "validation"
    scored_by: ClassVar[Literal["loss", "error"]] = "error"

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    C: float = parameter(10.0, at_least(0), server_side=True, search={"low": 1.0, "high": 50.0, "log": True})
    """Value of more samples compared with similar data: 0 is Local, large values are FedAvg after the first rounds."""
    alone: int = parameter(3, at_least(1))
    """Rounds in which agents train alone before they exchange models."""
    models: int = parameter(3, at_least(1))
    """Number of other agents' models that an agent evaluates per round, until it has evaluated all of them."""
    start: Literal["trained", "initial"] = parameter("trained", server_side=True)
    """Model with which a coalition starts: the mean of its members' models, or the initial model (the authors)."""
    weighting: fedavg.Weighting = parameter("samples", server_side=True)
    """Weight the agents of a coalition by their number of samples, as the authors do, or equally."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = (part.clone() for part in broadcast_to(net, agents))
        unknown = torch.ones(agents, agents, dtype=torch.float64, device=rows.device)
        label = torch.arange(agents, device=rows.device)
        r = torch.zeros((), dtype=torch.int64, device=rows.device)
        return Server(rows, stats, *net, unknown, label, torch.zeros_like(unknown), r), Agents()

    def asks_all(self, r: int, of: int, agents: int) -> bool:
        return r <= self._last_alone(agents)

    def _last_alone(self, agents: int) -> int:
        """Return the round after which coalitions are formed: agents have evaluated each other's models."""
        return self.alone + -(-(agents - 1) // self.models)

    def offer(self, server: Server) -> Offer:
        """Return the agents whose models are evaluated in this round: the next M agents, in turn."""
        agents = torch.arange(len(server.x), device=server.x.device)
        turn = server.r - self.alone
        distance = turn * self.models + torch.arange(1, self.models + 1, device=agents.device)
        offered = (turn >= 0) & (distance < len(agents))
        return Offer((agents[:, None] + distance) % len(agents), offered.expand(len(agents), -1))

    def broadcast(self, server: Server, agents: int) -> Down:
        offer = self.offer(server)
        unknown = torch.zeros(agents, 1 + self.models, dtype=torch.float64, device=server.x.device)
        return Down(server.x, server.stats, packed(server.x, offer), packed(server.stats, offer), unknown)

    def candidates(self, down: Down, agents: Agents) -> Net:
        theta, stats = torch.cat([down.x[:, None], down.theta], dim=1), [down.stats[:, None], down.theta_stats]
        return Net(theta, torch.cat(stats, dim=1))

    def begin(self, down: Down, agents: Agents) -> Local:
        return fedavg.begin(self.sgd, Net(down.x, down.stats))

    def step(self, local: Local, grad: Grad) -> Local:
        return fedavg.step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return agents, Up(local.y - down.x, local.stats, down.losses)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        agents, label = len(server.x), server.label
        gap = self._gap(server, up, now)
        formed = now.r == self._last_alone(agents)
        if formed:
            label = form_coalitions(torch.maximum(gap, gap.T), now.samples, now.received, self.C)
        members = ((label == label[:, None]) & now.received).double()
        shares = members * now.samples.double() if self.weighting == "samples" else members
        weights = shares / shares.sum(dim=1, keepdim=True).clamp(min=1)
        x = self._mean(weights, server.x, server.x + up.dy)
        stats = self._mean(weights, server.stats, up.stats)
        if formed and self.start == "initial":
            x, stats = (part.clone() for part in broadcast_to(Net(server.x_0, server.stats_0), agents))
        coalitions = (label == torch.arange(agents, device=label.device)).sum()
        return Server(x, stats, server.x_0, server.stats_0, gap, label, weights, server.r + 1), Info(coalitions)

    def _gap(self, server: Server, up: Up, now: Round) -> Tensor:
        """Return the differences in error, with those that were measured in this round."""
        offer = self.offer(server)
        found = (up.errors[:, 1:] - up.errors[:, :1].squeeze(1)[offer.ids]).abs()
        measured = now.received[:, None] & now.received[offer.ids]
        new = spread(torch.where(measured, 1 + found, 0.0), offer)  # 1 is added so that 0 means not measured
        return torch.where(new > 0, new - 1, server.gap)

    @staticmethod
    def _mean(weights: Tensor, before: Rows, rows: Rows) -> Rows:
        mean = (weights @ rows.double()).to(rows.dtype)
        return torch.where(weights.sum(dim=1, keepdim=True) > 0, mean, before)

    def relations(self, server: Server) -> Tensor:
        return server.weights

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return broadcast_to(Net(server.x, server.stats), count)
