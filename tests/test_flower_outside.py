"""A method from outside the package in a deployment: only sites that list it train it, with the simulator's bits."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower_harness import SITES, Deployment, bits, federation, run_job, run_simulation, small_config
from test_outside_method import NAME, snippet
from waffle_fl.config import RunConfig
from waffle_fl.deploy.local_cluster import deployed
from waffle_fl.deploy.settings_files import change
from waffle_fl.errors import WaffleError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a federation and put mine.py on the search path of this process."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(snippet())
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return federation(tmp_path / "federation", SITES)


def config() -> RunConfig:
    return replace(small_config(2), method=NAME, options={"mu": 0.02})


def allow(folder: Path) -> None:
    for name in SITES:
        change(folder / "sites" / name / "site.toml", methods=[NAME], imports=[NAME])


def test_sites_refuse_an_unlisted_method(folder: Path, tmp_path: Path) -> None:
    """The run ends before its first round with the site's reason."""
    with pytest.raises(WaffleError, match=r"this site takes part in .*, not in mine:ConstantPull"):
        run_job(folder, config(), tmp_path / "run")


def test_sites_train_a_listed_method(folder: Path, tmp_path: Path) -> None:
    """Model and record equal those of the simulator bit for bit."""
    allow(folder)
    run_job(folder, config(), tmp_path / "run")
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(config(), tmp_path / "reference"))[:2]


@pytest.mark.flower
def test_real_processes_train_a_listed_method(folder: Path, tmp_path: Path) -> None:
    """Flower processes with TLS and authentication train it, with the module on each site's PYTHONPATH."""
    allow(folder)
    deployment = Deployment(folder)
    deployment.environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "code"), *sys.path])
    s = config().settings
    flags = {"data": s.data, "agents": s.agents, "samples-per-agent": s.samples_per_agent, "rounds": s.rounds}
    flags |= {"batch-size": s.batch_size, "precision": s.precision, "model": s.model, "mu": 0.02}
    with deployed(deployment):
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        assert deployment.finish_run("run", NAME, *words, "--out", tmp_path / "run") == 0
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(config(), tmp_path / "reference"))[:2]
