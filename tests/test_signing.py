"""Signed requests: which ones a site accepts, and the ledger that records them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from conftest import refusal
from waffle_fl.cli import _run
from waffle_fl.deploy import membership
from waffle_fl.deploy.signing import load_operator_key, load_trusted_keys, sign, verify
from waffle_fl.deploy.site import Site
from waffle_fl.deploy.site_store import Ledger
from waffle_fl.engines.flower.messages import Message, packed, unpacked
from waffle_fl.errors import WaffleError

KEY = Ed25519PrivateKey.generate()
REQUEST = Message({"run": "job", "tasks": [{"round": 3}]}, {"course": b"model"})


def verified_nonce(request: Message, used: Any = (), now: float | None = None, site: str = "north") -> str:
    return verify(request, [KEY.public_key()], site, set(used), 900.0, now)


def test_an_honest_request_passes_once() -> None:
    """A request passes through Flower's records and is accepted once; a repetition is rejected."""
    signed = unpacked(packed(sign(REQUEST, KEY, "north")), 1 << 20)
    nonce = verified_nonce(signed)
    assert "answered before" in refusal(verified_nonce, signed, used=[nonce])


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, fields={**r.fields, "run": "other"}),
        lambda r: replace(r, fields={**r.fields, "tasks": [{"round": 4}]}),
        lambda r: replace(r, fields={**r.fields, "issued": r.fields["issued"] + 1}),
        lambda r: replace(r, fields={**r.fields, "nonce": "0" * 32}),
        lambda r: replace(r, fields={**r.fields, "site": "south"}),
        lambda r: replace(r, fields={**r.fields, "more": 1}),
        lambda r: replace(r, payloads={"course": b"trap"}),
        lambda r: replace(r, payloads={"other": b"model"}),
        lambda r: replace(r, payloads={}),
        lambda r: replace(r, signature=b""),
        lambda r: replace(r, signature=bytes(64)),
        lambda r: replace(r, signature=r.signature[:-1]),
        lambda r: sign(REQUEST, Ed25519PrivateKey.generate(), "north"),
    ],
)
def test_any_change_breaks_the_signature(change: Any) -> None:
    """The signature covers the job, the round, the site, the time, the nonce and every payload."""
    assert "not signed by an operator key" in refusal(verified_nonce, change(sign(REQUEST, KEY, "north")))


def test_a_request_is_valid_for_one_site_and_a_limited_time() -> None:
    """A correctly signed request for another site, or too old or too new, is rejected."""
    signed, now = sign(REQUEST, KEY, "north", now=1e9), 1e9
    assert verified_nonce(signed, now=now + 899)
    assert "addressed to another site" in refusal(verified_nonce, signed, site="south", now=now)
    for off in (-901, 901, 1e12):
        assert "before or after this site's time" in refusal(verified_nonce, signed, now=now + off)
    nan_time = sign(Message({"run": "job"}), KEY, "north", now=float("nan"))
    assert "before or after" in refusal(verified_nonce, nan_time)


@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5), max_size=4), st.binary())
def test_no_random_request_passes(words: dict[str, Any], signature: bytes) -> None:
    """Any random JSON and bytes are rejected in one line."""
    with pytest.raises(WaffleError):
        verified_nonce(Message(words, {}, signature))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "holds no operator key"), (b"# nothing\n", "holds no operator key"), (b"rubbish\n", "one per operator key")],
)
def test_a_site_without_a_readable_operator_key(content: bytes, words: str, tmp_path: Path) -> None:
    """A site without a readable operator key refuses every request and reports the reason."""
    (tmp_path / "operator.pub").write_bytes(content)
    assert words in refusal(load_trusted_keys, tmp_path / "operator.pub")


def test_two_operator_keys_are_trusted_while_one_is_replaced(tmp_path: Path) -> None:
    """Each line of operator.pub is a key, and a request signed with either passes."""
    keys = [KEY, Ed25519PrivateKey.generate()]
    lines = [key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) for key in keys]
    (tmp_path / "operator.pub").write_bytes(b"# old and new\n" + b"\n".join(lines) + b"\n")
    trusted = load_trusted_keys(tmp_path / "operator.pub")
    for key in keys:
        assert verify(sign(REQUEST, key, "north"), trusted, "north", (), 900.0)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    membership.init(tmp_path / "fed", ["north"], "127.0.0.1", 9443, "127.0.0.1")
    home = tmp_path / "fed" / "sites" / "north"
    (home / "data").mkdir()
    rows = [f"{20 + i},{'AB'[i % 2]}" for i in range(40)]
    (home / "data" / "north.csv").write_text("\n".join(["age,ward", *rows]))
    return home


def test_a_rejected_request_only_adds_a_ledger_line(site: Path) -> None:
    """A rejected request spends no budget and trains nothing; its ledger line contains none of its text."""
    before = sorted(path.name for path in site.iterdir())
    for signature in (b"", bytes(64)):
        reply = Site(site).answer(Message({"run": "evil", "stage": "hello", "software": "x"}, {}, signature))
        assert reply.fields["error"] == "this request is not signed by an operator key that this site trusts"
    lines = list(Ledger(site / "ledger.jsonl").lines())
    assert [line.keys() for line in lines] == [{"time", "rejected", "previous"}] * 2
    assert "evil" not in (site / "ledger.jsonl").read_text()
    assert sorted({path.name for path in site.iterdir()}.difference(before)) == [
        ".ledger.jsonl.head",
        ".ledger.jsonl.lock",
        "ledger.jsonl",
    ]


def test_a_replayed_request_is_refused(site: Path) -> None:
    """The nonces of answered requests are stored on disk, so a replay is refused after a restart too."""
    key = load_operator_key(site.parent.parent / "keys" / "operator.key")
    request = sign(Message({"run": "job"}), key, "north")
    first = Site(site).answer(request).fields["error"]
    assert first.startswith("the server runs None")
    assert Site(site).answer(request).fields["error"] == "this request was answered before"


def test_the_ledger_is_a_chain(tmp_path: Path) -> None:
    """A line that was changed, removed or added is detected, and so is a truncated or deleted ledger."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.check()
    for k in range(4):
        ledger.note(asked={"update": str(k)})
        ledger.check()
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in (
        [lines[0].replace(b'"0"', b'"9"'), *lines[1:]],
        [lines[0], *lines[2:]],
        [lines[1], lines[0], *lines[2:]],
        [*lines, json.dumps({"asked": {}, "previous": "00"}).encode() + b"\n"],
        lines[:2],
        [],
    ):
        path.write_bytes(b"".join(damaged))
        assert "it is unknown what has left this site" in refusal(ledger.check)
    path.unlink()
    assert "it is missing" in refusal(ledger.check)
    path.write_bytes(b"".join(lines))
    ledger.check()
    (tmp_path / ".ledger.jsonl.head").unlink()
    assert "lines are missing" in refusal(ledger.check)


def test_a_damaged_ledger_stops_every_answer_until_it_is_accepted(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the ledger was deleted, the site refuses requests, does not start, and names the flag that accepts it."""
    key = load_operator_key(site.parent.parent / "keys" / "operator.key")
    Site(site).answer(sign(Message({"run": "job"}), key, "north"))
    (site / "ledger.jsonl").unlink()
    reply = Site(site).answer(sign(Message({"run": "job"}), key, "north"))
    assert reply.fields["error"] == "failed at the site (WaffleError); see the site's own log"
    assert not (site / "ledger.jsonl").exists()
    membership.join(site)
    assert _run(["deploy", "site", str(site)]) == 2
    assert "--accept-ledger" in capsys.readouterr().err
    Ledger(site / "ledger.jsonl").accept()
    Ledger(site / "ledger.jsonl").check()
    assert "accepts the ledger" in (site / "ledger.jsonl").read_text()


def test_a_crash_between_the_line_and_the_head_is_no_damage(tmp_path: Path) -> None:
    """The head may be one line behind after a crash, and the ledger is still valid."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.note(asked={})
    head = ledger.head.read_bytes()
    ledger.note(asked={})
    ledger.head.write_bytes(head)
    ledger.check()


def test_the_ledger_records_the_numbers_of_a_survey(site: Path) -> None:
    """The ledger records the numbers of a survey as they left the site."""
    from waffle_fl.config import check_run
    from waffle_fl.deploy.site import software

    key = load_operator_key(site.parent.parent / "keys" / "operator.key")
    config = check_run("fedavg", {"data": "x", "target": "ward", "alice": "north", "min_category": 5}, {})
    aim = {"columns": [], "target": "ward", "task": "classification", "classes": ["A", "B"]}
    words = {"software": software(), "run": "job", "agent": 0, "config": config.to_json(), "stage": "columns"}
    known = {"aim": aim, "kinds": {"age": "numeric"}}
    request = Message(json.loads(json.dumps({**words, "known": known})))
    reply = Site(site).answer(sign(request, key, "north")).fields
    assert reply["moments"]["age"][0] == 30
    (line,) = Ledger(site / "ledger.jsonl").lines()
    assert line["said"]["moments"] == reply["moments"]
    assert time.strptime(line["time"], "%Y-%m-%dT%H:%M:%SZ")
