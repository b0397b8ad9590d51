"""A network whose features can be part of its loss: outputs and features in one tensor, and the loss of both.

The features of a sample are the input of the network's last linear layer. A term <pull, features> is added to the loss
of each sample; its gradient is that of any differentiable function of the features whose derivative is `pull`. The
joined network is an ordinary module with an ordinary loss, so it trains in every way in which the network does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from waffle_fl.errors import WaffleError
from waffle_fl.models.batch import Batch, Loss


class Joined(nn.Module):
    """Returns (batch, outputs + features) of a network with a linear layer; its parameters are those of the network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        last = [part for part in self.network.modules() if isinstance(part, nn.Linear)][-1]
        seen: list[Tensor] = []
        hook = last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            output = self.network(x)
        finally:
            hook.remove()
        if not seen or seen[-1].shape != (len(x), last.in_features):
            raise WaffleError("expected a model whose last linear layer takes one vector per sample")
        return torch.cat([output.reshape(len(x), -1), seen[-1]], dim=1)


def joined_loss(loss: Loss, classes: bool) -> Loss:
    """Return loss(output, label) + <pull, features> per sample; the target of a sample is its label and its pull."""

    def total(output: Tensor, target: Tensor) -> Tensor:
        pull = target[:, 1:]
        scores, features = output[:, : -pull.shape[1]], output[:, -pull.shape[1] :]
        label = target[:, 0].long() if classes else target[:, 0]
        own = loss(scores[:, 0] if scores.shape[1] == 1 else scores, label)
        return own + (pull * features).sum(dim=1)

    return total


def with_pull(batch: Batch, pull: Tensor) -> Batch:
    """Return the batch with targets of the joined loss; pull is (N, B, features)."""
    models = len(pull) // len(batch.x)
    if models > 1:
        batch = Batch(*(part.repeat(models, *[1] * (part.ndim - 1)) for part in batch))
    return batch._replace(y=torch.cat([batch.y.to(pull.dtype)[:, :, None], pull], dim=2))
