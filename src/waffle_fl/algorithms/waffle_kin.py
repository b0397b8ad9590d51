"""WAFFLE by kinship: the updates decide, layer by layer, with which agents Alice shares; no schedule is needed.

Three ideas of WAFFLE are kept: the model is trained for Alice, the other agents are weighted by how their updates
compare with hers, and training moves from global to personal. What differs: each layer has its own weights, an agent
continues with its own version of a layer that Alice does not share with it, and agents run FedAvg, because its updates
are not corrected towards each other (docs/theory-weights.md, 27).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import (
    SGD,
    TINY,
    About,
    Grad,
    Net,
    Optimiser,
    Round,
    Rows,
    Vector,
    Weights,
    averaged,
    broadcast_to,
    cosines,
    normalised,
    one_hot,
    row_of,
    weighted_sum,
)
from waffle_fl.algorithms.fedavg import Down, Local, Up
from waffle_fl.constraints import at_least, between, check_fields, model_dependent, parameter
from waffle_fl.errors import WaffleError
from waffle_fl.models.layers import Layers

NOT_SHARED, FULLY_SHARED = 0.45, 0.6  # kinship up to which a head is not shared, and from which it is fully shared


class Server(NamedTuple):
    x: Vector  # the model from which Alice starts a round
    stats: Vector
    y: Rows  # the model that each agent trained last
    share: Tensor  # (N, L): share of Alice's layer in an agent's start model, and the agent's raw weight in that layer
    evidence: Tensor  # (N, L): sum of l s^4 over the rounds so far, s the cosine with Alice's update, l its length
    agreement: Tensor  # (N, L): sum of l s^5
    strife: Tensor  # (L,): accumulated disagreement of the others with Alice
    mean: Rows  # the server's copy of `Agents`, to restore an agent that lost its state
    mean_stats: Rows
    rounds: Tensor


class Agents(NamedTuple):
    mean: Rows  # running mean of models between those that the agent received and those that it trained
    mean_stats: Rows
    rounds: Tensor  # number of models in the mean


class Info(NamedTuple):
    weights: Weights  # mean over all layers, by their sizes
    head: Weights  # of the last layer


class Cut(NamedTuple):
    """Sizes of the model's layers, and which of them are the head; empty before `for_model`."""

    sizes: tuple[int, ...] = ()
    heads: tuple[bool, ...] = ()


@final
@dataclass(frozen=True)
class WaffleKin:
    """A model for Alice: the body is shared while that helps, the head only with agents whose labels mean the same."""

    about: ClassVar[About] = About(
        name="waffle-kin",
        title="WAFFLE-kin",
        trains_model_for="Alice",
        in_words="a model for one agent: its last layer shared with similar agents, the other layers while that helps",
        order=50,
    )
    for_alice: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(5.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    head_layers: int = parameter(1, at_least(0), server_side=True)
    """Number of last layers shared according to kinship; the other layers are shared as long as that helps."""
    yielding: float = parameter(0.3, at_least(0), server_side=True)
    """How fast Alice stops sharing a layer in which the others' updates oppose hers; 0 means never."""
    averaging: float = parameter(0.1, between(0, 1))
    """Share of the rounds so far over which Alice's model is averaged; 0 uses the latest model only."""
    own: float = parameter(0.3, between(0, 1))
    """Which models are averaged: 0 the models that Alice received, 1 the models that she trained, or in between."""
    prediction: Literal["model", "mixture"] = "model"
    """What predicts: Alice's model, or its mixture with the average model, a model trained alone and neighbours."""
    cut: Cut = model_dependent(Cut())

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def mixes_predictions(self) -> bool:
        return self.prediction == "mixture"

    def for_model(self, layers: Layers) -> WaffleKin:
        head = layers.head(self.head_layers)
        runs = [(name, sum(n for _, n in part)) for name, part in groupby(layers.params, key=lambda part: part[0])]
        return replace(self, cut=Cut(tuple(n for _, n in runs), tuple(name in head for name, _ in runs)))

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        if not self.cut.sizes:
            raise WaffleError("this method must know the model's layers: call for_model(method, model.layers) first")
        zeros = torch.zeros(agents, len(self.cut.sizes), dtype=torch.float64, device=net.params.device)
        no_rounds = torch.zeros(agents, dtype=net.params.dtype, device=net.params.device)
        means = Agents(*broadcast_to(net, agents), no_rounds)
        y = net.params.repeat(agents, 1)
        return Server(*net, y, zeros + 1, zeros, zeros, zeros[0], *means), means

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(self._start_models(server), server.stats.expand(len(server.y), -1))

    def begin(self, down: Down, agents: Agents) -> Local:
        return fedavg.begin(self.sgd, down)

    def step(self, local: Local, grad: Grad) -> Local:
        return fedavg.step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        up = Up(local.y - down.x, local.stats)
        return self._add_to_mean(agents, self._interpolate(down, up)), up

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        is_alice = torch.arange(len(up.dy), device=up.dy.device) == now.alice
        s, t, length = self._compare(up.dy, now, now.received & ~is_alice, server.share)
        evidence, agreement = server.evidence + length * s**4, server.agreement + length * s**5
        strife = server.strife + (-t).clamp(min=0) ** 2
        kinship = torch.where(evidence > 0, agreement / evidence.clamp(min=TINY), FULLY_SHARED)
        share = torch.minimum(self._head_shares(kinship), torch.exp(-self.yielding * strife))
        share = torch.where(now.received[:, None], share, server.share)
        share = torch.where(is_alice[:, None], 1.0, share)
        starts = self.broadcast(server, len(up.dy))
        y = torch.where(now.received[:, None], starts.x + up.dy, server.y)
        alice_only, counted = one_hot(now.alice, len(up.dy)), torch.where(now.received[:, None], share, 0.0)
        alpha = [normalised(shares, alice_only) for shares in counted.unbind(dim=1)]
        layers = torch.split(y, list(self.cut.sizes), dim=1)
        x = torch.cat([weighted_sum(weights, rows) for weights, rows in zip(alpha, layers, strict=True)])
        parts = [n / sum(self.cut.sizes) for n in self.cut.sizes]
        overall = torch.stack([part * weights for part, weights in zip(parts, alpha, strict=True)]).sum(dim=0)
        stats = averaged(server.stats, overall, up.stats)
        means = self._means_after_round(server, starts, up, now)
        new = Server(x.to(server.x.dtype), stats, y, share, evidence, agreement, strife, *means)
        return new, Info(overall, alpha[-1])

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        means = self._add_to_mean(agents, broadcast_to(Net(server.x, server.stats), count))
        return Net(means.mean, means.mean_stats)

    def _add_to_mean(self, agents: Agents, latest: Net) -> Agents:
        """Return the mean with one more model, whose weight after r rounds is min(1, 1 / (averaging r))."""
        weight = (1 / (self.averaging * agents.rounds)).clamp(max=1)[:, None]
        mean, stats = (
            torch.lerp(agents.mean, latest.params, weight),
            torch.lerp(agents.mean_stats, latest.stats, weight),
        )
        return Agents(mean, stats, agents.rounds + 1)

    def _interpolate(self, down: Down, up: Up) -> Net:
        """Return the model between the received one (own = 0) and the trained one (own = 1)."""
        return Net(torch.add(down.x, up.dy, alpha=self.own), torch.lerp(down.stats, up.stats, self.own))

    def _means_after_round(self, server: Server, starts: Down, up: Up, now: Round) -> Agents:
        """Return the server's copy of the agents' means after this round."""
        previous = Agents(server.mean, server.mean_stats, server.rounds)
        mean, stats, rounds = self._add_to_mean(previous, self._interpolate(starts, up))
        intact = now.intact[:, None]
        mean, stats = torch.where(intact, mean, server.mean), torch.where(intact, stats, server.mean_stats)
        return Agents(mean, stats, torch.where(now.intact, rounds, server.rounds))

    def _start_models(self, server: Server) -> Rows:
        """Return each agent's start model: in every layer a mixture of its own and Alice's."""
        columns = zip(server.share.to(server.x.dtype).unbind(dim=1), self.cut.sizes, strict=True)
        share = torch.cat([column[:, None].expand(-1, n) for column, n in columns], dim=1)
        return torch.lerp(server.y, server.x.expand_as(server.y), share)

    def _head_shares(self, kinship: Tensor) -> Tensor:
        """Return each agent's share by its kinship in layers of the head, and 1 in the other layers."""
        shares = ((kinship - NOT_SHARED) / (FULLY_SHARED - NOT_SHARED)).clamp(0, 1)
        columns = zip(shares.unbind(dim=1), self.cut.heads, strict=True)
        return torch.stack([column if head else torch.ones_like(column) for column, head in columns], dim=1)

    def _compare(self, dy: Rows, now: Round, others: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return per layer: each agent's cosine with Alice's update, the cosine of the weighted sum, Alice's length."""
        s, t, length = [], [], []
        for rows, share in zip(
            torch.split(dy.double(), list(self.cut.sizes), dim=1), shares.unbind(dim=1), strict=True
        ):
            own = row_of(rows, now.alice)
            s.append(cosines(rows, own))
            t.append(cosines(weighted_sum(torch.where(others, share, 0.0), rows)[None], own).squeeze(0))
            length.append(own.norm())
        return torch.where(others[:, None], torch.stack(s, dim=1), 0.0), torch.stack(t), torch.stack(length)
