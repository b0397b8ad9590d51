"""Everything that a site may send in place of its update: rows W of the fault list, one lie a round."""

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
    """What a payload says of itself."""
    header = parse_header(payload[: 8 + MAX_HEADER], len(payload))
    return {k: v for k, v in header["__metadata__"].items() if k != "digest"}


def holding(change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> Lie:
    """Other tensors under honest labels."""
    return lambda payload: pack(change(load(payload)), labels(payload))


def update(change: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    """Another update in place of the honest one."""
    return holding(lambda tensors: {**tensors, "dy": change(tensors["dy"])})


def labelled(**wrong: str) -> Lie:
    """An honest update that says something else of itself."""
    return lambda payload: pack(load(payload), {**labels(payload), **wrong})


def declared(old: bytes, new: bytes) -> Lie:
    """The same bytes under a header that declares them as something else."""
    return lambda payload: payload.replace(old, new, 1)


def shaped(*first: object) -> Lie:
    """The same bytes under a sound header in which a shape begins otherwise."""

    def lie(payload: bytes) -> bytes:
        end = 8 + int.from_bytes(payload[:8], "little")
        text = payload[8:end].replace(b'"shape":[', b'"shape":[' + json.dumps(first)[1:-1].encode() + b",", 1)
        return len(text).to_bytes(8, "little") + text + payload[end:]

    return lie


# lie -> what is sent, and why the record then says that the agent was not heard; those about directions come first,
# while all agents still move the same way
LIES: dict[str, tuple[Lie, str]] = {
    "W7 opposed": (update(torch.neg), "opposed to Alice"),
    "W7 tiny": (update(lambda dy: dy * 1e-6), "too short"),
    "W7 zeros": (update(torch.zeros_like), "too short"),
    "W1 NaN": (update(lambda dy: dy * torch.nan), "not finite"),
    "W1 one infinite": (update(lambda dy: dy.index_fill(0, torch.tensor([7]), torch.inf)), "not finite"),
    "W2 1e20": (update(lambda dy: torch.full_like(dy, 1e20)), "too long"),
    "W2 no finite norm": (update(lambda dy: torch.full_like(dy, 1e200)), "too long"),
    "W3 another name": (holding(lambda t: {"dz": t["dy"], "stats": t["stats"]}), "missing"),
    "W3 missing": (holding(lambda t: {"stats": t["stats"]}), "'dy' is missing"),
    "W3 extra": (holding(lambda t: {**t, "more": t["dy"]}), "no such tensor"),
    "W3 a name of any length": (holding(lambda t: {**t, "m" * 100_000: t["dy"]}), "mmm"),
    "W4 broadcastable": (update(lambda dy: dy[:1].clone()), "expected ('F64'"),
    "W4 a scalar": (update(lambda dy: dy[0].clone()), "expected ('F64'"),
    "W4 transposed": (update(lambda dy: dy[:, None].clone()), "expected ('F64'"),
    "W5 int8": (update(lambda dy: dy.to(torch.int8)), "damaged"),
    "W5 float32": (update(lambda dy: dy.float()), "'F32'"),
    "W5 other than declared": (declared(b'"F64"', b'"F32"'), "damaged"),
    "W5 a pickle": (lambda payload: b"\x80\x04cos\nsystem\n(S'true'\ntR.", "not a safetensors file"),
    "W6 header bomb": (lambda payload: (1 << 40).to_bytes(8, "little") + payload[8:], "header would be longer"),
    "W6 shape bomb": (shaped(*300_000 * [9]), "damaged"),
    "W6 text bomb": (shaped(1_000_000, 1_000_000 * "x"), "damaged"),
    "W6 too long": (lambda payload: payload + bytes(BOMB), "more bytes than any message"),
    "W8 another round": (labelled(round="1"), "round is '1'"),
    "W8 another run": (labelled(run="other"), "run is 'other'"),
    "W8 another model": (labelled(model="other"), "model is 'other'"),
    "W10 steps": (labelled(steps="999"), "steps is '999'"),
    "damaged": (lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]), "does not match its digest"),
    "rubbish": (lambda payload: b"rubbish", "not a safetensors file"),
}
REPLAY, NO_ANSWER, BOAST, HONEST = "W8 replay", "no answer", "W10 W11 boast", ""
REASONS = {
    **{lie: reason for lie, (_, reason) in LIES.items()},
    REPLAY: "round is",
    NO_ANSWER: "the reply lacks this run",
}


def told(site: Path, request: Message, reply: Message) -> Message:
    """The reply as the site's `lies.json` (round -> lie) wants it; the second attempt at a round is honest."""
    (task,) = request.fields.get("tasks", [{}])
    if not task.get("round") or not reply.payloads or task["attempt"]:
        return reply
    ((course, payload),) = reply.payloads.items()
    first = site / "first.safetensors"
    if not first.exists():
        first.write_bytes(payload)
    lie = lie_of(site, task["round"])
    if lie == BOAST:
        return boasted(reply)
    if lie == NO_ANSWER:
        return replace(reply, fields={"courses": "none"})
    if lie == REPLAY:
        return Message(reply.fields, {course: first.read_bytes()})
    return Message(reply.fields, {course: LIES[lie][0](payload)}) if lie in LIES else reply


def lie_of(site: Path, r: int) -> str:
    """What the site's schedule has for a round."""
    schedule: dict[str, str] = json.loads((site / "lies.json").read_text())
    return schedule.get(str(r), HONEST)


def boasted(reply: Message) -> Message:
    """W10, W11: an honest update with a `dc`, and wrong words about its agent, its samples and its steps."""
    boasts: dict[str, Any] = {
        "num-examples": 10**9,
        "samples": 10**9,
        "agent": 0,
        "steps": 1,
        "alice": True,
        "score": 1,
    }
    ((course, payload),) = reply.payloads.items()
    longer = pack(load(payload) | {"dc": 1e9 * load(payload)["dy"]}, {**labels(payload), "num-examples": "1000000000"})
    courses = {course: {**reply.fields["courses"][course], **boasts}, "another": boasts}
    return Message({**reply.fields, **boasts, "courses": courses}, {course: longer, "another": payload[:100]})
