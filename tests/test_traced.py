"""Traced gradients have the same bits as untraced ones, and a trace never depends on values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conftest import BATCH, make_federation, make_model
from waffle_fl import SGD, RunSpec, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.models import FlatModel, LeNet5, mlp, traced
from waffle_fl.models.flat import Batch


class Branching(nn.Module):
    """A module whose path depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :12]
        return self.a(x) if float(x.sum()) > 0 else self.b(x)  # type: ignore[no-any-return]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, :, :8, :8])  # type: ignore[no-any-return]


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))


@pytest.fixture(autouse=True)
def trace_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace every function that is called twice."""
    monkeypatch.setattr(traced, "TRACED_AFTER", 0.0)


def batch_of(rows: int, seed: int, size: int = 8) -> Batch:
    torch.manual_seed(seed)
    x, y = torch.randn(rows, size, 1, 28, 28), torch.randint(3, (rows, size))
    return Batch(x, y, torch.rand(rows, size).round() + torch.eye(1, size), torch.arange(rows) + seed)


def nets(model: FlatModel, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    many = [model.init(seed + i) for i in range(rows)]
    return torch.stack([net.params for net in many]), torch.stack([net.stats for net in many])


@pytest.mark.parametrize(
    ("build", "rows"),
    [(LeNet5, 1), (LeNet5, 2), (lambda: mlp((1, 28, 28), 10), 5), (dropping, 3), (Normed, 1)],
    ids=["row by row", "two models a row", "stacked", "dropout", "BatchNorm"],
)
@pytest.mark.parametrize("precision", ["float32", "float64", "bf16"])
def test_replay_equals_the_untraced_pass(build: Callable[[], nn.Module], rows: int, precision: str) -> None:
    model = FlatModel(build, precision=precision)  # type: ignore[arg-type]
    for seed in range(3):
        batch = batch_of(rows, seed, 16)  # from this size on convolutions are rewritten
        batch = Batch(batch.x.to(model.dtype), batch.y, batch.weight.to(model.dtype), batch.key)
        params, stats = nets(model, rows, seed)
        found, expected = model.grad(params, stats, batch), model._grad(params, stats, *batch)
        assert torch.equal(found.params, expected.params)
        assert torch.equal(found.stats, expected.stats)
    (line,) = model._own.replays._traces.values()
    assert line is not model._own.replays._function


def test_results_are_not_overwritten() -> None:
    model = FlatModel(LeNet5)
    params, stats = nets(model, 1, 1)
    results = [model.grad(params, stats, batch_of(1, seed)).params for seed in range(4)]
    copies = [result.clone() for result in results]
    model.grad(params, stats, batch_of(1, 9))
    assert all(torch.equal(a, b) for a, b in zip(results, copies, strict=True))


def test_every_shape_has_its_own_trace() -> None:
    model = FlatModel(LeNet5)
    params, stats = nets(model, 1, 1)
    for size in (8, 8, 5, 5, 8, 5):
        batch = batch_of(1, size, size)
        assert torch.equal(model.grad(params, stats, batch).params, model._grad(params, stats, *batch).params)
    assert len(model._own.replays._traces) == 2


def test_data_dependent_paths_are_not_traced() -> None:
    """Both branches are taken, regardless of which came first."""
    model = FlatModel(Branching, stacked=False)
    params, stats = nets(model, 1, 1)
    for seed in range(6):
        batch = batch_of(1, seed)
        batch = batch._replace(x=batch.x.abs() if seed % 2 else -batch.x.abs())
        gradient = model.grad(params, stats, batch).params[0]
        half = len(gradient) // 2
        unused = gradient[half:] if seed % 2 else gradient[:half]
        assert not unused.any()
        assert gradient.any()
    assert not hasattr(model._own, "replays")


def test_wrong_traces_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = traced._to_function
    monkeypatch.setattr(
        traced, "_to_function", lambda trace: lambda *tensors: [2 * t for t in convert(trace)(*tensors)]
    )
    model = FlatModel(LeNet5)
    params, stats = nets(model, 1, 1)
    for seed in range(3):
        batch = batch_of(1, seed)
        assert torch.equal(model.grad(params, stats, batch).params, model._grad(params, stats, *batch).params)


@pytest.mark.parametrize("method", ["waffle-paper", "apfl", "pfedme", "fedala"])
def test_runs_end_in_the_same_bits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def last(workers: int) -> list[Outcome]:
        specs = [RunSpec(ALGORITHMS[method](sgd=SGD(0.1)), make_federation(), seed) for seed in (1, 2)]  # type: ignore[call-arg]
        *_, outcomes = simulate(specs, make_model(), rounds=3, batch_size=BATCH, workers=workers)
        return outcomes

    replayed = {workers: last(workers) for workers in (1, 2)}
    monkeypatch.setattr(traced, "TRACED_AFTER", 1e9)
    untraced = last(1)
    for workers, outcomes in replayed.items():
        for a, b in zip(outcomes, untraced, strict=True):
            states = zip((*a.state.server, *a.state.agents), (*b.state.server, *b.state.agents), strict=True)
            assert all(torch.equal(x, y) for x, y in states), f"{workers} workers"
