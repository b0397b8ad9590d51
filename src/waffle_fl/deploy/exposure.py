"""Does a model single out training rows? Then its update holds them nearly word for word.

The gradient of a linear layer's weights is a sum over rows: (gradient at the layer's output) x (the layer's input). A
unit that one row alone activates hands over that row's input; so does the difference of two units that are active for
the same rows but one. Weights can be chosen so that nearly every row is singled out in one of these ways ("trap
weights", "imprint layers"). In ordinary networks few rows are, unless there are few rows at all: docs/deploy.md has
what was measured. So a model is compared with random ones of its kind on the same rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from waffle_fl.algorithms import Net
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel

ROWS = 512  # rows that are looked at
NEGLIGIBLE = 1e-4  # of a unit's largest gradient: less does not show in the sum
RANDOM_MODELS = 3


def exposed_shares(model: FlatModel, net: Net, federation: Federation) -> tuple[float, float]:
    """Share of the agent's training rows that hidden linear layers single out: among all rows, and within a class.

    The last layer can silence all rows of other classes, so those of one class are looked at by themselves too.
    Convolutions are not looked at.
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
    """The same of random models, on average."""
    shares = [exposed_shares(model, model.init(seed), federation) for seed in range(RANDOM_MODELS)]
    among_all, within_class = (sum(part) / len(shares) for part in zip(*shares, strict=True))
    return among_all, within_class


def _singled_out(active: Tensor) -> Tensor:
    """Rows by which alone two units differ, or a unit differs from none: (rows, units) -> (rows,)."""
    sets = torch.cat([active, active.new_zeros(len(active), 1)], dim=1)
    held = sets.double()
    count = held.sum(dim=0)
    apart = count[:, None] + count - 2 * held.T @ held
    one, other = torch.nonzero((apart == 1).triu(), as_tuple=True)
    return (sets[:, one] != sets[:, other]).any(dim=1)


def _hidden_gradients(model: FlatModel, net: Net, x: Tensor) -> list[Tensor]:
    """For each hidden linear layer, how every row's answer depends on that layer's output: (rows, units).

    Of the answer, not of the loss: a row that is answered well has a small loss, but its unit is not used by others.
    """
    module = model.module()
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.ndim == 2:
            outputs.append(output)

    hooks = [part.register_forward_hook(keep) for part in module.modules() if isinstance(part, nn.Linear)]
    try:
        once = {
            name for name, _ in (*module.named_parameters(), *module.named_buffers())
        }  # tied tensors have two names
        saved = model.state_dict(net).items()
        state = {name: value.detach().requires_grad_() for name, value in saved if name in once}
        answer = functional_call(module, state, (x,)).reshape(len(x), -1)
        mixture = (answer * torch.arange(1, answer.shape[1] + 1, dtype=answer.dtype).sqrt()).sum()
    finally:
        for hook in hooks:
            hook.remove()
    hidden = outputs[:-1]  # the last one is the answer: its units are classes, which all rows share
    return list(torch.autograd.grad(mixture, hidden)) if hidden else []
