"""MR-MTL (Liu et al. 2022): every agent trains a model of its own, kept close to the mean of all models.

Per mini-batch: w_k -= lr (grad F_k(w_k) + lam (w_k - x)). x is the mean of all w_k at the start of the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, broadcast_to
from waffle_fl.algorithms.fedavg import Down, Info, Server, Up, Weighting
from waffle_fl.algorithms.fedprox import Local
from waffle_fl.constraints import at_least, check_fields, parameter


class Agents(NamedTuple):
    w: Rows
    w_stats: Rows


@final
@dataclass(frozen=True)
class MRMTL:
    """A model for every agent, regularised towards the mean of all agents' models."""

    about: ClassVar[About] = About(
        name="mr-mtl",
        title="MR-MTL",
        trains_model_for="each agent",
        in_words="a personal model, kept close to the mean of all personal models",
        cite="Liu et al., NeurIPS 2022",
        order=270,
    )
    averages_cohorts: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    lam: float = parameter(1.0, at_least(0), search={"low": 0.01, "high": 3.0, "log": True})
    """Strength of the pull towards the mean: 0 is Local, a large value one global model; lr * lam must be below 2."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally, as the paper prints it, or by their number of samples."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(*net), Agents(*broadcast_to(net, agents))

    def broadcast(self, server: Server, agents: int) -> Down:
        return fedavg.send(server, agents)

    def begin(self, down: Down, agents: Agents) -> Local:
        return Local(agents.w, agents.w_stats, self.sgd.zero_velocity(agents.w), down.x)

    def step(self, local: Local, grad: Grad) -> Local:
        g, stats = grad(local.y, local.stats)
        pull = self.lam * (local.y - local.x)
        w, velocity = self.sgd.step(local.y, local.velocity, g + pull, clip=self.clip)
        return Local(w, stats, velocity, local.x)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.y, local.stats), Up(local.y - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return fedavg.aggregate(server, up, now, self.weighting)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.w, agents.w_stats)
