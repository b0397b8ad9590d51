"""The plain loop: one agent after another, an ordinary module, one mini-batch at a time.

It computes the same updates on the same mini-batches as the simulator, so that the models can be compared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from waffle_fl.batches import Batches, Remainder
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel


def flat(module: nn.Module) -> Tensor:
    """Return the parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def load(module: nn.Module, vector: Tensor) -> None:
    """Set the parameters from one vector."""
    torch.nn.utils.vector_to_parameters(vector, module.parameters())


class PlainLoop:
    """FedAvg or SCAFFOLD over the agents of one federation."""

    def __init__(
        self,
        module: nn.Module,
        model: FlatModel,
        federation: Federation,
        seed: int,
        *,
        batch_size: int,
        lr: float,
        remainder: Remainder = "spread",
    ) -> None:
        self.module = module.to(model.device)
        self.federation, self.lr = federation, lr
        self.batches = Batches([federation], [seed], batch_size, 1, torch.float32, remainder=remainder)
        self.x = model.init(seed).params
        self.c = torch.zeros_like(self.x)
        self.c_i = [torch.zeros_like(self.x) for _ in range(federation.agents)]

    def prepared(self, r: int) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the mini-batches of a round, so that the timed loop need not gather them."""
        plan = self.batches.plan(r, 0, slice(None))
        prepared = []
        for i in range(self.federation.agents):
            rows = [plan.samples[i, t][plan.weight[i, t] > 0] for t in range(self.batches.steps[i])]
            prepared.append([(self.federation.x[index], self.federation.labels(i, index)) for index in rows])
        return prepared

    def round(self, prepared: list[list[tuple[Tensor, Tensor]]], scaffold: bool) -> None:
        """Train all agents and aggregate."""
        parameters = list(self.module.parameters())
        sizes = [p.numel() for p in parameters]
        updates, variates = [], []
        for i, batches in enumerate(prepared):
            load(self.module, self.x.clone())
            correction = [
                part.view_as(p) for part, p in zip(torch.split(self.c - self.c_i[i], sizes), parameters, strict=True)
            ]
            for x, y in batches:
                self.module.zero_grad(set_to_none=True)
                F.cross_entropy(self.module(x), y).backward()
                with torch.no_grad():
                    for p, correct in zip(parameters, correction, strict=True):
                        p -= self.lr * (p.grad + correct) if scaffold else self.lr * p.grad
            dy = flat(self.module) - self.x
            updates.append(dy)
            variates.append(self.c_i[i] - self.c - dy / (len(batches) * self.lr))
        self.x = self.x + torch.stack(updates).mean(dim=0)
        if scaffold:
            self.c = self.c + (torch.stack(variates) - torch.stack(self.c_i)).mean(dim=0)
            self.c_i = variates
