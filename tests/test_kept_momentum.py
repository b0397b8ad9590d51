"""Momentum kept between rounds is part of an agent's state in the simulator, in checkpoints and on Flower."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import BATCH, make_federation, refusal, shared_model
from waffle_fl import APFL, SGD, Ditto, FedAvg, RunSpec, WafflePaper, simulate
from waffle_fl.algorithms import ALGORITHMS, Algorithm, for_model
from waffle_fl.algorithms.kept_momentum import KeptMomentum
from waffle_fl.config import check_run
from waffle_fl.engines.run_spec import Outcome, own_net
from waffle_fl.engines.shared_training import carriers

KEEP = SGD(0.1, 0.5, momentum_between_rounds="keep")


def rounds(specs: list[RunSpec], start: int = 0, until: int = 4) -> list[list[Outcome]]:
    stream = simulate(specs, shared_model(), rounds=4, start=start, batch_size=BATCH)
    return [outcomes for outcomes, _ in zip(stream, range(until - start), strict=False)]


def same(a: Any, b: Any) -> bool:
    return type(a)._fields == type(b)._fields and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def requested(algorithm: Algorithm) -> RunSpec:
    """Return a run specification that requests only Alice's model, as an experiment does."""
    federation = make_federation(alice=2)
    return RunSpec(algorithm, federation, 1, requested=frozenset([federation.alice]))


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_a_run_resumes_to_the_same_bits(method: str) -> None:
    """The state after a round holds the velocity, so a resumed run equals the uninterrupted run."""
    spec = RunSpec(ALGORITHMS[method](sgd=KEEP), make_federation(), 1)
    whole = [o[0] for o in rounds([spec])]
    assert [name for name in whole[0].state.agents._fields if name.endswith("velocity")]
    later = [o[0] for o in rounds([replace(spec, state=whole[1].state)], start=2)]
    assert same(later[-1].state.agents, whole[-1].state.agents)
    assert same(later[-1].state.server, whole[-1].state.server)


def test_keeping_differs_from_resetting_from_the_second_round_on() -> None:
    kept, reset = (
        [o[0] for o in rounds([RunSpec(FedAvg(sgd), make_federation(), 1)])] for sgd in (KEEP, SGD(0.1, 0.5))
    )
    assert torch.equal(kept[0].state.server.x, reset[0].state.server.x)
    assert not torch.equal(kept[1].state.server.x, reset[1].state.server.x)


def test_a_misspelt_choice_is_refused() -> None:
    assert "expected 'reset' or 'keep' or 'average', got 'kept'" in refusal(
        SGD, 0.1, 0.9, momentum_between_rounds="kept"
    )


def test_without_momentum_there_is_nothing_to_keep() -> None:
    layers = shared_model().layers
    assert for_model(FedAvg(SGD(0.1, 0.0, 0.0, "keep")), layers) == FedAvg(SGD(0.1, 0.0, 0.0, "keep"))
    assert isinstance(for_model(FedAvg(KEEP), layers), KeptMomentum)
    assert for_model(for_model(WafflePaper(KEEP), layers), layers) == for_model(WafflePaper(KEEP), layers)


@pytest.mark.parametrize("kind", [APFL, Ditto])
def test_helper_agents_keep_their_velocity(kind: Any) -> None:
    """Helper agents train FedAvg's model; Alice and the server get the bits of a run without helpers."""
    few, whole = requested(kind(KEEP)), replace(requested(kind(KEEP)), requested=None)
    for (a,), (b,) in zip(rounds([few]), rounds([whole]), strict=True):
        assert same(a.state.server, b.state.server)
        assert torch.equal(a.state.agents.velocity, b.state.agents.velocity)
        assert torch.equal(own_net(few, a.state, shared_model()).params, own_net(whole, b.state, shared_model()).params)


@pytest.mark.parametrize("kind", [APFL, Ditto])
def test_fedavg_shares_training(kind: Any) -> None:
    """FedAvg shares the leader's training, has the same state as alone, and can continue alone."""
    fedavg, leader = (replace(requested(algorithm)) for algorithm in (FedAvg(KEEP), kind(KEEP)))
    leader = replace(leader, federation=fedavg.federation)
    fitted = [replace(c, algorithm=for_model(c.algorithm, shared_model().layers)) for c in (fedavg, leader)]
    assert carriers(fitted) == {0: 1}
    together, alone = [o[0] for o in rounds([fedavg, leader])], [o[0] for o in rounds([fedavg])]
    for a, b in zip(together, alone, strict=True):
        assert same(a.state.agents, b.state.agents)
        assert same(a.state.server, b.state.server)
    resumed = rounds([replace(fedavg, state=together[1].state)], start=2)
    assert same(resumed[-1][0].state.server, alone[-1].state.server)


flower = pytest.importorskip("flwr", reason="the Flower engine needs flwr")


def config(method: str) -> Any:
    given = {"data": "digits", "agents": 3, "samples_per_agent": 40, "batch_size": 16, "rounds": 4, "lr": 0.05}
    more = {"precision": "float64", "model": "mlp", "momentum": 0.6, "momentum_between_rounds": "keep"}
    return check_run(method, {**given, **more}, {})


@pytest.mark.parametrize("method", ["fedavg", "waffle-paper", "apfl", "fedrep", "ifca"])
def test_sites_keep_the_velocity_in_the_simulator_s_bits(method: str, tmp_path: Path) -> None:
    from flower_harness import bits, federation, run_job, run_simulation

    run_job(federation(tmp_path / "federation", ("a", "b", "c")), config(method), tmp_path / "run")
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(config(method), tmp_path / "reference"))[:2]


@pytest.mark.parametrize("method", ["fedavg", "waffle-paper"])
def test_a_site_that_lost_its_state_starts_its_momentum_at_zero_and_says_so(method: str, tmp_path: Path) -> None:
    from flower_harness import Grid, federation, run_job
    from waffle_fl.records import read_rounds

    folder = federation(tmp_path / "federation", ("a", "b", "c"))

    def delete_state(site: str, request: Any, reply: Any) -> Any:
        if site == "b" and any(task["round"] == 2 for task in request.fields.get("tasks", [])):
            shutil.rmtree(folder / "sites" / "b" / "state")
        return reply

    grid = Grid(folder, delete_state)
    run_job(folder, config(method), tmp_path / "run", grid)
    lines = read_rounds(tmp_path / "run" / "rounds.jsonl")
    assert len(lines) == 4
    reasons = [reason for line in lines for name, reason in line.get("refused", []) if name == "agent 1"]
    assert reasons == ["lost its state of round 2; the server restored it; its momentum starts at zero"]
