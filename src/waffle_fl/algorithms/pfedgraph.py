"""pFedGraph (Ye et al. 2023): the server infers, for each agent, with which weights the others' models help it.

The weights of agent i minimise -sum_j w_j cos(theta_i - theta_0, theta_j - theta_0) + alpha |w - p|^2 on the simplex.
p are the agents' shares of samples, theta_0 is the initial model. The agent starts from sum_j w_j theta_j and minimises
F_i(theta) - lam sum_j w_j cos(theta, theta_j).
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
    Vector,
    broadcast_to,
    inner,
    lengths,
    normalised,
)
from waffle_fl.constraints import above, at_least, between, check_fields, parameter

ABSENT = -1e30  # far below any other entry, so that the projection gives it weight 0
SHORTEST = 1e-30  # keeps divisions by the length of a model finite


class Server(NamedTuple):
    theta: Rows  # the server's copy of each agent's trained model
    theta_stats: Rows
    start: Rows  # row i: sum_j w_ij theta_j
    stats: Rows
    w: Tensor  # (N, N), float64
    theta_0: Vector
    trained: Tensor  # (), float64: 0 before the first round, then 1


class Agents(NamedTuple):
    y: Rows  # the trained model
    stats: Rows


class Down(NamedTuple):
    start: Rows
    stats: Rows
    toward: Rows  # sum_j w_ij theta_j / |theta_j|; 0 in the first round


class Local(NamedTuple):
    theta: Rows
    stats: Rows
    velocity: Rows
    toward: Rows


class Up(NamedTuple):
    dy: Rows
    stats: Rows


class Info(NamedTuple):
    pass


def on_simplex(points: Tensor) -> Tensor:
    """Return the nearest point of the probability simplex to each row."""
    ordered = points.sort(dim=1, descending=True).values
    excess = ordered.cumsum(dim=1) - 1
    counts = torch.arange(1, points.shape[1] + 1, dtype=points.dtype, device=points.device)
    kept = (ordered > excess / counts).sum(dim=1, keepdim=True)
    return (points - excess.gather(1, kept - 1) / kept).clamp(min=0)


def graph(updates: Rows, samples: Tensor, received: Tensor, alpha: float, saturation: float) -> Tensor:
    """Return w (N, N): row i minimises -<w, cosines of update i> + alpha |w - p|^2 on the simplex."""
    directions = updates.double() / lengths(updates).clamp(min=TINY)[:, None]
    cosines = directions @ directions.T
    own = torch.eye(len(updates), dtype=torch.bool, device=updates.device)
    cosines = torch.where(own | (cosines > saturation), 1.0, cosines)
    p = normalised(received * samples.double(), received)
    return on_simplex(torch.where(received | own, p + cosines / (2 * alpha), ABSENT))


@final
@dataclass(frozen=True)
class PFedGraph:
    """A model for every agent, started from a mixture of all models with weights by similarity and size."""

    about: ClassVar[About] = About(
        name="pfedgraph",
        title="pFedGraph",
        trains_model_for="each agent",
        in_words="a personal model, started each round from a mixture of models that changed in a similar way",
        cite="Ye et al., ICML 2023",
        order=230,
    )

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    alpha: float = parameter(0.8, above(0), server_side=True, search={"low": 0.05, "high": 20.0, "log": True})
    """Pull of the weights towards the shares of samples: large values are FedAvg, small ones prefer similar models."""
    lam: float = parameter(0.01, at_least(0))
    """Strength of the cosine term in local training; 0 turns it off."""
    cosine: Literal["attract", "repel"] = "attract"
    """Sign of the cosine term: attract rewards similarity to the others, repel (the released code) penalises it."""
    saturation: float = parameter(1.0, between(0, 1), server_side=True)
    """Cosines of updates above this count as 1 in the weights; 1 turns this off, the released code has 0.9."""
    used: Literal["trained", "mixed"] = "trained"
    """The agent's model: trained (after local training), or mixed (from which the next round starts)."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = (part.clone() for part in broadcast_to(net, agents))
        w = torch.eye(agents, dtype=torch.float64, device=net.params.device)
        return Server(rows, stats, rows, stats, w, net.params, w.new_zeros(())), Agents(rows, stats)

    def broadcast(self, server: Server, agents: int) -> Down:
        scale = server.trained * server.w / lengths(server.theta).clamp(min=TINY)
        return Down(server.start, server.stats, (scale @ server.theta.double()).to(server.theta.dtype))

    def begin(self, down: Down, agents: Agents) -> Local:
        return Local(down.start, down.stats, self.sgd.zero_velocity(down.start), down.toward)

    def step(self, local: Local, grad: Grad) -> Local:
        theta, toward = local.theta, local.toward
        g, stats = grad(theta, local.stats)
        if self.lam:
            size = inner(theta, theta).sqrt().clamp(min=SHORTEST)[:, None]
            along = inner(toward, theta)[:, None] / size**2
            slope = (toward - along * theta) / size  # of sum_j w_j cos(theta, theta_j)
            g = torch.add(g, slope, alpha=-self.lam if self.cosine == "attract" else self.lam)
        theta, velocity = self.sgd.step(theta, local.velocity, g, clip=self.clip)
        return Local(theta, stats, velocity, toward)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.theta, local.stats), Up(local.theta - down.start, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        intact = now.intact[:, None]
        theta = torch.where(intact, server.start + up.dy, server.theta)
        theta_stats = torch.where(intact, up.stats, server.theta_stats)
        w = graph(theta - server.theta_0, now.samples, now.received, self.alpha, self.saturation)
        start = (w @ theta.double()).to(theta.dtype)
        stats = (w @ theta_stats.double()).to(theta_stats.dtype)
        return Server(theta, theta_stats, start, stats, w, server.theta_0, torch.ones_like(server.trained)), Info()

    def relations(self, server: Server) -> Tensor:
        return server.w

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        if self.used == "mixed":
            return broadcast_to(Net(server.start, server.stats), count)
        return Net(agents.y, agents.stats)
