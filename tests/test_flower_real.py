"""Flower's own processes on loopback with TLS and one key per site: same bits as the simulator, also after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower_harness import (
    SITES,
    Deployment,
    bits,
    federation,
    processes_in,
    run_arguments,
    run_simulation,
    small_config,
)
from waffle_fl.deploy.local_cluster import PATIENCE, deployed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "federation", SITES)


@pytest.mark.flower
def test_the_demonstration_can_be_stopped(tmp_path: Path) -> None:
    """Ctrl-C ends the demonstration and all of its processes."""
    out, log = tmp_path / "demo", tmp_path / "log"
    command = [sys.executable, "-m", "waffle_fl", "deploy", "demo", "--out", str(out)]
    with log.open("wb") as stream:
        running = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
    try:
        end = time.monotonic() + PATIENCE
        while "all sites are online" not in log.read_text():
            assert running.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        assert processes_in(out)
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=PATIENCE) == 130
    finally:
        running.terminate()
        running.wait(timeout=PATIENCE)
    assert "stopped the run, the server and its sites" in log.read_text()
    end = time.monotonic() + 60
    while processes_in(out) and time.monotonic() < end:  # Flower's helpers end once their parent has ended
        time.sleep(0.5)
    assert processes_in(out) == []


@pytest.mark.flower
@pytest.mark.parametrize("victim", ["site", "ServerApp", "SuperLink"])
def test_f4_f5_f6_killed_and_resumed(victim: str, folder: Path, tmp_path: Path) -> None:
    """F4, F5, F6: a run whose site, ServerApp or SuperLink was killed resumes to the same bits."""
    out = tmp_path / "run"
    with deployed(Deployment(folder)) as deployment:
        running = deployment.start_run(*run_arguments(3, out))
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
                assert "the ServerApp ended without a result" in deployment.output_since(0)
            else:
                deployment.kill("server")
                running.terminate()
                running.wait()
            del deployment.processes["run"]
            deployment.wait_until(lambda: deployment.server_app() is None)
            if victim == "SuperLink":
                deployment.start_server()
            assert deployment.finish_run("resume", out) == 0
    assert bits(out)[:2] == bits(run_simulation(small_config(3), tmp_path / "reference"))[:2]


@pytest.mark.flower
def test_resume_watches_a_running_server_app(folder: Path, tmp_path: Path) -> None:
    """If only the watching command ended, `resume` watches the running ServerApp and starts no other."""
    out = tmp_path / "run"
    with deployed(Deployment(folder)) as deployment:
        deployment.start_run(*run_arguments(3, out))
        deployment.wait_for_rounds(out, 1)
        deployment.kill("run")
        running_app = deployment.server_app()
        resumed = deployment.start_run("resume", out)
        deployment.wait_for_rounds(out, 2)
        assert deployment.server_app() == running_app is not None
        assert resumed.wait(timeout=2 * PATIENCE) == 0
        del deployment.processes["run"]
        assert deployment.server_app() in (running_app, None)
    assert bits(out)[:2] == bits(run_simulation(small_config(3), tmp_path / "reference"))[:2]
