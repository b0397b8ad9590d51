"""One running federation of real processes: the simulator's bits, the operator's tasks, and attacks.

Each attack succeeded against an earlier version:

unknown client  reaches the server's port; has no key and no certificate
ca holder       also has `ca.crt`, which every site has
operator        controls the server and has the operator's key
local user      has an account on the machine of a site or of the server
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

pytest.importorskip("flwr")

from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest, UnregisterNodeRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from flower_harness import (
    SITES,
    Deployment,
    ForkedDeployment,
    bits,
    federation,
    processes_in,
    run_arguments,
    run_simulation,
    small_config,
)
from waffle_fl.cli import _run
from waffle_fl.deploy import membership
from waffle_fl.deploy.control_client import ControlClient
from waffle_fl.deploy.gateway import ACTIVATE, FLEET
from waffle_fl.deploy.keys import make_operator_key, wire_form
from waffle_fl.deploy.local_cluster import deployed, free_port
from waffle_fl.deploy.settings_files import change, read_server, read_site

ROUNDS = 3
pytestmark = pytest.mark.deployment


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start a server and three sites and wait until the sites are connected."""
    folder = federation(tmp_path_factory.mktemp("running") / "federation", SITES)
    with deployed(ForkedDeployment(folder)) as deployment:
        for name in SITES:
            online(deployment, name)
        yield deployment


def online(deployment: Deployment, name: str) -> None:
    def there() -> bool:
        return any(node.name == name and node.status == "online" for node in ControlClient(deployment.folder).nodes())

    deployment.wait_until(there)


class AnonymousClient:
    """A client that presents no client certificate."""

    def __init__(self, kind: Any, address: str, ca: bytes | None = None) -> None:
        self.kind, self.address, self.ca = kind, address, ca

    def status(self, call: str, request: Any) -> int:
        """Return the HTTP status of a call; 200 is success."""
        chain = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        if self.ca:
            client = self.kind.from_server_address(self.address, False, self.ca, chain)
        else:
            client = self.kind(f"https://{self.address}", interceptors=chain, verify=False)
        try:
            getattr(client, call)(request)
        except httpx.HTTPStatusError as error:
            return error.response.status_code
        finally:
            client.close()
        return 200


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


def addresses(deployment: Deployment) -> tuple[str, str]:
    s = read_server(deployment.folder)
    return f"127.0.0.1:{s.port}", f"127.0.0.1:{s.local_port}"


def raw_response(address: str, target: str, headers: str) -> bytes:
    """Return the response to a request that no client library would send."""
    host, port = address.split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port)), timeout=10) as plain, context.wrap_socket(plain) as secure:
        secure.sendall(f"POST {target} HTTP/1.1\r\nHost: {address}\r\n{headers}\r\nConnection: close\r\n\r\n".encode())
        return secure.recv(4096)


def task_request() -> AcquireTaskRequest:
    return AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP, TaskType.CLIENT_APP])


def test_an_unknown_client_cannot_act_as_the_server(running: Deployment) -> None:
    """The public port serves only the Fleet API: an unknown client can take no task and start no run."""
    public, _ = addresses(running)
    client = AnonymousClient(RuntimeHttpClient, public)
    assert client.status("AcquireTask", task_request()) == 404
    control = AnonymousClient(ControlHttpClient, public)
    assert control.status("ListNodes", ListNodesRequest()) == 404
    assert control.status("StartRun", StartRunRequest()) == 404


def test_local_apis_require_their_secrets(running: Deployment) -> None:
    """On loopback the Runtime API requires Flower's secret and the Control API requires the operator's."""
    _, local = addresses(running)
    ca = (running.folder / "keys" / "ca.crt").read_bytes()
    for certificate in (None, ca):
        assert AnonymousClient(RuntimeHttpClient, local, certificate).status("AcquireTask", task_request()) in (
            401,
            403,
        )
        control = AnonymousClient(ControlHttpClient, local, certificate)
        assert control.status("ListNodes", ListNodesRequest()) == 403
        assert control.status("StartRun", StartRunRequest()) == 403


def test_ca_certificate_alone_cannot_change_membership(running: Deployment) -> None:
    """A client that only has ca.crt can neither remove nor add a site."""
    public, local = addresses(running)
    ca = (running.folder / "sites" / "a" / "ca.crt").read_bytes()
    nodes = ControlClient(running.folder).nodes()
    for address in (public, local):
        control = AnonymousClient(ControlHttpClient, address, ca)
        for node in nodes:
            assert control.status("UnregisterNode", UnregisterNodeRequest(node_id=node.node_id)) in (403, 404)
        assert control.status("RegisterNode", RegisterNodeRequest(public_key=b"mine", name="evil")) in (403, 404)
    assert {node.name: node.status for node in ControlClient(running.folder).nodes()} == dict.fromkeys(SITES, "online")


def test_public_port_serves_only_fleet_calls(running: Deployment) -> None:
    """Every other path returns 404: documentation, health, registration by a site and path traversal."""
    public, _ = addresses(running)
    paths = ["/", "/docs", "/openapi.json", "/health", "/v1/fleet/register-node", "/v1/fleet/unregister-node"]
    paths += ["/v1/fleet/../control/list-nodes", "/v1/fleet/%2e%2e/control/list-nodes", "//v1/control/list-nodes"]
    paths += ["/v1/fleet/pull-messages/../../control/start-run", "/v1/runtime/get-nodes", "/v1/runtime/push-messages"]
    with httpx.Client(verify=False) as client:
        for path in paths:
            for method in ("GET", "POST"):
                assert client.request(method, f"https://{public}{path}", content=b"x").status_code == 404, path
        for path in FLEET:  # these exist and require a key
            assert client.post(f"https://{public}{path}", content=b"").status_code == (
                412 if path == ACTIVATE else 401
            ), path
    key = base64.b64encode(wire_form(running.folder / "keys" / "a.pub")).decode()
    for length in (f"Content-Length: {1 << 40}", "Transfer-Encoding: chunked"):
        assert raw_response(public, "/v1/fleet/push-object", length).split(b" ")[1] == b"401"
        assert (
            raw_response(public, "/v1/fleet/push-object", f"flwr-public-key: {key}\r\n{length}").split(b" ")[1]
            == b"413"
        )


def test_raw_requests_cannot_bypass_the_port_check(running: Deployment) -> None:
    """The socket decides which API is served, not the Host header, the target or the protocol of a request."""
    public, local = addresses(running)
    tricks = f"Host: {local}\r\nX-Forwarded-Port: {local.split(':')[1]}\r\nContent-Length: 0"
    for target in (
        "/v1/control/list-nodes",
        f"https://{local}/v1/control/list-nodes",
        "/v1/fleet/;/../control/start-run",
    ):
        assert raw_response(public, target, tricks).split(b" ")[1] in (b"404", b"400"), target


def test_a_local_process_cannot_take_a_site_s_task(running: Deployment) -> None:
    """The SuperNode's Runtime API requires the site's secret."""
    site = read_site(running.folder / "sites" / "a")
    client = RuntimeHttpClient(f"http://127.0.0.1:{site.port}", interceptors=[
        RuntimeVersionHttpInterceptor(component_name="SuperExec")
    ])  # fmt: skip
    for _ in range(20):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            client.AcquireTask(task_request())
        assert refused.value.response.status_code in (401, 403)
    client.close()


class Watched(NamedTuple):
    """The folder of a finished run, and the command lines of all processes seen during it."""

    folder: Path
    command_lines: set[str]


@pytest.fixture(scope="module")
def watched(running: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Run a job of two rounds to its end."""
    out = tmp_path_factory.mktemp("watched") / "run"
    run = running.start_run(*run_arguments(2, out))
    seen: set[str] = set()
    while run.poll() is None:
        for number in processes_in(running.folder):
            try:
                seen.add(Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        time.sleep(0.05)
    del running.processes["run"]
    assert run.returncode == 0
    return Watched(out, seen)


def test_f16_the_same_bits(watched: Watched, tmp_path: Path) -> None:
    """F16: a run over Flower, TLS and authentication ends with the simulator's model and record bit for bit."""
    assert bits(watched.folder)[:2] == bits(run_simulation(small_config(2), tmp_path / "reference"))[:2]


def test_no_secret_is_on_a_command_line(running: Deployment, watched: Watched) -> None:
    """During a run, no process listing shows a token, a key or a secret."""
    command_lines = watched.command_lines
    secrets = [(running.folder / "keys" / name).read_bytes().hex() for name in ("runtime.secret", "control.secret")]
    assert command_lines
    assert not [line for line in command_lines if "--token" in line or any(secret in line for secret in secrets)]
    assert not [line for line in command_lines if re.search(r"\b[0-9a-f]{40,}\b", line)]


@pytest.mark.usefixtures("watched")
def test_files_are_readable_by_their_owner_only(running: Deployment) -> None:
    """After a run, models, states, ledgers, the database and surveys have mode 0600, their folders 0700."""
    folder = running.folder
    secret = [
        folder / "superlink.db",
        folder / "server.log",
        *(folder / "keys").iterdir(),
        *(folder / "jobs").iterdir(),
    ]
    for name in SITES:
        home = folder / "sites" / name
        secret += [home / "ledger.jsonl", home / "site.log", home / "node.key", home / "runtime.secret"]
        secret += [path for part in ("state", "models") for path in (home / part).rglob("*")]
    assert [path for path in secret if path.name == "model.safetensors"]
    assert [path for path in secret if path.suffix == ".survey"]
    for path in secret:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))


def pause_after_a_round(deployment: Deployment, out: Path) -> int:
    """Pause the ServerApp after its first round and return its process id."""
    log = out / "rounds.jsonl"
    while not log.exists() or not log.stat().st_size:
        assert deployment.processes["run"].poll() is None
        time.sleep(0.02)
    number = deployment.server_app()
    assert number is not None
    os.kill(number, signal.SIGSTOP)
    return number


def continue_once(request: Path, number: int) -> None:
    """Continue a paused process as soon as the job's stop request exists, or after a minute."""
    end = time.monotonic() + 60
    while not request.exists() and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(number, signal.SIGCONT)


def test_status_stop_and_resume(running: Deployment, tmp_path: Path) -> None:
    """A running job is listed, stops between two rounds, and resumes to the bits of an uninterrupted run."""
    folder, out = running.folder, tmp_path / "job"
    run = running.start_run(*run_arguments(ROUNDS, out))
    request = folder / "jobs" / "job.stop"
    helper = threading.Thread(target=continue_once, args=(request, pause_after_a_round(running, out)))
    helper.start()
    lines = output_of("status", folder).splitlines()
    stopped = output_of("stop", "job", "--folder", folder)
    helper.join()
    assert lines[0] == "server: running"
    assert any(line.split()[:2] == ["a", "connected"] for line in lines)
    assert any(line.startswith("job job: running, round ") for line in lines)
    assert any(line.startswith("  weights for a: a 0.") for line in lines)
    assert stopped.startswith("job stopped after round ")
    assert f"waffle deploy resume {out} --folder {folder}" in stopped
    assert run.wait(timeout=60) == 2
    del running.processes["run"]
    assert "job job: stopped, round " in output_of("status", folder)
    assert "job is not running" in error_of("stop", "job", "--folder", folder)
    events = output_of("logs", folder, "--job", "job").splitlines()
    assert any(line.endswith("INFO server all sites are online") for line in events)
    assert any("ERROR server stopped by the operator after round" in line for line in events)
    assert running.finish_run("resume", out) == 0
    assert f"job job: finished, round {ROUNDS} of {ROUNDS}" in output_of("status", folder)
    assert bits(out)[:2] == bits(run_simulation(small_config(ROUNDS), tmp_path / "reference"))[:2]


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


def test_a_port_in_use_is_named(running: Deployment) -> None:
    """A second server or site process reports which port is taken and which setting to change."""
    s = read_server(running.folder)
    assert f"port {s.port} on 127.0.0.1 is in use by another program" in error_of("server", running.folder)
    taken = error_of("site", running.folder / "sites" / "a")
    assert "is in use by another program: stop that program, or change port in" in taken


def test_the_server_never_holds_a_site_s_private_key(tmp_path: Path) -> None:
    """`init` creates no site key; each site creates its own and sends only the public part to the server."""
    folder = tmp_path / "federation"
    membership.init(folder, ["north"], "127.0.0.1", 9443, "127.0.0.1")
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "keys"]
    assert not [path for path in files if b"PRIVATE KEY" in path.read_bytes()]
    home = tmp_path / "north"
    (folder / "sites" / "north").rename(home)
    public = membership.join(home)
    assert b"PRIVATE" not in public
    (tmp_path / "north.pub").write_bytes(public)
    membership.accept_key(folder, "north", tmp_path / "north.pub")
    private = (home / "node.key").read_bytes()
    assert not [path for path in folder.rglob("*") if path.is_file() and path.read_bytes() == private]


def test_sites_refuse_requests_without_the_operator_key(running: Deployment, tmp_path: Path) -> None:
    """A ServerApp with Flower's secret but without the operator's key gets no answer and spends no budget.

    It reaches the sites through the real SuperLink; each site refuses and records the refusal in its ledger.
    """
    real = running.folder / "keys" / "operator.key"
    real_key = real.read_bytes()
    ledgers = {name: running.folder / "sites" / name / "ledger.jsonl" for name in SITES}
    before = {name: path.read_bytes() if path.exists() else b"" for name, path in ledgers.items()}
    make_operator_key(real, tmp_path / "stolen.pub")
    try:
        assert "not signed by an operator key" in running.run_error(*run_arguments(1, tmp_path / "theft"))
    finally:
        shutil.rmtree(tmp_path / "theft", ignore_errors=True)
        real.write_bytes(real_key)
    for name, path in ledgers.items():
        added = [json.loads(line) for line in path.read_bytes()[len(before[name]) :].splitlines()]
        assert [sorted(line) for line in added] == [["previous", "rejected", "time"]] * len(added)
    assert any(path.read_bytes() != before[name] for name, path in ledgers.items())


def test_a_site_can_be_admitted_again(running: Deployment) -> None:
    """A site that was revoked, or removed at the SuperLink, can be admitted again with the same key."""
    link = ControlClient(running.folder)
    node = next(node for node in link.nodes() if node.name == "b")
    link.unregister(node.node_id)
    assert link.register() == ["b is admitted"]
    running.kill("b")
    running.start_site("b")
    online(running, "b")


@pytest.mark.flower
def test_a_site_is_added_rotated_and_revoked(running: Deployment, tmp_path: Path) -> None:
    """A fourth site joins a running server, gets a new key, is revoked, and is admitted again."""
    folder = running.folder
    assert "send to the site" in output_of("add-site", "d", "--folder", folder)
    home = folder / "sites" / "d"
    join_output = output_of("join", home)
    assert "ecdsa-sha2-nistp384" in join_output
    assert "SHA256:" in join_output
    assert "already has a key, SHA256:" in error_of("join", home)
    printed = output_of("add-site", "d", "--key", home / "node.pub", "--folder", folder)
    assert "d has the key SHA256:" in printed
    assert "d is admitted" in printed
    change(home / "site.toml", data="digits", port=free_port())
    running.start_site("d")
    online(running, "d")
    assert states(folder) == dict.fromkeys((*SITES, "d"), "connected")
    assert running.finish_run(*run_arguments(1, tmp_path / "four", agents=4)) == 0

    old = (home / "node.pub").read_bytes()
    assert "is the current key of d" in error_of("rotate", "d", "--key", home / "node.pub", "--folder", folder)
    output_of("join", home, "--rotate")
    assert (home / "node.pub").read_bytes() != old
    printed = output_of("rotate", "d", "--key", home / "node.pub", "--folder", folder)
    assert "the old one is refused" in printed
    running.kill("d", signal.SIGTERM)
    running.start_site("d")
    online(running, "d")

    printed = output_of("revoke", "d", "--folder", folder)
    assert "d is revoked" in printed
    assert "d is no longer admitted" in printed
    assert states(folder)["d"] == "revoked"
    assert read_server(folder).members == SITES
    running.kill("d", signal.SIGTERM)
    assert running.finish_run(*run_arguments(1, tmp_path / "three")) == 0
    assert "d is already revoked" in error_of("revoke", "d", "--folder", folder)
    output_of("add-site", "d", "--key", home / "node.pub", "--folder", folder)
    running.start_site("d")
    online(running, "d")
    output_of("revoke", "d", "--folder", folder)
    running.kill("d", signal.SIGTERM)


@pytest.mark.flower
def test_a_run_reports_the_sites_it_waits_for(running: Deployment, tmp_path: Path) -> None:
    """A run that needs a site that is not connected reports it at once."""
    running.kill("b")
    running.wait_until(lambda: states(running.folder)["b"] == "not connected", 120)
    run = running.start_run(*run_arguments(1, tmp_path / "waits"))
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


@pytest.mark.parametrize(
    "words", [["run", "--help"], ["run", "waffle-paper", "--help"], ["site", "--help"], ["--help"]]
)
def test_help_is_readable(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every help text is printed and contains no type-checker comment."""
    with contextlib.suppress(SystemExit):
        assert _run(["deploy", *words]) == 0
    out = capsys.readouterr().out
    assert "usage" in out
    assert "type: ignore" not in out


CANARY = """\
import os
from pathlib import Path

Path({folder!r}, os.environ.get("FLWR_HOME", "command").replace("/", "_")).touch()


def half(r, rounds):
    return 0.5
"""


@pytest.mark.flower
def test_operator_gets_no_values_and_sites_import_no_modules(tmp_path: Path) -> None:
    """Ages leave real sites neither as categories nor as classes, and sites import no module that a run names."""
    tables = tmp_path / "tables"
    tables.mkdir()
    for name, shift in (("north", 0), ("south", 3)):
        rows = [f"{20 + (7 * i + shift) % 60},{(13 * i) % 90 + 0.5},{i % 2}" for i in range(80)]
        (tables / f"{name}.csv").write_text("\n".join(["age,creatinine,outcome", *rows]))
    folder = federation(tmp_path / "federation", ("north", "south"), str(tables))
    for name in ("north", "south"):
        change(folder / "sites" / name / "site.toml", surveys=9)
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "hostile_schedule.py").write_text(CANARY.format(folder=str(canary)))
    deployment = Deployment(folder)
    deployment.environment["PYTHONPATH"] = str(canary)
    with deployed(deployment):
        common = [
            "run",
            "waffle-paper",
            "--data",
            "hospitals",
            "--alice",
            "north",
            "--rounds",
            "1",
            "--batch-size",
            "16",
        ]
        for k, (flags, words) in enumerate(
            [
                (["--target", "outcome", "--categorical", "age"], "column 'age' holds numbers, and"),
                (["--target", "age", "--task", "classification"], "'age' has more than 10 different numbers"),
                (["--target", "outcome", "--min-category", "1", "--categorical", "age"], "does not leave this site"),
                (
                    ["--target", "outcome", "--omega", "hostile_schedule:half"],
                    "does not import 'hostile_schedule:half'",
                ),
            ]
        ):
            assert words in deployment.run_error(*common, *flags, "--out", tmp_path / f"run-{k}")
    seen = [path.name for path in canary.iterdir() if path.suffix != ".py"]
    assert not [name for name in seen if "sites" in name], seen
    for name in ("north", "south"):
        ledger = (folder / "sites" / name / "ledger.jsonl").read_text()
        assert "categories" not in ledger
        assert '"values": ["20"' not in ledger
