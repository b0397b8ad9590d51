"""What a study may cost: counted work, its limits, and what is reduced when they are exceeded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cli_support import waffle
from conftest import make_federation
from waffle_fl.config import Settings
from waffle_fl.decision import budget, measurement
from waffle_fl.decision.budget import WorkBudget, budget_for, is_expensive, passes_of, seeds_within
from waffle_fl.experiment import Runtime, all_alices_of
from waffle_fl.models.cost import multiply_adds


def write_images(folder: Path, size: int = 8) -> Path:
    """Two agents with 40 small colour images of two classes each."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        y = np.arange(40) % 2
        np.savez(folder / f"{name}.npz", x=rng.standard_normal((40, 3, size, size)) + y[:, None, None, None], y=y)
    return folder


def test_multiply_adds_are_counted_by_layer() -> None:
    """On 8 x 8 pixels: 16 filters of 3 x 3 x 3 weights at 64 positions, then 16 x 16 values to 5 classes.

    Group normalisation counts its 32 parameters once, and the module itself is not changed.
    """
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(8, 16), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 5)]
    net = nn.Sequential(*layers).train()
    assert multiply_adds(net, torch.zeros(1, 3, 8, 8)) == 16 * 27 * 64 + 32 + 256 * 5
    assert net.training
    assert not any(part._forward_hooks for part in net.modules())


def test_a_limit_counts_passes_times_the_work_of_a_sample() -> None:
    """Ten passes of 5 exceed a limit of 49 and not of 50; the factor multiplies the limit, and 0 removes it."""
    assert WorkBudget(5).exceeds(10, 49)
    assert not WorkBudget(5).exceeds(10, 50)
    assert not WorkBudget(5, factor=2).exceeds(10, 49)
    assert not WorkBudget(5, factor=0).exceeds(10**9, 1)
    assert not WorkBudget(0).exceeds(10**9, 1)  # tables


def test_the_budget_counts_the_network_of_the_data(tmp_path: Path) -> None:
    """Larger images cost more per sample; tables cost nothing here."""
    small, large = (
        budget_for(s, all_alices_of(s, Runtime()), Runtime(), 2.0)
        for size in (8, 16)
        for s in [Settings(data=str(write_images(tmp_path / str(size), size)), alice="all")]
    )
    assert budget.PER_SAMPLE < small.per_sample < large.per_sample
    assert small.factor == 2
    assert budget_for(Settings(), make_federation(), Runtime()).per_sample == 0


def test_passes_depend_on_what_a_method_trains() -> None:
    """Local trains its own rows, FedAvg all of them once, WAFFLE once per Alice, and Ditto two models."""
    federation = make_federation(sizes=(10, 20, 30))
    found = [passes_of(m, federation, 5, [0, 2]) for m in ("local", "fedavg", "waffle", "ditto")]
    assert found == [5 * 40, 5 * 60, 5 * 60 * 2, 5 * 60 * 2]


def test_one_seed_is_left_if_all_would_exceed_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = make_federation(sizes=(10, 20, 30))
    arguments = (("local", "fedavg"), federation, 5, [0, 1, 2])
    monkeypatch.setattr(budget, "TRAININGS", 3 * 600)
    assert seeds_within(WorkBudget(1), (1, 2, 3), *arguments) == (1, 2, 3)
    assert seeds_within(WorkBudget(1.01), (1, 2, 3), *arguments) == (1,)
    assert seeds_within(WorkBudget(1.01, factor=2), (1, 2, 3), *arguments) == (1, 2, 3)


def test_expensive_data_costs_more_than_the_trials_may() -> None:
    """One federated model for each of two agents, 60 rows and 5 rounds are 600 passes."""
    federation = make_federation(sizes=(10, 20, 30))
    assert is_expensive(WorkBudget(budget.TRIALS / 599), federation, 5, 2)
    assert not is_expensive(WorkBudget(budget.TRIALS / 601), federation, 5, 2)


def test_four_sites_with_750_small_images_keep_three_seeds() -> None:
    """This study reduces trials and partner values, so that it ends in five minutes, but not its seeds."""
    net = WorkBudget(budget.PER_SAMPLE + 1.65e6)
    federation = make_federation(sizes=(563,) * 4)
    methods, agents = ("local", "fedavg-ft", "waffle"), range(4)
    assert is_expensive(net, federation, 23, 4)
    assert seeds_within(net, (1, 2, 3), methods, federation, 26, list(agents)) == (1, 2, 3)
    assert seeds_within(net, (1, 2, 3), methods, make_federation(sizes=(1500,) * 4), 26, list(agents)) == (1,)


def test_a_reduced_study_says_so_and_the_budget_lifts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limits there is one seed, no Ditto and no partner value; the page names each, and how to get more."""
    for limit in ("TRIALS", "TRAININGS"):
        monkeypatch.setattr(budget, limit, 1)
    monkeypatch.setattr(measurement, "PARTNERS", 1)
    line = ("decide", write_images(tmp_path / "images"), "--rounds", "1", "--training", "given", "--workers", "1")
    shown = waffle(*line, "--out", tmp_path / "short")
    page = (tmp_path / "short" / "decision.html").read_text()
    said = json.loads((tmp_path / "short" / "reduced.json").read_text())["reduced"]
    assert said == [budget.WITHOUT, budget.ONE_SEED.format(3), measurement.NOTHING]
    for sentence in said:
        assert f"note: {sentence}" in shown.err
        assert sentence in re.sub("</?code>", "", page)
    assert {path.name for path in (tmp_path / "short").glob("*/")} == {
        f"images-{method}-1-{agent}" for method in ("local", "fedavg-ft", "waffle") for agent in ("north", "south")
    }
    assert waffle("report", tmp_path / "short", "--out", tmp_path / "again").code == 0
    assert "Ditto was left out, because training takes long" in (tmp_path / "again" / "decision.html").read_text()
    shown = waffle(*line, "--budget", "0", "--partners", "none", "--out", tmp_path / "long")
    assert "What was reduced" not in (tmp_path / "long" / "decision.html").read_text()
    assert len(list((tmp_path / "long").glob("*-ditto-3-*/"))) == 2
    assert "expected a factor of at least 0" in waffle(*line, "--budget", "-1", "--out", tmp_path / "bad").err


def test_the_page_shows_the_record_of_times() -> None:
    """Every line of results/decide-time.jsonl is a row of docs/decision.md; 4 sites with 750 images need 5 minutes."""
    root = Path(__file__).parent.parent
    record = [json.loads(line) for line in (root / "results" / "decide-time.jsonl").read_text().splitlines()]
    text = (root / "docs" / "decision.md").read_text()
    for r in record:
        size = " x ".join(map(str, r["sample"][1:]))
        parts = " | ".join(f"{r[part]:.0f}" for part in ("trials", "trainings", "partners", "references"))
        assert f"| {r['data']} | {r['agents']} | {r['samples']:,} | {size} | {parts} | {r['seconds']:.0f} |" in text
    (photographs,) = (r for r in record if r["data"] == "photographs-750")
    assert (photographs["agents"], photographs["samples"], len(photographs["recommended"])) == (4, 3000, 4)
    assert photographs["seconds"] <= 300
