"""What a method costs per agent and round: numbers sent down and up, and gradients of mini-batches computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from waffle_fl.algorithms import SGD, Algorithm, Grad, Net, algorithm_of, for_model
from waffle_fl.algorithms.hooks import ValidationDependent
from waffle_fl.models import Batch, FlatModel

AGENTS, FEATURES, CLASSES, BATCH, STEPS = 4, 6, 3, 8, 10


class Cost(NamedTuple):
    """Per agent and round. A model counts as 1 in `down` and `up`."""

    down: float  # models received
    up: float  # models sent
    gradients: float  # gradients per mini-batch


def cost_of(method: str, options: dict[str, Any] | None = None) -> Cost:
    """Count on a tiny federation: the sizes of a method's messages, and the gradients that it asks for."""
    model = FlatModel(lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES)))
    algorithm: Algorithm = algorithm_of(method)(sgd=SGD(0.1), **(options or {}))  # type: ignore[call-arg]
    if isinstance(algorithm, ValidationDependent):
        algorithm = algorithm.for_validation(True)
    algorithm = for_model(algorithm, model.layers)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(AGENTS, BATCH, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (AGENTS, BATCH), generator=generator)
    batch = Batch(x, y, torch.ones(AGENTS, BATCH), torch.arange(AGENTS))
    counted: list[int] = []

    def gradient(params: Tensor, stats: Tensor, **more: Any) -> Net:
        counted.append(len(params))
        return Net(torch.full_like(params, 0.01), stats)

    server, agents = algorithm.init(model.init(0), AGENTS)
    down = algorithm.broadcast(server, AGENTS)
    local = algorithm.begin(down, agents)
    template = Grad.on(model, batch, torch.tensor([0]), torch.full((AGENTS,), STEPS))
    for t in range(STEPS):
        local = algorithm.step(local, Grad(gradient, torch.tensor([t]), template.steps, template.features_of))
    _, up = algorithm.finish(down, agents, local)
    size = model.size + model.stats_size
    return Cost(_numbers(down) / size, _numbers(up) / size, sum(counted) / AGENTS / STEPS)


def _numbers(message: Sequence[Tensor]) -> float:
    """Return the numbers in one agent's row of a message."""
    return sum(part[0].numel() for part in message)
