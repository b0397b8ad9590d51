"""Twenty kills at random moments: whoever dies, and whenever, the run ends in the bits of the unbroken one.

WAFFLE_KILLS=20             how many
WAFFLE_KILLS_SEED=1         which victims, and when
WAFFLE_KILLS_RECORD=FILE    a line for each, as it happens
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

from flower_harness import Deployment, asked, bits, federation, simulated, small
from waffle_fl.deploy.local_cluster import PATIENCE, deployed

ROOT = Path(__file__).parent.parent
KINDS = ("site", "ServerApp", "SuperLink")
ROUNDS = 2
SITES = ("a", "b")  # two are enough, and on a small machine half as long as three
VICTIMS = (*(f"site {name}" for name in SITES), "ServerApp", "SuperLink")


def test_the_record_of_kills() -> None:
    """The runbook quotes how many kills are on record, of whom, and how many of them ended in the same bits."""
    told = [json.loads(line) for line in (ROOT / "results" / "kills.jsonl").read_text().splitlines()]
    same = sum(kill["same bits"] for kill in told)
    counted = ", ".join(f"{sum(kill['victim'].startswith(kind) for kill in told)} of {kind}" for kind in KINDS)
    assert f"{same} of {len(told)} kills ({counted})" in (ROOT / "docs" / "deploy.md").read_text()


@pytest.mark.flower
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """F4, F5, F6: a site, the ServerApp or the SuperLink killed at a random moment: the run ends in the same bits."""
    count, seed = (int(os.environ.get(name, usual)) for name, usual in (("WAFFLE_KILLS", 20), ("WAFFLE_KILLS_SEED", 1)))
    rng = random.Random(seed)
    twin = bits(simulated(small(ROUNDS, agents=len(SITES)), tmp_path / "twin"))[:2]
    with deployed(Deployment(federation(tmp_path / "federation", SITES))) as deployment:
        began = time.monotonic()
        assert deployment.finish_run(*command(tmp_path / "unbroken")) == 0
        span = time.monotonic() - began
        assert bits(tmp_path / "unbroken")[:2] == twin
        told = []
        while len(told) < count:
            out = tmp_path / f"run-{rng.getrandbits(32):08x}"
            kill = killed(deployment, rng.choice(VICTIMS), rng.uniform(0, span), out)
            if kill:
                kill |= {"same bits": kill["exit code"] == 0 and bits(out)[:2] == twin}
                told.append({"kill": len(told) + 1, "of": count, "seed": seed, **kill})
                keep(told[-1])
    assert all(kill["same bits"] for kill in told), told


def command(out: Path) -> list[str | Path]:
    return asked(ROUNDS, out, agents=len(SITES))


def killed(deployment: Deployment, victim: str, moment: float, out: Path) -> dict[str, Any] | None:
    """A run whose victim is killed, brought to its end; None if it was over by then."""
    began = time.monotonic()
    running = deployment.start_run(*command(out))
    while time.monotonic() - began < moment or (victim == "ServerApp" and deployment.server_app() is None):
        if running.poll() is not None or time.monotonic() - began > PATIENCE:
            break
        time.sleep(0.05)
    if running.poll() is not None:
        del deployment.processes["run"]
        return None
    when = {"after": round(time.monotonic() - began, 1), "rounds recorded": recorded(out)}
    if victim.startswith("site"):
        name = victim.removeprefix("site ")
        deployment.kill(name)
        deployment.start_site(name)
        code = running.wait(timeout=4 * PATIENCE)
        del deployment.processes["run"]
    else:
        kill_the_middle(deployment, victim)
        known = (deployment.folder / "jobs" / f"{out.name}.json").exists()
        again = ["resume", out] if known else command(out)
        code = deployment.finish_run(*again, seconds=4 * PATIENCE)
    seconds = round(time.monotonic() - began, 1)
    return {"victim": victim, **when, "exit code": code, "seconds": seconds}


def kill_the_middle(deployment: Deployment, victim: str) -> None:
    """The ServerApp or the SuperLink, and who watches the run; the SuperLink is started anew."""
    number = deployment.server_app()
    if victim == "SuperLink":
        deployment.kill("server")
    elif number is not None:
        os.kill(number, signal.SIGKILL)
    deployment.kill("run", signal.SIGTERM)
    deployment.wait_until(lambda: deployment.server_app() is None)
    if victim == "SuperLink":
        deployment.start_server()


def recorded(out: Path) -> int:
    log = out / "rounds.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def keep(kill: dict[str, Any]) -> None:
    record = os.environ.get("WAFFLE_KILLS_RECORD")
    if record:
        with Path(record).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(kill) + "\n")
