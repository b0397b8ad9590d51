"""What travels: a JSON part for words and small numbers, and for each course one safetensors payload.

Nothing here knows Flower but `packed` and `unpacked`, and nothing that arrives is trusted: the JSON is read field by
field, the payloads by `wire.Inbox` and `tensorfile.unpack`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeGuard

from waffle_fl.config import check_name
from waffle_fl.errors import WaffleError

MAX_JSON = 8 << 20  # bytes of JSON
OVERHEAD = 1 << 16  # bytes of what a site says of a round's work, and of what Flower writes around it
SCORES = ("accuracy", "rmse", "loss", "validation_accuracy", "validation_rmse", "validation_loss")  # of a round
METRICS = ("balanced_accuracy", "auc", "log_loss")  # and of the final model besides


class Version(NamedTuple):
    """A state of an agent: after which round, in which attempt at it, it came to be. (0, 0) is the start."""

    round: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class Request:
    """What a course asks of one agent: train a round from a state that it holds, and maybe examine its model."""

    course: str
    alice: str
    base: Version
    round: int = 0  # 0: nothing is to be trained
    attempt: int = 0
    examine: bool = False
    final: bool = False  # the run is over: this is Alice's model
    restored: bool = False  # the payload also holds the agent's state, for it has lost its own

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Request:
        """A task as it came: each field of its own type, and a course that is a plain name, for files bear it."""
        try:
            r, attempt = content["base"]
            task = cls(**{**content, "base": Version(r, attempt)})
        except (TypeError, KeyError, ValueError):
            raise WaffleError("a task that cannot be read") from None
        counts = (*task.base, task.round, task.attempt)
        flags, texts = (task.examine, task.final, task.restored), (task.course, task.alice)
        typed = all(type(flag) is bool for flag in flags) and all(type(text) is str for text in texts)
        if not typed or not all(map(_is_count, counts)):
            raise WaffleError("a task with a field that is not of its type")
        check_name(task.course)
        return task


@dataclass(frozen=True)
class Message:
    """One message: words, and bytes by name."""

    fields: dict[str, Any]
    payloads: dict[str, bytes] = field(default_factory=dict)
    signature: bytes = b""  # of a request, by the operator's key

    @property
    def size(self) -> int:
        return len(json.dumps(self.fields)) + sum(len(payload) for payload in self.payloads.values())


def packed(message: Message) -> Any:
    """A parcel as Flower's records; payloads are arrays of bytes, which Flower sends in pieces."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {
        name: Array(dtype="uint8", shape=(len(content),), stype="waffle", data=content)
        for name, content in message.payloads.items()
    }
    fields = ConfigRecord({"json": json.dumps(message.fields), "signature": message.signature})
    return RecordDict({"words": fields, "payloads": ArrayRecord(arrays)})


def unpacked(records: Any, max_bytes: int) -> Message:
    """A parcel from Flower's records, refused before it is parsed if it is larger than anything honest."""
    try:
        text, signature = records["words"]["json"], records["words"].get("signature", b"")
        payloads = {str(name): array.data for name, array in records["payloads"].items()}
        if not isinstance(text, str) or not isinstance(signature, bytes):
            raise TypeError
        if len(text) > MAX_JSON or sum(map(len, payloads.values())) > max_bytes:
            raise WaffleError("more bytes than any message of ours")
        fields = json.loads(text)
    except WaffleError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise WaffleError("not a message of ours") from None
    if not isinstance(fields, dict):
        raise WaffleError("not a message of ours")
    return Message(fields, payloads, signature)


def read_count(fields: Mapping[str, Any], name: str) -> int:
    """A count that a site tells; anything but a whole number of ordinary size is refused."""
    value = fields.get(name)
    if not _is_count(value):
        raise WaffleError(f"expected a count as {name!r}, got {str(value)[:40]!r}")
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 40
