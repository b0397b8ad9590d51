"""Partial participation in a deployment: the server asks only the cohort, and the bits are the simulator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flower_harness import SMALL, Grid, bits, federation, run_job, run_simulation
from waffle_fl.config import RunConfig, check_run

SITES = ("a", "b", "c", "d")
ROUNDS = 4


def config(method: str, **more: Any) -> RunConfig:
    settings = {**SMALL, "agents": 4, "model": "linear", "rounds": ROUNDS, "participation": 0.5, **more}
    return check_run(method, settings, {"alone": 1} if method == "fedcollab" else {})


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("waffle-paper", {}),
        ("ditto", {"momentum": 0.5, "momentum_between_rounds": "keep"}),
        ("cobo", {}),
        ("fedfomo", {"alice": "2"}),
        ("fedcollab", {}),
        ("fedavg", {"guard": "standard"}),
    ],
)
def test_the_server_asks_only_the_cohort(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Model and record are the simulator's bit for bit; an absent Alice is only asked for the score of her model."""
    folder = federation(tmp_path / "federation", SITES)
    grid = Grid(folder)
    run_job(folder, config(method, **more), tmp_path / "run", grid)
    model, rounds, result = bits(tmp_path / "run")
    assert (model, rounds, result) == bits(run_simulation(config(method, **more), tmp_path / "reference"))
    tasks = [(site, task) for site, request in grid.requests for task in request.fields.get("tasks", ())]
    for line in rounds:
        trained = {f"agent {SITES.index(site)}" for site, task in tasks if task["round"] == line["round"]}
        assert trained == set(line.get("participants", [f"agent {i}" for i in range(4)]))
    assert [len(line.get("participants", SITES)) for line in rounds][-1] == 2
