"""Adam at the agents: the arithmetic of torch.optim.AdamW, as SGD's replacement in every method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import BATCH, make_federation, refusal, shared_model
from waffle_fl import Adam, FedAvg, Local, RunSpec, WafflePaper, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.config import check_run
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.experiment import Runtime, execute
from waffle_fl.tensorfile import read_named

KEEP = Adam(0.01, weight_decay=0.1, momentum_between_rounds="keep")


def last(spec: RunSpec, rounds: int = 3, engine: str = "fast") -> Outcome:
    stream = simulate([spec], shared_model(), rounds=rounds, batch_size=BATCH, engine=engine)  # type: ignore[arg-type]
    return list(stream)[-1][0]


def test_steps_are_those_of_torch() -> None:
    """Ten steps of two rows, with decoupled weight decay, are those of torch.optim.AdamW to 1e-12."""
    torch.manual_seed(0)
    start, gradients = torch.randn(2, 5, dtype=torch.float64), torch.randn(10, 2, 5, dtype=torch.float64)
    theirs = torch.nn.Parameter(start.clone())
    optimiser = torch.optim.AdamW([theirs], 0.01, weight_decay=0.1)
    ours, moments = start, KEEP.zero_velocity(start)
    for g in gradients:
        theirs.grad = g.clone()
        optimiser.step()
        # AdamW decays before the step, ours with it: y (1 - lr wd) - lr direction in both
        ours, moments = KEEP.step(ours, moments, g)
    torch.testing.assert_close(ours, theirs.data, atol=1e-12, rtol=1e-12)


def test_the_correction_of_control_variates_is_added_to_the_step() -> None:
    """A correction moves the model by lr times itself, after the moments, and clipping limits the gradient alone."""
    y, g = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[30.0, 0.0, 40.0]], dtype=torch.float64)
    plain, moments = Adam(0.1).step(y, Adam(0.1).zero_velocity(y), g)
    shifted, same = Adam(0.1).step(y, Adam(0.1).zero_velocity(y), g, correction=torch.ones_like(y))
    torch.testing.assert_close(shifted, plain - 0.1)
    assert torch.equal(moments, same)
    _, clipped = Adam(0.1).step(y, Adam(0.1).zero_velocity(y), g, clip=5.0)
    torch.testing.assert_close(clipped[:, :3], 0.1 * g / 10)


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_the_fast_engine_agrees_with_the_loop(method: str) -> None:
    """Every method trains with Adam, and the fast engine gives the models of the readable one to 1e-12."""
    spec = RunSpec(ALGORITHMS[method](sgd=KEEP), make_federation(), 1)
    fast, loop = last(spec), last(spec, engine="loop")
    assert not fast.error
    for ours, theirs in zip(fast.state.server, loop.state.server, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_kept_moments_are_part_of_the_state() -> None:
    """A run that is resumed after two rounds ends in the bits of the whole run, and keeping differs from resetting."""
    spec = RunSpec(WafflePaper(KEEP), make_federation(), 1)
    stream = simulate([spec], shared_model(), rounds=4, batch_size=BATCH)
    whole = [outcomes[0] for outcomes in stream]
    later = simulate([replace(spec, state=whole[1].state)], shared_model(), rounds=4, start=2, batch_size=BATCH)
    assert torch.equal(list(later)[-1][0].state.server.x, whole[-1].state.server.x)
    kept, reset = (last(RunSpec(FedAvg(sgd), make_federation(), 1)) for sgd in (KEEP, Adam(0.01, weight_decay=0.1)))
    assert not torch.equal(kept.state.server.x, reset.state.server.x)


def test_kept_moments_count_all_steps() -> None:
    """The step count of kept moments after two rounds of Local is that of two epochs."""
    federation = make_federation().only(0)
    outcome = last(RunSpec(Local(KEEP), federation, 1), rounds=2)
    assert outcome.state.agents.velocity[0, -1] == 2 * -(-len(federation.train[0]) // BATCH)


def test_mistakes_are_one_line() -> None:
    """Momentum belongs to SGD, and an unknown optimiser is refused."""
    config = check_run("local", {"optimiser": "adam", "momentum": 0.9}, {})
    assert "expected 0 with the optimiser adam, got 0.9" in refusal(config.algorithm)
    assert "expected 'sgd' or 'adam', got 'adma'" in refusal(check_run, "local", {"optimiser": "adma"}, {})


# ----------------------------------------------------------------------------------------- the model of the best round

TINY = {"data": "digits", "agents": 3, "samples_per_agent": 40, "rounds": 8, "lr": 3.0, "validation": 0.25, "seed": 5}


def test_the_selected_model_is_that_of_the_best_validation_round(tmp_path: Path) -> None:
    """With final_model = "selected" the predictions have the test accuracy of the round selected on validation data."""
    config = check_run("fedavg", {**TINY, "final_model": "selected"}, {})
    (result,) = execute([(config, tmp_path / "run")], Runtime())
    tensors = read_named(tmp_path / "run" / "predictions.safetensors", ("output", "target"))
    accuracy = (tensors["output"].argmax(dim=1) == tensors["target"]).double().mean()
    assert float(accuracy) == pytest.approx(result["selected"]["accuracy"])
    assert result["metrics"]["accuracy"] == pytest.approx(result["selected"]["accuracy"])
    assert result["selected"]["round"] < 8


def test_the_selected_model_survives_an_interruption(tmp_path: Path) -> None:
    """A run that is paused after its best round and resumed saves the same model as an uninterrupted one."""
    config = check_run("fedavg", {**TINY, "final_model": "selected"}, {})
    execute([(config, tmp_path / "whole")], Runtime())
    execute([(config, tmp_path / "paused")], Runtime(checkpoint_seconds=0), until=6)
    execute([(config, tmp_path / "paused")], Runtime())
    whole, paused = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "paused"))
    assert whole == paused


def test_selecting_needs_validation_data(tmp_path: Path) -> None:
    """Without validation data a model cannot be selected, and the message names the setting."""
    config = check_run("fedavg", {**TINY, "validation": 0.0, "final_model": "selected"}, {})
    assert "set validation, such as 0.2" in refusal(execute, [(config, tmp_path / "run")], Runtime())
