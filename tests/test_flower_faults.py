"""Faults of real processes on loopback: who is refused and why, who is absent, and who calls whom."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import waffle_fl
from flower_harness import OWN_MODEL, SITES, Deployment, asked, bits, federation, simulated, small, with_model
from waffle_fl.deploy.control_client import REGISTERED
from waffle_fl.deploy.keys import make_certificates, make_node_key
from waffle_fl.deploy.local_cluster import deployed
from waffle_fl.deploy.settings_files import change
from waffle_fl.records import read_rounds

pytestmark = pytest.mark.flower


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "federation", SITES)


@pytest.fixture
def stranger(folder: Path) -> Path:
    """A site that is not what it should be; its own port is b's, whom nobody starts."""
    return Path(shutil.copytree(folder / "sites" / "b", folder / "sites" / "stranger"))


def turned_away(deployment: Deployment, site: Path, words: str) -> None:
    """Start a site, wait until these words are said of it, and end it."""
    before = deployment.log.stat().st_size
    deployment.start("stranger", "deploy", "site", str(site), "--i-know")
    deployment.wait_until(lambda: words in deployment.said(before))
    deployment.kill("stranger")


def checked(folder: Path) -> str:
    """What `waffle deploy check` does not find in order."""
    done = subprocess.run(
        [sys.executable, "-m", "waffle_fl", "deploy", "check", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith("NOT OK"))


def another_ca(site: Path) -> None:
    make_certificates(site / "other", "other", ["127.0.0.1"])
    shutil.copy(site / "other" / "ca.crt", site / "ca.crt")


def another_key(site: Path) -> None:
    (site / "node.key").unlink()
    make_node_key(site / "node.key", site / "node.pub")


def another_key_and_name(site: Path) -> None:
    another_key(site)
    change(site / "site.toml", name="a")


def no_tls(site: Path) -> None:
    change(site / "site.toml", insecure=True)


def test_f7_f8_strangers(folder: Path, stranger: Path) -> None:
    """F7, F8: a site with another CA, without TLS, or with an unknown key is refused, and the cause is named."""
    faults: dict[Callable[[Path], None], str] = {
        another_ca: "certificate verify failed: unable to get local issuer certificate",
        no_tls: "Connection attempt failed",
        another_key: "the server does not admit this site's key",
        another_key_and_name: "the server does not admit this site's key",
    }
    deployment = Deployment(folder)
    try:
        deployment.start_server()
        for fault, words in faults.items():
            shutil.rmtree(stranger)
            shutil.copytree(folder / "sites" / "b", stranger)
            fault(stranger)
            turned_away(deployment, stranger, words)
            if fault is another_ca:
                assert "unable to get local issuer certificate" in checked(stranger)
            if fault is no_tls:
                assert "with TLS, but this folder is set to insecure" in checked(stranger)
    finally:
        deployment.close()


def test_f8_insecure_works_for_who_knows(folder: Path, tmp_path: Path) -> None:
    """F8: asked for twice, a federation without TLS and authentication trains, in the same bits."""
    for file in (folder / "server.toml", *(folder / "sites" / name / "site.toml" for name in SITES)):
        change(file, insecure=True)
    deployment = Deployment(folder)
    try:
        deployment.start("server", "deploy", "server", str(folder), "--i-know")
        deployment.wait_until((folder / REGISTERED).exists)
        for name in SITES:
            deployment.start(name, "deploy", "site", str(folder / "sites" / name), "--i-know")
        assert deployment.finish_run(*asked(1, tmp_path / "run")) == 0
    finally:
        deployment.close()
    assert bits(tmp_path / "run")[:2] == bits(simulated(small(1), tmp_path / "twin"))[:2]


@pytest.mark.parametrize(("insecure", "words"), [(False, "certificate has expired"), (True, "WRONG_VERSION_NUMBER")])
def test_f7_strange_servers(insecure: bool, words: str, folder: Path, stranger: Path) -> None:
    """F7: a server whose certificate has expired, or that has no TLS, is refused by the site, which says so."""
    names = ["127.0.0.1"]
    make_certificates(folder / "keys", "federation", names, valid=datetime.timedelta(minutes=-1))
    shutil.copy(folder / "keys" / "ca.crt", stranger / "ca.crt")
    change(folder / "server.toml", insecure=insecure)
    deployment = Deployment(folder)
    try:
        deployment.start("server", "deploy", "server", str(folder), "--i-know")
        deployment.wait_until(lambda: "Application startup complete" in deployment.said(0))
        turned_away(deployment, stranger, words)
        assert words in checked(stranger)
    finally:
        deployment.close()


def with_wire_version(folder: Path, version: int) -> str:
    """A folder with waffle-fl of another wire version, as a search path."""
    package = Path(shutil.copytree(Path(waffle_fl.__file__).parent, folder / "waffle_fl"))
    text = (package / "versions.py").read_text()
    (package / "versions.py").write_text(re.sub(r"WIRE_VERSION = .*", f"WIRE_VERSION = {version}", text))
    return os.pathsep.join([str(folder), *sys.path])


def test_f8_f10_f11_f13_before_the_first_round(folder: Path, tmp_path: Path) -> None:
    """F10, F11, F13: a missing site, other software, another model, too large a message are each told in a line.

    F8: a site that calls itself Alice is still who its key says, and obeys no request for the site of its key.
    """
    server, site = folder / "server.toml", folder / "sites" / "c" / "site.toml"
    here, there = with_model(tmp_path / "here", 8), with_model(tmp_path / "there", 9)
    change(server, start_timeout=5.0, retries=0)
    deployment = Deployment(folder)
    deployment.environment["PYTHONPATH"] = here
    try:
        deployment.start_server()
        for name in ("a", "b"):
            deployment.start_site(name)
        missing = deployment.refuses(*asked(1, tmp_path / "f10"))
        assert re.search(r"sites did not connect within 5 seconds: .*c; start them", missing)

        change(server, start_timeout=240.0)
        deployment.environment["PYTHONPATH"] = with_wire_version(tmp_path / "other", 99)
        deployment.start_site("c")
        deployment.environment["PYTHONPATH"] = here
        versions = deployment.refuses(*asked(1, tmp_path / "f11"))
        assert re.search(
            r"c: the server runs results version \d+, wire version \d+, torch \S+, this site .*wire version 99,",
            versions,
        )
        deployment.kill("c", signal.SIGTERM)

        for name in SITES:
            change(folder / "sites" / name / "site.toml", imports=[OWN_MODEL])
        change(site, name="a")
        deployment.start_site("c")
        assert "c: this request is addressed to another site" in deployment.refuses(*asked(1, tmp_path / "f8"))
        deployment.kill("c", signal.SIGTERM)

        change(site, name="c")
        deployment.environment["PYTHONPATH"] = there
        deployment.start_site("c")
        deployment.environment["PYTHONPATH"] = here
        models = deployment.refuses(*asked(1, tmp_path / "model", model=OWN_MODEL, alice="2"))
        assert re.search(r"Alice \(agent 2\) unreachable in round 1 \(the server's model own_network:build", models)

        change(server, message_mb=1)
        size = deployment.refuses(*asked(1, tmp_path / "f13"))
        assert re.search(r"a message of this model needs up to \d+ MB, server.toml allows 1", size)

        change(server, message_mb=1024)
        assert deployment.finish_run(*asked(1, tmp_path / "run")) == 0
        assert bits(tmp_path / "run")[:2] == bits(simulated(small(1), tmp_path / "twin"))[:2]
    finally:
        deployment.close()


DEADLINE = 60.0
ROUNDS = 7


def test_f1_f2_f3_f12_absent(folder: Path, tmp_path: Path) -> None:
    """F1, F3, F12: who fails, is killed or stands still has weight 0 in that round, which closes at the deadline.

    F3: who stood still is asked again in the next. F2: without Alice the round is held, then the run stops, resumable.
    """
    out = tmp_path / "run"
    change(folder / "server.toml", deadline=DEADLINE, quorum=1, retries=1, backoff=1.0)
    in_the_way = folder / "sites" / "c" / "state"
    in_the_way.write_text("where c would keep its state")
    with deployed(Deployment(folder)) as deployment:
        running = deployment.start_run(*asked(ROUNDS, out))
        deployment.wait_for_rounds(out, 1)
        in_the_way.unlink()
        deployment.kill("b")
        os.killpg(deployment.processes["c"].pid, signal.SIGSTOP)
        deployment.wait_for_rounds(out, 2)
        os.killpg(deployment.processes["c"].pid, signal.SIGCONT)
        deployment.start_site("b")
        deployment.wait_for_rounds(out, 4)
        deployment.kill("a")
        before = deployment.log.stat().st_size
        assert running.wait(timeout=10 * DEADLINE) == 2
        del deployment.processes["run"]
        assert re.search(
            r"Alice \(agent 0\) unreachable in round \d; all rounds so far are saved", deployment.said(before)
        )
        journal = (folder / "jobs" / "run.log").read_text()
        assert "Alice (agent 0) unreachable in round" in journal
        assert ": retry 1 of 1" in journal
        deployment.start_site("a")
        assert deployment.finish_run("resume", out) == 0
    _, rounds, result = bits(out)
    assert result["status"] == "finished"
    assert [line["round"] for line in rounds] == list(range(1, ROUNDS + 1))
    failed = ["agent 2", "failed at the site (NotADirectoryError); see the site's own log"]
    assert rounds[0]["screened"] == {"agent 2": "absent"}
    assert failed in rounds[0]["refused"]
    assert "NotADirectoryError" in (folder / "sites" / "c" / "site.log").read_text()
    assert str(in_the_way) in (folder / "sites" / "c" / "site.log").read_text()
    assert str(in_the_way) not in journal + (out / "rounds.jsonl").read_text()
    assert rounds[2]["screened"] == {"agent 1": "absent", "agent 2": "absent"}
    assert rounds[2]["weights"][1:] == [0.0, 0.0]
    assert DEADLINE <= read_rounds(out / "rounds.jsonl")[1]["seconds"] < 2 * DEADLINE
    assert all(any(line["norms"][i] > 0 for line in rounds[3:]) for i in (1, 2))


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed here")
def test_no_connection_but_loopback(folder: Path, tmp_path: Path) -> None:
    """A trace of all processes of a server, its sites and a run shows no address but loopback, and no look-up."""
    traces = tmp_path / "traces"
    traces.mkdir()
    deployment = Deployment(folder)
    deployment.prefix = ("strace", "-D", "-ff", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o", str(traces / "t"))
    with deployed(deployment):
        assert deployment.finish_run(*asked(1, tmp_path / "run")) == 0
    calls = [line for file in traces.iterdir() for line in file.read_text(errors="replace").splitlines()]
    internet = [line for line in calls if "sa_family=AF_INET" in line]
    assert any("connect(" in line for line in internet)
    strange = [line for line in internet if not re.search(r'inet_addr\("127\.|"::1"|"::ffff:127\.', line)]
    assert strange == []
    assert [line for line in internet if re.search(r"htons\(53\)", line)] == []
