"""WAFFLE (Beaussart et al. 2021): SCAFFOLD with each agent weighted by how close its update is to Alice's.

`# A1.n` and `# A2.n` cite line n of the paper's Algorithms 1 and 2. Agents run SCAFFOLD unchanged; this file contains
what WAFFLE changes at the server, printed in red in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional as F

from waffle_fl.algorithms import adaptive_degree, scaffold
from waffle_fl.algorithms.contract import (
    CLIP,
    LR,
    NEARLY_EQUAL,
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
    angular_distance,
    broadcast_to,
    lengths,
    normalised,
    one_hot,
    row_of,
    shifted,
    sums_of,
    unless_absent,
)
from waffle_fl.algorithms.scaffold import Agents, Down, Local, Up
from waffle_fl.algorithms.schedules import ADAPTIVE, DEGREE, Schedule, evaluate
from waffle_fl.constraints import above, at_least, between, check_fields, parameter

Degree: TypeAlias = float | Tensor  # of personalisation: from a schedule, or measured
AS_PRINTED = {"control": "paper", "denominator": "range", "clip": 0.0}  # without the repairs of docs/paper.md
LOCAL_FROM = 95  # percent of the rounds, A1.7
NO_PART = -1.0  # in place of the weight of an agent that was not asked to take part in a round
SEARCH = {
    "omega": ["sigmoid(slope, shift)", "exponential(rate)", "step(at)", "constant(level)", "adaptive"],
    "psi": "omega",
    "slope": {"low": 1.0, "high": 12.0},
    "shift": {"low": -0.3, "high": 0.3, "of": "rounds"},
    "rate": {"low": 1.0, "high": 12.0},
    "at": {"low": 0.05, "high": 0.9},
    "level": {"low": 0.1, "high": 1.0},
    "clip": CLIP,
    "lr": LR,
}


class Server(NamedTuple):
    x: Vector
    stats: Vector
    c: Vector
    c_i: Rows
    past: Rows  # (2, N): the raw weights alpha of the rounds r-2 and r-1; NO_PART if the agent took no part
    squares: Tensor  # this and the following fields: adaptive_degree.GradientStatistics
    cubes: Tensor
    strife: Tensor
    degree: Tensor


class Info(NamedTuple):
    weights: Weights  # alpha_bar, used in this round
    alpha: Weights  # before smoothing
    distances: Weights  # d_i, with the assigned distance for Alice
    omega: Degree
    psi: Degree


def calc_weights(
    dy: Rows,
    past: Rows,
    now: Round,
    omega: Degree,
    psi: Degree,
    denominator: Literal["max", "range"] = "max",
    local_at_end: bool = True,
    distance: Callable[[Rows, Vector], Weights] = lengths,
) -> tuple[Weights, Weights, Weights]:
    """A1: weight each agent by how close its update is to Alice's. Returns (alpha_bar, alpha, d)."""
    d = distance(dy, row_of(dy, now.alice))  # A1.2
    return weigh_distances(d, past, now, omega, psi, denominator, local_at_end)


def weigh_distances(
    d: Weights,
    past: Rows,
    now: Round,
    omega: Degree,
    psi: Degree,
    denominator: Literal["max", "range"] = "max",
    local_at_end: bool = True,
) -> tuple[Weights, Weights, Weights]:
    """A1.3-10: weight each agent by its distance from Alice. Returns (alpha_bar, alpha, d)."""
    is_alice = torch.arange(len(d), device=d.device) == now.alice
    others = now.received & ~is_alice
    d_max = torch.where(others, d, -math.inf).max().clamp(min=0)  # A1.3
    d_min = torch.where(others, d, math.inf).min().minimum(d_max)  # A1.3
    d_alice = d_min * (1 - (d_max - d_min) / d_max.clamp(min=TINY) * (1 - omega))  # A1.4
    d_alice = d_alice.clamp(min=0)
    d = torch.where(is_alice, d_alice, d)
    span = d_max if denominator == "max" else d_max - torch.minimum(d_alice, d_min)  # A1.6, two readings
    ratio = (d - d_alice) / span.clamp(min=TINY)
    # Differs from the paper: with equal distances "range" is 0/0; use the limit for the nearest agent.
    all_equal = span <= NEARLY_EQUAL * d_max
    limit = 0.0 if denominator == "max" else (1 - omega) / (2 - _at_most_1(omega))
    ratio = torch.where(all_equal, limit * (~is_alice).double(), ratio)
    alpha = torch.where(others | is_alice, (psi - ratio).clamp(min=0), 0.0)  # A1.6
    alice_only = one_hot(now.alice, len(d))
    if local_at_end and 100 * now.r >= LOCAL_FROM * now.of:  # A1.7
        alpha = alice_only  # A1.8
    alpha = normalised(alpha, alice_only)  # A1.9
    rounds = 1 + (past >= 0).sum(dim=0)  # 3, or fewer with partial participation: those in which the agent took part
    past = torch.stack([normalised(torch.where(now.samples > 0, earlier, 0.0), alice_only) for earlier in past])
    alpha_bar = (past[0] + past[1] + alpha) / rounds  # A1.10
    # Differs from the paper: an agent without a received update weighs 0; the others share its past weight.
    alpha_bar = normalised(torch.where(now.received, alpha_bar, 0.0), alice_only)
    return alpha_bar, alpha, d


def _at_most_1(degree: Degree) -> Degree:
    return degree.clamp(max=1) if isinstance(degree, Tensor) else min(degree, 1)


@final
@dataclass(frozen=True)
class WafflePaper:
    """The paper's algorithm for Alice: global training first, then more and more weight on similar agents."""

    about: ClassVar[About] = About(
        name="waffle-paper",
        title="WAFFLE (paper)",
        trains_model_for="Alice",
        in_words="a model for one agent: all agents count at first, later mainly those with similar updates",
        cite="Beaussart et al., 2021",
        order=50,
        search=SEARCH,
    )
    for_alice: ClassVar[bool] = True
    trains_as: ClassVar[type] = scaffold.Scaffold

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(2.0, at_least(0))
    """Largest norm of a corrected gradient; 0 turns clipping off."""
    correction: float = parameter(1.0, between(0, 1))
    """Share of the correction c - c_i added to each gradient: 1 as in the paper; 0 trains agents as in FedAvg."""
    control: Literal["anchored", "paper"] = parameter("anchored", server_side=True)
    """Update of the server's control variate: anchored (c = sum a_i c_i), or paper (c += sum a_i dc_i, as printed)."""
    denominator: Literal["max", "range"] = parameter("max", server_side=True)
    """Divisor of the distances: max (the largest distance), or range (the largest minus Alice's, as in Eq. 2)."""
    compared: Literal["updates", "gradients", "directions"] = parameter("updates", server_side=True)
    """What distances compare: corrected updates (as in the paper), mean gradients, or directions of mean gradients."""
    omega: str | Schedule = parameter("sigmoid(3.2)", DEGREE, server_side=True)
    """Schedule of Omega, which sets Alice's assigned distance: 1 is global training, 0 is local training."""
    psi: str | Schedule = parameter("sigmoid(3.2)", DEGREE, server_side=True)
    """Schedule of Psi, the relative distance from which an agent has no weight: 1 is global, 0 is local training."""
    eta_g: float = parameter(1.0, above(0), server_side=True)
    """Global step size: factor of the weighted mean update."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        server, rows = scaffold.start(net, agents)
        past = torch.full((2, agents), 1 / agents, dtype=torch.float64, device=net.params.device)  # A2.1
        return Server(*server, past, *adaptive_degree.start(net.params.device)), rows

    def broadcast(self, server: Server, agents: int) -> Down:
        return scaffold.send(server, agents)  # A2.3

    def begin(self, down: Down, agents: Agents) -> Local:
        return scaffold.begin(self.sgd, self.correction, down, agents)  # A2.5

    def step(self, local: Local, grad: Grad) -> Local:
        return scaffold.step(self.sgd, self.clip, local, grad)  # A2.7-8

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return scaffold.finish(self.sgd, self.correction, down, agents, local)  # A2.9-12

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        c_i = scaffold.received_control_variates(server, up, now, self.sgd.lr, self.correction)
        if ADAPTIVE in (self.omega, self.psi):
            before = adaptive_degree.GradientStatistics(server.squares, server.cubes, server.strife, server.degree)
            server = server._replace(**adaptive_degree.observe(before, c_i, now)._asdict())
        # Differs from the paper if requested: the correction hides how an agent differs from the others.
        rows = up.dy if self.compared == "updates" else self.new_control_variates(server, up, now.steps)
        distance = angular_distance if self.compared == "directions" else lengths
        server, weights, info = self.weigh(server, Seen(distance(rows, row_of(rows, now.alice))), now)
        sums = sums_of(weights, {**up._asdict(), **self._control_rows(server.c_i, c_i)})
        return self.combine(server, sums, now)._replace(c_i=c_i), info

    def needs_updates(self) -> str:
        return next((f"{name} = {ADAPTIVE}" for name in ("omega", "psi") if getattr(self, name) == ADAPTIVE), "")

    def compared_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        if self.compared == "updates":
            return {"dy": up.dy}
        c_i = scaffold.control_variate(agents.c_i, down.c, up.dy, steps, self.sgd.lr, self.correction)
        return {"c": c_i} if self.compared == "gradients" else {"direction": F.normalize(c_i.double(), eps=TINY)}

    def summed_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        c_i = scaffold.control_variate(agents.c_i, down.c, up.dy, steps, self.sgd.lr, self.correction)
        return {**up._asdict(), **self._control_rows(agents.c_i, c_i)}

    def weigh(self, server: Server, seen: Seen, now: Round) -> tuple[Server, dict[str, Weights], Info]:
        omega, psi = self._degree("omega", now, server), self._degree("psi", now, server)
        local_at_end = self.psi != ADAPTIVE  # with an adaptive psi no round number decides when Alice trains alone
        options = (self.denominator, local_at_end)
        alpha_bar, alpha, d = weigh_distances(seen.distances, server.past, now, omega, psi, *options)  # A2.13
        past = torch.stack([server.past[1], unless_absent(now, alpha, torch.full_like(alpha, NO_PART))])  # A2.14
        weights = dict.fromkeys(("dy", "stats", "c" if self.control == "anchored" else "dc"), alpha_bar)
        return server._replace(past=past), weights, Info(alpha_bar, alpha, d, omega, psi)

    def combine(self, server: Server, sums: Mapping[str, Vector], now: Round) -> Server:
        """A2.15-16: apply the weighted updates to the model and the control variate."""
        # Differs from the paper if anchored: c is the weighted mean itself, so it cannot drift.
        c = sums["c"] if self.control == "anchored" else server.c.double() + sums["dc"]
        x, stats = shifted(server.x, sums["dy"], self.eta_g), sums["stats"].to(server.stats.dtype)
        return server._replace(x=x, stats=stats, c=c.to(server.c.dtype))

    def _control_rows(self, before: Rows, after: Rows) -> dict[str, Rows]:
        """Return what c is computed from: the new control variates, or their changes."""
        return {"c": after} if self.control == "anchored" else {"dc": after - before}

    def _degree(self, name: Literal["omega", "psi"], now: Round, server: Server) -> Degree:
        schedule = getattr(self, name)
        return server.degree if schedule == ADAPTIVE else evaluate(schedule, name, now.r, now.of)

    def new_control_variates(self, server: Server, up: Up, steps: Tensor) -> Rows:
        return scaffold.control_variate(server.c_i, server.c, up.dy, steps, self.sgd.lr, self.correction)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return broadcast_to(Net(server.x, server.stats), count)
