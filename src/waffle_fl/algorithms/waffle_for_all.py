"""WAFFLE for all agents at once, in time linear in their number: one training, shared sketches, nearest agents only.

WAFFLE trains every agent from Alice's model, so a model for each of N agents takes N^2 trainings per round. Here each
agent trains once per round, from its own model, and the server weighs for each agent

    its k nearest agents     by WAFFLE's weights (A1), from distances between sketches of their mean gradients
    all others               together, by the mean weight of a few of them, drawn at random

so that a round takes O(N k). The nearest agents are kept from round to round, and are looked for among them, their own
nearest agents and random ones (Dong et al., WWW 2011). Sketches are averaged over rounds, as WAFFLE
averages weights. It is not WAFFLE: once models differ, the gradients that it compares are of different models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from waffle_fl.algorithms import scaffold
from waffle_fl.algorithms.contract import BLOCK, SGD, TINY, Grad, Net, Optimiser, Round, Rows, Weights, unless_absent
from waffle_fl.algorithms.scaffold import Agents, Down, Local, Up
from waffle_fl.algorithms.schedules import ADAPTIVE, DEGREE, evaluate
from waffle_fl.algorithms.waffle_paper import LOCAL_FROM
from waffle_fl.constraints import at_least, between, check_fields, parameter
from waffle_fl.errors import WaffleError
from waffle_fl.randomness import derive, noise

KEPT = 2 / 3  # share of an agent's earlier sketch: WAFFLE averages the weights of three rounds


class Server(NamedTuple):
    x: Rows  # the model of each agent
    stats: Rows
    c: Rows  # the control variate of each agent's neighbourhood
    c_i: Rows  # the server's copy, to restore an agent that lost its own
    sketch: Rows  # (N, sketch_length) of the mean gradients
    near: Tensor  # (N, k): the nearest agents found so far


class Info(NamedTuple):
    weights: Weights  # of all agents in Alice's model


class Mixture(NamedTuple):
    """The weights of each agent's model: its own, the nearest, and all others together."""

    own: Tensor  # (N,)
    near: Tensor  # (N, k)
    rest: Tensor  # (N,), of each other agent that is not near
    is_near: Tensor  # (N, k), False where fewer than k agents were found


@dataclass(frozen=True)
class WaffleForAll:
    """A model for every agent at once: WAFFLE's weights for the nearest agents, in linear time."""

    for_alice: ClassVar[bool] = False

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(2.0, at_least(0))
    """Largest norm of a corrected gradient; 0 turns clipping off."""
    correction: float = parameter(1.0, between(0, 1))
    """Share of the correction c - c_i added to each gradient."""
    omega: str = parameter("sigmoid(3.2)", DEGREE, server_side=True)
    """Schedule of Omega, as in WAFFLE."""
    psi: str = parameter("sigmoid(3.2)", DEGREE, server_side=True)
    """Schedule of Psi, as in WAFFLE."""
    neighbours: int = parameter(10, at_least(1), server_side=True)
    """Number k of agents that each agent is compared with and weighs one by one."""
    sketch_length: int = parameter(1024, at_least(2), server_side=True)
    """Numbers of a sketch, from which distances are estimated; a model that is not longer is compared as it is."""

    def __post_init__(self) -> None:
        check_fields(self)
        if ADAPTIVE in (self.omega, self.psi):
            raise WaffleError("omega and psi: expected schedules such as sigmoid(3.2), got adaptive")

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        zeros = torch.zeros_like(net.params).repeat(agents, 1)
        numbers = torch.arange(agents, device=net.params.device)
        steps = torch.arange(1, min(self.neighbours, agents - 1) + 1, device=net.params.device)
        near = (numbers[:, None] + steps) % agents
        start = Server(net.params.repeat(agents, 1), net.stats.repeat(agents, 1), zeros, zeros, zeros[:, :0], near)
        return start._replace(sketch=sketched(zeros, self.sketch_length)), Agents(zeros)

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(server.x, server.stats, server.c)

    def begin(self, down: Down, agents: Agents) -> Local:
        return scaffold.begin(self.sgd, self.correction, down, agents)

    def step(self, local: Local, grad: Grad) -> Local:
        return scaffold.step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return scaffold.finish(self.sgd, self.correction, down, agents, local)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        c_i = scaffold.control_variate(server.c_i, server.c, up.dy, now.steps, self.sgd.lr, self.correction)
        c_i = torch.where(now.intact[:, None], c_i, server.c_i)
        known = (server.sketch != 0).any(dim=1, keepdim=True)
        fresh = sketched(c_i, self.sketch_length)
        sketch = torch.where(known, torch.lerp(fresh, server.sketch, KEPT), fresh)
        sketch = torch.where(now.intact[:, None], sketch, server.sketch)
        near, d = nearest(sketch, server.near, now)
        omega, psi = (evaluate(getattr(self, name), name, now.r, now.of) for name in ("omega", "psi"))
        mixture = weigh(d, *sampled(sketch, near, d, now), now, omega, psi)
        y = torch.where(now.received[:, None], server.x + up.dy, server.x)
        stats = torch.where(now.received[:, None], up.stats, server.stats)
        x, stats, c = (
            unless_absent(now, mixed(mixture, rows, near, now.received), before)
            for rows, before in ((y, server.x), (stats, server.stats), (c_i, server.c))
        )
        return Server(x, stats, c, c_i, sketch, near), Info(row_of_weights(mixture, near, now))

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(server.x, server.stats)


def sketched(rows: Rows, size: int) -> Rows:
    """Return the count sketch of each row: its numbers, with random signs, added to `size` sums; the same for all."""
    if rows.shape[1] <= size:
        return rows.clone()
    words = noise(torch.tensor([derive(0, "waffle for all: sketch")]), rows.shape[1])[0].to(rows.device)
    places, signs = words.abs() % size, 1 - 2 * (words // size % 2).to(rows.dtype)
    return rows.new_zeros(len(rows), size).index_add_(1, places, rows * signs)


def nearest(sketch: Rows, near: Tensor, now: Round) -> tuple[Tensor, Tensor]:
    """Return (N, k) the nearest agents among those known, their nearest agents and random ones; and their distances.

    Agents whose update was not received are infinitely far; where fewer than k others are left, so is a repeated one.
    """
    agents, k = near.shape
    if not k:
        return near, near.double()
    turned = torch.stack([near[near[:, j], (j + now.r) % k] for j in range(k)], dim=1)
    candidates = torch.cat([near, turned, random_agents(agents, k, now.r, near.device)], dim=1).sort(dim=1).values
    repeated = torch.zeros_like(candidates, dtype=torch.bool)
    repeated[:, 1:] = candidates[:, 1:] == candidates[:, :-1]
    own = candidates == torch.arange(agents, device=near.device)[:, None]
    d = distances_to(sketch, candidates).masked_fill(repeated | own | ~now.received[candidates], torch.inf)
    order = d.argsort(dim=1, stable=True)[:, :k]
    return candidates.gather(1, order), d.gather(1, order)


def sampled(sketch: Rows, near: Tensor, d: Tensor, now: Round) -> tuple[Tensor, Tensor]:
    """Return (N, k) distances of random agents, infinite for those that are near already, and the number of others."""
    agents, k = near.shape
    others = now.received.sum() - now.received.long()
    left = (others - torch.isfinite(d).sum(dim=1)).clamp(min=0)
    drawn = random_agents(agents, k, -now.r, near.device)
    known = (drawn[:, :, None] == near[:, None, :]).any(dim=2) | ~now.received[drawn]
    return distances_to(sketch, drawn).masked_fill(known, torch.inf), left


def random_agents(agents: int, count: int, r: int, device: torch.device) -> Tensor:
    """Return (N, count) other agents: of each round the same random steps from every agent."""
    steps = [derive(0, "waffle for all: agents", r, j) % max(1, agents - 1) + 1 for j in range(count)]
    return (
        torch.arange(agents, device=device)[:, None] + torch.tensor(steps, dtype=torch.int64, device=device)
    ) % agents


def distances_to(sketch: Rows, others: Tensor) -> Tensor:
    """Return (N, M) the distance of each agent's sketch to those of its M others, in float64."""
    block = max(1, BLOCK // max(1, sketch.shape[1] * max(1, others.shape[1])))
    parts = zip(torch.split(sketch, block), torch.split(others, block), strict=True)
    return torch.cat([(sketch[chosen].double() - own[:, None].double()).norm(dim=2) for own, chosen in parts])


def weigh(d: Tensor, d_random: Tensor, left: Tensor, now: Round, omega: float, psi: float) -> Mixture:
    """A1.3-9 for every agent, from the distances of the nearest and of some random agents; `left` are not near."""
    both = torch.cat([d, d_random], dim=1)
    finite = torch.isfinite(both)
    d_max = torch.where(finite, both, 0.0).amax(dim=1, keepdim=True) if both.shape[1] else both.new_zeros(len(d), 1)
    d_min = both.amin(dim=1, keepdim=True).minimum(d_max) if both.shape[1] else d_max
    d_own = (d_min * (1 - (d_max - d_min) / d_max.clamp(min=TINY) * (1 - omega))).clamp(min=0)
    alpha = (psi - (both - d_own) / d_max.clamp(min=TINY)).clamp(min=0)
    alpha = torch.where(finite, alpha, 0.0)
    near, some = alpha[:, : d.shape[1]], alpha[:, d.shape[1] :]
    rest = some.sum(dim=1) / finite[:, d.shape[1] :].sum(dim=1).clamp(min=1)
    own = torch.full_like(rest, psi)
    total = own + near.sum(dim=1) + rest * left
    alone = (total <= 0) | (100 * now.r >= LOCAL_FROM * now.of)
    total = torch.where(alone, 1.0, total)
    near, rest = (torch.where(alone.view(-1, *[1] * (part.ndim - 1)), 0.0, part) for part in (near, rest))
    own = torch.where(alone, 1.0, own / total)
    return Mixture(own, near / total[:, None], torch.where(left > 0, rest / total, 0.0), finite[:, : d.shape[1]])


def mixed(weights: Mixture, rows: Rows, near: Tensor, received: Tensor) -> Rows:
    """Return the weighted sum of each agent's own row, those of the nearest agents, and those of all others.

    The sum of the others is that of all rows without those that are added one by one.
    """
    total = torch.where(received[:, None], rows, 0.0).double().sum(dim=0)
    own = weights.own - weights.rest * received
    others = torch.where(weights.is_near, weights.near - weights.rest[:, None], 0.0)
    result, block = torch.empty_like(rows), max(1, BLOCK // max(1, rows.shape[1]))
    for i in range(0, len(rows), block):
        part = slice(i, i + block)
        value = weights.rest[part, None] * total + own[part, None] * rows[part].double()
        for j in range(near.shape[1]):
            value += others[part, j, None] * rows[near[part, j]].double()
        result[part] = value.to(rows.dtype)
    return result


def row_of_weights(weights: Mixture, near: Tensor, now: Round) -> Weights:
    """Return the weight of every agent in Alice's model."""
    alice = now.alice
    found = torch.where(now.received, weights.rest[alice], 0.0).index_copy(0, alice.view(1), weights.own[alice].view(1))
    return found.index_add(
        0, near[alice], torch.where(weights.is_near, weights.near - weights.rest[:, None], 0.0)[alice]
    )
