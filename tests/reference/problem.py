"""The problem that all reference methods solve, and one step of SGD."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

Batch = tuple[Tensor, Tensor]
Batches = list[list[list[Batch]]]  # batches[round][agent] = the (x, y) mini-batches of that agent in that round


@dataclass
class Trace:
    """Alice's model and weights after each round."""

    models: list[Tensor] = field(default_factory=list)  # the flat parameters of Alice's model
    weights: list[list[float]] = field(default_factory=list)  # the normalised aggregation weights


@dataclass
class Problem:
    """Initial model, data, Alice and the settings of local SGD."""

    nets: list[nn.Module]  # one ordinary network per agent
    start: Tensor
    batches: Batches
    alice: int
    lr: float
    momentum: float
    weight_decay: float
    keeps_momentum: bool = False
    lr_decay: float = 1.0
    velocities: dict[tuple[int, str], Tensor] = field(default_factory=dict)  # (agent, model) -> at a round's end

    def rounds(self, first: int = 1, last: int | None = None) -> Iterator[int]:
        """Yield the numbers of the rounds, and set the learning rate of each."""
        start = self.lr
        for r in range(first, (len(self.batches) if last is None else last) + 1):
            self.lr = start * self.lr_decay ** (r - 1)
            yield r
        self.lr = start

    def velocity(self, agent: int, like: Tensor, model: str = "") -> Tensor:
        """Return an agent's velocity at the start of a round."""
        return self.velocities.get((agent, model), torch.zeros_like(like))

    def keep(self, agent: int, velocity: Tensor, model: str = "") -> None:
        """Keep the velocity for the next round, as an optimiser that is created only once does."""
        if self.keeps_momentum:
            self.velocities[agent, model] = velocity


def gradient(net: nn.Module, at: Tensor, batch: Batch) -> Tensor:
    """Return the flat gradient of the mean cross-entropy of one mini-batch at the given parameters."""
    vector_to_parameters(at.clone(), net.parameters())
    loss = cross_entropy(net(batch[0]), batch[1])
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(net.parameters()))])


def step(problem: Problem, y: Tensor, v: Tensor, g: Tensor, clip: float, correction: Tensor) -> tuple[Tensor, Tensor]:
    """Return parameters and velocity after one SGD step; the correction is added outside the momentum."""
    v = problem.momentum * v + (g + problem.weight_decay * y)
    direction = v + correction
    norm, longest = float(direction.norm()), clip / (1 - problem.momentum)
    if clip > 0 and norm > longest:
        direction = direction * (longest / norm)
    return y - problem.lr * direction, v


def train(problem: Problem, r: int, i: int, x: Tensor, clip: float, correction: Tensor | None = None) -> Tensor:
    """Return agent i's model after local training in round r from x (Algorithm 2, lines 5 to 8)."""
    if correction is None:
        correction = torch.zeros_like(x)
    y, v = x, problem.velocity(i, x)
    for batch in problem.batches[r - 1][i]:
        y, v = step(problem, y, v, gradient(problem.nets[i], y, batch), clip, correction)
    problem.keep(i, v)
    return y


def samples(problem: Problem, r: int, i: int) -> int:
    """Return the number of samples of agent i: the rows of its mini-batches of the round."""
    return sum(len(y) for _, y in problem.batches[r - 1][i])


def shares(problem: Problem, r: int, weighting: str) -> list[float]:
    """Return the aggregation weight of each agent in round r."""
    sizes = [samples(problem, r, i) if weighting == "samples" else 1 for i in range(len(problem.nets))]
    return [size / sum(sizes) for size in sizes]


def weighted_sum(weights: list[float], vectors: list[Tensor]) -> Tensor:
    """Return sum_i weights_i vectors_i."""
    total = torch.zeros_like(vectors[0])
    for weight, vector in zip(weights, vectors, strict=True):
        total = total + weight * vector
    return total
