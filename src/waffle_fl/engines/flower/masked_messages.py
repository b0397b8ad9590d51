"""Messages of private rounds between the server and a site: those of `privacy.phases`, and what begins a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from waffle_fl.privacy.keys import Introduction

INTRODUCE: Literal["introduce"] = "introduce"  # the request for a site's signed public key
READ_BEFORE = "read"  # field of a reply: the agent has helped to read another sum of the same updates


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
