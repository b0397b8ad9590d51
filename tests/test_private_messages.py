"""Messages of private rounds as bytes: what was written is read again, and nothing else is."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from conftest import refusal
from private_support import PrivateRound, rows_of
from waffle_fl.engines.masked_parts import MessageSizes, is_well_formed
from waffle_fl.errors import WaffleError
from waffle_fl.privacy import ring
from waffle_fl.privacy.messages import DealerWord, MaskedSums, MaskedVector, ProductWord
from waffle_fl.privacy.phases import (
    REPLIES,
    REQUESTS,
    AloneReply,
    AloneRequest,
    CompareRequest,
    DealRequest,
    DealtReply,
    OpenReply,
    OpenRequest,
    ProductRequest,
    Products,
    SketchReply,
    SumReply,
    SumRequest,
    UnmaskRequest,
)
from waffle_fl.privacy.wire import read, written

LENGTH, SKETCH = 50, 20


def messages() -> list[Any]:
    """Return a message of every phase, from a round of four agents."""
    one, rows = PrivateRound(4), rows_of(4, LENGTH)
    hub = one.open(LENGTH)
    delivery = hub.deliver(one.openings)[1]
    sketch = one.sides[1].sketch(0, rows[1, :SKETCH], 1.0, 0)
    announced = one.contribute(rows, dict.fromkeys(range(4), 0.25))
    one.unmask(announced)
    words = np.arange(LENGTH, dtype=np.uint64)
    vector, dealt, product = (
        MaskedVector(1, 0, words, bytes(32)),
        DealerWord(2, 1, words[:1]),
        ProductWord(1, 0, words[:1]),
    )
    compare = CompareRequest(delivery, (0,), ("dy",))
    sketches = SketchReply({"dy": (sketch,)})
    return [
        OpenRequest(True),
        OpenReply(0, 1.5, 0.0, 2.0, (), (one.openings[1],)),
        compare,
        sketches,
        DealRequest(compare, {0: 2}, (3,)),
        DealtReply(sketches, (vector,), (dealt,)),
        ProductRequest((vector,), (dealt,)),
        Products((product,)),
        SumRequest(announced, (delivery,), False),
        SumReply((one.masked[1],)),
        UnmaskRequest(announced, hub.request(one.masked), True),
        one.revealed[1],
        AloneRequest(),
        AloneReply(0, {"dy": ring.plain_bytes(rows[0])}),
    ]


MESSAGES = messages()


def plain(message: Any) -> Any:
    """Return a message without arrays, to compare it."""
    if isinstance(message, np.ndarray):
        return message.dtype, message.tolist()
    if isinstance(message, tuple):
        return tuple(map(plain, message))
    if isinstance(message, dict):
        return {key: plain(value) for key, value in message.items()}
    if dataclasses.is_dataclass(message):
        return type(message), [plain(getattr(message, field.name)) for field in dataclasses.fields(message)]
    return message


def test_there_is_a_message_of_every_kind() -> None:
    """Every request and every reply of a phase is among the messages of these tests."""
    assert {type(message) for message in MESSAGES} == {*REQUESTS.values(), *REPLIES.values()}
    assert REQUESTS.keys() == {"open", "compare", "deal", "product", "first", "unmask", "sum", "reveal", "alone"}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_read_as_written(message: Any) -> None:
    """Bytes give the message again, and writing it again gives the same bytes; other classes do not read them."""
    content = written(message)
    found = read(content, type(message))
    assert plain(found) == plain(message)
    assert written(found) == content
    for other in {*REQUESTS.values(), *REPLIES.values()} - {type(message)}:
        with contextlib.suppress(WaffleError):
            assert plain(read(content, other)) != plain(message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_damaged_messages_are_refused_in_one_line(message: Any) -> None:
    """Truncated, extended and changed bytes are a message of the same class, or a WaffleError; nothing else happens."""
    content, rng = written(message), random.Random(0)
    for damaged in (b"", content[:3], content[:-1], content + b"x", b"\xff" * 8 + content):
        assert "not a message" in refusal(read, damaged, type(message)) or not content[4:]
    for _ in range(200):
        changed = bytearray(content)
        changed[rng.randrange(min(len(content), 400))] = rng.randrange(256)
        with contextlib.suppress(WaffleError):
            assert isinstance(read(bytes(changed), type(message)), type(message))


def test_replies_of_other_sizes_are_not_well_formed() -> None:
    """The server uses no reply with parts or lengths that an agent would not send."""
    sizes = MessageSizes({"dy": LENGTH}, {"dy": LENGTH}, LENGTH, directions=False, first=False)
    good = {type(m): m for m in MESSAGES if type(m) in REPLIES.values()}
    assert all(is_well_formed(message, sizes, SKETCH) for message in good.values())
    opening, sketch = good[OpenReply].openings, good[SketchReply].sketches["dy"][0]
    vector = MaskedVector(1, 0, np.zeros(3, np.uint64), bytes(32))
    bad = [
        OpenReply(0, 1.0, 0.0, 1.0, (), ()),
        OpenReply(0, 1.0, 0.0, 1.0, (), opening * 2),
        OpenReply(2, 1.0, 0.0, 1.0, (), opening),
        OpenReply(99, 1.0, 0.0, 1.0, (), ()),
        OpenReply(0, -1.0, 0.0, 1.0, (), opening),
        OpenReply(0, 1.0, 0.0, 0.0, (), opening),
        OpenReply(0, 1.0, 0.0, 1.0, (1.0,), opening),
        SketchReply({"c": (sketch,)}),
        SketchReply({"dy": (dataclasses.replace(sketch, content=b"abcdef"),)}),
        SketchReply({"dy": (dataclasses.replace(sketch, content=b"abc"),)}),
        DealtReply(good[SketchReply], (vector,), ()),
        DealtReply(good[SketchReply], (), (DealerWord(2, 1, np.zeros(0, np.uint64)),)),
        Products((ProductWord(1, 0, np.zeros(2, np.uint64)),)),
        SumReply((MaskedSums(1, np.zeros(1, np.uint32)),) * 2),
        AloneReply(0, {}),
        AloneReply(0, {"dy": b"abc"}),
        AloneReply(0, {"dy": np.full(LENGTH, np.nan).tobytes()}),
    ]
    assert not any(is_well_formed(message, sizes, SKETCH) for message in bad)
    two = sizes._replace(directions=True, first=True)
    assert is_well_formed(OpenReply(0, 1.0, 0.0, 1.0, (1.0,), opening * 2), two, SKETCH)
    for lengths, openings in (((), opening * 2), ((1.0,), opening), ((-1.0,), opening * 2)):
        assert not is_well_formed(OpenReply(0, 1.0, 0.0, 1.0, lengths, openings), two, SKETCH)


@pytest.mark.parametrize("kind", ["<f4", "<f8"])
def test_plain_numbers(kind: str) -> None:
    """Numbers that are not masked keep their bits, in as few bytes as that needs."""
    numbers = np.random.default_rng(0).normal(size=5).astype(kind).astype(np.float64)
    content = ring.plain_bytes(numbers)
    assert len(content) == 5 * int(kind[2])
    np.testing.assert_array_equal(ring.plain_numbers(content, 5), numbers)
    for count in (4, 6):
        with pytest.raises(ValueError, match="finite numbers"):
            ring.plain_numbers(content, count)
