"""kNN-Per (Marfoq et al. 2022): one global model, combined with the k nearest training samples of each agent.

A prediction is mix times the mean label of the k nearest training samples plus 1 - mix times the model's prediction.
Neighbours are found by the input of the model's last layer. The model is that of FedAvg; no sample leaves the agent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from waffle_fl.algorithms import fedavg
from waffle_fl.algorithms.contract import SGD, About, Grad, Net, Optimiser, Round, broadcast_to
from waffle_fl.algorithms.fedavg import Agents, Down, Info, Local, Server, Up, Weighting
from waffle_fl.constraints import above, at_least, between, check_fields, parameter

MAX_DISTANCES = 1 << 24  # computed at a time
MIN_PROBABILITY = 1e-30  # keeps the logarithm finite for a class without neighbours


def neighbours(features: Tensor, known: Tensor, targets: Tensor, k: int, scale: float) -> Tensor:
    """Return the mean target of each sample's k nearest known samples, weighted by exp(-|a - b|^2 / (D scale)).

    A traced program takes any number of rows, so it computes all distances at once.
    """
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    parts = [features] if traced else torch.split(features, max(1, MAX_DISTANCES // len(known)))
    means = []
    for part in parts:
        distance = torch.cdist(part, known, compute_mode="donot_use_mm_for_euclid_dist")
        nearest_distances, ids = distance.topk(min(k, len(known)), largest=False)
        weight = torch.softmax(-(nearest_distances.double() ** 2) / (features.shape[1] * scale), dim=1)
        means.append((weight[:, :, None] * targets[ids].double()).sum(dim=1))
    return torch.cat(means)


@final
@dataclass(frozen=True)
class KNNPer:
    """A model for every agent: the model of FedAvg, combined with the agent's nearest training samples."""

    about: ClassVar[About] = About(
        name="knn-per",
        title="kNN-Per",
        trains_model_for="each agent",
        in_words="a shared global model, combined with the agent's most similar training samples",
        cite="Marfoq et al., ICML 2022",
        order=210,
    )
    averages_cohorts: ClassVar[bool] = True
    trains_as: ClassVar[type] = fedavg.FedAvg

    sgd: Optimiser = field(default_factory=SGD)
    clip: float = parameter(0.0, at_least(0))
    """Largest norm of a gradient; 0 turns clipping off."""
    k: int = parameter(10, at_least(1), server_side=True)
    """Number of nearest training samples."""
    mix: float = parameter(0.5, between(0, 1), server_side=True)
    """Share of the neighbours in a prediction: 0 is FedAvg."""
    scale: float = parameter(0.1, above(0), server_side=True)
    """Width of the kernel: a neighbour at a squared distance of scale times the number of features weighs 1/e."""
    weighting: Weighting = parameter("equal", server_side=True)
    """Weight agents equally or by their number of samples, as the authors do."""

    def __post_init__(self) -> None:
        check_fields(self)

    def init(self, net: Net, agents: int) -> tuple[Server, Agents]:
        return Server(*net), Agents()

    def broadcast(self, server: Server, agents: int) -> Down:
        return fedavg.send(server, agents)

    def begin(self, down: Down, agents: Agents) -> Local:
        return fedavg.begin(self.sgd, down)

    def step(self, local: Local, grad: Grad) -> Local:
        return fedavg.step(self.sgd, self.clip, local, grad)

    def finish(self, down: Down, agents: Agents, local: Local) -> tuple[Agents, Up]:
        return agents, Up(local.y - down.x, local.stats)

    def aggregate(self, server: Server, up: Up, now: Round) -> tuple[Server, Info]:
        return fedavg.aggregate(server, up, now, self.weighting)

    def personal(self, server: Server, agents: Agents, count: int) -> Net:
        return broadcast_to(Net(server.x, server.stats), count)

    def answer(self, output: Tensor, features: Tensor, known: Tensor, labels: Tensor) -> Tensor:
        """Return the logarithms of the mixed probabilities, or for regression the mixed values."""
        numbers = labels.is_floating_point()
        targets = labels[:, None] if numbers else F.one_hot(labels, output.shape[1])
        nearest = neighbours(features, known, targets, self.k, self.scale)
        own = output.double().view(output.shape[0], -1) if numbers else output.double().softmax(dim=1)
        mixed = torch.lerp(own, nearest, self.mix)
        return (mixed if numbers else mixed.clamp(min=MIN_PROBABILITY).log()).to(output.dtype).view(output.shape)
