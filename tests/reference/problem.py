"""What every twin starts from: the data, the start, and a step of SGD."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

Batch = tuple[Tensor, Tensor]
Batches = list[list[list[Batch]]]  # batches[round][agent] = the (x, y) mini-batches of that agent in that round


@dataclass
class Trace:
    """What Alice sees after each round."""

    models: list[Tensor] = field(default_factory=list)  # the flat parameters of the model she would use
    weights: list[list[float]] = field(default_factory=list)  # the normalised aggregation weights


@dataclass
class Problem:
    """What all methods share: the start, the data, Alice and the settings of local SGD."""

    nets: list[nn.Module]  # one ordinary network per agent
    start: Tensor
    batches: Batches
    alice: int
    lr: float
    momentum: float
    weight_decay: float
    keeps_momentum: bool = False
    velocities: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # (agent, which model) -> at a round's end

    def velocity(self, agent: int, like: Tensor, model: str = "") -> Tensor:
        """What an agent's velocity is when a round begins."""
        return self.velocities.get((agent, model), torch.zeros_like(like))

    def keep(self, agent: int, velocity: Tensor, model: str = "") -> None:
        """The round is over: an optimiser that was created once goes on with this velocity in the next."""
        if self.keeps_momentum:
            self.velocities[agent, model] = velocity


def gradient(net: nn.Module, at: Tensor, batch: Batch) -> Tensor:
    """The flat gradient of the mean cross-entropy of one mini-batch at the given parameters."""
    vector_to_parameters(at.clone(), net.parameters())
    loss = cross_entropy(net(batch[0]), batch[1])
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(net.parameters()))])


def step(problem: Problem, y: Tensor, v: Tensor, g: Tensor, clip: float, correction: Tensor) -> tuple[Tensor, Tensor]:
    """One SGD step: the new parameters and velocity; the correction is added outside the momentum."""
    v = problem.momentum * v + (g + problem.weight_decay * y)
    direction = v + correction
    norm, longest = float(direction.norm()), clip / (1 - problem.momentum)
    if clip > 0 and norm > longest:
        direction = direction * (longest / norm)
    return y - problem.lr * direction, v


def train(problem: Problem, r: int, i: int, x: Tensor, clip: float, correction: Tensor | None = None) -> Tensor:
    """Agent i's local pass of round r from x (Algorithm 2, lines 5 to 8)."""
    if correction is None:
        correction = torch.zeros_like(x)
    y, v = x, problem.velocity(i, x)
    for batch in problem.batches[r - 1][i]:
        y, v = step(problem, y, v, gradient(problem.nets[i], y, batch), clip, correction)
    problem.keep(i, v)
    return y


def samples(problem: Problem, r: int, i: int) -> int:
    """How many samples agent i has: the rows of its mini-batches of the round."""
    return sum(len(y) for _, y in problem.batches[r - 1][i])


def weighted_sum(weights: list[float], vectors: list[Tensor]) -> Tensor:
    """sum_i weights_i vectors_i."""
    total = torch.zeros_like(vectors[0])
    for weight, vector in zip(weights, vectors, strict=True):
        total = total + weight * vector
    return total
