"""SCAFFOLD (Karimireddy et al. 2020, option II): control variates correct each agent's drift.

`# A2.n` cites line n of the WAFFLE paper's Algorithm 2, which is SCAFFOLD except for the parts in red. The agent sends
no control variate: the server computes the same one from dy and K by line 9. This halves the upload, and an agent
cannot report a false control variate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import (
    CLIP,
    SGD,
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
    shifted,
    sums_of,
    weighted_sum,
)
from waffle_fl.constraints import above, at_least, between, check_fields, parameter


class Shared(Protocol):
    """The fields of a server state that SCAFFOLD's functions read; WAFFLE's server state has them too."""

    @property
    def x(self) -> Vector: ...
    @property
    def stats(self) -> Vector: ...
    @property
    def c(self) -> Vector: ...
    @property
    def c_i(self) -> Rows: ...


class Server(NamedTuple):
    x: Vector
    stats: Vector
    c: Vector
    c_i: Rows  # the server's copy, to restore an agent that lost its own


class Agents(NamedTuple):
    c_i: Rows


class Down(NamedTuple):
    x: Rows
    stats: Rows
    c: Rows


class Local(NamedTuple):
    y: Rows
    stats: Rows
    velocity: Rows
    correction: Rows  # c - c_i, or a share of it, constant during the round
    steps: Tensor  # K_i, steps so far


class Up(NamedTuple):
    dy: Rows
    stats: Rows


class Info(NamedTuple):
    weights: Weights


def control_variate(c_i: Rows, c: Rows, dy: Rows, steps: Tensor, lr: float | Tensor, share: float) -> Rows:
    """A2.9: c_i+ = share (c_i - c) + (x - y_i) / (K_i lr), where share is 1 in the paper.

    An agent that made no step keeps its c_i.
    """
    moves = steps[:, None].to(dy.dtype) * lr
    return torch.where(moves > 0, share * (c_i - c) - dy / moves.clamp(min=lr), c_i)


def received_control_variates(server: Shared, up: Up, now: Round, lr: float | Tensor, share: float) -> Rows:
    """Return c_i+ of every agent. An agent whose update was clipped or not received keeps its c_i."""
    c_i = control_variate(server.c_i, server.c, up.dy, now.steps, lr, share)
    return torch.where(now.intact[:, None], c_i, server.c_i)


def start(net: Net, agents: int) -> tuple[Server, Agents]:
    """Return the initial state, with all control variates zero."""
    c = torch.zeros_like(net.params)
    return Server(net.params, net.stats, c, c.repeat(agents, 1)), Agents(c.repeat(agents, 1))


def send(server: Shared, agents: int) -> Down:
    """A2.3: communicate (x, c) to all agents."""
    return Down(*broadcast_to(Net(server.x, server.stats), agents), server.c.expand(agents, -1))


def begin(sgd: Optimiser, share: float, down: Down, agents: Agents) -> Local:
    """A2.5: y_i <- x."""
    steps = torch.zeros(len(down.x), dtype=torch.int64, device=down.x.device)
    return Local(down.x, down.stats, sgd.zero_velocity(down.x), share * (down.c - agents.c_i), steps)


def step(sgd: Optimiser, clip: float, local: Local, grad: Grad) -> Local:
    """A2.7-8: y_i <- y_i - lr (g_i(y_i) - c_i + c), with the norm of the corrected gradient clipped to `clip`."""
    g, stats = grad(local.y, local.stats)  # A2.7
    y, velocity = sgd.step(local.y, local.velocity, g, local.correction, clip)  # A2.8
    return local._replace(y=y, stats=stats, velocity=velocity, steps=local.steps + 1)


def finish(sgd: Optimiser, share: float, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
    """A2.9-12: return the new control variate, which stays at the agent, and the update."""
    dy = local.y - down.x  # A2.10
    c_i = control_variate(agents.c_i, down.c, dy, local.steps, sgd.lr, share)  # A2.9, A2.11
    return Agents(c_i), Up(dy, local.stats)  # A2.12


@final
@dataclass(frozen=True)
class Scaffold:
    """One global model, trained with control variates."""

    about: ClassVar[About] = About(
        name="scaffold",
        title="SCAFFOLD",
        trains_model_for="all agents",
        in_words="one shared global model, corrected for the drift of each agent",
        cite="Karimireddy et al., ICML 2020",
        order=20,
    )

    sums_of_changes: ClassVar[tuple[str, ...]] = ("dc",)  # an agent that drops out keeps its c_i

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(2.0, at_least(0), search=CLIP)
    """Largest norm of a corrected gradient; 0 turns clipping off."""
    correction: float = parameter(1.0, between(0, 1))
    """Share of the correction c - c_i added to each gradient: 1 as in the paper; 0 trains agents as in FedAvg."""
    eta_g: float = parameter(1.0, above(0), server_side=True, search={"low": 0.3, "high": 1.5})
    """Global step size: factor of the mean update."""
    weighting: fedavg.Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples in the model and in c."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return start(net, agents)

    def broadcast(self, server: Server, agents: int) -> Down:
        return send(server, agents)

    def begin(self, down: Down, agents: Agents) -> Local:
        return begin(self.sgd, self.correction, down, agents)

    def step(self, local: Local, grad: Grad) -> Local:
        return step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return finish(self.sgd, self.correction, down, agents, local)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        c_i = received_control_variates(server, up, now, self.sgd.lr, self.correction)
        weights = self._weights(now)
        after = self.combine(server, sums_of(weights, {**up._asdict(), "dc": c_i - server.c_i}), now)
        if now.suspect is not None:  # otherwise the c_i of a suspect would bias all agents permanently
            trusted = fedavg.shares(self.weighting, (now.samples > 0) & ~now.suspect, now.samples)
            after = after._replace(c=weighted_sum(trusted, c_i).to(server.c.dtype))
        return after._replace(c_i=c_i), Info(weights["dy"])

    def needs_updates(self) -> str:
        return ""

    def compared_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        return {}

    def summed_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        c_i = control_variate(agents.c_i, down.c, up.dy, steps, self.sgd.lr, self.correction)
        return {**up._asdict(), "dc": c_i - agents.c_i}

    def weigh(self, server: Server, seen: Seen, now: Round) -> tuple[Server, dict[str, Weights], Info]:
        weights = self._weights(now)
        return server, weights, Info(weights["dy"])

    def _weights(self, now: Round) -> dict[str, Weights]:
        received = fedavg.shares(self.weighting, now.received, now.samples)
        of_all = fedavg.shares(self.weighting, now.samples > 0, now.samples)  # c is the mean of all c_i
        return {"dy": received, "stats": received, "dc": of_all}

    def combine(self, server: Server, sums: Mapping[str, Vector], now: Round) -> Server:
        x, stats = shifted(server.x, sums["dy"], self.eta_g), sums["stats"].to(server.stats.dtype)
        return server._replace(x=x, stats=stats, c=server.c + sums["dc"].to(server.c.dtype))

    def new_control_variates(self, server: Server, up: Up, steps: Tensor) -> Rows:
        return control_variate(server.c_i, server.c, up.dy, steps, self.sgd.lr, self.correction)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return broadcast_to(Net(server.x, server.stats), count)
