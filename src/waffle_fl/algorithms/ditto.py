"""Ditto (Li et al. 2021): a personal model for every agent, kept close to the global one by a proximal term.

Per mini-batch: v -= lr (grad F(v) + lam (v - x));  w -= lr grad F(w).

x is the global model at the start of the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, broadcast_to, gradients
from waffle_fl.algorithms.fedavg import Down, Info, Server, Up, Weighting
from waffle_fl.constraints import at_least, check_fields, parameter


class Agents(NamedTuple):
    v: Rows
    v_stats: Rows


class Local(NamedTuple):
    w: Rows
    stats: Rows
    velocity: Rows
    v: Rows
    v_stats: Rows
    v_velocity: Rows
    x: Rows  # the anchor, constant during the round


@final
@dataclass(frozen=True)
class Ditto:
    """A model for every agent, regularised towards the global one."""

    about: ClassVar[About] = About(
        name="ditto",
        title="Ditto",
        trains_model_for="each agent",
        in_words="a personal model, kept close to a shared global model",
        cite="Li et al., ICML 2021",
        order=70,
    )

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    lam: float = parameter(1.0, at_least(0), search={"low": 0.01, "high": 3.0, "log": True})
    """Strength of the pull towards the global model: 0 is Local, a large value FedAvg; lr * lam must be below 2."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples, as the authors do."""

    def __post_init__(self) -> None:
        check_fields(self)

    def helper(self) -> fedavg.FedAvg:
        return fedavg.FedAvg(self.sgd, self.clip, self.weighting)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(*net), Agents(*broadcast_to(net, agents))

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(*broadcast_to(Net(server.x, server.stats), agents))

    def begin(self, down: Down, agents: Agents) -> Local:
        velocity = self.sgd.zero_velocity(down.x)
        return Local(down.x, down.stats, velocity, agents.v, agents.v_stats, velocity, down.x)

    def step(self, local: Local, grad: Grad) -> Local:
        (g_w, stats), (g_v, v_stats) = gradients(grad, Net(local.w, local.stats), Net(local.v, local.v_stats))
        w, velocity = self.sgd.step(local.w, local.velocity, g_w, clip=self.clip)
        pull = self.lam * (local.v - local.x)
        v, v_velocity = self.sgd.step(local.v, local.v_velocity, g_v + pull, clip=self.clip)
        return Local(w, stats, velocity, v, v_stats, v_velocity, local.x)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.v, local.v_stats), Up(local.w - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return fedavg.aggregate(server, up, now, self.weighting)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.v, agents.v_stats)
