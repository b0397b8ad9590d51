"""The engine for real machines, its sites in this process: the same bits as the simulator, whatever happens to it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flower_harness import Loopback, bits, change, conduct, federation, simulated
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.config import RunConfig, check_run
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.serverapp import Conductor
from waffle_fl.engines.flower import post
from waffle_fl.engines.flower.messages import Parcel
from waffle_fl.errors import WaffleError
from waffle_fl.results import read_runs
from waffle_fl.use.trained import open_run

SITES = ("a", "b", "c")


def config(method: str = "waffle", **settings: Any) -> RunConfig:
    given = {
        "data": "digits",
        "agents": 3,
        "samples_per_agent": 40,
        "batch_size": 16,
        "rounds": 3,
        "precision": "float64",
        "guard": "standard",
        "model": "mlp",
    }
    return check_run(method, {**given, **settings}, {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "federation", SITES)


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_every_method_ends_in_the_simulator_s_bits(method: str, folder: Path, tmp_path: Path) -> None:
    """F16: sites that answer one by one, each from its own files, give the simulator's model and record, bit for bit."""
    conduct(folder, config(method), tmp_path / "run")
    model, rounds, result = bits(tmp_path / "run")
    twin = bits(simulated(config(method), tmp_path / "twin"))
    assert (model, rounds) == twin[:2]
    assert {k: v for k, v in result.items() if k != "metrics"} == {k: v for k, v in twin[2].items() if k != "metrics"}
    assert result["metrics"] == twin[2]["metrics"]
