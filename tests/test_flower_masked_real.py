"""Masked runs with Flower's own processes: the simulator's bits, also after a kill, and without a site."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flower_harness import Deployment, bits, federation, run_arguments, run_simulation, small_config
from waffle_fl.deploy.local_cluster import deployed
from waffle_fl.deploy.settings_files import change

SITES = ("a", "b", "c", "d")
MASKED: dict[str, Any] = {"agents": 4, "privacy": "masked", "guard": "off"}


@pytest.mark.flower
@pytest.mark.parametrize("victim", ["site", "ServerApp", "SuperLink"])
def test_a_killed_process_changes_no_bit(victim: str, tmp_path: Path) -> None:
    """A masked run whose site, ServerApp or SuperLink was killed goes on with new masks to the same bits."""
    out, folder = tmp_path / "run", federation(tmp_path / "federation", SITES)
    with deployed(Deployment(folder)) as deployment:
        running = deployment.start_run(*run_arguments(3, out, **MASKED))
        deployment.wait_for_rounds(out, 1)
        if victim == "site":
            deployment.kill("b")
            deployment.start_site("b")
            assert running.wait(timeout=900) == 0
        else:
            if victim == "ServerApp":
                number = deployment.server_app()
                assert number is not None
                os.kill(number, signal.SIGKILL)
                assert running.wait(timeout=900) == 2
            else:
                deployment.kill("server")
                running.terminate()
                running.wait()
            del deployment.processes["run"]
            deployment.wait_until(lambda: deployment.server_app() is None)
            if victim == "SuperLink":
                deployment.start_server()
            assert deployment.finish_run("resume", out) == 0
    assert bits(out)[:2] == bits(run_simulation(small_config(3, **MASKED), tmp_path / "reference"))[:2]


@pytest.mark.flower
def test_one_of_four_sites_may_stay_away(tmp_path: Path) -> None:
    """A site that is killed in a round and does not return is left out of the sums; the run ends."""
    out, folder = tmp_path / "run", federation(tmp_path / "federation", SITES)
    change(folder / "server.toml", grace=5.0)
    with deployed(Deployment(folder)) as deployment:
        running = deployment.start_run(*run_arguments(3, out, **MASKED))
        deployment.wait_for_rounds(out, 1)
        deployment.kill("d")
        assert running.wait(timeout=900) == 0
        del deployment.processes["run"]
    _, rounds, result = bits(out)
    assert result["status"] == "finished"
    assert rounds[-1]["screened"] == {"agent 3": "absent"}
    assert rounds[-1]["weights"][3] == 0
