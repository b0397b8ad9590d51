"""Flower's own processes on loopback, with TLS and a key for each site: the same bits, and what becomes of a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower_harness import SITES, Deployment, asked, bits, federation, simulated, small
from waffle_fl.deploy.loopback import deployed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "federation", SITES)


def test_f16_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """F16: a run over Flower, TLS and authentication ends in the simulator's model and record, bit for bit."""
    with deployed(Deployment(folder)) as deployment:
        assert deployment.finish_run(*asked(2, tmp_path / "run")) == 0
    assert bits(tmp_path / "run")[:2] == bits(simulated(small(2), tmp_path / "twin"))[:2]


@pytest.mark.flower
@pytest.mark.parametrize("victim", ["site", "ServerApp", "SuperLink"])
def test_f4_f5_f6_killed_and_resumed(victim: str, folder: Path, tmp_path: Path) -> None:
    """F4, F5, F6: a site, the ServerApp or the SuperLink killed in a round: the resumed run ends in the same bits."""
    out = tmp_path / "run"
    with deployed(Deployment(folder)) as deployment:
        running = deployment.start_run(*asked(3, out))
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
                assert "the ServerApp ended without a word" in deployment.said(0)
            else:
                deployment.kill("server")
                running.terminate()
                running.wait()
            del deployment.processes["run"]
            deployment.wait_until(lambda: deployment.server_app() is None)
            if victim == "SuperLink":
                deployment.start_server()
            assert deployment.finish_run("resume", out) == 0
    assert bits(out)[:2] == bits(simulated(small(3), tmp_path / "twin"))[:2]
