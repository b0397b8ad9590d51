"""APFL (Deng et al. 2020): each agent mixes a personal model v with the global one and learns the mixing weight.

Per mini-batch: w -= lr grad f(w);  v -= lr mix grad f(v_bar), v_bar = mix v + (1 - mix) w. The mixing weight follows
its own gradient <v - w, grad f(v_bar)>, at the first step of a round or once per round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, broadcast_to, gradients, inner
from waffle_fl.algorithms.fedavg import Down, Info, Server, Up
from waffle_fl.constraints import at_least, between, check_fields, parameter


class Agents(NamedTuple):
    v: Rows
    w: Rows  # the agent's copy of the global model after its training, before averaging
    mixed_stats: Rows  # normalisation statistics of the mixed model
    mix: Tensor


class Local(NamedTuple):
    w: Rows
    stats: Rows
    velocity: Rows
    v: Rows
    mixed_stats: Rows
    v_velocity: Rows
    mix: Tensor
    first: Tensor  # whether this is the first step of the round


@final
@dataclass(frozen=True)
class APFL:
    """A model for every agent: an adaptive mixture of a personal model and the global model."""

    about: ClassVar[About] = About(
        name="apfl",
        title="APFL",
        trains_model_for="each agent",
        in_words="a mixture of a personal model and a shared global model",
        cite="Deng et al., arXiv:2003.13461, 2020",
        order=60,
    )

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    mix: float = parameter(0.5, between(0, 1), search={"low": 0.0, "high": 1.0})
    """Initial share of the personal model in the mixture."""
    adaptive: Literal["step", "round", "off"] = parameter("step", search=["step", "round", "off"])
    """When the share adapts: at the first step of each round, once per round from its total change, or never."""

    def __post_init__(self) -> None:
        check_fields(self)

    def helper(self) -> fedavg.FedAvg:
        return fedavg.FedAvg(self.sgd, self.clip)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        rows, stats = broadcast_to(net, agents)
        mix = torch.full((agents,), self.mix, dtype=net.params.dtype, device=net.params.device)
        return Server(*net), Agents(rows, rows, stats, mix)

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(*broadcast_to(Net(server.x, server.stats), agents))

    def begin(self, down: Down, agents: Agents) -> Local:
        first = torch.ones(len(down.x), dtype=torch.bool, device=down.x.device)
        velocity = self.sgd.zero_velocity(down.x)
        return Local(down.x, down.stats, velocity, agents.v, agents.mixed_stats, velocity, agents.mix, first)

    def step(self, local: Local, grad: Grad) -> Local:
        share = local.mix[:, None]
        mixed = Net(torch.lerp(local.w, local.v, share), local.mixed_stats)  # v_bar
        (g_w, stats), (g_mixed, mixed_stats) = gradients(grad, Net(local.w, local.stats), mixed)
        w, velocity = self.sgd.step(local.w, local.velocity, g_w, clip=self.clip)
        v, v_velocity = self.sgd.step(local.v, local.v_velocity, share * g_mixed, clip=self.clip)
        mix = local.mix
        if self.adaptive == "step":
            slope = inner(local.v - local.w, g_mixed)[:, None]
            mix = torch.where(local.first, self._adapted(mix, slope), mix)
        return Local(w, stats, velocity, v, mixed_stats, v_velocity, mix, torch.zeros_like(local.first))

    def _adapted(self, mix: Tensor, slope: Tensor) -> Tensor:
        """Return the share after a step along its gradient (N, 1)."""
        change = (self.sgd.lr * slope).squeeze(1)
        return torch.where(torch.isfinite(change), (mix - change).clamp(0, 1), mix)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        mix = local.mix
        if self.adaptive == "round":
            slope = ((agents.v - down.x) * (agents.v - local.v)).sum(dim=1, keepdim=True) / self.sgd.lr
            mix = self._adapted(mix, slope)
        return Agents(local.v, local.w, local.mixed_stats, mix), Up(local.w - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return fedavg.FedAvg().aggregate(server, up, now)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        share = agents.mix[:, None]
        return Net(torch.lerp(agents.w, agents.v, share), agents.mixed_stats)
