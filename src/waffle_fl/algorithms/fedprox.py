"""FedProx (Li et al. 2020): FedAvg with a proximal term that keeps local training close to its start.

Per mini-batch: y -= lr (grad F(y) + mu (y - x)). x is the global model at the start of the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, broadcast_to
from waffle_fl.algorithms.fedavg import Agents, Down, Info, Server, Up, Weighting
from waffle_fl.constraints import at_least, check_fields, parameter


class Local(NamedTuple):
    y: Rows
    stats: Rows
    velocity: Rows
    x: Rows  # the anchor, constant during the round


@final
@dataclass(frozen=True)
class FedProx:
    """One global model: FedAvg with local training kept close to the global model."""

    about: ClassVar[About] = About(
        name="fedprox",
        title="FedProx",
        trains_model_for="all agents",
        in_words="one shared global model; local training is kept close to it",
        cite="Li et al., MLSys 2020",
        order=80,
    )
    averages_cohorts: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    mu: float = parameter(0.1, at_least(0))
    """Strength of the pull towards the global model: 0 is FedAvg; lr * mu must be below 2."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(*net), Agents()

    def broadcast(self, server: Server, agents: int) -> Down:
        return fedavg.send(server, agents)

    def begin(self, down: Down, agents: Agents) -> Local:
        return Local(down.x, down.stats, self.sgd.zero_velocity(down.x), down.x)

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(local.y, local.stats)
        pull = self.mu * (local.y - local.x)
        y, velocity = self.sgd.step(local.y, local.velocity, g + pull, clip=self.clip)
        return Local(y, stats, velocity, local.x)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return agents, Up(local.y - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return fedavg.aggregate(server, up, now, self.weighting)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return broadcast_to(Net(server.x, server.stats), count)
