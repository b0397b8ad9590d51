"""Averaged momentum: agents start each round with the mean velocity, in FedAvg and FedAvg+FT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import BATCH, make_federation, refusal, shared_model
from waffle_fl import SGD, Adam, FedAvg, FedAvgFT, Local, RunSpec, Waffle, simulate
from waffle_fl.algorithms import for_model
from waffle_fl.algorithms.averaged_momentum import AveragedMomentum
from waffle_fl.config import RunConfig, Settings, check_run
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.experiment import Listener, Runtime, execute

AVERAGE = SGD(0.1, 0.5, momentum_between_rounds="average")
ADAM = Adam(0.01, momentum_between_rounds="average")


def rounds(spec: RunSpec, start: int = 0, until: int = 4, **more: Any) -> list[Outcome]:
    given = {"rounds": 4, "start": start, "batch_size": BATCH, **more}
    stream = simulate([spec], shared_model(), **given)
    return [outcomes[0] for outcomes, _ in zip(stream, range(until - start), strict=False)]


def same(a: Any, b: Any) -> bool:
    return type(a)._fields == type(b)._fields and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("sgd", [AVERAGE, ADAM, replace(ADAM, lr_decay=0.9, averaging=0.5)])
@pytest.mark.parametrize("kind", [FedAvg, FedAvgFT])
def test_a_run_resumes_to_the_same_bits(kind: Any, sgd: Any) -> None:
    """The server's state holds the mean velocity, so a resumed run equals the uninterrupted run."""
    spec = RunSpec(kind(sgd=sgd), make_federation(), 1)
    whole = rounds(spec)
    later = rounds(replace(spec, state=whole[1].state), start=2)
    assert same(later[-1].state.agents, whole[-1].state.agents)
    assert same(later[-1].state.server, whole[-1].state.server)


def test_the_engines_agree() -> None:
    """The loop of the paper, one agent after another, ends with the model of the stacked engine."""
    spec = RunSpec(FedAvg(ADAM), make_federation(), 1)
    stacked, loop = (rounds(spec, engine=engine)[-1].state.server for engine in ("fast", "loop"))
    assert torch.allclose(stacked.x, loop.x, atol=1e-5)
    assert torch.allclose(stacked.mean_velocity, loop.mean_velocity, atol=1e-5)


def test_agents_start_with_the_mean_velocity_weighted_as_their_updates() -> None:
    algorithm = for_model(FedAvg(AVERAGE, weighting="samples"), shared_model().layers)
    federation = make_federation()
    state = rounds(RunSpec(algorithm, federation, 1), until=1)[0].state
    down = algorithm.broadcast(state.server, federation.agents)
    started = algorithm.begin(down, state.agents)
    assert state.server.mean_velocity.norm() > 0
    assert all(torch.equal(row, state.server.mean_velocity) for row in started.velocity)
    _, up = algorithm.finish(down, state.agents, started)
    assert torch.equal(up.velocity, started.velocity)


def test_one_step_of_every_agent_per_round_is_momentum_on_the_mean_gradient() -> None:
    """SGD's velocity is linear in the gradients: averaging it or keeping it gives the same models up to rounding."""
    few = make_federation()
    kept, averaged = (
        rounds(RunSpec(FedAvg(replace(AVERAGE, momentum_between_rounds=how)), few, 1), steps_per_round=1)[-1]
        for how in ("keep", "average")
    )
    assert torch.allclose(kept.state.server.x, averaged.state.server.x, atol=1e-5)


def test_adam_differs_from_kept_moments_from_the_second_round_on() -> None:
    kept, averaged = (
        rounds(RunSpec(FedAvg(replace(ADAM, momentum_between_rounds=how)), make_federation(), 1))
        for how in ("keep", "average")
    )
    assert torch.equal(kept[0].state.server.x, averaged[0].state.server.x)
    assert not torch.allclose(kept[1].state.server.x, averaged[1].state.server.x, atol=1e-4)


def test_it_needs_momentum_and_a_method_that_averages() -> None:
    layers = shared_model().layers
    plain = FedAvg(SGD(0.1, 0.0, momentum_between_rounds="average"))
    assert for_model(plain, layers) == plain
    prepared = for_model(FedAvg(ADAM), layers)
    assert isinstance(prepared, AveragedMomentum)
    assert for_model(prepared, layers) == prepared
    assert "FedAvg and FedAvg+FT only, got Waffle" in refusal(for_model, Waffle(ADAM), layers)
    assert "FedAvg and FedAvg+FT only, got Local" in refusal(for_model, Local(ADAM), layers)
    assert "robust aggregation" in refusal(for_model, FedAvg(ADAM, aggregation="median"), layers)


def config(**more: Any) -> RunConfig:
    given = {"data": "digits", "agents": 3, "samples_per_agent": 40, "batch_size": 16, "rounds": 3, "lr": 0.01}
    options = {"model": "mlp", "optimiser": "adam", "momentum_between_rounds": "average"}
    return check_run("fedavg", {**given, **options, **more}, {})


def test_masked_sums_are_refused(tmp_path: Path) -> None:
    """The server would see the velocity of every agent."""
    runs = [(config(privacy="masked"), tmp_path / "run")]
    assert "momentum_between_rounds = average" in refusal(execute, runs, Runtime(), Listener())


def test_a_round_without_some_agents_averages_the_others(tmp_path: Path) -> None:
    (result,) = execute([(config(participation=0.7), tmp_path / "run")], Runtime(workers=1), Listener())
    assert result["status"] == "finished"


def test_settings_name_the_choices() -> None:
    assert "expected 'reset' or 'keep' or 'average', got 'kept'" in refusal(
        SGD, 0.1, 0.9, momentum_between_rounds="kept"
    )
    assert Settings(momentum_between_rounds="average").momentum_between_rounds == "average"


flower = pytest.importorskip("flwr", reason="the Flower engine needs flwr")


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_sites_average_the_velocity_in_the_simulator_s_bits(method: str, tmp_path: Path) -> None:
    from flower_harness import bits, federation, run_job, run_simulation

    given = replace(config(precision="float64"), method=method)
    run_job(federation(tmp_path / "federation", ("a", "b", "c")), given, tmp_path / "run")
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(given, tmp_path / "reference"))[:2]
