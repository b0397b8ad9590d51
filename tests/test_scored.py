"""One run with a score for every agent: the same numbers as one run per Alice, from a single training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import BATCH, make_federation, shared_model
from waffle_fl import SGD, RunSpec, WaffleError, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.config import RunConfig, Settings, check_run
from waffle_fl.engines.simulate import Engine
from waffle_fl.experiment import Runtime, alices, execute
from waffle_fl.records import read_rounds

EVERYONE = tuple(m for m, kind in ALGORITHMS.items() if m == "local" or not getattr(kind, "for_alice", False))
DIGITS: dict[str, Any] = {"data": "digits", "agents": 3, "samples_per_agent": 40, "rounds": 2, "batch_size": 16}


@pytest.mark.parametrize("engine", ["fast", "loop"])
@pytest.mark.parametrize("method", EVERYONE)
def test_scores_of_everyone_equal_one_run_per_alice(method: str, engine: Engine) -> None:
    """`by_agent` has the accuracy of each Alice's run; accuracy and loss are means over all test samples."""
    federation = make_federation((12, 5, 9, 7))
    federation = replace(federation, test=(*federation.test[:-1], federation.test[-1][:5]))
    algorithm, model = ALGORITHMS[method](sgd=SGD(0.1)), shared_model()  # type: ignore[call-arg]
    options: Any = {"rounds": 2, "batch_size": BATCH, "engine": engine}
    runs = [RunSpec(algorithm, replace(federation, alice=i), 1) for i in range(federation.agents)]
    *_, alone = simulate(runs, model, **options)
    *_, (together,) = simulate([RunSpec(algorithm, federation, 1, everyone=True)], model, **options)
    rows = [len(part) for part in federation.test]
    assert together.measured["by_agent"] == pytest.approx([run.measured["accuracy"] for run in alone])
    for key in ("accuracy", "loss"):
        expected = sum(n * run.measured[key] for n, run in zip(rows, alone, strict=True)) / sum(rows)
        assert together.measured[key] == pytest.approx(expected)


def test_an_agent_without_test_data_is_left_out() -> None:
    federation = make_federation()
    federation = replace(federation, test=(federation.test[0][:0], *federation.test[1:]))
    spec = RunSpec(ALGORITHMS["fedper"](sgd=SGD(0.1)), federation, 1, everyone=True)  # type: ignore[call-arg]
    ((outcome,),) = simulate([spec], shared_model(), rounds=1, batch_size=BATCH)
    assert len(outcome.measured["by_agent"]) == federation.agents - 1


def test_helpers_share_the_training_of_their_carrier(tmp_path: Path) -> None:
    """FedAvg rides on Ditto's training and scores everyone by the global model; results keep each agent's score."""
    configs = [check_run(method, {**DIGITS, "scored": "all"}, {}) for method in ("ditto", "fedavg", "local")]
    runs = [(config, tmp_path / config.label) for config in configs]
    results = execute(runs, Runtime(device="cpu", workers=1))
    alone = execute([(configs[1], tmp_path / "alone")], Runtime(device="cpu", workers=1))
    assert results[1]["last"] == alone[0]["last"]
    for (_, folder), result in zip(runs, results, strict=True):
        last = read_rounds(folder / "rounds.jsonl")[-1]
        assert len(last["by_agent"]) == DIGITS["agents"]
        assert result["last"] == {key: last[key] for key in ("round", "accuracy", "by_agent")}
        assert result["metrics"]["accuracy"] == pytest.approx(last["accuracy"])


def run(settings: dict[str, Any], method: str, folder: Path) -> None:
    execute([(RunConfig(method=method, settings=Settings(**{**DIGITS, **settings})), folder)], Runtime(device="cpu"))


def test_methods_for_alice_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WaffleError, match="waffle-paper, which trains for Alice alone: use alice = all"):
        run({"scored": "all"}, "waffle-paper", tmp_path / "waffle-paper")
    with pytest.raises(WaffleError, match="expected alice with the attack sign-flip"):
        run({"scored": "all", "attack": "sign-flip"}, "fedavg", tmp_path / "attacked")
    with pytest.raises(WaffleError, match="one agent with scored = all"):
        alices(Settings(scored="all", alice="all"), Runtime())
