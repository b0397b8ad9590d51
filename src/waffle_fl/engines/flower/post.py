"""Messages that survive a restart: who is online, by the key it has proven, and an exchange with a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from waffle_fl.engines.flower.messages import Parcel, packed, unpacked
from waffle_fl.errors import WaffleError

PAUSE = 3.0  # seconds between two looks; Flower's own grid takes as many, and asking more often slows it down
OFFLINE = 5  # Flower's code for a node that it has not heard of for too long
TRIES = 3  # how often a message is sent again to a node whose process died over it


@dataclass
class Post:
    """The sites that Flower's grid can reach. A node is who its public key says, whatever it is called or replies."""

    grid: Any
    keys: Mapping[bytes, str]  # public key -> site
    max_bytes: int
    log: list[tuple[str, str]] = field(default_factory=list)

    def online(self) -> dict[str, Any]:
        """The nodes that Flower has heard of lately, by site."""
        nodes = [(self.keys.get(bytes(node.public_key)), node) for node in self.grid.get_nodes()]
        return {name: node for name, node in nodes if name is not None}

    def wait(self, names: list[str], seconds: float) -> list[str]:
        """Wait until these sites are online; those that are not, in the end."""
        end = time.monotonic() + seconds
        while missing := [name for name in names if name not in self.online()]:
            if time.monotonic() >= end:
                return missing
            time.sleep(min(PAUSE, max(0.1, end - time.monotonic())))
        return []

    def exchange(self, parcels: Mapping[str, Parcel], kind: str, seconds: float) -> Iterator[tuple[str, Parcel]]:
        """Send, and give every answer that comes in time; a site that comes back meanwhile is asked again."""
        from flwr.app import Message

        waiting, marks, tries = dict(parcels), dict[str, tuple[int, str]](), dict.fromkeys(parcels, 0)
        sent: dict[str, tuple[str, int]] = {}  # message -> site, node
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            online = self.online()
            for name in [name for name in waiting if name in online]:
                node = online[name]
                mark = node.node_id, node.last_activated_at
                if marks.get(name) != mark:  # not asked yet, or it was restarted and has forgotten the question
                    content = packed(waiting[name])
                    ttl = max(1.0, end - time.monotonic())
                    message = Message(content, dst_node_id=node.node_id, message_type=kind, ttl=ttl)
                    (number,) = self.grid.push_messages([message])
                    if number is not None:
                        marks[name], sent[number] = mark, (name, node.node_id)
            for reply in list(self.grid.pull_messages(list(sent))) if sent else []:
                name, node_id = sent.pop(reply.metadata.reply_to_message_id, ("", 0))
                if name not in waiting:
                    continue
                if reply.has_error():
                    self.log.append((name, f"Flower says: {_cause(reply.error)}"))
                    tries[name] += reply.error.code != OFFLINE
                    marks.pop(name, None)
                    if tries[name] >= TRIES:
                        waiting.pop(name)
                    continue
                if reply.metadata.src_node_id != node_id:
                    self.log.append((name, "a reply from another node"))
                    continue
                try:
                    yield name, unpacked(reply.content, self.max_bytes)
                except WaffleError as error:
                    self.log.append((name, str(error)))
                waiting.pop(name)
            if waiting:
                time.sleep(PAUSE)


def _cause(error: Any) -> str:
    """Flower's code, and of its reason nothing that a site's exception could have put there."""
    known = {
        3: "message unavailable",
        4: "reply unavailable",
        OFFLINE: "node unavailable",
        8: "the site's process died",
    }
    return known.get(error.code, f"error {error.code}")
