"""The footer of a report names the trained network and the number of test samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from test_report import finished
from waffle_fl.config import RunConfig, Settings
from waffle_fl.experiment import Runtime, execute, model_name
from waffle_fl.models import builder
from waffle_fl.records import read_json
from waffle_fl.report import write_report
from waffle_fl.report.page import facts_of, training_text
from waffle_fl.results import FinishedRun, read_runs

RESULTS = Path(__file__).parent.parent / "results"
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "digits": (1, 8, 8), "synthetic": (20,), "a/folder": (9, 128)}


@pytest.mark.parametrize("data", SHAPES)
def test_the_resolved_model_is_that_of_auto(data: str) -> None:
    """The resolved model name builds the same network as `auto`."""
    named = model_name(Settings(data=data), SHAPES[data])
    assert named != "auto"
    assert str(builder(named, data, SHAPES[data], 10)()) == str(builder("auto", data, SHAPES[data], 10)())
    assert model_name(Settings(data=data, model="linear"), SHAPES[data]) == "linear"


def test_a_run_records_its_model(tmp_path: Path) -> None:
    """provenance.json names the network, and the page prints it."""
    config = RunConfig(method="local", settings=Settings(data="synthetic", rounds=2))
    execute([(config, tmp_path / "run")], Runtime(device="cpu"))
    assert (read_json(tmp_path / "run" / "provenance.json") or {})["model"] == "mlp"
    (run,) = read_runs([tmp_path / "run"])
    assert facts_of(run)["model"].startswith("mlp, ")


def measured_on(split: str, samples: int | None) -> FinishedRun:
    return replace(finished("local", split, 1, 0.9), provenance={"test_samples": samples, "sample": [1, 8, 8]})


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([measured_on("A", 1000), measured_on("B", 1000)], "<dd>1,000</dd>"),
        ([measured_on("A", 1000), measured_on("C", 949), measured_on("A*", 1000)], "<dd>1,000 in A, A*; 949 in C</dd>"),
        ([measured_on("A", None)], "<dd>not known</dd>"),
    ],
)
def test_test_samples_are_listed_per_split(runs: list[FinishedRun], text: str, tmp_path: Path) -> None:
    """When splits differ in the number of test samples, the page lists the number of each."""
    assert text in write_report(runs, tmp_path, "title", images=False).read_text()


def test_an_old_record_names_its_model(tmp_path: Path) -> None:
    """A record without a model name gets it from its settings: lenet5, with 949 test samples in split C."""
    text = write_report(read_runs([RESULTS / "mnist-6000.jsonl"]), tmp_path, "title", images=False).read_text()
    assert "<dd>lenet5, 61,706 parameters</dd>" in text
    assert "949 in C" in text
    assert "auto" not in text[text.index("Where this comes from") : text.index("All runs")]


def test_facts_that_differ_are_all_listed() -> None:
    """Runs with two learning rates have both on the page."""
    one = finished("local", "A", 1, 0.9)
    two = replace(one, config=replace(one.config, settings=replace(one.config.settings, lr=0.5)))
    training = facts_of(one, two, one)["training"]
    assert "lr 0.1," in training
    assert "lr 0.5," in training
    assert training.count("rounds") == 2


def test_the_training_is_named_in_words() -> None:
    """The page names optimiser, augmentation and the round whose model is used; Adam has no momentum."""
    s = Settings(data="images", rounds=26, optimiser="adam", lr=0.003, augment=True, flips=False)
    assert training_text(s) == "26 rounds of 1 epoch, batch 32, Adam, lr 0.003, weight decay 0.0, shifts"
    chosen = replace(s, optimiser="sgd", final_model="selected", final_round=15, augment=False, steps_per_round=5)
    text = "26 rounds of 5 steps, model of round 15, batch 32, SGD, momentum 0.0, lr 0.003, weight decay 0.0"
    assert training_text(chosen) == text
