"""Faults of real processes on loopback: rejected sites and servers, absent sites, and outgoing connections."""

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
from flower_harness import (
    OWN_MODEL,
    SITES,
    Deployment,
    bits,
    federation,
    run_arguments,
    run_simulation,
    small_config,
    write_model,
)
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
def invalid_site(folder: Path) -> Path:
    """Return the folder of an invalid site; it uses the port of site b, which is not started."""
    return Path(shutil.copytree(folder / "sites" / "b", folder / "sites" / "invalid-site"))


def assert_rejected(deployment: Deployment, site: Path, words: str) -> None:
    """Start a site, wait until the log contains this message, and stop the site."""
    before = deployment.log.stat().st_size
    deployment.start("invalid-site", "deploy", "site", str(site), "--i-know")
    deployment.wait_until(lambda: words in deployment.output_since(before))
    deployment.kill("invalid-site")


def check_failures(folder: Path) -> str:
    """Return the failed checks of `waffle deploy check`."""
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


def test_f7_f8_invalid_sites_are_rejected(folder: Path, invalid_site: Path) -> None:
    """F7, F8: a site with another CA, without TLS or with an unknown key is rejected with the cause."""
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
            shutil.rmtree(invalid_site)
            shutil.copytree(folder / "sites" / "b", invalid_site)
            fault(invalid_site)
            assert_rejected(deployment, invalid_site, words)
            if fault is another_ca:
                assert "unable to get local issuer certificate" in check_failures(invalid_site)
            if fault is no_tls:
                assert "with TLS, but this folder is set to insecure" in check_failures(invalid_site)
    finally:
        deployment.close()


def test_f8_insecure_federation_trains_with_i_know(folder: Path, tmp_path: Path) -> None:
    """F8: with both flags, a federation without TLS and authentication trains to the same bits."""
    for file in (folder / "server.toml", *(folder / "sites" / name / "site.toml" for name in SITES)):
        change(file, insecure=True)
    deployment = Deployment(folder)
    try:
        deployment.start("server", "deploy", "server", str(folder), "--i-know")
        deployment.wait_until((folder / REGISTERED).exists)
        for name in SITES:
            deployment.start(name, "deploy", "site", str(folder / "sites" / name), "--i-know")
        assert deployment.finish_run(*run_arguments(1, tmp_path / "run")) == 0
    finally:
        deployment.close()
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(small_config(1), tmp_path / "reference"))[:2]


@pytest.mark.parametrize(("insecure", "words"), [(False, "certificate has expired"), (True, "WRONG_VERSION_NUMBER")])
def test_f7_sites_reject_invalid_servers(insecure: bool, words: str, folder: Path, invalid_site: Path) -> None:
    """F7: a site rejects a server without TLS or with an expired certificate and reports the cause."""
    names = ["127.0.0.1"]
    make_certificates(folder / "keys", "federation", names, valid=datetime.timedelta(minutes=-1))
    shutil.copy(folder / "keys" / "ca.crt", invalid_site / "ca.crt")
    change(folder / "server.toml", insecure=insecure)
    deployment = Deployment(folder)
    try:
        deployment.start("server", "deploy", "server", str(folder), "--i-know")
        deployment.wait_until(lambda: "Application startup complete" in deployment.output_since(0))
        assert_rejected(deployment, invalid_site, words)
        assert words in check_failures(invalid_site)
    finally:
        deployment.close()


def write_package_with_wire_version(folder: Path, version: int) -> str:
    """Write a copy of waffle-fl with another wire version and return it as a search path."""
    package = Path(shutil.copytree(Path(waffle_fl.__file__).parent, folder / "waffle_fl"))
    text = (package / "versions.py").read_text()
    (package / "versions.py").write_text(re.sub(r"WIRE_VERSION = .*", f"WIRE_VERSION = {version}", text))
    return os.pathsep.join([str(folder), *sys.path])


def test_f8_f10_f11_f13_are_reported_before_the_first_round(folder: Path, tmp_path: Path) -> None:
    """F10, F11, F13: a missing site, other software, another model and a too large message are each one line.

    F8: a site that names itself Alice is still identified by its key and refuses requests addressed to that key's site.
    """
    server, site = folder / "server.toml", folder / "sites" / "c" / "site.toml"
    here, there = write_model(tmp_path / "here", 8), write_model(tmp_path / "there", 9)
    change(server, start_timeout=5.0, retries=0)
    deployment = Deployment(folder)
    deployment.environment["PYTHONPATH"] = here
    try:
        deployment.start_server()
        for name in ("a", "b"):
            deployment.start_site(name)
        missing = deployment.run_error(*run_arguments(1, tmp_path / "f10"))
        assert re.search(r"sites did not connect within 5 seconds: .*c; start them", missing)

        change(server, start_timeout=240.0)
        deployment.environment["PYTHONPATH"] = write_package_with_wire_version(tmp_path / "other", 99)
        deployment.start_site("c")
        deployment.environment["PYTHONPATH"] = here
        versions = deployment.run_error(*run_arguments(1, tmp_path / "f11"))
        assert re.search(
            r"c: the server runs results version \d+, wire version \d+, torch \S+, this site .*wire version 99,",
            versions,
        )
        deployment.kill("c", signal.SIGTERM)

        for name in SITES:
            change(folder / "sites" / name / "site.toml", imports=[OWN_MODEL])
        change(site, name="a")
        deployment.start_site("c")
        assert "c: this request is addressed to another site" in deployment.run_error(
            *run_arguments(1, tmp_path / "f8")
        )
        deployment.kill("c", signal.SIGTERM)

        change(site, name="c")
        deployment.environment["PYTHONPATH"] = there
        deployment.start_site("c")
        deployment.environment["PYTHONPATH"] = here
        models = deployment.run_error(*run_arguments(1, tmp_path / "model", model=OWN_MODEL, alice="2"))
        assert re.search(r"Alice \(agent 2\) unreachable in round 1 \(the server's model own_network:build", models)

        change(server, message_mb=1)
        size = deployment.run_error(*run_arguments(1, tmp_path / "f13"))
        assert re.search(r"a message of this model needs up to \d+ MB, server.toml allows 1", size)

        change(server, message_mb=1024)
        assert deployment.finish_run(*run_arguments(1, tmp_path / "run")) == 0
        assert bits(tmp_path / "run")[:2] == bits(run_simulation(small_config(1), tmp_path / "reference"))[:2]
    finally:
        deployment.close()


DEADLINE = 60.0
ROUNDS = 7


def test_f1_f2_f3_f12_absent_sites(folder: Path, tmp_path: Path) -> None:
    """F1, F3, F12: a site that fails, is killed or hangs has weight 0 in that round, which ends at the deadline.

    F3: a site that hung is included in the next round. F2: without Alice the round is retried, then the run stops and
    can be resumed.
    """
    out = tmp_path / "run"
    change(folder / "server.toml", deadline=DEADLINE, quorum=1, retries=1, backoff=1.0)
    blocking_file = folder / "sites" / "c" / "state"
    blocking_file.write_text("a file in place of c's state folder")
    with deployed(Deployment(folder)) as deployment:
        running = deployment.start_run(*run_arguments(ROUNDS, out))
        deployment.wait_for_rounds(out, 1)
        blocking_file.unlink()
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
            r"Alice \(agent 0\) unreachable in round \d; all rounds so far are saved", deployment.output_since(before)
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
    assert str(blocking_file) in (folder / "sites" / "c" / "site.log").read_text()
    assert str(blocking_file) not in journal + (out / "rounds.jsonl").read_text()
    assert rounds[2]["screened"] == {"agent 1": "absent", "agent 2": "absent"}
    assert rounds[2]["weights"][1:] == [0.0, 0.0]
    assert DEADLINE <= read_rounds(out / "rounds.jsonl")[1]["seconds"] < 2 * DEADLINE
    assert all(any(line["norms"][i] > 0 for line in rounds[3:]) for i in (1, 2))


@pytest.mark.skipif(not shutil.which("strace"), reason="strace is not installed here")
def test_processes_connect_to_loopback_only(folder: Path, tmp_path: Path) -> None:
    """A trace of all processes of a server, its sites and a run shows only loopback addresses and no DNS lookup."""
    traces = tmp_path / "traces"
    traces.mkdir()
    deployment = Deployment(folder)
    deployment.prefix = ("strace", "-D", "-ff", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-o", str(traces / "t"))
    with deployed(deployment):
        assert deployment.finish_run(*run_arguments(1, tmp_path / "run")) == 0
    calls = [line for file in traces.iterdir() for line in file.read_text(errors="replace").splitlines()]
    internet = [line for line in calls if "sa_family=AF_INET" in line]
    assert any("connect(" in line for line in internet)
    other_addresses = [line for line in internet if not re.search(r'inet_addr\("127\.|"::1"|"::ffff:127\.', line)]
    assert other_addresses == []
    assert [line for line in internet if re.search(r"htons\(53\)", line)] == []
