"""The false replies that a site may send in place of its update: rows W of the fault list, one lie per round."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from waffle_fl.engines.flower.messages import Message
from waffle_fl.tensorfile import MAX_HEADER, pack, parse_header

BOMB = 64 << 20  # bytes of a payload that is far too long

Tensors = dict[str, torch.Tensor]
Lie = Callable[[bytes], bytes]


def labels(payload: bytes) -> dict[str, str]:
    """Return the metadata of a payload without its digest."""
    header = parse_header(payload[: 8 + MAX_HEADER], len(payload))
    return {k: v for k, v in header["__metadata__"].items() if k != "digest"}


def with_tensors(change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> Lie:
    """Return a lie that sends other tensors under honest labels."""
    return lambda payload: pack(change(load(payload)), labels(payload))


def with_update(change: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    """Return a lie that replaces the honest update."""
    return with_tensors(lambda tensors: {**tensors, "dy": change(tensors["dy"])})


def with_labels(**wrong: str) -> Lie:
    """Return a lie that sends an honest update with wrong labels."""
    return lambda payload: pack(load(payload), {**labels(payload), **wrong})


def with_header_text(old: bytes, new: bytes) -> Lie:
    """Return a lie that sends the same bytes under a header that declares another type."""
    return lambda payload: payload.replace(old, new, 1)


def with_shape(*first: object) -> Lie:
    """Return a lie that sends the same bytes under a valid header with extra leading dimensions."""

    def lie(payload: bytes) -> bytes:
        end = 8 + int.from_bytes(payload[:8], "little")
        text = payload[8:end].replace(b'"shape":[', b'"shape":[' + json.dumps(first)[1:-1].encode() + b",", 1)
        return len(text).to_bytes(8, "little") + text + payload[end:]

    return lie


# lie -> payload that is sent, and the reason in the record for rejecting it. Lies about directions come first, while
# the updates of all agents still point the same way.
LIES: dict[str, tuple[Lie, str]] = {
    "W7 opposed": (with_update(torch.neg), "opposed to Alice"),
    "W7 tiny": (with_update(lambda dy: dy * 1e-6), "too short"),
    "W7 zeros": (with_update(torch.zeros_like), "too short"),
    "W1 NaN": (with_update(lambda dy: dy * torch.nan), "not finite"),
    "W1 one infinite": (with_update(lambda dy: dy.index_fill(0, torch.tensor([7]), torch.inf)), "not finite"),
    "W2 1e20": (with_update(lambda dy: torch.full_like(dy, 1e20)), "too long"),
    "W2 no finite norm": (with_update(lambda dy: torch.full_like(dy, 1e200)), "too long"),
    "W3 another name": (with_tensors(lambda t: {"dz": t["dy"], "stats": t["stats"]}), "missing"),
    "W3 missing": (with_tensors(lambda t: {"stats": t["stats"]}), "'dy' is missing"),
    "W3 extra": (with_tensors(lambda t: {**t, "more": t["dy"]}), "no such tensor"),
    "W3 a name of any length": (with_tensors(lambda t: {**t, "m" * 100_000: t["dy"]}), "mmm"),
    "W4 broadcastable": (with_update(lambda dy: dy[:1].clone()), "expected ('F64'"),
    "W4 a scalar": (with_update(lambda dy: dy[0].clone()), "expected ('F64'"),
    "W4 transposed": (with_update(lambda dy: dy[:, None].clone()), "expected ('F64'"),
    "W5 int8": (with_update(lambda dy: dy.to(torch.int8)), "damaged"),
    "W5 float32": (with_update(lambda dy: dy.float()), "'F32'"),
    "W5 other than declared": (with_header_text(b'"F64"', b'"F32"'), "damaged"),
    "W5 a pickle": (lambda payload: b"\x80\x04cos\nsystem\n(S'true'\ntR.", "not a safetensors file"),
    "W6 header bomb": (lambda payload: (1 << 40).to_bytes(8, "little") + payload[8:], "its header is too long"),
    "W6 shape bomb": (with_shape(*300_000 * [9]), "damaged"),
    "W6 text bomb": (with_shape(1_000_000, 1_000_000 * "x"), "damaged"),
    "W6 too long": (lambda payload: payload + bytes(BOMB), "more bytes than any message"),
    "W8 another round": (with_labels(round="1"), "round is '1'"),
    "W8 another run": (with_labels(run="other"), "run is 'other'"),
    "W8 another model": (with_labels(model="other"), "model is 'other'"),
    "W10 steps": (with_labels(steps="999"), "steps is '999'"),
    "damaged": (lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]), "does not match its digest"),
    "rubbish": (lambda payload: b"rubbish", "not a safetensors file"),
}
REPLAY, NO_ANSWER, FALSE_CLAIMS, HONEST = "W8 replay", "no answer", "W10 W11 false claims", ""
REASONS = {
    **{lie: reason for lie, (_, reason) in LIES.items()},
    REPLAY: "round is",
    NO_ANSWER: "the reply lacks this run",
}


def apply_lie(site: Path, request: Message, reply: Message) -> Message:
    """Return the reply changed by the lie that `lies.json` (round -> lie) schedules; retries of a round are honest."""
    (task,) = request.fields.get("tasks", [{}])
    if not task.get("round") or not reply.payloads or task["attempt"]:
        return reply
    ((label, payload),) = reply.payloads.items()
    first = site / "first.safetensors"
    if not first.exists():
        first.write_bytes(payload)
    lie = scheduled_lie(site, task["round"])
    if lie == FALSE_CLAIMS:
        return with_false_claims(reply)
    if lie == NO_ANSWER:
        return replace(reply, fields={"courses": "none"})
    if lie == REPLAY:
        return Message(reply.fields, {label: first.read_bytes()})
    return Message(reply.fields, {label: LIES[lie][0](payload)}) if lie in LIES else reply


def scheduled_lie(site: Path, r: int) -> str:
    """Return the lie that the site's schedule has for a round."""
    schedule: dict[str, str] = json.loads((site / "lies.json").read_text())
    return schedule.get(str(r), HONEST)


def with_false_claims(reply: Message) -> Message:
    """W10, W11: return an honest update with an added `dc` and false agent, sample and step counts."""
    claims: dict[str, Any] = {
        "num-examples": 10**9,
        "samples": 10**9,
        "agent": 0,
        "steps": 1,
        "alice": True,
        "score": 1,
    }
    ((label, payload),) = reply.payloads.items()
    longer = pack(load(payload) | {"dc": 1e9 * load(payload)["dy"]}, {**labels(payload), "num-examples": "1000000000"})
    replies = {label: {**reply.fields["courses"][label], **claims}, "another": claims}
    return Message({**reply.fields, **claims, "courses": replies}, {label: longer, "another": payload[:100]})
