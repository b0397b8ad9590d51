"""Message exchange with a deadline that survives restarts. Sites are identified by their authenticated keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeAlias

from waffle_fl.engines.flower.messages import OVERHEAD, Message, packed, unpacked
from waffle_fl.errors import WaffleError

PAUSE = 0.3  # seconds between two polls for replies
LONGEST_PAUSE = 2.0  # the pause grows to this while no reply arrives
OFFLINE = 5  # Flower's code for a node whose heartbeats have stopped
TRIES = 3  # how often a message is sent to a node whose process dies while handling it

MessageFactory: TypeAlias = Callable[[], Message]  # called when the message is sent, so that only one is in memory
Watch: TypeAlias = Callable[[Collection[str] | None, Collection[str]], None]  # (sites online, sites waited for)


@dataclass
class TransferLimit:
    """Abort a transfer before reading it if it announces more bytes than are left, to bound the server's memory."""

    left: float = math.inf
    piece: float = math.inf  # largest chunk that Flower sends

    def __call__(self, response: Any) -> None:
        announced = int(response.headers.get("content-length", 0))
        self.left -= announced
        if self.left < 0 or announced > self.piece:
            raise WaffleError("more bytes than any message of ours")


@dataclass
class Transport:
    """The sites that Flower's grid can reach. A node is identified by its public key only, not by its name or reply."""

    grid: Any
    keys: Mapping[bytes, str]  # public key -> site
    max_bytes: int
    watch: Watch = lambda online, waiting: None
    log: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as CHUNK

        self._limit, self._deadline = TransferLimit(piece=CHUNK + OVERHEAD), math.inf
        self._last_online: dict[str, float] = {}  # by site, in monotonic seconds
        if client := getattr(self.grid, "_runtime_client", None):
            client._client.event_hooks = {"response": [self._limit]}  # Flower has no size limit
            import_module(type(self.grid).__module__).pull_objects = self._fetch  # type: ignore[attr-defined]

    def online(self) -> dict[str, Any] | None:
        """The nodes that are online, by site; None while the SuperLink does not answer."""
        from httpx import HTTPError

        try:
            nodes = [(self.keys.get(bytes(node.public_key)), node) for node in self.grid.get_nodes()]
        except HTTPError:
            return None
        return {name: node for name, node in nodes if name is not None}

    def wait(self, names: Sequence[str], seconds: float, suffice: Callable[[Collection[str]], bool]) -> list[str]:
        """Wait until enough sites are online, or the time is over; return those of `names` that are missing."""
        end = time.monotonic() + seconds
        while True:
            online = self.online() or {}
            missing = [name for name in names if name not in online]
            self.watch(online, missing)
            if suffice(online) or time.monotonic() >= end:
                return missing
            time.sleep(min(1.0, max(0.1, end - time.monotonic())))

    def exchange(
        self, requests: Mapping[str, MessageFactory], kind: str, seconds: float, grace: float
    ) -> Iterator[tuple[str, Message]]:
        """Send requests and yield the replies that arrive in time. A site that restarts gets its request again.

        Waits for `seconds`, but ends once every site that has not replied has been offline for `grace` seconds.
        """
        waiting, activations, tries = dict(requests), dict[str, tuple[int, str]](), dict.fromkeys(requests, 0)
        sent: dict[str, str] = {}  # message id -> site; the sender named in a reply is ignored
        self._deadline, pause = time.monotonic() + seconds, PAUSE
        self._last_online = dict.fromkeys(requests, time.monotonic()) | self._last_online
        while waiting and time.monotonic() < self._deadline:
            online, now = self.online(), time.monotonic()
            self.watch(online, list(waiting))
            self._last_online |= dict.fromkeys(waiting if online is None else online, now)
            for name, node in (online or {}).items():
                activation = node.node_id, node.last_activated_at
                if name in waiting and activations.get(name) != activation:  # not sent yet, or the site was restarted
                    message_id = self._push(waiting[name](), node.node_id, kind)
                    if message_id is not None:
                        activations[name], sent[message_id] = activation, name
            for message_id, name in list(sent.items()):
                try:
                    reply = self._pull(message_id)
                    if reply is None:
                        continue
                    message = None if reply.has_error() else unpacked(reply.content, self.max_bytes)
                except WaffleError as error:
                    message = Message({"error": str(error)})
                del sent[message_id]
                if name not in waiting:
                    self.log.append((name, "a second reply in one round"))
                    continue
                if message is None:
                    self.log.append((name, f"Flower says: {_cause(reply.error)}"))
                    tries[name] += reply.error.code != OFFLINE
                    activations.pop(name, None)
                    if tries[name] >= TRIES:
                        waiting.pop(name)
                    continue
                waiting.pop(name)
                pause = PAUSE
                yield name, message
            if all(now - self._last_online[name] >= grace for name in waiting):  # excludes the time spent fetching
                return
            time.sleep(pause)
            pause = min(1.1 * pause, LONGEST_PAUSE)

    def _push(self, message: Message, node: int, kind: str) -> str | None:
        """Send a message; return its id, or None if it could not be sent now."""
        from flwr.app import Message
        from httpx import HTTPError

        ttl = max(1.0, self._deadline - time.monotonic())
        try:
            return next(iter(self.grid.push_messages([Message(packed(message), node, kind, ttl=ttl)])), None)
        except HTTPError:
            return None

    def _fetch(self, object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
        """Flower's `pull_objects`, limited to the deadline: Flower waits hours for a reply whose sender died."""
        from flwr.supercore.inflatable.inflatable_utils import pull_objects

        left = max(0.0, self._deadline - time.monotonic())
        return pull_objects(object_ids, pull_object_fn, max_time=left, backoff_cap=LONGEST_PAUSE)

    def _pull(self, message_id: str) -> Any:
        """Return the reply to one message, or None if there is none yet.

        Replies are fetched one by one, so that a malformed one cannot affect another site's reply.
        """
        from httpx import HTTPError

        self._limit.left = self.max_bytes
        try:
            return next(iter(self.grid.pull_messages([message_id])), None)
        except HTTPError:
            return None
        except WaffleError:
            raise
        except Exception as error:
            raise WaffleError(f"not a message that Flower can read ({type(error).__name__})") from None
        finally:
            self._limit.left = math.inf


def _cause(error: Any) -> str:
    """Describe Flower's error code. Its reason text is dropped: it may come from an exception at the site."""
    known = {
        3: "message unavailable",
        4: "reply unavailable",
        OFFLINE: "node unavailable",
        8: "the site's process died",
    }
    return known.get(error.code, f"error {error.code}")
