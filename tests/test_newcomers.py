"""An agent that joins after training: one mechanism for every method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import BATCH, fitted, make_federation, make_model, outcomes_of, refusal
from waffle_fl import SGD, RunSpec
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.config import Settings, check_run
from waffle_fl.engines.newcomers import join_after_training
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.experiment import Runtime, execute
from waffle_fl.experiment.active_run import tensors_of
from waffle_fl.experiment.planning import alices

ROUNDS = 2
SETTINGS = RoundSettings(ROUNDS, BATCH)
MODEL = make_model()


def joined(method: str, rounds: int = 1, **options: Any) -> dict[str, Any]:
    """Train the method without agent 2, and return the scores with which this agent joins."""
    whole = make_federation(alice=1)
    algorithm = fitted(ALGORITHMS[method](sgd=SGD(0.1, 0.5), **options))
    spec = RunSpec(algorithm, whole.before_joining("agent 2"), 1)
    state = outcomes_of(spec, MODEL, ROUNDS)[-1].state
    kept = {name: tensor.clone() for name, tensor in tensors_of(state).items()}
    scores = join_after_training(spec, state, MODEL, SETTINGS, whole.only(2), rounds)
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors_of(state).items())
    return scores


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_every_method_takes_a_newcomer(method: str) -> None:
    """Scores before and after are finite, and nothing at the server or at another agent changes."""
    scores = joined(method)
    assert list(scores) == ["before", "after", "tuned"]
    assert all(value is not None for found in scores.values() for value in found.values())


def test_a_global_model_is_the_same_before_and_after() -> None:
    """FedAvg gives its global model; local training is what changes it."""
    scores = joined("fedavg")
    assert scores["before"] == scores["after"] != scores["tuned"]


@pytest.mark.parametrize(("method", "options"), [("fedavg-ft", {}), ("ditto", {"lam": 0.0}), ("local", {})])
def test_plain_local_training_from_the_given_model(method: str, options: dict[str, Any]) -> None:
    """A personal model without regularisation is the given model after local training."""
    scores = joined(method, **options)
    assert scores["after"] == scores["tuned"] != scores["before"]


def test_ifca_chooses_a_cluster_for_a_newcomer() -> None:
    """After its first round the newcomer uses the cluster whose model fits its own data best."""
    scores = joined("ifca")
    assert scores["after"]["loss"] <= scores["before"]["loss"]


def test_the_others_train_as_if_the_newcomer_did_not_exist() -> None:
    """A run with a newcomer equals one without that agent."""
    whole, algorithm = make_federation(alice=1), ALGORITHMS["waffle-paper"](sgd=SGD(0.1))
    ends = [
        outcomes_of(RunSpec(algorithm, federation, 1), MODEL, ROUNDS)[-1].state.server.x
        for federation in (whole.before_joining("2"), whole.without("2"))
    ]
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


SMALL = {"data": "digits", "agents": 4, "samples_per_agent": 40, "rounds": 2, "model": "linear"}


@pytest.mark.parametrize("method", ["fedper", "local"])
def test_the_scores_are_in_the_result(method: str, tmp_path: Path) -> None:
    """`newcomers` names agents by name or number; the result has their scores, the training has no data of them."""
    config = check_run(method, {**SMALL, "newcomers": ("2", "agent 3"), "newcomer_rounds": 2}, {})
    [result] = execute([(config, tmp_path / "run")], Runtime(device="cpu"))
    assert list(result["newcomers"]) == ["agent 2", "agent 3"]
    scores = result["newcomers"]["agent 2"]
    assert scores["after"]["loss"] < scores["before"]["loss"]
    assert alices(replace(config.settings, alice="all"), Runtime()) == ["0", "1"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"newcomers": ("0",)}, "newcomers: expected other agents than Alice, got agent 0"),
        ({"newcomers": ("7",)}, "expected a newcomer's index between 0 and 3, got 7"),
        ({"newcomers": ("2",), "attack": "sign-flip"}, "newcomers: expected none with an attack, got 2"),
    ],
)
def test_impossible_newcomers(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    """One line says which agents cannot join later."""
    config = check_run("fedavg", {**SMALL, **changed}, {})
    assert refusal(execute, [(config, tmp_path / "run")], Runtime(device="cpu")) == words


def test_by_default_all_agents_take_part() -> None:
    """There are no newcomers unless they are named."""
    assert Settings().newcomers == ()
    assert make_federation().newcomers == ()
