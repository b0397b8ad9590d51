"""Local: every agent trains alone and sends nothing. The baseline that a federation must beat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

from waffle_fl.algorithms.contract import (
    CLIP,
    SGD,
    About,
    Grad,
    Net,
    Optimiser,
    Round,
    Rows,
    Weights,
    broadcast_to,
    one_hot,
)
from waffle_fl.constraints import at_least, check_fields, parameter


class Server(NamedTuple):
    pass


class Agents(NamedTuple):
    y: Rows
    stats: Rows


class Down(NamedTuple):
    pass


class Training(NamedTuple):
    y: Rows
    stats: Rows
    velocity: Rows


class Up(NamedTuple):
    pass


class Info(NamedTuple):
    weights: Weights


@final
@dataclass(frozen=True)
class Local:
    """A model for every agent: SGD on its own data only."""

    about: ClassVar[About] = About(
        name="local",
        title="Local",
        trains_model_for="each agent",
        in_words="a model trained alone, on the agent's own data",
        order=0,
    )
    for_alice: ClassVar[bool] = True
    averages_cohorts: ClassVar[bool] = True
    sends_nothing: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0), search=CLIP)
    """Largest norm of a gradient; 0 turns clipping off."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(), Agents(*broadcast_to(net, agents))

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down()

    def begin(self, down: Down, agents: Agents) -> Training:
        return Training(agents.y, agents.stats, self.sgd.zero_velocity(agents.y))

    def step(self, local: Training, grad: Grad) -> Training:
        g, stats = grad(local.y, local.stats)
        y, velocity = self.sgd.step(local.y, local.velocity, g, clip=self.clip)
        return Training(y, stats, velocity)

    def finish(self, down: Down, agents: Agents, local: Training) -> tuple[Agents, Up]:
        return Agents(local.y, local.stats), Up()

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return server, Info(one_hot(now.alice, len(now.received)))

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.y, agents.stats)
