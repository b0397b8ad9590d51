"""FedDBE (Zhang et al. 2023): a personal vector holds what is specific to an agent's features, so the rest agrees.

The head sees f(x) + m_i. m_i is trained and never leaves the agent. In addition local training keeps the mean of its
features close to the mean z of all agents, which is measured in the first round:
F_i(y, m) + kappa / (2 D) |mean of f(x) - z|^2. All other parameters are averaged as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import (
    SGD,
    About,
    Grad,
    Net,
    Optimiser,
    Round,
    Rows,
    Vector,
    broadcast_to,
    normalised,
    weighted_sum,
)
from waffle_fl.algorithms.fedavg import Info, Weighting
from waffle_fl.constraints import at_least, between, check_fields, model_dependent, parameter
from waffle_fl.errors import WaffleError
from waffle_fl.models.layers import LastLinear, Layers


class Server(NamedTuple):
    x: Vector
    stats: Vector
    z: Vector  # (D,), the mean of the features of all agents
    measured: Tensor  # (), 0 before z is known, then 1


class Agents(NamedTuple):
    m: Rows  # (N, D)


class Down(NamedTuple):
    x: Rows
    stats: Rows
    z: Rows
    measured: Tensor  # (N,)


class Local(NamedTuple):
    y: Rows  # the model, followed by m
    stats: Rows
    velocity: Rows
    mean: Rows  # (N, D): running mean of the features
    z: Rows
    measured: Tensor


class Up(NamedTuple):
    dy: Rows
    stats: Rows
    mean: Rows


@final
@dataclass(frozen=True)
class FedDBE:
    """A model for every agent: a shared network, and a personal vector that is added to its features."""

    about: ClassVar[About] = About(
        name="feddbe",
        title="FedDBE",
        trains_model_for="each agent",
        in_words="a shared network with a personal vector that is added to its features",
        cite="Zhang et al., NeurIPS 2023",
        order=260,
    )

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    kappa: float = parameter(1.0, at_least(0), search={"low": 0.01, "high": 50.0, "log": True})
    """Strength of the pull of the mean features towards the mean of all agents; 0 turns it off."""
    mu: float = parameter(1.0, between(0, 1))
    """Share of the latest mini-batch in the running mean of the features; 1 uses it alone."""
    memory: bool = True
    """Learn the personal vector m; false leaves it at 0."""
    weighting: Weighting = parameter("samples", server_side=True)
    """Weight agents by their number of samples, as the authors do, or equally."""
    last: LastLinear = model_dependent(LastLinear("", -1, -1, 0, 0))

    def __post_init__(self) -> None:
        check_fields(self)

    def for_model(self, layers: Layers) -> FedDBE:
        if layers.last_linear is None or layers.last_linear.bias < 0:
            raise WaffleError("feddbe: expected a model with a linear layer with a bias, to whose input m is added")
        return replace(self, last=layers.last_linear)

    def asks_all(self, r: int, of: int, agents: int) -> bool:
        return r == 1  # the mean features of all agents are measured

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        zeros = net.params.new_zeros(self.last.features)
        return Server(*net, zeros, zeros.new_zeros(())), Agents(zeros.expand(agents, -1))

    def broadcast(self, server: Server, agents: int) -> Down:
        rows = broadcast_to(Net(server.x, server.stats), agents)
        return Down(*rows, server.z.expand(agents, -1), server.measured.expand(agents))

    def begin(self, down: Down, agents: Agents) -> Local:
        y = torch.cat([down.x, agents.m], dim=1)
        return Local(y, down.stats, self.sgd.zero_velocity(y), torch.zeros_like(agents.m), down.z, down.measured)

    def step(self, local: Local, grad: Grad) -> Local:
        y, m = local.y[:, : -self.last.features], local.y[:, -self.last.features :]
        features = grad.features(y, local.stats)
        count = features.weight.sum(dim=1, keepdim=True).clamp(min=1)
        latest = (features.weight[:, :, None] * features.values).sum(dim=1) / count
        mean = torch.lerp(local.mean, latest, self.mu)
        slope = self.kappa * self.mu / self.last.features * local.measured[:, None] * (mean - local.z)
        pull = slope[:, None].expand(features.values.shape) if self.kappa else None
        g, stats = grad(self._with_vector(y, m), local.stats, pull)
        g, g_m = self._slopes(y, m, g)
        g_m = g_m * (local.measured[:, None] if self.memory else 0.0)
        stepped, velocity = self.sgd.step(local.y, local.velocity, torch.cat([g, g_m], dim=1), clip=self.clip)
        return local._replace(y=stepped, stats=stats, velocity=velocity, mean=mean)

    def _head(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the weight (N, outputs, D) and the bias (N, outputs) of the last layer, or of its gradient."""
        last = self.last
        weight = rows[:, last.weight : last.weight + last.outputs * last.features]
        return weight.view(-1, last.outputs, last.features), rows[:, last.bias : last.bias + last.outputs]

    def _with_vector(self, y: Rows, m: Rows) -> Rows:
        """Return the model that computes W (f + m) + b: its bias is b + W m."""
        (weight, bias), at = self._head(y), self.last.bias
        shifted = bias + (weight * m[:, None]).sum(dim=2)
        return torch.cat([y[:, :at], shifted, y[:, at + self.last.outputs :]], dim=1)

    def _slopes(self, y: Rows, m: Rows, g: Rows) -> tuple[Rows, Rows]:
        """Return the gradients of the model and of m from the gradient g of the model with the shifted bias."""
        (weight, _), (_, slope), at = self._head(y), self._head(g), self.last.weight
        change = (slope[:, :, None] * m[:, None]).flatten(1)
        g_weight = g[:, at : at + change.shape[1]] + change
        g = torch.cat([g[:, :at], g_weight, g[:, at + change.shape[1] :]], dim=1)
        return g, (weight * slope[:, :, None]).sum(dim=1)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        y, m = local.y[:, : -self.last.features], local.y[:, -self.last.features :]
        return Agents(m), Up(y - down.x, local.stats, local.mean)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        shared = fedavg.Server(server.x, server.stats)
        (x, stats), info = fedavg.aggregate(shared, fedavg.Up(up.dy, up.stats), now, self.weighting)
        weights = normalised(now.received * now.samples.double(), now.received)
        z = torch.where(server.measured > 0, server.z, weighted_sum(weights, up.mean).to(server.z.dtype))
        return Server(x, stats, z, torch.ones_like(server.measured)), info

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        params, stats = broadcast_to(Net(server.x, server.stats), count)
        return Net(self._with_vector(params, agents.m), stats)
