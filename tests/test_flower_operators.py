"""A day of an operator, with real processes: look, stop, resume, add a site, rotate a key, revoke a site."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower_harness import Deployment, asked, bits, federation, simulated, small
from waffle_fl.cli import _run
from waffle_fl.deploy.control_client import ControlClient
from waffle_fl.deploy.local_cluster import deployed, free_port
from waffle_fl.deploy.settings_files import change, read_server

SITES = ("a", "b")
ROUNDS = 12


def waffle(*words: object) -> tuple[int, str, str]:
    """A `waffle deploy` command to its end: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _run(["deploy", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


def refused(*words: object) -> str:
    code, _, err = waffle(*words)
    assert code == 2
    assert err.count("\n") == 1
    return err


def said(*words: object) -> str:
    code, out, err = waffle(*words)
    assert code == 0, err
    return out


def states(folder: Path) -> dict[str, str]:
    return {site["name"]: site["state"] for site in json.loads(said("status", folder, "--json"))["sites"]}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = federation(tmp_path_factory.mktemp("operated") / "federation", SITES)
    with deployed(Deployment(folder)) as deployment:
        yield deployment


def online(deployment: Deployment, name: str) -> None:
    def there() -> bool:
        return any(node.name == name and node.status == "online" for node in ControlClient(deployment.folder).nodes())

    deployment.wait_until(there)


def test_status_stop_and_resume(running: Deployment, tmp_path: Path) -> None:
    """A job is seen while it runs, stopped between two rounds, and resumed to the bits of an unbroken run."""
    folder, out = running.folder, tmp_path / "job"
    run = running.start_run(*asked(ROUNDS, out, agents=2))
    running.wait_for_rounds(out, 1)
    lines = said("status", folder).splitlines()
    assert lines[0] == "server: running"
    assert any(line.split()[:2] == ["a", "connected"] for line in lines)
    assert any(line.startswith("job job: running, round ") for line in lines)
    assert any(line.startswith("  weights for a: a 0.") for line in lines)
    stopped = said("stop", "job", "--folder", folder)
    assert stopped.startswith("job stopped after round ")
    assert f"waffle deploy resume {out} --folder {folder}" in stopped
    assert run.wait(timeout=60) == 2
    del running.processes["run"]
    assert "job job: stopped, round " in said("status", folder)
    assert "job is not running" in refused("stop", "job", "--folder", folder)
    events = said("logs", folder, "--job", "job").splitlines()
    assert any(line.endswith("INFO server all sites are online") for line in events)
    assert "with two sites WAFFLE's weights are fixed" in "\n".join(events)
    assert any("ERROR server stopped by the operator after round" in line for line in events)
    assert running.finish_run("resume", out) == 0
    assert f"job job: finished, round {ROUNDS} of {ROUNDS}" in said("status", folder)
    assert bits(out)[:2] == bits(simulated(small(ROUNDS, agents=2), tmp_path / "twin"))[:2]


def test_logs_are_plain_lines(running: Deployment) -> None:
    """One line per event: time, level, the site's name; no colours, in the log and on the terminal."""
    for end, name in ((running.folder, "server"), (running.folder / "sites" / "a", "a")):
        lines = said("logs", end, "--lines", 1000).splitlines()
        assert len(lines) > 5
        for line in lines:
            when, level, who, *_ = line.split(" ")
            assert when.endswith("Z")
            assert level in ("INFO", "WARNING", "ERROR")
            assert who == name
    assert b"\x1b[" not in running.log.read_bytes()


@pytest.mark.flower
def test_a_site_is_added_rotated_and_revoked(running: Deployment, tmp_path: Path) -> None:
    """A third site joins a running server; its key is replaced; it is revoked, and admitted again."""
    folder = running.folder
    assert "send to the site" in said("add-site", "c", "--folder", folder)
    home = folder / "sites" / "c"
    made = said("join", home)
    assert "ecdsa-sha2-nistp384" in made
    assert "SHA256:" in made
    assert "already has a key, SHA256:" in refused("join", home)
    told = said("add-site", "c", "--key", home / "node.pub", "--folder", folder)
    assert "c has the key SHA256:" in told
    assert "c is admitted" in told
    change(home / "site.toml", data="digits", port=free_port())
    running.start_site("c")
    online(running, "c")
    assert states(folder) == {"a": "connected", "b": "connected", "c": "connected"}
    assert running.finish_run(*asked(1, tmp_path / "three", agents=3)) == 0

    old = (home / "node.pub").read_bytes()
    assert "the key that c has already" in refused("rotate", "c", "--key", home / "node.pub", "--folder", folder)
    said("join", home, "--rotate")
    assert (home / "node.pub").read_bytes() != old
    told = said("rotate", "c", "--key", home / "node.pub", "--folder", folder)
    assert "the old one is refused" in told
    running.kill("c", signal.SIGTERM)
    running.start_site("c")
    online(running, "c")

    told = said("revoke", "c", "--folder", folder)
    assert "c is revoked" in told
    assert "c is no longer admitted" in told
    assert states(folder)["c"] == "revoked"
    assert read_server(folder).members == SITES
    running.kill("c", signal.SIGTERM)
    assert running.finish_run(*asked(1, tmp_path / "two", agents=2)) == 0
    assert "c is already revoked" in refused("revoke", "c", "--folder", folder)
    said("add-site", "c", "--key", home / "node.pub", "--folder", folder)
    running.start_site("c")
    online(running, "c")
    said("revoke", "c", "--folder", folder)
    running.kill("c", signal.SIGTERM)


def test_a_port_in_use_is_named(running: Deployment) -> None:
    """A second server, or a second process of a site, says which port is taken and which setting to change."""
    s = read_server(running.folder)
    assert f"port {s.port} on 127.0.0.1 is in use by another program" in refused("server", running.folder)
    taken = refused("site", running.folder / "sites" / "a")
    assert "is in use by another program: stop that program, or change port in" in taken


@pytest.mark.flower
def test_it_says_whom_it_waits_for(running: Deployment, tmp_path: Path) -> None:
    """A run that needs a site which is not there says so at once."""
    running.kill("b")
    running.wait_until(lambda: states(running.folder)["b"] == "not connected", 120)
    run = running.start_run(*asked(1, tmp_path / "waits", agents=2))
    journal = running.folder / "jobs" / "waits.log"
    running.wait_until(lambda: journal.exists() and "waiting for b (not connected)" in journal.read_text())
    assert "waiting for b" in said("status", running.folder)
    running.start_site("b")
    assert run.wait(timeout=240) == 0
    del running.processes["run"]


def test_a_site_without_its_data_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing data file, or a missing key, is told when the site is started, not when the first request comes."""
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
    """Every help works and shows nothing that is meant for a type checker."""
    with contextlib.suppress(SystemExit):
        assert _run(["deploy", *words]) == 0
    out = capsys.readouterr().out
    assert "usage" in out
    assert "type: ignore" not in out
