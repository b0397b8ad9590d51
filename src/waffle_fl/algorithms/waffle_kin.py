"""WAFFLE by kinship: whose layers Alice shares is decided by what the updates say, layer by layer, and by no clock.

Three of WAFFLE's ideas stay: Alice is at the centre, others count by how their updates compare with hers, and training
goes from global to personal. What differs: each layer has weights of its own, an agent whose layer Alice does not share
goes on with its own one there, and agents run FedAvg, whose updates show what they would do (docs/theory.md, 27).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import (
    SGD,
    TINY,
    About,
    Grad,
    Net,
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

STRANGERS, KIN = 0.45, 0.6  # kinship at which a head is not shared at all, and wholly


class Server(NamedTuple):
    x: Vector  # the model that Alice starts a round from
    stats: Vector
    y: Rows  # what each agent has trained
    share: Tensor  # (N, L): how much of Alice's layer each agent starts from, and counts in it
    evidence: Tensor  # (N, L): sum of l s^4 over the rounds so far, s the cosine with Alice's update, l its length
    agreement: Tensor  # (N, L): sum of l s^5
    strife: Tensor  # (L,): how long and how much the others have pulled away from Alice
    mean: Rows  # what the agents hold, whose disks may fail
    mean_stats: Rows
    rounds: Tensor


class Agents(NamedTuple):
    mean: Rows  # of the models that the agent was sent, mostly the latest ones, and of what it made of them
    mean_stats: Rows
    rounds: Tensor  # how many those were


class Info(NamedTuple):
    weights: Weights  # of all layers, by their sizes
    head: Weights  # of the last layer


class Cut(NamedTuple):
    """Where a model is cut into layers; before `for_model` nobody knows."""

    sizes: tuple[int, ...] = ()
    heads: tuple[bool, ...] = ()


@final
@dataclass(frozen=True)
class WaffleKin:
    """A model for Alice: the body with all while they help, the head with those alone who mean the same by it."""

    about: ClassVar[About] = About(
        name="waffle-kin",
        title="WAFFLE-kin",
        trains_model_for="Alice",
        in_words="a model for one agent: its last layer with those who mean the same, the others while that helps",
        order=50,
    )
    for_alice: ClassVar[bool] = True

    sgd: SGD = field(default_factory=SGD)
    clip: float = parameter(5.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    head_layers: int = parameter(1, at_least(0), server_side=True)
    """How many of the last layers are shared by kinship; the others are shared until they are of no more help."""
    yielding: float = parameter(0.3, at_least(0), server_side=True)
    """How fast Alice withdraws from a layer in which the others pull away from her; 0 is never."""
    averaging: float = parameter(0.1, between(0, 1))
    """Share of the rounds so far over which Alice's model is the mean; 0 takes the latest model alone."""
    own: float = parameter(0.3, between(0, 1))
    """How far the mean goes from the models that Alice was sent to what she trained them into."""
    cut: Cut = model_dependent(Cut())

    def __post_init__(self) -> None:
        check_fields(self)

    def for_model(self, layers: Layers) -> WaffleKin:
        head = layers.head(self.head_layers)
        runs = [(name, sum(n for _, n in part)) for name, part in groupby(layers.params, key=lambda part: part[0])]
        return replace(self, cut=Cut(tuple(n for _, n in runs), tuple(name in head for name, _ in runs)))

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        if not self.cut.sizes:
            raise WaffleError(
                "this method must know the model's layers: give it those by for_model(method, model.layers)"
            )
        nothing = torch.zeros(agents, len(self.cut.sizes), dtype=torch.float64, device=net.params.device)
        none_yet = torch.zeros(agents, dtype=net.params.dtype, device=net.params.device)
        held = Agents(*broadcast_to(net, agents), none_yet)
        y = net.params.repeat(agents, 1)
        return Server(*net, y, nothing + 1, nothing, nothing, nothing[0], *held), held

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(self._starts(server), server.stats.expand(len(server.y), -1))

    def begin(self, down: Down, agents: Agents) -> Local:
        return fedavg.begin(self.sgd, down)

    def step(self, local: Local, grad: Grad) -> Local:
        return fedavg.step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        up = Up(local.y - down.x, local.stats)
        return self._held(agents, self._between(down, up)), up

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        is_alice = torch.arange(len(up.dy), device=up.dy.device) == now.alice
        s, t, length = self._compare(up.dy, now, now.received & ~is_alice, server.share)
        evidence, agreement = server.evidence + length * s**4, server.agreement + length * s**5
        strife = server.strife + (-t).clamp(min=0) ** 2
        kinship = torch.where(evidence > 0, agreement / evidence.clamp(min=TINY), KIN)
        share = torch.minimum(self._alike(kinship), torch.exp(-self.yielding * strife))
        share = torch.where(now.received[:, None], share, server.share)
        share = torch.where(is_alice[:, None], 1.0, share)
        starts = self.broadcast(server, len(up.dy))
        y = torch.where(now.received[:, None], starts.x + up.dy, server.y)
        alone, counted = one_hot(now.alice, len(up.dy)), torch.where(now.received[:, None], share, 0.0)
        alpha = [normalised(shares, alone) for shares in counted.unbind(dim=1)]
        layers = torch.split(y, list(self.cut.sizes), dim=1)
        x = torch.cat([weighted_sum(weights, rows) for weights, rows in zip(alpha, layers, strict=True)])
        parts = [n / sum(self.cut.sizes) for n in self.cut.sizes]
        overall = torch.stack([part * weights for part, weights in zip(parts, alpha, strict=True)]).sum(dim=0)
        stats = averaged(server.stats, overall, up.stats)
        held = self._held_now(server, starts, up, now)
        new = Server(x.to(server.x.dtype), stats, y, share, evidence, agreement, strife, *held)
        return new, Info(overall, alpha[-1])

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        held = self._held(agents, broadcast_to(Net(server.x, server.stats), count))
        return Net(held.mean, held.mean_stats)

    def _held(self, agents: Agents, latest: Net) -> Agents:
        """The mean with one more model: after r rounds that weighs 1 / (averaging r), at first all."""
        pace = (1 / (self.averaging * agents.rounds)).clamp(max=1)[:, None]
        mean, stats = torch.lerp(agents.mean, latest.params, pace), torch.lerp(agents.mean_stats, latest.stats, pace)
        return Agents(mean, stats, agents.rounds + 1)

    def _between(self, down: Down, up: Up) -> Net:
        """A model on the way from what an agent was sent to what it made of that."""
        return Net(torch.add(down.x, up.dy, alpha=self.own), torch.lerp(down.stats, up.stats, self.own))

    def _held_now(self, server: Server, starts: Down, up: Up, now: Round) -> Agents:
        """What the agents hold after this round, by the server's account."""
        before = Agents(server.mean, server.mean_stats, server.rounds)
        mean, stats, rounds = self._held(before, self._between(starts, up))
        intact = now.intact[:, None]
        mean, stats = torch.where(intact, mean, server.mean), torch.where(intact, stats, server.mean_stats)
        return Agents(mean, stats, torch.where(now.intact, rounds, server.rounds))

    def _starts(self, server: Server) -> Rows:
        """Where each agent begins: in every layer between its own and Alice's."""
        columns = zip(server.share.to(server.x.dtype).unbind(dim=1), self.cut.sizes, strict=True)
        share = torch.cat([column[:, None].expand(-1, n) for column, n in columns], dim=1)
        return torch.lerp(server.y, server.x.expand_as(server.y), share)

    def _alike(self, kinship: Tensor) -> Tensor:
        """In the head: how much the agents mean the same as Alice, by their kinship."""
        alike = ((kinship - STRANGERS) / (KIN - STRANGERS)).clamp(0, 1)
        columns = zip(alike.unbind(dim=1), self.cut.heads, strict=True)
        return torch.stack([column if head else torch.ones_like(column) for column, head in columns], dim=1)

    def _compare(self, dy: Rows, now: Round, others: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In each layer: the others' cosines with Alice's update, that of those who share it, and its length."""
        s, t, length = [], [], []
        for rows, share in zip(
            torch.split(dy.double(), list(self.cut.sizes), dim=1), shares.unbind(dim=1), strict=True
        ):
            own = row_of(rows, now.alice)
            s.append(cosines(rows, own))
            t.append(cosines(weighted_sum(torch.where(others, share, 0.0), rows)[None], own).squeeze(0))
            length.append(own.norm())
        return torch.where(others[:, None], torch.stack(s, dim=1), 0.0), torch.stack(t), torch.stack(length)
