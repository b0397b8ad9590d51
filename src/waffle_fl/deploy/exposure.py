"""Detect models that single out training rows, so that an update reveals them almost exactly.

The gradient of a linear layer's weights is a sum over rows: (gradient at the layer's output) x (the layer's input). A
unit that only one row activates reveals that row's input; so does the difference of two units whose sets of active rows
differ by one row. Weights can be chosen so that nearly every row is singled out in one of these ways ("trap weights",
"imprint layers"). Ordinary networks single out few rows, unless there are few rows in total; docs/threat-model.md has
measurements. A model is therefore compared with random models of the same architecture on the same rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from waffle_fl.algorithms import Net
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel

ROWS = 512  # rows that are examined
NEGLIGIBLE = 1e-4  # fraction of a unit's largest gradient below which a row is not visible in the sum
RANDOM_MODELS = 3


def exposed_shares(model: FlatModel, net: Net, federation: Federation) -> tuple[float, float]:
    """Share of the agent's training rows that hidden linear layers single out: among all rows, and within a class.

    The last layer can suppress all rows of other classes, so the rows of each class are also examined separately.
    Convolutions are not examined.
    """
    rows = federation.train[0][:ROWS]
    if not len(rows):
        return 0.0, 0.0
    groups = [torch.ones(len(rows), dtype=torch.bool)]
    if federation.task == "classification":
        labels = federation.labels(0, rows)
        groups += [labels == label for label in set(labels.tolist())]
    exposed = torch.zeros(2, len(rows), dtype=torch.bool)
    for gradient in _hidden_gradients(model, net, federation.x[rows].to(model.dtype)):
        size = gradient.abs()
        active = size > NEGLIGIBLE * size.amax(dim=0).clamp(min=torch.finfo(size.dtype).tiny)
        for k, group in enumerate(groups):
            exposed[min(k, 1), group] |= _singled_out(active[group])
    among_all, within_class = exposed.double().mean(dim=1).tolist()
    return among_all, within_class


def usual_shares(model: FlatModel, federation: Federation) -> tuple[float, float]:
    """Mean of `exposed_shares` over random models."""
    shares = [exposed_shares(model, model.init(seed), federation) for seed in range(RANDOM_MODELS)]
    among_all, within_class = (sum(part) / len(shares) for part in zip(*shares, strict=True))
    return among_all, within_class


def _singled_out(active: Tensor) -> Tensor:
    """Rows that are the only difference between two units, or between a unit and none: (rows, units) -> (rows,)."""
    sets = torch.cat([active, active.new_zeros(len(active), 1)], dim=1)
    held = sets.double()
    count = held.sum(dim=0)
    apart = count[:, None] + count - 2 * held.T @ held
    one, other = torch.nonzero((apart == 1).triu(), as_tuple=True)
    return (sets[:, one] != sets[:, other]).any(dim=1)


def _hidden_gradients(model: FlatModel, net: Net, x: Tensor) -> list[Tensor]:
    """For each hidden linear layer, the gradient of every row's prediction at that layer's output: (rows, units).

    The gradient of the loss would hide well-predicted rows: their loss is small, although no other row uses their unit.
    """
    module = model.module()
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.ndim == 2:
            outputs.append(output)

    hooks = [part.register_forward_hook(keep) for part in module.modules() if isinstance(part, nn.Linear)]
    try:
        # tied tensors have two names in the state dict
        unique = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
        saved = model.state_dict(net).items()
        state = {name: value.detach().requires_grad_() for name, value in saved if name in unique}
        answer = functional_call(module, state, (x,)).reshape(len(x), -1)
        mixture = (answer * torch.arange(1, answer.shape[1] + 1, dtype=answer.dtype).sqrt()).sum()
    finally:
        for hook in hooks:
            hook.remove()
    hidden = outputs[:-1]  # without the output layer, whose units are shared by all rows
    return list(torch.autograd.grad(mixture, hidden)) if hidden else []
