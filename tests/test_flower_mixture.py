"""Deployed runs whose predictions need several models or training samples: a mixture of predictions, and kNN-Per."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

from conftest import refusal
from flower_harness import SITES, Grid, bits, federation, run_job, run_simulation, small_config
from waffle_fl.config import RunConfig, check_run
from waffle_fl.engines.flower.messages import Message
from waffle_fl.engines.mixed_outputs import MEMORY_NAMES
from waffle_fl.inference.trained_run import open_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "federation", SITES)


def mixture() -> RunConfig:
    return check_run("waffle", dict(vars(small_config(3, validation=0.3).settings)), {"prediction": "mixture"})


def neighbours() -> RunConfig:
    return check_run("knn-per", dict(vars(small_config(3).settings)), {})


def test_a_mixture_gives_the_simulator_s_bits(folder: Path, tmp_path: Path) -> None:
    """Alice's site weighs the parts by its own validation data, and its metrics are those of the mixture."""
    run_job(folder, mixture(), tmp_path / "run")
    model, rounds, result = bits(tmp_path / "run")
    reference = bits(run_simulation(mixture(), tmp_path / "reference"))
    assert (model, rounds) == reference[:2]
    assert result["metrics"] == reference[2]["metrics"]
    (at_site,) = (folder / "sites" / "a" / "models").iterdir()
    simulated = load_file(tmp_path / "reference" / "model.safetensors")
    stored = load_file(at_site / "model.safetensors")
    assert set(stored) == set(simulated)
    assert all(torch.equal(tensor, simulated[name]) for name, tensor in stored.items())
    x = torch.zeros(2, 1, 8, 8)
    assert torch.equal(open_run(at_site).outputs(x), open_run(tmp_path / "reference").outputs(x))


@pytest.mark.parametrize("method", ["mixture", "knn-per"])
def test_training_samples_stay_at_the_site(method: str, folder: Path, tmp_path: Path) -> None:
    """The server's file has the models alone, also if `model_may_leave` is set, and says where predictions are made."""
    run_job(folder, mixture() if method == "mixture" else neighbours(), tmp_path / "run")
    (at_site,) = (folder / "sites" / "a" / "models").iterdir()
    complete, sent = (set(load_file(one / "model.safetensors")) for one in (at_site, tmp_path / "run"))
    assert complete & MEMORY_NAMES
    assert sent == complete - MEMORY_NAMES
    assert "only the folder at Alice's site" in refusal(open_run, tmp_path / "run")


def test_a_site_that_lost_its_state_starts_its_own_model_anew(folder: Path, tmp_path: Path) -> None:
    """The server restores what it has, and the record says that the model trained alone starts anew."""
    seen: list[int] = []

    def lose(name: str, request: Message, reply: Message) -> Message:
        if request.fields.get("tasks", [{}])[0].get("round") == 2 and name == "b" and not seen:
            seen.append(1)
            shutil.rmtree(folder / "sites" / "b" / "state")
        return reply

    run_job(folder, mixture(), tmp_path / "run", Grid(folder, lose))
    model, rounds, _ = bits(tmp_path / "run")
    (note,) = [text for line in rounds for _, text in line.get("refused", ())]
    assert "its model trained alone starts anew" in note
    assert model == bits(run_simulation(mixture(), tmp_path / "reference"))[0]
