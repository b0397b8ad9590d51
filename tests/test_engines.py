"""Every way of computing a round agrees with the readable engine, `engines/loop.py`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from conftest import BATCH, CLASSES, FEATURES, make_federation, shared_model
from waffle_fl import SGD, FlatModel, RunSpec, WafflePaper, simulate
from waffle_fl.algorithms import ALGORITHMS, Algorithm
from waffle_fl.engines import aggregation, helper_agents, loop, run_workers, workers
from waffle_fl.engines.run_spec import Outcome, own_net
from waffle_fl.federation import Federation
from waffle_fl.models import mlp

SIZES = (17, 5, 12, 7)  # three, one, two and one mini-batches
STEP = SGD(0.1, 0.9, 0.01, "keep")
CONV = FlatModel(
    lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ),
    precision="float64",
)
NORMALISED = FlatModel(
    lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)),
    precision="float64",
)


def rounds(specs: Sequence[RunSpec], model: FlatModel, **options: Any) -> list[list[Outcome]]:
    settings: dict[str, Any] = {"rounds": 3, "batch_size": BATCH, "epochs": 2, "workers": 1, **options}
    return list(simulate(specs, model, **settings))


def assert_engines_agree(specs: Sequence[RunSpec], model: FlatModel, **options: Any) -> None:
    """Both engines give the same models, measurements and errors to 1e-12."""
    expected = rounds(specs, model, engine="loop", **options)
    assert_same_rounds(specs, model, rounds(specs, model, **options), expected)


def assert_same_rounds(
    specs: Sequence[RunSpec], model: FlatModel, found: list[list[Outcome]], expected: list[list[Outcome]]
) -> None:
    """Models and errors are the same to 1e-12, and measurements as `close_to` compares them."""
    assert [[o.index for o in line] for line in found] == [[o.index for o in line] for line in expected]
    for one, other in ((a, b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True)):
        assert (one.round, one.attempt, str(one.error)) == (other.round, other.attempt, str(other.error))
        assert one.measured.keys() - {"seconds"} == other.measured.keys()
        for key in other.measured:
            close_to(one.measured[key], other.measured[key])  # type: ignore[literal-required]
        nets = [own_net(specs[o.index], o.state, model) for o in (one, other)]
        for a, b in zip(*nets, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def close_to(found: Any, expected: Any) -> None:
    """Compare numbers to 1e-9 and everything else exactly."""
    if isinstance(expected, float) or (isinstance(expected, list) and isinstance(expected[0], float)):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)
    else:
        assert found == expected


def images() -> Federation:
    """Return the test federation with images of 8 x 8 pixels."""
    federation = make_federation(SIZES)
    return replace(federation, x=federation.x.repeat(1, 13)[:, :64])


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_backend_agrees_with_the_loop(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks, shared training, workers, batched aggregation and helper agents change nothing but the speed."""
    algorithm: Algorithm = ALGORITHMS[method](sgd=STEP)  # type: ignore[call-arg]
    federation, model = make_federation(SIZES), shared_model()
    alices = [RunSpec(algorithm, replace(federation, alice=i), 1) for i in range(4)]
    other = RunSpec(algorithm, make_federation(SIZES, alice=1, seed=5), 1)
    expected = rounds([*alices, other], model, epochs=1, engine="loop")
    two = [replace(spec, requested=frozenset([1])) for spec in (alices[1], other)]
    with named("the stack"):
        assert_same_rounds(alices[:1], model, rounds(alices[:1], model, epochs=1), of_runs(expected, 0))
    with named("shared training"):
        assert_same_rounds(alices, model, rounds(alices, model, epochs=1), of_runs(expected, 0, 1, 2, 3))
    for backend in ("run workers", "row workers", "aggregate together", "no helper agents"):
        with named(backend), switched(backend, monkeypatch) as options:
            assert_same_rounds(two, model, rounds(two, model, **options), of_runs(expected, 1, 4))


@contextmanager
def named(backend: str) -> Iterator[None]:
    """Add the name of the backend to a failure."""
    try:
        yield
    except AssertionError as error:
        error.add_note(f"{backend} and the loop differ")
        raise


@contextmanager
def switched(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Force one part of the fast engine on or off on this machine."""
    with monkeypatch.context() as patch:
        for limit in ("ROUND", "START", "WARM_UP"):
            patch.setattr(workers, limit, 0.0)
        if backend == "row workers":
            patch.setattr(run_workers, "applies", lambda specs, model, cores: False)
        if backend == "aggregate together":
            patch.setattr(aggregation, "applies", lambda model: True)
        if backend == "no helper agents":
            patch.setattr(helper_agents, "applies", lambda specs: False)
        yield {"workers": 2 if "workers" in backend else 1, "epochs": 1}


def of_runs(outcomes: list[list[Outcome]], *runs: int) -> list[list[Outcome]]:
    """Return the outcomes of some runs, numbered from 0."""
    return [[replace(line[i], index=k) for k, i in enumerate(runs)] for line in outcomes]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_single_rows_agree_with_the_loop(method: str) -> None:
    """Convolutions on a CPU, one row after another, train as plain autograd does."""
    assert_engines_agree([RunSpec(ALGORITHMS[method](sgd=STEP), images(), 1)], CONV, rounds=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["waffle-paper", "fedbn", "fedavg", "apfl", "cobo", "fedpac", "feddbe"])
def test_statistics_and_dropout_agree_with_the_loop(method: str) -> None:
    """BatchNorm's statistics and seeded dropout are the same in both engines."""
    federation = make_federation(SIZES)
    assert_engines_agree([RunSpec(ALGORITHMS[method](sgd=STEP), federation, 1)], NORMALISED)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["waffle-paper", "fedfomo", "fedala", "ifca", "cobo", "fedcollab", "fedpac"])
def test_an_agent_without_samples(method: str) -> None:
    """An agent without training samples takes no part in either engine."""
    federation = make_federation(SIZES)
    train = tuple(rows[:0] if i == 2 else rows for i, rows in enumerate(federation.train))
    assert_engines_agree([RunSpec(ALGORITHMS[method](sgd=STEP), replace(federation, train=train), 1)], shared_model())  # type: ignore[call-arg]


def test_attacks_and_the_guard() -> None:
    """Updates changed in transit are screened in the same way."""

    def tamper(up: Any, r: int) -> Any:
        return up._replace(dy=torch.cat([up.dy[:3], -50 * up.dy[3:]]))

    spec = RunSpec(WafflePaper(STEP), make_federation(), 1, tamper=tamper, attackers=(3,))
    assert_engines_agree([spec], shared_model(), guard="standard")


def test_divergence_ends_a_run_in_both_engines() -> None:
    """Runs whose Alice has unusable data end with the same error, and the others continue."""
    broken = make_federation()
    broken.x[broken.train[0]] = torch.inf
    specs = [RunSpec(WafflePaper(STEP), broken, 1), RunSpec(WafflePaper(STEP), make_federation(), 2)]
    assert_engines_agree(specs, shared_model())


def test_the_loop_is_one_page() -> None:
    """The readable engine has at most 100 lines and none of the fast engine's parts."""
    source = inspect.getsource(loop)
    assert len(source.splitlines()) <= 100
    for part in ("workers", "cuda", "Graph", "row_training", "helper", "shared_training"):
        assert part not in source


def depth_at_first_gradient(monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Return the number of Python frames between `simulate`'s caller and the first backward pass."""
    found: list[int] = []
    compute = torch.autograd.grad

    def measured(*arguments: Any, **more: Any) -> Any:
        frame, depth = sys._getframe(1), 0
        while frame.f_code.co_name != "depth_at_first_gradient":
            frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
        found.append(depth)
        return compute(*arguments, **more)

    monkeypatch.setattr(torch.autograd, "grad", measured)
    stream: Iterator[list[Outcome]] = simulate(
        [RunSpec(WafflePaper(SGD(0.1)), make_federation(), 1)], shared_model(), rounds=1, batch_size=BATCH, **options
    )
    next(stream)
    return found[0]


def test_call_depth_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 12 frames in the readable engine, 16 in the fast one."""
    assert depth_at_first_gradient(monkeypatch, engine="loop") <= 12
    assert depth_at_first_gradient(monkeypatch, workers=1) <= 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_gpu_agrees_with_the_loop(method: str) -> None:
    """On a GPU in float64, with CUDA graphs and batched aggregation, models agree to 1e-9."""
    algorithm: Algorithm = ALGORITHMS[method](sgd=STEP)  # type: ignore[call-arg]
    specs = [RunSpec(algorithm, make_federation(alice=1, seed=seed), 1, requested=frozenset([1])) for seed in (0, 5)]
    build = lambda: mlp((FEATURES,), CLASSES, hidden=6)  # noqa: E731
    on_gpu = FlatModel(build, precision="float64", device="cuda")
    on_cpu = FlatModel(build, precision="float64")
    found, expected = rounds(specs, on_gpu)[-1], rounds(specs, on_cpu, engine="loop")[-1]
    for one, other in zip(found, expected, strict=True):
        nets = [own_net(specs[o.index], o.state, model) for o, model in ((one, on_gpu), (other, on_cpu))]
        torch.testing.assert_close(nets[0].params.cpu(), nets[1].params, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_draws_in_the_forward_pass_train_on_a_gpu() -> None:
    """A module that draws random numbers is not captured as a graph, and trains."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x + 0.1 * torch.rand_like(x))

    model = FlatModel(Noisy, device="cuda")
    outcomes = rounds([RunSpec(WafflePaper(SGD(0.1)), make_federation(), 1)], model)
    assert not model.capturable
    assert len(outcomes) == 3
