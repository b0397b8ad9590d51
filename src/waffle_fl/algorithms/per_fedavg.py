"""Per-FedAvg (Fallah et al. 2020): a global model that is good after one gradient step on an agent's own data.

One update uses mini-batches D, D' and, in the Hessian-free variant, D'':

    adapted = w - inner_lr grad f(w; D);   d = grad f(adapted; D')
    w      -= lr d                                                                     first order
    w      -= lr (d - inner_lr (grad f(w + h d; D'') - grad f(w - h d; D'')) / 2 h)    Hessian-free
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, broadcast_to, gradients
from waffle_fl.algorithms.fedavg import Down, Info, Server, Up, Weighting
from waffle_fl.constraints import above, at_least, check_fields, parameter


class Agents(NamedTuple):
    v: Rows  # the global model of the round after one step on the agent's first mini-batch
    v_stats: Rows


class Local(NamedTuple):
    w: Rows
    stats: Rows
    velocity: Rows
    adapted: Rows
    d: Rows  # the gradient at `adapted`; without columns in the first-order variant
    v: Rows
    v_stats: Rows


@final
@dataclass(frozen=True)
class PerFedAvg:
    """A model for every agent: one gradient step from a global model that is trained as a start for that step."""

    about: ClassVar[About] = About(
        name="per-fedavg",
        title="Per-FedAvg",
        trains_model_for="each agent",
        in_words="a shared global model trained for adaptation, after one gradient step on the agent's data",
        cite="Fallah et al., NeurIPS 2020",
        order=100,
    )
    averages_cohorts: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of an update's gradient; 0 turns clipping off."""
    inner_lr: float = parameter(0.03, at_least(0))
    """Step size of the adaptation step."""
    variant: Literal["first-order", "hessian-free"] = "first-order"
    """Ignore the Hessian, or approximate it by a difference of gradients; an update uses 2 or 3 mini-batches."""
    difference_step: float = parameter(0.001, above(0))
    """Step h of this difference, in lengths of the gradient after adaptation; hessian-free only."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples, as the authors do."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(*net), Agents(*broadcast_to(net, agents))

    def broadcast(self, server: Server, agents: int) -> Down:
        return fedavg.send(server, agents)

    def begin(self, down: Down, agents: Agents) -> Local:
        d = down.x[:, :0] if self.variant == "first-order" else down.x
        return Local(down.x, down.stats, self.sgd.zero_velocity(down.x), down.x, d, *agents)

    @property
    def batches_per_update(self) -> int:
        return 2 if self.variant == "first-order" else 3

    def step(self, local: Local, grad: Grad) -> Local:
        phase = grad.t % self.batches_per_update
        at = torch.where(phase == 1, local.adapted, local.w)
        if self.variant == "first-order":
            g, stats = grad(at, local.stats)
            d, moving, direction = local.d, phase == 1, g
        else:
            offset = torch.where(phase == 2, self.difference_step * local.d, 0.0)
            (g, stats), (g_minus, _) = gradients(grad, Net(at + offset, local.stats), Net(at - offset, local.stats))
            curvature = (g - g_minus) / (2 * self.difference_step)
            d, moving, direction = torch.where(phase == 1, g, local.d), phase == 2, local.d - self.inner_lr * curvature
        adapted = torch.where(phase == 0, local.w - self.inner_lr * g, local.adapted)
        w, velocity = self._step_where(local, direction, moving)
        first = grad.t == 0
        v, v_stats = torch.where(first, adapted, local.v), torch.where(first, stats, local.v_stats)
        return Local(w, stats, velocity, adapted, d, v, v_stats)

    def _step_where(self, local: Local, direction: Rows, moving: Tensor) -> tuple[Rows, Rows]:
        w, velocity = self.sgd.step(local.w, local.velocity, direction, clip=self.clip)
        return torch.where(moving, w, local.w), torch.where(moving, velocity, local.velocity)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.v, local.v_stats), Up(local.w - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return fedavg.aggregate(server, up, now, self.weighting)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.v, agents.v_stats)
