"""pFedMe (T. Dinh et al. 2020): personal models solve a proximal problem around w, and w moves towards them.

Per mini-batch: theta -= lr (grad f(theta) + lam (theta - w)), a few times; then w -= eta lam (w - theta).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

from waffle_fl.algorithms import fedavg
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
    broadcast_to,
)
from waffle_fl.algorithms.fedavg import Down, Info, Server, Up, Weighting
from waffle_fl.constraints import above, at_least, check_fields, parameter


class Agents(NamedTuple):
    theta: Rows
    stats: Rows


class Local(NamedTuple):
    w: Rows
    theta: Rows
    stats: Rows
    velocity: Rows


@final
@dataclass(frozen=True)
class PFedMe:
    """A model for every agent, kept close to a global model that moves towards the personal models."""

    about: ClassVar[About] = About(
        name="pfedme",
        title="pFedMe",
        trains_model_for="each agent",
        in_words="a personal model, kept close to a shared global model that moves towards all of them",
        cite="T. Dinh et al., NeurIPS 2020",
        order=110,
    )
    averages_cohorts: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    lam: float = parameter(1.0, at_least(0))
    """Strength of the pull of the personal model towards the global one; lr * lam must be below 2."""
    inner_steps: int = parameter(5, at_least(1))
    """Number of steps of the personal model per mini-batch."""
    eta: float = parameter(0.5, above(0))
    """Step size of the global model: it moves by eta * lam of the way to the personal model."""
    beta: float = parameter(1.0, above(0), server_side=True)
    """Share of the way that the server moves towards the mean of the agents' models."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples, as the authors do."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(*net), Agents(*broadcast_to(net, agents))

    def broadcast(self, server: Server, agents: int) -> Down:
        return fedavg.send(server, agents)

    def begin(self, down: Down, agents: Agents) -> Local:
        return Local(down.x, down.x, down.stats, self.sgd.zero_velocity(down.x))

    def step(self, local: Local, grad: Grad) -> Local:
        w, theta, stats, velocity = local
        for _ in range(self.inner_steps):
            g, stats = grad(theta, stats)
            theta, velocity = self.sgd.step(theta, velocity, g + self.lam * (theta - w), clip=self.clip)
        return Local(w - self.eta * self.lam * (w - theta), theta, stats, velocity)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.theta, local.stats), Up(local.w - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        weights = fedavg.shares(self.weighting, now.received, now.samples)
        x = apply_update(server.x, weights, up.dy, self.beta, now.cohort)
        return Server(x, averaged(server.stats, weights, up.stats, now.cohort)), Info(weights)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.theta, agents.stats)
