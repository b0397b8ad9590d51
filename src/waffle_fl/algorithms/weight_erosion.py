"""Weight Erosion (Grimberg et al. 2020): an agent's weight starts at 1 and falls with its update's distance to Alice's.

alpha_i <- max(0, alpha_i - (1 + p_s floor((r-1) b / |S_i|)) p_d |g_i - g_A| / |g_A|)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, final

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
    Seen,
    Vector,
    Weights,
    broadcast_to,
    lengths,
    normalised,
    one_hot,
    row_of,
    sums_of,
)
from waffle_fl.algorithms.fedavg import Agents, Down, Local, Up
from waffle_fl.constraints import at_least, check_fields, parameter


class Server(NamedTuple):
    x: Vector
    stats: Vector
    alpha: Weights  # not normalised; never increases


class Info(NamedTuple):
    weights: Weights  # normalised
    alpha: Weights
    distances: Weights  # relative to Alice's update


def relative(distances: Weights, length: Tensor) -> Weights:
    """Return |g_i - g_A| / |g_A| (the learning rate cancels); 0 if Alice's update is 0, so that no weight changes."""
    return torch.where(length > 0, distances / torch.where(length > 0, length, 1.0), 0.0)


@final
@dataclass(frozen=True)
class WeightErosion:
    """A model for Alice: FedAvg whose weights fall with the distance of an agent's update to hers."""

    about: ClassVar[About] = About(
        name="weight-erosion",
        title="WE",
        trains_model_for="Alice",
        in_words="Weight Erosion, a model for one agent: partners whose updates differ from its own lose weight",
        cite="Grimberg et al., 2020",
        order=30,
    )
    for_alice: ClassVar[bool] = True
    reads_length: ClassVar[bool] = True
    trains_as: ClassVar[type] = fedavg.FedAvg

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    p_d: float = parameter(0.0067, at_least(0), server_side=True, search={"low": 0.001, "high": 0.3, "log": True})
    """Distance penalty: weight lost per round and unit of relative distance; 0 is FedAvg."""
    p_d_rounds: int = parameter(0, at_least(0), server_side=True)
    """Number of rounds for which p_d is meant: it is scaled by p_d_rounds / rounds; 0 uses p_d as it is."""
    p_s: float = parameter(0.0, at_least(0), server_side=True)
    """Size penalty: increase of the weight loss each time an agent has used all its data once more."""
    counted: Literal["samples", "batches"] = parameter("samples", server_side=True)
    """Unit of an agent's data size for p_s: samples, or batches (mini-batches, as in the authors' code)."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        alpha = torch.ones(agents, dtype=torch.float64, device=net.params.device)
        return Server(net.params, net.stats, alpha), Agents()

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(*broadcast_to(Net(server.x, server.stats), agents))

    def begin(self, down: Down, agents: Agents) -> Local:
        return self._training.begin(down, agents)

    def step(self, local: Local, grad: Grad) -> Local:
        return self._training.step(local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return self._training.finish(down, agents, local)

    @property
    def _training(self) -> fedavg.FedAvg:
        return fedavg.FedAvg(self.sgd, self.clip)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        hers = row_of(up.dy, now.alice)
        server, weights, info = self.weigh(server, Seen(lengths(up.dy, hers), hers.double().norm()), now)
        return self.combine(server, sums_of(weights, up._asdict()), now), info

    def needs_updates(self) -> str:
        return ""

    def compared_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        return {"dy": up.dy}

    def summed_rows(self, down: Down, agents: Agents, up: Up, steps: Tensor) -> dict[str, Rows]:
        return up._asdict()

    def weigh(self, server: Server, seen: Seen, now: Round) -> tuple[Server, dict[str, Weights], Info]:
        assert seen.length is not None
        d = relative(seen.distances, seen.length)
        size = now.samples if self.counted == "samples" else now.steps
        reuses = (((now.r - 1) * now.batch_size) // size.clamp(min=1)).double()
        p_d = self.p_d * self.p_d_rounds / now.of if self.p_d_rounds else self.p_d
        eroded = (server.alpha - (1 + self.p_s * reuses) * p_d * d).clamp(min=0)
        alpha = torch.where(now.received, eroded, server.alpha)  # an agent without a received update keeps its weight
        weights = normalised(torch.where(now.received, alpha, 0.0), one_hot(now.alice, len(alpha)))
        return server._replace(alpha=alpha), {"dy": weights, "stats": weights}, Info(weights, alpha, d)

    def combine(self, server: Server, sums: Mapping[str, Vector], now: Round) -> Server:
        return Server(*fedavg.combine(fedavg.Server(server.x, server.stats), sums), server.alpha)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return broadcast_to(Net(server.x, server.stats), count)
