"""FedAMP (Huang et al. 2021): every agent has a personal model, which is pulled towards similar models.

Server and agents alternately minimise sum_i F_i(w_i) + lam sum_{i<j} A(|w_i - w_j|^2), A(d) = 1 - exp(-d / sigma). A
step of size alpha on the second sum gives each agent its cloud model u_i = sum_j xi_ij w_j; the agent then minimises
F_i(w) + lam / (2 alpha) |w - u_i|^2 by SGD.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, broadcast_to, lengths
from waffle_fl.constraints import above, at_least, check_fields, fraction, parameter


class Server(NamedTuple):
    w: Rows  # the server's copy of each agent's model
    xi: Tensor  # (N, N), float64: row i holds the weights of all models in u_i


class Agents(NamedTuple):
    w: Rows
    stats: Rows  # normalisation statistics of its own data; not mixed


class Down(NamedTuple):
    u: Rows


class Local(NamedTuple):
    w: Rows
    stats: Rows
    velocity: Rows
    u: Rows  # the anchor, constant during the round


class Up(NamedTuple):
    dy: Rows


class Info(NamedTuple):
    pass


def attention(w: Rows, received: Tensor, alpha: float, sigma: float, own_share: float = 0.0) -> Tensor:
    """Return xi: xi_ij = alpha A'(|w_i - w_j|^2) for j other than i, and xi_ii = 1 - sum_j xi_ij."""
    squared = torch.stack([lengths(w, row) for row in w]) ** 2
    own = torch.eye(len(w), dtype=torch.float64, device=w.device)
    others = alpha / sigma * torch.exp(-squared / sigma) * received.double() * (1 - own)
    # Differs from the paper: the others' weights are limited, so that close models do not overshoot their mean.
    others = others / (others.sum(dim=1, keepdim=True) / (1 - own_share)).clamp(min=1)
    return others + own * (1 - others.sum(dim=1, keepdim=True))


@final
@dataclass(frozen=True)
class FedAMP:
    """A model for every agent, pulled towards the models that are similar to it."""

    about: ClassVar[About] = About(
        name="fedamp",
        title="FedAMP",
        trains_model_for="each agent",
        in_words="a personal model, pulled towards the models of similar agents",
        cite="Huang et al., AAAI 2021",
        order=150,
    )

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    lam: float = parameter(1.0, at_least(0))
    """Strength of the attraction between models: 0 is Local; lr * lam / alpha must be below 2."""
    alpha: float = parameter(1.0, above(0))
    """Step size of the server on the attraction term; agents are pulled to their cloud model by lam / alpha."""
    sigma: float = parameter(0.3, above(0), server_side=True)
    """Squared distance between models at which their attraction falls to 1/e."""
    own: float = parameter(0.0, fraction(), server_side=True)
    """Least weight of the agent's own model in its cloud model; the others' weights sum to at most 1 - own."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = broadcast_to(net, agents)
        xi = torch.eye(agents, dtype=torch.float64, device=net.params.device)
        return Server(rows.clone(), xi), Agents(rows, stats)

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down((server.xi @ server.w.double()).to(server.w.dtype))

    def begin(self, down: Down, agents: Agents) -> Local:
        return Local(agents.w, agents.stats, self.sgd.zero_velocity(agents.w), down.u)

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(local.w, local.stats)
        pull = self.lam / self.alpha * (local.w - local.u)
        w, velocity = self.sgd.step(local.w, local.velocity, g + pull, clip=self.clip)
        return Local(w, stats, velocity, local.u)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.w, local.stats), Up(local.w - agents.w)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        w = torch.where(now.intact[:, None], server.w + up.dy, server.w)
        return Server(w, attention(w, now.received, self.alpha, self.sigma, self.own)), Info()

    def relations(self, server: Server) -> Tensor:
        return server.xi

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.w, agents.stats)
