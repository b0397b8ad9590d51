"""Messages of private rounds between the server and a site: those of `privacy.phases`, and what begins a round."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from waffle_fl.privacy.keys import Introduction
from waffle_fl.tensorfile import digest

INTRODUCE: Literal["introduce"] = "introduce"  # the request for a site's signed public key
READ_BEFORE = "read"  # field of a reply: the agent has helped to read another sum of the same updates


def digest_of_received(config: Any, known: Any, fingerprint: str, algorithm: Any, down: Any) -> str:
    """Return a digest of all that an agent's update depends on besides its data and state.

    Masks are bound to it: a server that sends other settings or models to some sites, for example such that their
    updates are zero, reads nothing. Fields that the method sends to each agent by itself (`sent_to_each`) are left out.
    """
    received, own = json.dumps([config, known, fingerprint], sort_keys=True), getattr(algorithm, "sent_to_each", ())
    return digest(
        {name: value[:1] for name, value in down._asdict().items() if name not in own}, {"received": received}
    )


@dataclass(frozen=True)
class SessionTerms:
    """Who takes part in a private round, and the signed public keys of all agents of the job."""

    group: tuple[int, ...]
    alice: int
    sites: tuple[str, ...]  # by agent
    introductions: tuple[Introduction, ...]  # by agent


@dataclass(frozen=True)
class FirstRequest:
    """The first request of a private round: the model to train from, and the request of the first phase."""

    terms: SessionTerms
    request: bytes
    model: bytes
