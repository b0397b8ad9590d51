"""Misuse of the Python API: one line with what was expected, what came and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import waffle_fl
from conftest import BATCH, CLASSES, FEATURES, make_federation, make_model, refusal
from waffle_fl import (
    APFL,
    SGD,
    FedAvg,
    FedProx,
    FlatModel,
    PersonalizedClassifier,
    RunSpec,
    Scaffold,
    WaffleError,
    WafflePaper,
    simulate,
    table_of_rounds,
)
from waffle_fl.config import check_run
from waffle_fl.experiment import Runtime, execute


class Pair(nn.Module):
    """A module that returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


def run(algorithm: Any = None, model: Any = None, seed: Any = 1, alice: int = 0, **options: Any) -> Any:
    """Simulate one round."""
    federation = replace(make_federation(), alice=alice)
    settings = {"rounds": 2, "batch_size": BATCH, **options}
    return next(simulate([RunSpec(algorithm or WafflePaper(), federation, seed)], model or make_model(), **settings))


MISUSE: dict[str, tuple[Callable[[], Any], str]] = {
    "guard": (lambda: run(guard="standrad"), "guard: expected 'off' or 'standard', got 'standrad', did you mean"),
    "step size": (lambda: SGD(-0.1), "lr: expected a number above 0, got -0.1"),
    "momentum": (lambda: SGD(momentum=5), "momentum: expected a number from 0 to below 1, got 5"),
    "eta_g": (lambda: Scaffold(eta_g=-1), "eta_g: expected a number above 0, got -1"),
    "clip": (lambda: WafflePaper(clip=-1), "clip: expected at least 0, got -1"),
    "mix": (lambda: APFL(mix=3), "mix: expected a number from 0 to 1, got 3"),
    "mu": (lambda: FedProx(mu=-5), "mu: expected at least 0, got -5"),
    "krum": (lambda: run(FedAvg(aggregation="krum(99)")), "krum"),
    "denominator": (lambda: WafflePaper(denominator="typo"), "denominator: expected"),  # type: ignore[arg-type]
    "weighting": (lambda: FedAvg(weighting="equall"), "did you mean 'equal'?"),  # type: ignore[arg-type]
    "compared": (lambda: WafflePaper(compared="direction"), "did you mean 'directions'?"),  # type: ignore[arg-type]
    "control": (lambda: WafflePaper(control="papr"), "did you mean 'paper'?"),  # type: ignore[arg-type]
    "precision": (lambda: FlatModel(nn.Linear(2, 2), precision="flaot32"), "did you mean float32?"),  # type: ignore[arg-type]
    "no rounds": (lambda: run(rounds=0), "rounds: expected at least 1, got 0"),
    "fewer rounds": (lambda: run(rounds=-3), "rounds: expected at least 1, got -3"),
    "start": (lambda: run(start=99), "start: expected an integer from 0 to rounds (2), got 99"),
    "seed": (lambda: run(seed="a"), "seed: expected an integer of at least 0, got 'a'"),
    "batch size": (lambda: run(batch_size=0), "batch_size: expected at least 1, got 0"),
    "epochs": (lambda: run(epochs=0), "epochs: expected at least 1, got 0"),
    "workers": (lambda: run(workers=-1), "workers: expected an integer of at least 0, got -1"),
    "engine": (lambda: run(engine="lop"), "engine: unknown 'lop', did you mean loop?"),
    "Alice": (lambda: run(alice=7), "alice: expected an agent from 0 to 3, got 7"),
    "nothing to run": (lambda: simulate([], make_model(), rounds=1), "specs: expected at least one RunSpec, got none"),
    "a class": (lambda: run(WafflePaper), "algorithm: expected an instance such as Waffle()"),
    "input size": (lambda: run(model=FlatModel(nn.Linear(10, CLASSES))), "expects 10 features, got 5"),
    "a tuple": (lambda: run(model=FlatModel(Pair)), "returns one tensor of shape (batch, outputs), got a tuple"),
    "arguments": (lambda: FlatModel(nn.Linear), "which needs in_features, out_features"),  # type: ignore[arg-type]
    "no model": (lambda: FlatModel(3), "expected a torch.nn.Module"),  # type: ignore[arg-type]
    "a method's object": (
        lambda: PersonalizedClassifier(WafflePaper()).fit(agents()),
        "such as 'waffle-paper', got WafflePaper(",
    ),  # type: ignore[arg-type]
    "a list": (lambda: PersonalizedClassifier().fit([1, 2]), "expected"),  # type: ignore[arg-type]
}


def agents() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: (rng.normal(size=(20, 3)), np.arange(20) % 2) for name in ("north", "south")}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_one_line(what: str) -> None:
    """A mistake is rejected with one line, by an error that is also a ValueError."""
    call, words = MISUSE[what]
    assert words in refusal(call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_an_absent_gpu_is_one_line() -> None:
    assert "this machine has no CUDA device" in refusal(FlatModel, nn.Linear(2, 2), device="cuda")


def test_a_misspelt_option_is_a_value_error() -> None:
    """A misspelt option raises a ValueError."""
    with pytest.raises(ValueError, match="lr"):
        SGD(-1.0)
    assert issubclass(WaffleError, ValueError)


@pytest.mark.parametrize(
    "model", [nn.Linear(FEATURES, CLASSES), nn.LazyLinear(CLASSES), lambda: nn.LazyLinear(CLASSES)]
)
def test_modules_and_lazy_layers_train(model: Any) -> None:
    """A module in place of a factory, and a lazy layer, train."""
    (outcome,) = run(model=FlatModel(model))
    assert outcome.error is None


def test_the_public_names_are_listed() -> None:
    """`dir(waffle_fl)` lists the public names and no other."""
    listed = set(dir(waffle_fl)) - {"__version__"}
    assert listed == set(waffle_fl.__all__)
    for name in ("Algorithm", "Round", "Grad", "Net", "Dataset", "Partition", "Outcome", "WafflePaper", "simulate"):
        assert name in listed
        assert getattr(waffle_fl, name) is not None


def test_rounds_become_a_table(tmp_path: Any) -> None:
    """`rounds` returns one dictionary per run and round with the settings that differ and the measurements."""
    settings = {"data": "digits", "agents": 3, "samples_per_agent": 40, "rounds": 3}
    execute([(check_run(m, settings, {}), tmp_path / m) for m in ("waffle-paper", "local")], Runtime(device="cpu"))
    rows = table_of_rounds(tmp_path)
    assert [(row["method"], row["round"]) for row in rows if row["method"] == "waffle-paper"] == [
        ("waffle-paper", r) for r in (1, 2, 3)
    ]
    assert {"data", "split", "seed", "accuracy", "loss"} <= rows[0].keys()
