"""Operator tasks with real processes: status, stop, resume, add a site, rotate a key, revoke a site."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower_harness import Deployment, bits, federation, run_arguments, run_simulation, small_config
from waffle_fl.cli import _run
from waffle_fl.deploy.control_client import ControlClient
from waffle_fl.deploy.local_cluster import deployed, free_port
from waffle_fl.deploy.settings_files import change, read_server

SITES = ("a", "b")
ROUNDS = 8
pytestmark = pytest.mark.slow_first


def waffle(*words: object) -> tuple[int, str, str]:
    """Run a `waffle deploy` command and return its exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _run(["deploy", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


def error_of(*words: object) -> str:
    code, _, err = waffle(*words)
    assert code == 2
    assert err.count("\n") == 1
    return err


def output_of(*words: object) -> str:
    code, out, err = waffle(*words)
    assert code == 0, err
    return out


def states(folder: Path) -> dict[str, str]:
    return {site["name"]: site["state"] for site in json.loads(output_of("status", folder, "--json"))["sites"]}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start a server and two sites and wait until the sites are connected."""
    folder = federation(tmp_path_factory.mktemp("operated") / "federation", SITES)
    with deployed(Deployment(folder)) as deployment:
        for name in SITES:
            online(deployment, name)
        yield deployment


def online(deployment: Deployment, name: str) -> None:
    def there() -> bool:
        return any(node.name == name and node.status == "online" for node in ControlClient(deployment.folder).nodes())

    deployment.wait_until(there)


def test_status_stop_and_resume(running: Deployment, tmp_path: Path) -> None:
    """A running job is listed, stops between two rounds, and resumes to the bits of an uninterrupted run."""
    folder, out = running.folder, tmp_path / "job"
    run = running.start_run(*run_arguments(ROUNDS, out, agents=2))
    running.wait_for_rounds(out, 1)
    lines = output_of("status", folder).splitlines()
    assert lines[0] == "server: running"
    assert any(line.split()[:2] == ["a", "connected"] for line in lines)
    assert any(line.startswith("job job: running, round ") for line in lines)
    assert any(line.startswith("  weights for a: a 0.") for line in lines)
    stopped = output_of("stop", "job", "--folder", folder)
    assert stopped.startswith("job stopped after round ")
    assert f"waffle deploy resume {out} --folder {folder}" in stopped
    assert run.wait(timeout=60) == 2
    del running.processes["run"]
    assert "job job: stopped, round " in output_of("status", folder)
    assert "job is not running" in error_of("stop", "job", "--folder", folder)
    events = output_of("logs", folder, "--job", "job").splitlines()
    assert any(line.endswith("INFO server all sites are online") for line in events)
    assert "with two sites WAFFLE's weights are fixed" in "\n".join(events)
    assert any("ERROR server stopped by the operator after round" in line for line in events)
    assert running.finish_run("resume", out) == 0
    assert f"job job: finished, round {ROUNDS} of {ROUNDS}" in output_of("status", folder)
    assert bits(out)[:2] == bits(run_simulation(small_config(ROUNDS, agents=2), tmp_path / "reference"))[:2]


def test_logs_are_plain_lines(running: Deployment) -> None:
    """A log has one uncoloured line per event with time, level and the site's name."""
    for end, name in ((running.folder, "server"), (running.folder / "sites" / "a", "a")):
        lines = output_of("logs", end, "--lines", 1000).splitlines()
        assert len(lines) > 5
        for line in lines:
            when, level, sender, *_ = line.split(" ")
            assert when.endswith("Z")
            assert level in ("INFO", "WARNING", "ERROR")
            assert sender == name
    assert b"\x1b[" not in running.log.read_bytes()


@pytest.mark.flower
def test_a_site_is_added_rotated_and_revoked(running: Deployment, tmp_path: Path) -> None:
    """A third site joins a running server, gets a new key, is revoked, and is admitted again."""
    folder = running.folder
    assert "send to the site" in output_of("add-site", "c", "--folder", folder)
    home = folder / "sites" / "c"
    join_output = output_of("join", home)
    assert "ecdsa-sha2-nistp384" in join_output
    assert "SHA256:" in join_output
    assert "already has a key, SHA256:" in error_of("join", home)
    printed = output_of("add-site", "c", "--key", home / "node.pub", "--folder", folder)
    assert "c has the key SHA256:" in printed
    assert "c is admitted" in printed
    change(home / "site.toml", data="digits", port=free_port())
    running.start_site("c")
    online(running, "c")
    assert states(folder) == {"a": "connected", "b": "connected", "c": "connected"}
    assert running.finish_run(*run_arguments(1, tmp_path / "three", agents=3)) == 0

    old = (home / "node.pub").read_bytes()
    assert "the key that c has already" in error_of("rotate", "c", "--key", home / "node.pub", "--folder", folder)
    output_of("join", home, "--rotate")
    assert (home / "node.pub").read_bytes() != old
    printed = output_of("rotate", "c", "--key", home / "node.pub", "--folder", folder)
    assert "the old one is refused" in printed
    running.kill("c", signal.SIGTERM)
    running.start_site("c")
    online(running, "c")

    printed = output_of("revoke", "c", "--folder", folder)
    assert "c is revoked" in printed
    assert "c is no longer admitted" in printed
    assert states(folder)["c"] == "revoked"
    assert read_server(folder).members == SITES
    running.kill("c", signal.SIGTERM)
    assert running.finish_run(*run_arguments(1, tmp_path / "two", agents=2)) == 0
    assert "c is already revoked" in error_of("revoke", "c", "--folder", folder)
    output_of("add-site", "c", "--key", home / "node.pub", "--folder", folder)
    running.start_site("c")
    online(running, "c")
    output_of("revoke", "c", "--folder", folder)
    running.kill("c", signal.SIGTERM)


def test_a_port_in_use_is_named(running: Deployment) -> None:
    """A second server or site process reports which port is taken and which setting to change."""
    s = read_server(running.folder)
    assert f"port {s.port} on 127.0.0.1 is in use by another program" in error_of("server", running.folder)
    taken = error_of("site", running.folder / "sites" / "a")
    assert "is in use by another program: stop that program, or change port in" in taken


@pytest.mark.flower
def test_a_run_reports_the_sites_it_waits_for(running: Deployment, tmp_path: Path) -> None:
    """A run that needs a site that is not connected reports it at once."""
    running.kill("b")
    running.wait_until(lambda: states(running.folder)["b"] == "not connected", 120)
    run = running.start_run(*run_arguments(1, tmp_path / "waits", agents=2))
    journal = running.folder / "jobs" / "waits.log"
    running.wait_until(lambda: journal.exists() and "waiting for b (not connected)" in journal.read_text())
    assert "waiting for b" in output_of("status", running.folder)
    running.start_site("b")
    assert run.wait(timeout=240) == 0
    del running.processes["run"]


def test_a_site_without_its_data_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing data file or key is reported when the site starts, not at the first request."""
    assert _run(["deploy", "init", str(tmp_path / "fed"), "--sites", "north"]) == 0
    home = tmp_path / "fed" / "sites" / "north"
    assert _run(["deploy", "site", str(home)]) == 2
    assert "expected a table or .npz file, found none" in capsys.readouterr().err
    (home / "data").mkdir()
    (home / "data" / "north.csv").write_text("a,b\n1,2\n")
    assert _run(["deploy", "site", str(home)]) == 2
    assert "has no key yet: make one with waffle deploy join" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["run", "--help"], ["run", "waffle", "--help"], ["site", "--help"], ["--help"]])
def test_help_is_readable(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every help text is printed and contains no type-checker comment."""
    with contextlib.suppress(SystemExit):
        assert _run(["deploy", *words]) == 0
    out = capsys.readouterr().out
    assert "usage" in out
    assert "type: ignore" not in out
