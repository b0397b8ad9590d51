"""Kill processes at random moments: each resumed run ends with the bits of the uninterrupted run.

WAFFLE_KILLS=20             number of kills
WAFFLE_KILLS_SEED=1         seed for the victims and the moments
WAFFLE_KILLS_RECORD=FILE    appends one line per kill
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flower_harness import Deployment, bits, federation, run_arguments, run_simulation, small_config
from waffle_fl.deploy.local_cluster import PATIENCE, deployed

ROOT = Path(__file__).parent.parent
KINDS = ("site", "ServerApp", "SuperLink")
ROUNDS = 2
SITES = ("a", "b")  # two suffice, and take half as long as three on a small machine
VICTIMS = (*(f"site {name}" for name in SITES), "ServerApp", "SuperLink")


def test_the_runbook_quotes_the_recorded_kills() -> None:
    """The runbook states the number of recorded kills, their victims, and how many ended with the same bits."""
    kills = [json.loads(line) for line in (ROOT / "results" / "kills.jsonl").read_text().splitlines()]
    same = sum(kill["same bits"] for kill in kills)
    counts = ", ".join(f"{sum(kill['victim'].startswith(kind) for kill in kills)} of {kind}" for kind in KINDS)
    assert f"{same} of {len(kills)} kills ({counts})" in (ROOT / "docs" / "deploy.md").read_text()


@pytest.mark.flower
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """F4, F5, F6: a run ends with the same bits after a site, the ServerApp or the SuperLink was killed."""
    count, seed = (
        int(os.environ.get(name, default)) for name, default in (("WAFFLE_KILLS", 20), ("WAFFLE_KILLS_SEED", 1))
    )
    rng = random.Random(seed)
    reference = bits(run_simulation(small_config(ROUNDS, agents=len(SITES)), tmp_path / "reference"))[:2]
    with deployed(Deployment(federation(tmp_path / "federation", SITES))) as deployment:
        began = time.monotonic()
        assert deployment.finish_run(*command(tmp_path / "unbroken")) == 0
        span = time.monotonic() - began
        assert bits(tmp_path / "unbroken")[:2] == reference
        kills = []
        while len(kills) < count:
            out = tmp_path / f"run-{rng.getrandbits(32):08x}"
            kill = run_with_kill(deployment, rng.choice(VICTIMS), rng.uniform(0, span), out)
            if kill:
                kill |= {"same bits": kill["exit code"] == 0 and bits(out)[:2] == reference}
                kills.append({"kill": len(kills) + 1, "of": count, "seed": seed, **kill})
                append_record(kills[-1])
    assert all(kill["same bits"] for kill in kills), kills


def command(out: Path) -> list[str | Path]:
    return run_arguments(ROUNDS, out, agents=len(SITES))


def run_with_kill(deployment: Deployment, victim: str, moment: float, out: Path) -> dict[str, Any] | None:
    """Kill the victim during a run and finish the run; return None if the run ended before the kill."""
    began = time.monotonic()
    running = deployment.start_run(*command(out))
    while time.monotonic() - began < moment or (victim == "ServerApp" and deployment.server_app() is None):
        if running.poll() is not None or time.monotonic() - began > PATIENCE:
            break
        time.sleep(0.05)
    if running.poll() is not None:
        del deployment.processes["run"]
        return None
    when = {"after": round(time.monotonic() - began, 1), "rounds recorded": recorded_rounds(out)}
    if victim.startswith("site"):
        name = victim.removeprefix("site ")
        deployment.kill(name)
        deployment.start_site(name)
        code = running.wait(timeout=4 * PATIENCE)
        del deployment.processes["run"]
    else:
        kill_server(deployment, victim)
        known = (deployment.folder / "jobs" / f"{out.name}.json").exists()
        again = ["resume", out] if known else command(out)
        code = deployment.finish_run(*again, seconds=4 * PATIENCE)
    seconds = round(time.monotonic() - began, 1)
    return {"victim": victim, **when, "exit code": code, "seconds": seconds}


def kill_server(deployment: Deployment, victim: str) -> None:
    """Kill the ServerApp or the SuperLink and the watching command; restart the SuperLink."""
    number = deployment.server_app()
    if victim == "SuperLink":
        deployment.kill("server")
    elif number is not None:
        os.kill(number, signal.SIGKILL)
    deployment.kill("run", signal.SIGTERM)
    deployment.wait_until(lambda: deployment.server_app() is None)
    if victim == "SuperLink":
        deployment.start_server()


def recorded_rounds(out: Path) -> int:
    log = out / "rounds.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def append_record(kill: dict[str, Any]) -> None:
    record = os.environ.get("WAFFLE_KILLS_RECORD")
    if record:
        with Path(record).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(kill) + "\n")
