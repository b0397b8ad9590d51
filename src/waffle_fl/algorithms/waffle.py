"""WAFFLE by kinship: the updates decide, layer by layer, with which agents Alice shares; no schedule is needed.

Three ideas of the paper's WAFFLE (`waffle_paper.py`) are kept: the model is trained for Alice, the other agents are
weighted by how their updates compare with hers, and training moves from global to personal. What differs: each layer
has its own weights, an agent continues with its own version of a layer that Alice does not share with it, and agents
run FedAvg, because its updates are not corrected towards each other (docs/theory-weights.md, 27). Where Alice has
validation samples, her model is one of four parts of her prediction (`mixture.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import isclose
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
    Seen,
    Vector,
    Weights,
    broadcast_to,
    cosines,
    normalised,
    one_hot,
    row_of,
    weighted_sum,
)
from waffle_fl.algorithms.fedavg import Local, Up
from waffle_fl.algorithms.mixture import COUNT
from waffle_fl.constraints import at_least, between, check_fields, each_at_least, model_dependent, parameter
from waffle_fl.errors import WaffleError
from waffle_fl.models.layers import Layers

NOT_SHARED, FULLY_SHARED = 0.45, 0.6  # kinship up to which a head is not shared, and from which it is fully shared


class Server(NamedTuple):
    x: Vector  # the model from which Alice starts a round
    stats: Vector
    y: Rows  # this and `mean`, `mean_stats` and `rounds`: a copy of `Agents`, to restore an agent that lost its state
    share: Tensor  # (N, L): share of Alice's layer in an agent's start model, and the agent's raw weight in that layer
    evidence: Tensor  # (N, L): sum of l s^4 over the rounds so far, s the cosine with Alice's update, l its length
    agreement: Tensor  # (N, L): sum of l s^5
    strife: Tensor  # (L,): accumulated disagreement of the others with Alice
    mean: Rows
    mean_stats: Rows
    rounds: Tensor


class Agents(NamedTuple):
    y: Rows  # the model that the agent trained last
    mean: Rows  # running mean of models between those that the agent received and those that it trained
    mean_stats: Rows
    rounds: Tensor  # number of models in the mean


class Down(NamedTuple):
    x: Rows  # Alice's model
    stats: Rows
    share: Tensor  # (N, L): its share in the agent's start model, in every layer


class Info(NamedTuple):
    weights: Weights  # mean over all layers, by their sizes
    head: Weights  # of the last layer


class Cut(NamedTuple):
    """Sizes of the model's layers, and which of them are the head; empty before `for_model`."""

    sizes: tuple[int, ...] = ()
    heads: tuple[bool, ...] = ()


@final
@dataclass(frozen=True)
class Waffle:
    """A model for Alice: the body is shared while that helps, the head only with agents whose labels mean the same."""

    about: ClassVar[About] = About(
        name="waffle",
        title="WAFFLE",
        trains_model_for="Alice",
        in_words="a model for one agent: its last layer shared with similar agents, the other layers while that helps",
        order=40,
    )
    for_alice: ClassVar[bool] = True
    compares_directions: ClassVar[bool] = True
    sums_by_layer: ClassVar[bool] = True
    sent_to_each: ClassVar[tuple[str, ...]] = ("share",)

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
    prediction: Literal["auto", "mixture", "model"] = "auto"
    """What predicts: Alice's model, or its mixture with the average model, a model trained alone and her nearest
    training samples. auto: the mixture if she has validation samples or `part_weights`, without private rounds."""
    part_weights: tuple[float, ...] = parameter((), each_at_least(0), server_side=True)
    """Weights of the mixture's four parts, as in earlier trials. Empty: chosen on Alice's validation samples."""
    cut: Cut = model_dependent(Cut())

    def __post_init__(self) -> None:
        check_fields(self)
        given = self.part_weights
        if given and (len(given) != COUNT or not isclose(sum(given), 1, abs_tol=1e-6)):
            raise WaffleError(f"part_weights: expected {COUNT} numbers of sum 1, got {list(given)}")

    def for_validation(self, has_samples: bool) -> Waffle:
        automatic: Literal["mixture", "model"] = "mixture" if has_samples or self.part_weights else "model"
        return replace(self, prediction=automatic) if self.prediction == "auto" else self

    @property
    def mixes_predictions(self) -> bool:
        return self.prediction == "mixture"

    def for_model(self, layers: Layers) -> Waffle:
        head = layers.head(self.head_layers)
        runs = [(name, sum(n for _, n in part)) for name, part in groupby(layers.params, key=lambda part: part[0])]
        return replace(self, cut=Cut(tuple(n for _, n in runs), tuple(name in head for name, _ in runs)))

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        if not self.cut.sizes:
            raise WaffleError("this method must know the model's layers: call for_model(method, model.layers) first")
        zeros = torch.zeros(agents, len(self.cut.sizes), dtype=torch.float64, device=net.params.device)
        no_rounds = torch.zeros(agents, dtype=net.params.dtype, device=net.params.device)
        rows = Agents(net.params.repeat(agents, 1), *broadcast_to(net, agents), no_rounds)
        return Server(*net, rows.y, zeros + 1, zeros, zeros, zeros[0], *rows[1:]), rows

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(*broadcast_to(Net(server.x, server.stats), agents), server.share)

    def begin(self, down: Down, agents: Agents) -> Local:
        return fedavg.begin(self.sgd, self._start(down, agents))

    def step(self, local: Local, grad: Grad) -> Local:
        return fedavg.step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        start = self._start(down, agents)
        up = Up(local.y - start.params, local.stats)
        return self._after_round(agents, start, up), up

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        s, t, length = self._compare(up.dy, now, self._others(now), server.share)
        weighed, weights, info = self._weigh(server, s, t, length, now)
        before = Agents(server.y, server.mean, server.mean_stats, server.rounds)
        start = self._start(self.broadcast(server, len(up.dy)), before)
        rows = {**self._by_layer(start.params + up.dy), **self._statistics(up)}
        after = self.combine(weighed, {name: weighted_sum(weights[name], part) for name, part in rows.items()}, now)
        copies = zip(Agents._fields, before, self._after_round(before, start, up), strict=True)
        kept = {name: torch.where(now.intact.view(-1, *[1] * (o.ndim - 1)), n, o) for name, o, n in copies}
        return after._replace(**kept), info

    def needs_updates(self) -> str:
        return "prediction = mixture" if self.mixes_predictions else ""

    def compared_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        return self._by_layer(up.dy)

    def summed_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        return {**self._by_layer(self._start(down, agents).params + up.dy), **self._statistics(up)}

    def first_weights(self, server: Server, seen: Seen, now: Round) -> dict[str, Weights]:
        shares, inner, _ = self._others_sum(server, seen, now)
        columns = zip(self._names, shares.unbind(dim=1), inner.tolist(), strict=True)
        return {name: share for name, share, product in columns if product < 0}

    def weigh(self, server: Server, seen: Seen, now: Round) -> tuple[Server, dict[str, Weights], Info]:
        assert seen.angles is not None
        cosine, length = seen.angles
        _, inner, longest = self._others_sum(server, seen, now)
        totals = [seen.totals.get(name, most) for name, most in zip(self._names, longest.tolist(), strict=True)]
        t = inner / torch.tensor(totals, dtype=inner.dtype, device=inner.device).clamp(min=TINY)
        s = torch.where(self._others(now)[:, None], cosine, 0.0)
        return self._weigh(server, s, t.clamp(-1, 1), row_of(length, now.alice), now)

    def combine(self, server: Server, sums: Mapping[str, Vector], now: Round) -> Server:
        """Return the state with the new model; of a layer that was not summed each agent keeps its own."""
        parts = zip(self._names, torch.split(server.x, list(self.cut.sizes)), strict=True)
        x = torch.cat([sums[name] if name in sums else part.double() for name, part in parts])
        summed = torch.tensor([name in sums for name in self._names], device=x.device)
        stats = sums["stats"].to(server.stats.dtype) if "stats" in sums else server.stats
        return server._replace(x=x.to(server.x.dtype), stats=stats, share=torch.where(summed, server.share, 0.0))

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        sent = Down(*broadcast_to(Net(server.x, server.stats), count), server.share.expand(count, -1))
        means = self._add_to_mean(agents, self._start(sent, agents))
        return Net(means.mean, means.mean_stats)

    @property
    def _names(self) -> list[str]:
        return [f"layer {k}" for k in range(len(self.cut.sizes))]

    def _by_layer(self, rows: Rows) -> dict[str, Rows]:
        return dict(zip(self._names, torch.split(rows, list(self.cut.sizes), dim=1), strict=True))

    def _statistics(self, up: Up) -> dict[str, Rows]:
        return {"stats": up.stats} if up.stats.shape[1] else {}

    def _others(self, now: Round) -> Tensor:
        """Return the agents besides Alice whose update was received."""
        return now.received & (torch.arange(len(now.received), device=now.received.device) != now.alice)

    def _start(self, down: Down, agents: Agents) -> Net:
        """Return each agent's start model: in every layer a mixture of its own and Alice's."""
        columns = zip(down.share.clamp(0, 1).to(down.x.dtype).unbind(dim=1), self.cut.sizes, strict=True)
        share = torch.cat([column[:, None].expand(-1, n) for column, n in columns], dim=1)
        return Net(torch.lerp(agents.y, down.x, share), down.stats)

    def _after_round(self, agents: Agents, start: Net, up: Up) -> Agents:
        """Return the agents' states after a round; `own` places the round's model between start (0) and end (1)."""
        model = Net(torch.add(start.params, up.dy, alpha=self.own), torch.lerp(start.stats, up.stats, self.own))
        return self._add_to_mean(agents, model)._replace(y=start.params + up.dy)

    def _add_to_mean(self, agents: Agents, latest: Net) -> Agents:
        """Return the mean with one more model, whose weight after r rounds is min(1, 1 / (averaging r))."""
        weight = (1 / (self.averaging * agents.rounds)).clamp(max=1)[:, None]
        mean, stats = (
            torch.lerp(agents.mean, latest.params, weight),
            torch.lerp(agents.mean_stats, latest.stats, weight),
        )
        return Agents(agents.y, mean, stats, agents.rounds + 1)

    def _weigh(
        self, server: Server, s: Tensor, t: Tensor, length: Tensor, now: Round
    ) -> tuple[Server, dict[str, Weights], Info]:
        """Return the state, the weights in each layer and the diagnostics, from what `_compare` returns."""
        agents = len(now.received)
        is_alice = torch.arange(agents, device=s.device) == now.alice
        evidence, agreement = server.evidence + length * s**4, server.agreement + length * s**5
        strife = server.strife + (-t).clamp(min=0) ** 2
        kinship = torch.where(evidence > 0, agreement / evidence.clamp(min=TINY), FULLY_SHARED)
        share = torch.minimum(self._head_shares(kinship), torch.exp(-self.yielding * strife))
        share = torch.where(now.received[:, None], share, server.share)
        share = torch.where(is_alice[:, None], 1.0, share)
        alice_only, counted = one_hot(now.alice, agents), torch.where(now.received[:, None], share, 0.0)
        alpha = [normalised(shares, alice_only) for shares in counted.unbind(dim=1)]
        parts = [n / sum(self.cut.sizes) for n in self.cut.sizes]
        overall = torch.stack([part * weights for part, weights in zip(parts, alpha, strict=True)]).sum(dim=0)
        weighed = server._replace(share=share, evidence=evidence, agreement=agreement, strife=strife)
        weights = dict(zip(self._names, alpha, strict=True))
        return weighed, {**weights, **({"stats": overall} if len(server.stats) else {})}, Info(overall, alpha[-1])

    def _others_sum(self, server: Server, seen: Seen, now: Round) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is known of the others' weighted sum in each layer before it is computed.

        Their weights (N, L), scaled to sum to 1, its inner product with Alice's direction (L,), and the most that its
        length can be (L,).
        """
        assert seen.angles is not None
        cosine, length = seen.angles
        shares = torch.where(self._others(now)[:, None], server.share, 0.0)
        shares = shares / shares.sum(dim=0).clamp(min=TINY)
        return shares, (shares * length * cosine).sum(dim=0), (shares * length).sum(dim=0)

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
