"""`waffle deploy`: folders, keys, rules and dry runs, without starting any process."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import refusal
from waffle_fl.algorithms.scaffold import Agents
from waffle_fl.cli import _run
from waffle_fl.config import check_run
from waffle_fl.deploy import demo, membership, processes
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.server_app import JobRunner
from waffle_fl.deploy.settings_files import change, read_server, read_site
from waffle_fl.deploy.site_store import OLDER, Ledger, Store
from waffle_fl.engines.flower.messages import Message, Request, Version, packed, unpacked
from waffle_fl.errors import WaffleError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert (
        _run(["deploy", "init", str(tmp_path / "fed"), "--sites", "south", "north", "--address", "fl.example.org"]) == 0
    )
    return tmp_path / "fed"


def test_files_created_by_init(folder: Path) -> None:
    """init writes valid settings, a certificate with the server's names, and no secret of any site."""
    server = read_server(folder)
    assert server.sites == ("north", "south")
    assert not server.insecure
    certificate = x509.load_pem_x509_certificate((folder / "keys" / "server.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((folder / "keys" / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fl.example.org" in names.get_values_for_type(x509.DNSName)
    for name in server.sites:
        site = folder / "sites" / name
        assert read_site(site).name == name
        assert sorted(path.name for path in site.iterdir()) == ["ca.crt", "operator.pub", "site.toml"]
    for secret in ("server.key", "operator.key"):
        assert stat.S_IMODE((folder / "keys" / secret).stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "keys").stat().st_mode) == 0o700
    assert not list(folder.rglob("ca.key"))
    assert not list(folder.rglob("node.key"))


def test_no_site_can_be_named_all(tmp_path: Path) -> None:
    """A site cannot have the name `all`, which stands for every site."""
    assert "means every site" in refusal(membership.init, tmp_path / "x", ["all", "b"], "127.0.0.1", 9443, "127.0.0.1")


def test_init_does_not_overwrite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """init keeps the keys of an existing federation."""
    before = (folder / "keys" / "server.key").read_bytes()
    assert _run(["deploy", "init", str(folder), "--sites", "north"]) == 2
    assert "already holds a federation" in capsys.readouterr().err
    assert (folder / "keys" / "server.key").read_bytes() == before


def test_f8_insecure_requires_i_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F8: without TLS, nothing is created or started unless --i-know is given too."""
    line = ["deploy", "init", str(tmp_path / "fed"), "--sites", "north", "--insecure"]
    assert _run(line) == 2
    assert "--i-know" in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()
    assert _run([*line, "--i-know"]) == 0
    assert _run(["deploy", "server", str(tmp_path / "fed")]) == 2
    assert _run(["deploy", "site", str(tmp_path / "fed" / "sites" / "north")]) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ["wafle"]}, "did you mean waffle"),
        ({"metrics": ["acuracy"]}, "did you mean accuracy"),
        ({"rounds": 0}, "rounds: expected above 0"),
        ({"max_norm": "much"}, "max_norm: cannot be 'much'"),
    ],
)
def test_mistakes_in_site_toml(changes: dict[str, Any], words: str, folder: Path) -> None:
    """The error for a mistake in site.toml names the file and the correct word."""
    change(folder / "sites" / "north" / "site.toml", **changes)
    text = refusal(read_site, folder / "sites" / "north")
    assert "site.toml" in text
    assert words in text


def test_unknown_keys(folder: Path) -> None:
    """C1: an unknown key is rejected, and the error suggests the closest known key."""
    with (folder / "server.toml").open("a") as stream:
        stream.write("dead_line = 3\n")
    assert "did you mean deadline" in refusal(read_server, folder)


def test_mistakes_in_server_toml(folder: Path) -> None:
    """Duplicate or invalid site names, ports and times are rejected with an error that names the file."""
    for changes, words in (
        ({"sites": ["north", "north"]}, "sites: expected each name once"),
        ({"sites": ["../north", "south"]}, "expected a run name"),
        ({"port": 99999}, "port: expected 1 to 65535"),
        ({"grace": 0}, "grace: expected above 0"),
    ):
        before = (folder / "server.toml").read_text()
        change(folder / "server.toml", **changes)
        assert words in refusal(read_server, folder)
        (folder / "server.toml").write_text(before)


@pytest.mark.parametrize("content", [None, b"rubbish", b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA== x"])
def test_a_missing_or_invalid_public_key_is_one_line(content: bytes | None, folder: Path, tmp_path: Path) -> None:
    """If a site in server.toml has no valid public key, the one-line error names the key file."""
    if content is not None:
        (folder / "keys" / "north.pub").write_bytes(content)
        (folder / "keys" / "south.pub").write_bytes(content)
    job = Job.create(folder, check_run("waffle-paper", {"data": "hospitals"}, {}), tmp_path / "run", force=False)
    assert "north.pub" in refusal(JobRunner, folder, job, None)


def test_check_reports_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` reports a missing certificate, CA or port in one line each."""
    change(folder / "server.toml", listen="127.0.0.1", port=1)
    (folder / "keys" / "server.pem").write_bytes(b"rubbish")
    assert _run(["deploy", "check", str(folder)]) == 2
    assert "server.pem is not a certificate" in capsys.readouterr().out
    for name in ("server.pem", "ca.crt"):
        (folder / "keys" / name).unlink()
    assert _run(["deploy", "check", str(folder)]) == 2
    out = capsys.readouterr().out
    assert "server.pem: No such file" in out
    assert "ca.crt is missing" in out
    site = folder / "sites" / "north"
    for server in ("fl.example.org", ":9443", "fl.example.org:port", "fl.example.org:99999"):
        change(site / "site.toml", server=server)
        assert _run(["deploy", "check", str(site)]) == 2
        assert f"NOT OK: server = {server!r}" in capsys.readouterr().out
        assert _run(["deploy", "site", str(site)]) == 2
    assert _run(["deploy", "server", str(folder)]) == 2
    assert "lacks ca.crt, server.pem" in capsys.readouterr().err


def test_the_demo_replaces_only_an_earlier_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with other content is rejected; an empty one or one of an earlier demo is used."""
    monkeypatch.setenv("WAFFLE_DATA", str(tmp_path / "none"))
    membership.init(tmp_path / "work" / "federation", ["north"], "127.0.0.1", 9443, "127.0.0.1")
    assert _run(["deploy", "demo", "--out", str(tmp_path / "work")]) == 2
    assert (tmp_path / "work" / "federation" / "keys" / "server.key").exists()
    (tmp_path / "demo").mkdir()
    for _ in range(2):
        demo.set_up(tmp_path / "demo")
    assert (tmp_path / "demo" / "federation" / "server.toml").exists()


def test_peers_prints_a_line_per_site(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of peers.pub are names and public keys; a missing key is named in one line."""
    for name in read_server(folder).sites:
        membership.join(folder / "sites" / name)
        membership.accept_key(folder, name, folder / "sites" / name / "node.pub")
    assert _run(["deploy", "peers", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    for line, name in zip(lines, read_server(folder).sites, strict=True):
        assert line == f"{name} {(folder / 'keys' / f'{name}.pub').read_text().strip()}"
    (folder / "keys" / f"{name}.pub").unlink()
    assert _run(["deploy", "peers", str(folder)]) == 2
    assert f"lacks {name}.pub" in capsys.readouterr().err


def test_a_deployment_refuses_an_attack(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A deployment rejects an attack, which works in simulations only, and makes no job."""
    out = ["--folder", str(folder), "--out", str(tmp_path / "run")]
    assert _run(["deploy", "run", "waffle-paper", "--data", "hospitals", "--attack", "sign-flip", *out]) == 2
    assert "attack works in simulations only" in capsys.readouterr().err
    assert not (folder / "jobs").exists()


def test_processes_make_no_outside_connections(folder: Path) -> None:
    """Flower's processes get TLS, authentication and a secret, and neither install packages nor send telemetry."""
    command = processes.server_command(folder, read_server(folder))
    assert {"--enable-supernode-auth", "--ssl-certfile", "--disable-runtime-dependency-installation"} <= set(command)
    assert "--insecure" not in command
    environment = processes.environment(folder)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environment["FLWR_HOME"].startswith(str(folder))
    assert {"--isolation", "process", "--superexec-auth-secret-file"} <= set(command)
    site = folder / "sites" / "north"
    assert "--root-certificates" in processes.site_command(site, read_site(site))


def test_sent_code_is_not_run(folder: Path) -> None:
    """Flower's client process loads the installed app instead of the code that it was sent."""
    code = f"""
from importlib import import_module
from pathlib import Path
from waffle_fl.deploy import executor
executor._preload("site")
runtime = import_module("flwr.supernode.runtime.run_clientapp")
assert runtime.install_from_fab(b"evil") is None
runtime.run_clientapp = lambda *_: None
home = Path({str(folder / "sites" / "north")!r})
executor.run_client_app(home, executor.endpoint_of(home), "token")
app = runtime.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)("evil/app", "1", "0")
assert type(app).__name__ == "ClientApp"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_dry_run_lists_everything_that_would_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run lists every field and every tensor with its size, and writes no file."""
    membership.init(tmp_path / "fed", ["north"], "127.0.0.1", 9443, "127.0.0.1", data="digits")
    site = tmp_path / "fed" / "sites" / "north"
    before = sorted(site.iterdir())
    capsys.readouterr()
    flags = ["--agents", "4", "--samples-per-agent", "20", "--model", "linear", "--batch-size", "8"]
    assert _run(["deploy", "site", str(site), "--dry-run", *flags]) == 0
    out = capsys.readouterr().out
    assert "survey, hello:" in out
    assert "dy: F32 [650], 2600 bytes" in out
    assert '"accuracy"' in out
    assert sorted(site.iterdir()) == before
    change(site / "site.toml", metrics=[])
    assert _run(["deploy", "site", str(site), "--dry-run", *flags]) == 0
    assert '"accuracy"' not in capsys.readouterr().out


def test_recent_states_are_kept(tmp_path: Path) -> None:
    """A site keeps the current state and the three before it, and ignores a damaged file."""
    store = Store(tmp_path)
    for r in range(1, 9):
        store.save("run", "course", Version(r), Version(r - 1), Agents(torch.full((1, 3), float(r))))
    like = Agents(torch.zeros(1, 3))
    found = [r for r in range(9) if store.load("run", "course", Version(r), like) is not None]
    assert found == list(range(7 - OLDER, 9))
    path = next(tmp_path.rglob("00000008-0.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert store.load("run", "course", Version(8), like) is None
    for name in ("../evil", "", "a/b"):
        with pytest.raises(WaffleError):
            store.load(name, "course", Version(8), like)


def test_the_ledger_counts_a_request_once(tmp_path: Path) -> None:
    """A repeated request is not counted again, and each kind of request has its own count."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for kind, request_id in (("update", "one"), ("update", "two"), ("update", "two"), ("score", "three")):
        ledger.note(asked={kind: request_id})
    assert ledger.different("update", "two") == 2
    assert ledger.different("update", "three") == 3
    assert ledger.different("score", "three") == 1


def test_an_incomplete_ledger_line_affects_no_other(tmp_path: Path) -> None:
    """After a line cut by a power failure, the next entry starts a new line, and all complete lines are read."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.note(asked={"update": "one"})
    for incomplete in (b'{"asked": {"upd', b"\x00\xff", b'{"asked": {"update": "lost"}'):
        ledger.path.write_bytes(ledger.path.read_bytes() + incomplete)
        ledger.note(asked={"update": "two"})
    assert ledger.different("update", "one") == 2


TEXT = st.text(max_size=8)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
JSON = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(TEXT, PLAIN, max_size=3)
RELAXED = settings(suppress_health_check=[HealthCheck.too_slow])


@RELAXED
@given(st.dictionaries(TEXT, JSON, max_size=3), st.dictionaries(st.text("abc", min_size=1), st.binary(), max_size=3))
def test_a_message_arrives_as_it_was_sent(words: dict[str, Any], payloads: dict[str, bytes]) -> None:
    """Fields and payloads survive the conversion to Flower's records."""
    message = unpacked(packed(Message(words, payloads)), 1 << 20)
    assert message.payloads == payloads
    assert message.fields == json.loads(json.dumps(words))


@RELAXED
@given(JSON)
def test_a_task_that_cannot_be_read_is_refused(content: Any) -> None:
    """Any JSON in place of a task raises WaffleError."""
    try:
        Request.from_json(content)
    except WaffleError:
        return
    raise AssertionError("a task requires more fields")


def test_node_keys_use_a_curve_that_flower_accepts(folder: Path) -> None:
    """Node keys are NIST P-384 keys in OpenSSH format."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    membership.join(folder / "sites" / "north")
    membership.accept_key(folder, "north", folder / "sites" / "north" / "node.pub")
    private = load_ssh_private_key((folder / "sites" / "north" / "node.key").read_bytes(), None)
    public = load_ssh_public_key((folder / "keys" / "north.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == public
    assert isinstance(private.curve, ec.SECP384R1)


@pytest.mark.parametrize("name", ["operator", "server", "ca", "all", "../x", "a b"])
def test_reserved_site_names(name: str, folder: Path, tmp_path: Path) -> None:
    """A site named like one of the server's keys would overwrite that key, so the name is rejected."""
    assert refusal(membership.add_site, folder, name)
    assert (folder / "keys" / "operator.pub").read_bytes().startswith(b"ssh-ed25519")


def test_invalid_key_files(folder: Path, tmp_path: Path) -> None:
    """A FIFO does not block, a huge file is not read, and only the key itself is stored."""
    import os

    os.mkfifo(tmp_path / "fifo")
    assert "is a FIFO" in refusal(membership.accept_key, folder, "north", tmp_path / "fifo")
    membership.join(folder / "sites" / "north")
    public = folder / "sites" / "north" / "node.pub"
    (tmp_path / "large").write_bytes(public.read_bytes().strip() + b" " + b"x" * (1 << 20))
    assert "not the public key" in refusal(membership.accept_key, folder, "north", tmp_path / "large")
    (tmp_path / "commented").write_bytes(public.read_bytes().strip() + b" \x1b[2Jhello\n")
    membership.accept_key(folder, "north", tmp_path / "commented")
    assert (folder / "keys" / "north.pub").read_bytes() == public.read_bytes()
