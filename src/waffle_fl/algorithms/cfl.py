"""CFL (Sattler et al. 2020): one model per cluster; a cluster whose updates conflict is split in two.

A cluster trains as in FedAvg. If its mean update is short (below eps_mean: the shared model has converged) although an
agent's update is long (above eps_max: that agent's optimum is elsewhere), the cluster is split so that the largest
cosine between updates across the two parts is as small as possible. Both parts continue from the model they shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import SGD, TINY, About, Grad, Net, Optimiser, Round, Rows, broadcast_to, lengths
from waffle_fl.algorithms.fedavg import Agents, Down, Local, Up, Weighting
from waffle_fl.constraints import at_least, check_fields, parameter


class Server(NamedTuple):
    x: Rows  # row i: the model of agent i's cluster
    stats: Rows
    label: Tensor  # (N,): the cluster of each agent, named by the index of its first agent
    weights: Tensor  # (N, N), float64: row i holds the weights of the updates in x_i


class Info(NamedTuple):
    clusters: Tensor  # number of clusters


def cosines(dy: Rows) -> Tensor:
    """Return the cosines between all pairs of updates, (N, N), float64."""
    directions = dy.double() / lengths(dy).clamp(min=TINY)[:, None]
    return directions @ directions.T


def bottlenecks(similarity: Tensor, together: Tensor) -> Tensor:
    """Return for each pair of agents in a cluster the weakest link of the best chain between them."""
    own = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    links = torch.where(own, torch.inf, torch.where(together, similarity, -torch.inf))
    for k in range(len(links)):
        links = torch.maximum(links, torch.minimum(links[:, k : k + 1], links[k : k + 1]))
    return links


def split_clusters(label: Tensor, links: Tensor, together: Tensor, split: Tensor) -> Tensor:
    """Return new labels: where `split`, a cluster is split at its weakest link, which is the paper's best bipartition.

    The part that contains the first agent with a received update keeps the label. Agents without a received update keep
    theirs too.
    """
    numbers = torch.arange(len(label), device=label.device)
    weakest = torch.where(together, links, torch.inf).min(dim=1).values
    first = torch.where(together, numbers, len(label) - 1).min(dim=1).values
    leaving = split & (numbers != first) & (links.gather(1, first[:, None])[:, 0] <= weakest)
    new_part = together & leaving & leaving[:, None]
    return torch.where(leaving, torch.where(new_part, numbers, len(label)).min(dim=1).values, label)


@final
@dataclass(frozen=True)
class CFL:
    """A model for every cluster of agents; a cluster is split when its updates point in different directions."""

    about: ClassVar[About] = About(
        name="cfl",
        title="CFL",
        trains_model_for="each agent",
        in_words="one model per group of agents; a group is split when its updates point in different directions",
        cite="Sattler et al., IEEE TNNLS 2020",
        order=200,
    )

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    eps_mean: float = parameter(0.4, at_least(0), server_side=True)
    """Split a cluster only if its mean update is shorter than this; 0 never splits, which is FedAvg."""
    eps_max: float = parameter(1.6, at_least(0), server_side=True)
    """Split a cluster only if its longest update is longer than this."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples as in the paper."""
    split_first: bool = parameter(False, server_side=True)
    """Split a cluster before its updates are averaged, so that both parts already average alone in that round."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = broadcast_to(net, agents)
        label = torch.zeros(agents, dtype=torch.int64, device=net.params.device)
        weights = torch.zeros(agents, agents, dtype=torch.float64, device=net.params.device)
        return Server(rows.clone(), stats.clone(), label, weights), Agents()

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(server.x, server.stats)

    def begin(self, down: Down, agents: Agents) -> Local:
        return fedavg.begin(self.sgd, down)

    def step(self, local: Local, grad: Grad) -> Local:
        return fedavg.step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return agents, Up(local.y - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        same = server.label == server.label[:, None]
        weights, mean = self._mean(server.label, up.dy, now)
        longest = torch.where(same & now.received, lengths(up.dy), 0.0).max(dim=1).values
        split = (mean.norm(dim=1) < self.eps_mean) & (longest > self.eps_max)
        together = same & now.received & now.received[:, None]
        label = split_clusters(server.label, bottlenecks(cosines(up.dy), together), together, split & now.received)
        if self.split_first:
            weights, mean = self._mean(label, up.dy, now)
        x = (server.x.double() + mean).to(server.x.dtype)
        stats = (weights @ up.stats.double()).to(server.stats.dtype)
        stats = torch.where(weights.sum(dim=1, keepdim=True) > 0, stats, server.stats)
        clusters = (label == torch.arange(len(label), device=label.device)).sum()
        return Server(x, stats, label, weights), Info(clusters)

    def _mean(self, label: Tensor, dy: Rows, now: Round) -> tuple[Tensor, Tensor]:
        """Return the weights (N, N) of all agents in each agent's cluster, and the mean updates, in float64."""
        members = ((label == label[:, None]) & now.received).double()
        counts = members if self.weighting == "equal" else members * now.samples.double()
        weights = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        return weights, (weights @ dy.double()).index_select(0, label)  # all agents of a cluster have the same row

    def relations(self, server: Server) -> Tensor:
        return server.weights

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return broadcast_to(Net(server.x, server.stats), count)
