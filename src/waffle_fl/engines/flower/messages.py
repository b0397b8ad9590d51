"""Content of a message: a JSON part with text and small numbers, and one safetensors payload per run.

Only `packed` and `unpacked` depend on Flower. Received content is not trusted: the JSON is validated field by field,
the payloads by `update_encoding.UpdateCollector` and `tensorfile.unpack`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeGuard

from waffle_fl.config import check_name
from waffle_fl.errors import WaffleError

MAX_JSON = 8 << 20  # bytes of JSON
OVERHEAD = 1 << 16  # bytes for the JSON reply of one round and for Flower's own framing
SCORES = ("accuracy", "rmse", "loss", "validation_accuracy", "validation_rmse", "validation_loss")  # per round
METRICS = ("balanced_accuracy", "auc", "log_loss")  # additional metrics of the final model


class Version(NamedTuple):
    """Version of an agent's state: the round and the attempt that produced it. (0, 0) is the initial state."""

    round: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class Request:
    """One run's request to one agent: train a round from a stored state, evaluate its model, or both."""

    course: str  # label of the run; the wire key is `course`
    alice: str
    base: Version
    round: int = 0  # 0: no training
    attempt: int = 0
    examine: bool = False
    final: bool = False  # the run has ended: report the metrics of Alice's final model
    restored: bool = False  # the payload also holds the agent's state, because the site lost it
    phase: str = ""  # of a private round; the payload is then a message of this phase
    session: int = 0  # of a private round

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Request:
        """Validate a received request: every field has its type, and `course` is a valid file name."""
        try:
            r, attempt = content["base"]
            request = cls(**{**content, "base": Version(r, attempt)})
        except (TypeError, KeyError, ValueError):
            raise WaffleError("a task that cannot be read") from None
        counts = (*request.base, request.round, request.attempt)
        flags = (request.examine, request.final, request.restored)
        texts = (request.course, request.alice, request.phase)
        typed = all(type(flag) is bool for flag in flags) and all(type(text) is str for text in texts)
        typed = typed and type(request.session) is int and 0 <= request.session < 1 << 63
        if not typed or not all(map(_is_count, counts)):
            raise WaffleError("a task with a field of the wrong type")
        check_name(request.course)
        return request


@dataclass(frozen=True)
class Message:
    """One message: JSON fields, and binary payloads by name."""

    fields: dict[str, Any]
    payloads: dict[str, bytes] = field(default_factory=dict)
    signature: bytes = b""  # requests only: made with the operator's key

    @property
    def size(self) -> int:
        return len(json.dumps(self.fields)) + sum(len(payload) for payload in self.payloads.values())


def packed(message: Message) -> Any:
    """Return a message as Flower records. Payloads are byte arrays, which Flower sends in chunks."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {
        name: Array(dtype="uint8", shape=(len(content),), stype="waffle", data=content)
        for name, content in message.payloads.items()
    }
    fields = ConfigRecord({"json": json.dumps(message.fields), "signature": message.signature})
    return RecordDict({"words": fields, "payloads": ArrayRecord(arrays)})


def unpacked(records: Any, max_bytes: int) -> Message:
    """Return the message held by Flower records. Oversized records are rejected before they are parsed."""
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
    """Return a count from a site's reply; raise unless it is an integer from 0 to 2**40 - 1."""
    value = fields.get(name)
    if not _is_count(value):
        raise WaffleError(f"expected a count as {name!r}, got {str(value)[:40]!r}")
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 40
