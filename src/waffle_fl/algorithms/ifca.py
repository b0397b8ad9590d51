"""IFCA (Ghosh et al. 2020): k cluster models; each agent trains the one that fits its data best.

Per round an agent receives all k cluster models theta_j, chooses the one with the least loss on its training data and
trains it. The server averages the updates of agents that chose the same model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import (
    SGD,
    About,
    Grad,
    Net,
    Optimiser,
    Round,
    Rows,
    apply_update,
    averaged,
    normalised,
)
from waffle_fl.algorithms.fedavg import Weighting
from waffle_fl.constraints import at_least, check_fields, parameter
from waffle_fl.randomness import noise


class Server(NamedTuple):
    theta: Rows  # (k, P)
    stats: Rows  # (k, S)
    chosen: Tensor  # (N, k), float64: the agent's count in the cluster of its last round; zeros if not received


class Agents(NamedTuple):
    chosen: Tensor  # (N, k), float64


class Down(NamedTuple):
    theta: Tensor  # (N, k, P)
    stats: Tensor  # (N, k, S)
    losses: Tensor  # (N, k), float64, filled in by the agent


class Local(NamedTuple):
    y: Rows
    stats: Rows
    velocity: Rows


class Up(NamedTuple):
    dy: Rows
    stats: Rows
    chosen: Tensor


class Info(NamedTuple):
    pass


def starts(net: Net, clusters: int) -> Rows:
    """Return k initial models: the first is the given one, the others have the same parameters with random signs.

    Initial parameters are distributed symmetrically about 0, so a change of sign keeps their distribution. Parameters
    that start at 1, such as the gains of normalisation layers, keep their sign.
    """
    draws = noise(torch.arange(clusters, device=net.params.device), len(net.params))
    flipped = (draws % 2 == 1) & (torch.arange(clusters, device=draws.device) > 0)[:, None] & (net.params != 1)
    return torch.where(flipped, -net.params, net.params)


def best(down: Down) -> Tensor:
    """Return the index of the cluster with the least loss; losses that are not finite count as infinite."""
    return torch.where(torch.isfinite(down.losses), down.losses, torch.inf).argmin(dim=1)


def select_model(stack: Tensor, cluster: Tensor) -> Rows:
    """Return row i of model cluster_i from (N, k, P)."""
    return stack.gather(1, cluster[:, None, None].expand(-1, 1, stack.shape[2])).squeeze(1)


@final
@dataclass(frozen=True)
class IFCA:
    """A model for every cluster of agents; each agent joins the cluster whose model fits it best."""

    about: ClassVar[About] = About(
        name="ifca",
        title="IFCA",
        trains_model_for="each agent",
        in_words="one model per group of agents; each agent chooses the group whose model fits its data best",
        cite="Ghosh et al., NeurIPS 2020",
        order=190,
    )
    scored_on: ClassVar[Literal["training", "validation"]] = "training"

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    clusters: int = parameter(3, at_least(1))
    """Number of models k; 1 is FedAvg."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples, as the authors do."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        unassigned = torch.zeros(agents, self.clusters, dtype=torch.float64, device=net.params.device)
        server = Server(starts(net, self.clusters), net.stats.repeat(self.clusters, 1), unassigned)
        return server, Agents(unassigned)

    def broadcast(self, server: Server, agents: int) -> Down:
        unknown = torch.zeros(agents, self.clusters, dtype=torch.float64, device=server.theta.device)
        return Down(server.theta.expand(agents, -1, -1), server.stats.expand(agents, -1, -1), unknown)

    def candidates(self, down: Down, agents: Agents) -> Net:
        return Net(down.theta, down.stats)

    def begin(self, down: Down, agents: Agents) -> Local:
        y = select_model(down.theta, best(down))
        return Local(y, select_model(down.stats, best(down)), self.sgd.zero_velocity(y))

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(local.y, local.stats)
        y, velocity = self.sgd.step(local.y, local.velocity, g, clip=self.clip)
        return Local(y, stats, velocity)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        cluster = best(down)
        chosen = (cluster[:, None] == torch.arange(self.clusters, device=cluster.device)).double()
        return Agents(chosen), Up(local.y - select_model(down.theta, cluster), local.stats, chosen)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        theta, stats = [], []
        counts = now.received if self.weighting == "equal" else now.received * now.samples
        for x, x_stats, members in zip(server.theta, server.stats, up.chosen.T, strict=True):
            weights = normalised(members * counts, torch.zeros_like(now.received))  # all 0 if no agent chose it
            theta.append(apply_update(x, weights, up.dy))
            stats.append(torch.where(weights.sum() > 0, averaged(x_stats, weights, up.stats), x_stats))
        chosen = up.chosen * counts[:, None]
        return Server(torch.stack(theta), torch.stack(stats), chosen), Info()

    def relations(self, server: Server) -> Tensor:
        together = (server.chosen > 0).double() @ server.chosen.T
        return together / together.sum(dim=1, keepdim=True).clamp(min=1)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        cluster = agents.chosen.argmax(dim=1)
        return Net(server.theta.index_select(0, cluster), server.stats.index_select(0, cluster))
