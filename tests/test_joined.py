"""Features in training: the same in every pass, and part of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from conftest import refusal
from waffle_fl.algorithms import Grad, for_model
from waffle_fl.algorithms.feddbe import FedDBE
from waffle_fl.algorithms.fedpac import FedPAC
from waffle_fl.models import Batch, FlatModel, squared_error
from waffle_fl.models.layers import LastLinear

ROWS, BATCH, D = 3, 6, 4


class Gated(nn.Module):
    """A module that uses its parameters in its own way, so that its rows are stacked by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.gate = nn.Linear(5, D), nn.Linear(D, 3), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.gate)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "folded": lambda: nn.Sequential(nn.Linear(5, D), nn.ReLU(), nn.Linear(D, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(5, D), nn.Dropout(0.5), nn.Linear(D, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(5, D), nn.BatchNorm1d(D), nn.Linear(D, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, D), nn.Linear(D, 3)
    ),
    "vmap": Gated,
}


def batch_of(y: Tensor) -> Batch:
    x = torch.randn(ROWS, BATCH, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Batch(x, y, torch.ones(ROWS, BATCH, dtype=torch.float64), torch.arange(ROWS))


def labels() -> Tensor:
    return torch.randint(0, 3, (ROWS, BATCH), generator=torch.Generator().manual_seed(2))


def rows_of(model: FlatModel) -> tuple[Tensor, Tensor]:
    nets = [model.init(seed) for seed in range(ROWS)]
    return torch.stack([net.params for net in nets]), torch.stack([net.stats for net in nets])


@pytest.mark.parametrize("kind", MODULES)
def test_features_are_those_of_the_gradient(kind: str) -> None:
    """The gradient with pull f - c is that of |f - c|^2 / 2, in every pass, with dropout and batch statistics."""
    model, batch = FlatModel(MODULES[kind], precision="float64"), batch_of(labels())
    (params, stats), at, steps = rows_of(model), torch.zeros(1, dtype=torch.int64), torch.ones(ROWS)
    grads = [Grad.on(model, batch, at, steps, plain=plain) for plain in (False, True)]
    found = [grad.features(params, stats) for grad in grads]
    torch.testing.assert_close(found[0].values, found[1].values)
    assert found[0].values.shape == (ROWS, BATCH, D)
    centre = torch.randn(D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    pulled = [grad(params, stats, features.values - centre) for grad, features in zip(grads, found, strict=True)]
    torch.testing.assert_close(pulled[0].params, pulled[1].params)
    torch.testing.assert_close(pulled[0].stats, pulled[1].stats)
    torch.testing.assert_close(grads[0](params, stats).stats, pulled[0].stats)
    step = 1e-6
    direction = torch.randn(params.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def energy(at: Tensor) -> Tensor:
        return ((grads[1].features(at, stats).values - centre) ** 2).sum(dim=(1, 2)) / (2 * BATCH)

    slope = (energy(params + step * direction) - energy(params - step * direction)) / (2 * step)
    alone = pulled[0].params - grads[0](params, stats).params
    torch.testing.assert_close((alone * direction).sum(dim=1), slope, rtol=1e-5, atol=1e-7)


def test_several_models_per_row() -> None:
    """With two models per row the pull has a block of rows per model."""
    model, batch = FlatModel(MODULES["folded"], precision="float64"), batch_of(labels())
    params, stats = rows_of(model)
    pull = torch.randn(2 * ROWS, BATCH, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    both = model.grad(torch.cat([params, 2 * params]), torch.cat([stats, stats]), batch, pull).params
    parts = [model.grad(scale * params, stats, batch, pull[k * ROWS :][:ROWS]).params for k, scale in enumerate((1, 2))]
    torch.testing.assert_close(both, torch.cat(parts))


def test_features_of_a_regression() -> None:
    """Targets that are numbers stay numbers."""
    build = partial(nn.Sequential, nn.Linear(5, D), nn.Tanh(), nn.Linear(D, 1))
    model, batch = FlatModel(build(), loss=squared_error, precision="float64"), batch_of(labels() / 3)
    params, stats = rows_of(model)
    without, zero = model.grad(params, stats, batch), torch.zeros(ROWS, BATCH, D, dtype=torch.float64)
    torch.testing.assert_close(model.grad(params, stats, batch, zero).params, without.params)


def test_the_last_linear_layer() -> None:
    """Layers know where the last linear layer is in the flat vector."""
    layers = FlatModel(MODULES["batch norm"]).layers
    assert layers.last_linear == LastLinear("2", 5 * D + D + 2 * D, 5 * D + D + 2 * D + 3 * D, 3, D)
    assert FlatModel(lambda: nn.Linear(5, 3)).layers.last_linear == LastLinear("", 0, 15, 3, 5)
    assert FlatModel(lambda: nn.Conv1d(1, 1, 1)).layers.last_linear is None


def test_models_without_usable_features_are_rejected() -> None:
    """A model without a linear layer, or with one that does not fit the method, gives one line."""
    convolution = FlatModel(lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 5), nn.Flatten()))
    assert "a linear layer" in refusal(for_model, FedDBE(), convolution.layers)
    assert "an output per class" in refusal(for_model, FedPAC(), convolution.layers)
    unbiased = FlatModel(lambda: nn.Linear(5, 3, bias=False))
    assert "with a bias" in refusal(for_model, FedDBE(), unbiased.layers)
    assert "an output per class" in refusal(for_model, FedPAC(), FlatModel(lambda: nn.Linear(5, 1)).layers)
    params, stats = convolution.init(0)
    batch = Batch(torch.zeros(1, 2, 5), torch.zeros(1, 2).long(), torch.ones(1, 2), torch.zeros(1).long())
    assert "a model with a linear layer" in refusal(convolution.training_features, params[None], stats[None], batch)
