"""FedAvg + fine-tuning: each agent fine-tunes the global model on its own data.

A round's local training fine-tunes the global model, so after every round each agent has a fine-tuned model at no extra
cost. In the last rounds nothing is averaged, and each agent continues to train its own model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, Rows, Vector, broadcast_to
from waffle_fl.algorithms.fedavg import Info, Local, Up, Weighting
from waffle_fl.constraints import at_least, check_fields, parameter


class Server(NamedTuple):
    x: Vector
    stats: Vector
    tuned: Tensor  # (), bool: whether agents continue from their own model instead of the global one


class Agents(NamedTuple):
    y: Rows
    y_stats: Rows


class Down(NamedTuple):
    x: Rows
    stats: Rows
    tuned: Tensor


@final
@dataclass(frozen=True)
class FedAvgFT:
    """A model for every agent: the model of FedAvg, fine-tuned on the agent's own data."""

    about: ClassVar[About] = About(
        name="fedavg-ft",
        title="FedAvg+FT",
        trains_model_for="each agent",
        in_words="a shared global model, fine-tuned by each agent on its own data",
        order=90,
    )
    averages_momentum: ClassVar[bool] = True

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    tuning: int = parameter(1, at_least(1), server_side=True)
    """Number of final rounds that only fine-tune; each has as many epochs as a round of training."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples."""

    def __post_init__(self) -> None:
        check_fields(self)

    def asks_all(self, r: int, of: int, agents: int) -> bool:
        return r > of - self.tuning  # fine-tuning needs no other agent

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(*net, torch.zeros((), dtype=torch.bool, device=net.params.device)), Agents(
            *broadcast_to(net, agents)
        )

    def broadcast(self, server: Server, agents: int) -> Down:
        return Down(*broadcast_to(Net(server.x, server.stats), agents), server.tuned.expand(agents))

    def begin(self, down: Down, agents: Agents) -> Local:
        y, stats = (torch.where(down.tuned[:, None], own, new) for own, new in zip(agents, down[:2], strict=True))
        return fedavg.begin(self.sgd, Net(y, stats))

    def step(self, local: Local, grad: Grad) -> Local:
        return fedavg.step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return Agents(local.y, local.stats), Up(local.y - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        averaged, info = fedavg.aggregate(fedavg.Server(server.x, server.stats), up, now, self.weighting)
        if now.r > now.of - self.tuning:
            return server._replace(tuned=torch.ones_like(server.tuned)), info
        return Server(*averaged, server.tuned), info

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return Net(agents.y, agents.y_stats)
