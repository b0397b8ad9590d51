"""APFL (Deng et al. 2020): each agent mixes a personal model v with the global one and learns the mixing weight.

Per mini-batch: w -= lr grad f(w);  v -= lr mix grad f(v_bar), v_bar = mix v + (1 - mix) w. The mixing weight follows
its own gradient <v - w, grad f(v_bar)>, at the first step of a round or once per round. With `mixing = "outputs"` v is
trained on the loss of the mixed outputs mix v(sample) + (1 - mix) w(sample), and these are the agent's predictions, as
in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import (
    SGD,
    About,
    Features,
    Grad,
    Net,
    Optimiser,
    Round,
    Rows,
    broadcast_to,
    gradients,
    inner,
)
from waffle_fl.algorithms.fedavg import Down, Info, Server, Up, Weighting
from waffle_fl.constraints import at_least, between, check_fields, model_dependent, parameter
from waffle_fl.errors import WaffleError
from waffle_fl.models.layers import LastLinear, Layers

DAMPING = 0.02  # of the mixing weight in the authors' code: part of its gradient if outputs are mixed


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
    mixing: Literal["parameters", "outputs"] = "parameters"
    """What is mixed: parameters, or outputs as in the authors' code, for classes and cross-entropy."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples, as the authors do."""

    last: LastLinear = model_dependent(LastLinear("", -1, -1, 0, 0))

    def __post_init__(self) -> None:
        check_fields(self)

    def for_model(self, layers: Layers) -> APFL:
        if self.mixing == "parameters":
            return self
        if layers.last_linear is None or layers.last_linear.outputs < 2:
            raise WaffleError("mixing: expected a model whose last linear layer has an output per class, or parameters")
        return replace(self, last=layers.last_linear)

    def helper(self) -> fedavg.FedAvg:
        return fedavg.FedAvg(self.sgd, self.clip, self.weighting)

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
        if self.mixing == "outputs":
            return self._step_on_outputs(local, grad)
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

    def _step_on_outputs(self, local: Local, grad: Grad) -> Local:
        """As in the authors' code: w first, then v, then the mixing weight, on the loss of the mixed outputs."""
        share = local.mix[:, None]
        g_w, stats = grad(local.w, local.stats)
        w, velocity = self.sgd.step(local.w, local.velocity, g_w, clip=self.clip)
        nets, shares = (Net(local.v, local.mixed_stats), Net(w, stats)), (share, 1 - share)
        (g_v, mixed_stats), (g_mixed_w, _) = self._output_gradients(nets, shares, grad)
        v, v_velocity = self.sgd.step(local.v, local.v_velocity, g_v, clip=self.clip)
        mix = local.mix
        if self.adaptive == "step":
            slope = inner(v - w, share * g_v + (1 - share) * g_mixed_w)[:, None] + DAMPING * share
            mix = torch.where(local.first, self._adapted(mix, slope), mix)
        return Local(w, stats, velocity, v, mixed_stats, v_velocity, mix, torch.zeros_like(local.first))

    def _output_gradients(self, nets: tuple[Net, Net], shares: tuple[Tensor, Tensor], grad: Grad) -> list[Net]:
        """Return the gradients of the loss of the mixed outputs with respect to both models.

        The derivative of that loss by a model's output differs from that of the model's own loss. The difference is
        passed through the last layer to the features, as `pull`; the gradient of the last layer is set directly.
        """
        seen = [grad.features(*net) for net in nets]
        outputs = [self._outputs(net.params, part.values) for net, part in zip(nets, seen, strict=True)]
        mixed = shares[0][:, :, None] * outputs[0] + shares[1][:, :, None] * outputs[1]
        numbers = torch.arange(self.last.outputs, device=mixed.device)
        truth = (seen[0].labels[:, :, None] == numbers).to(mixed.dtype)
        slopes = [share[:, :, None] * (mixed.softmax(dim=2) - truth) for share in shares]
        pulls = [
            ((slope - output.softmax(dim=2) + truth)[:, :, :, None] * self._weight(net.params)[:, None]).sum(dim=2)
            for slope, output, net in zip(slopes, outputs, nets, strict=True)
        ]
        params, stats = (torch.cat(parts) for parts in zip(*nets, strict=True))
        g, stats = grad(params, stats, torch.cat(pulls))
        parts = zip(g.chunk(2), stats.chunk(2), slopes, seen, strict=True)
        return [Net(self._with_head(rows, slope, part), own) for rows, own, slope, part in parts]

    def _weight(self, rows: Rows) -> Tensor:
        """Return the weight (N, outputs, D) of the last layer."""
        last = self.last
        return rows[:, last.weight : last.weight + last.outputs * last.features].view(-1, last.outputs, last.features)

    def _outputs(self, rows: Rows, features: Tensor) -> Tensor:
        """Return the outputs (N, B, outputs) of the last layer."""
        output = (features[:, :, None] * self._weight(rows)[:, None]).sum(dim=3)
        at = self.last.bias
        return output if at < 0 else output + rows[:, None, at : at + self.last.outputs]

    def _with_head(self, g: Rows, slope: Tensor, seen: Features) -> Rows:
        """Return the gradient with that of the last layer computed from the slopes (N, B, outputs) of its outputs."""
        slope = slope * (seen.weight / seen.weight.sum(dim=1, keepdim=True).clamp(min=1))[:, :, None]
        weight = (slope[:, :, :, None] * seen.values[:, :, None]).sum(dim=1).flatten(1)
        at, bias = self.last.weight, self.last.bias
        g = torch.cat([g[:, :at], weight, g[:, at + weight.shape[1] :]], dim=1)
        if bias < 0:
            return g
        return torch.cat([g[:, :bias], slope.sum(dim=1), g[:, bias + self.last.outputs :]], dim=1)

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
        return fedavg.aggregate(server, up, now, self.weighting)

    @property
    def mixes_outputs(self) -> bool:
        return self.mixing == "outputs"

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        share = agents.mix[:, None]
        if self.mixes_outputs:
            _, stats = broadcast_to(Net(server.x, server.stats), count)
            return Net(torch.cat([agents.v, agents.w, share], dim=1), torch.cat([agents.mixed_stats, stats], dim=1))
        return Net(torch.lerp(agents.w, agents.v, share), agents.mixed_stats)
