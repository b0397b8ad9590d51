"""The server's side of a masked run: the phases of `engines/masked_round.py`, one message per agent and phase.

It has no collector of updates. All that it reads from replies are messages of `privacy.phases`, so it never holds
numbers of an agent other than Alice, who alone sends hers once she holds all weight.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from waffle_fl.engines.aggregation import recorded
from waffle_fl.engines.arithmetic import one_thread, products
from waffle_fl.engines.flower.masked_messages import READ_BEFORE, FirstRequest, SessionTerms, digest_of_received
from waffle_fl.engines.flower.messages import Request
from waffle_fl.engines.flower.server_run import ServerRun
from waffle_fl.engines.masked_parts import MessageSizes, TrainedRow, sizes_of
from waffle_fl.engines.masked_round import MaskedRound
from waffle_fl.engines.masked_sums import Unreadable
from waffle_fl.engines.participation import asking
from waffle_fl.errors import WaffleError
from waffle_fl.privacy import ring
from waffle_fl.privacy.messages import RoundId
from waffle_fl.privacy.phases import REPLIES, REQUESTS
from waffle_fl.privacy.wire import read, written

TRIES = 3  # how often a round is begun whose sums cannot be read
SHARE_TABLES = 512  # bytes per agent in the messages of a phase: shares, digests, weights


@dataclass
class MaskedServerRun(ServerRun):
    """A masked run in progress, with the functions of a ServerRun."""

    failed: int = 0  # sessions of this round that could not be read
    read_before: bool = False
    _session: int = 0

    def _open_round(self) -> None:
        self.failed, self.read_before = 0, False
        self._open_session()

    def _open_session(self) -> None:
        """Begin the round, with masks that were never used: the session's number exceeds all earlier ones."""
        if not self.training:
            return
        plan, masking = self.plan, self.plan.masking
        assert masking is not None
        self._session = max(self._session + 1, time.time_ns())
        down = plan.algorithm.broadcast(self._server(), len(plan.names))
        received = digest_of_received(masking.config, masking.known, self.model.fingerprint(), plan.algorithm, down)
        at = RoundId(f"{plan.run}/{plan.label}", self.latest.round + 1, self.attempt, self._session, received)
        known = asking(self._registered, self.cohort)
        floors = [masking.settings.min_contributors] * len(plan.names)
        self.masked = MaskedRound(plan.algorithm, masking.settings, self._server(), known, at, self._sizes, floors)

    @cached_property
    def _sizes(self) -> MessageSizes:
        algorithm: Any = self.plan.algorithm
        server, agents = algorithm.init(self.model.init(0), 1)
        return sizes_of(
            algorithm, TrainedRow(algorithm.broadcast(server, 1), agents, self._up, self._registered.steps[:1])
        )

    @property
    def largest_reply(self) -> int:
        """Upper bound on the bytes of a reply, and of what a request relays."""
        others, parts = len(self.plan.names) - 1, sum(self._sizes.parts.values())
        compared = max(self._sizes.compared.values(), default=0)
        assert self.plan.masking is not None
        size = ring.SKETCH_BYTES * (self.plan.masking.settings.sketch_size + 1) + SHARE_TABLES
        sketch = (len(self._sizes.compared) + 1) * size
        dealt = 8 * (compared + 1) + SHARE_TABLES if self.plan.masking.settings.masked_distances == "dealer" else 0
        return 2 * SHARE_TABLES * (others + 1) + 8 * (parts + SHARE_TABLES) + others * (sketch + dealt)

    def request_for(self, agent: int) -> tuple[Request, bytes]:
        """Return the request to an agent, and its payload; the first of a session holds the model."""
        one = self.masked.requests.get(agent) if self.training else None
        if one is not None and self.masked.begun:
            plan, base = self.plan, self.latest.versions[agent]
            request = Request(plan.label, plan.handle, base, phase=self.masked.phase, session=self._session)
            return request, written(one)
        request, model = super().request_for(agent)
        if one is None or not request.round:
            return request, model
        masking = self.plan.masking
        assert masking is not None
        terms = SessionTerms(self.masked.group, self.plan.alice, masking.sites, masking.introductions)
        request = replace(request, phase=self.masked.phase, session=self._session)
        return request, written(FirstRequest(terms, written(one), model))

    def receive(self, agent: int, fields: Mapping[str, Any], payload: bytes | None) -> None:
        self.read_before = self.read_before or fields.get(READ_BEFORE) is True
        super().receive(agent, fields, payload)

    def _lacking(self) -> set[int]:
        return set(self.masked.requests)

    def _deliver(self, agent: int, payload: bytes) -> None:
        if agent in self.masked.requests:
            try:
                self.masked.receive(agent, read(payload, REPLIES[REQUESTS[self.masked.phase]]))
            except WaffleError as error:
                self.notes.append((agent, str(error)))

    def _blocking(self, quorum: int) -> set[int]:
        if self.read_before:  # its agents will not read another sum; the round goes on with other batches
            return set()
        few = self.masked.phase == "open" and len(self.masked.group) - len(self._lacking()) < quorum
        return self._lacking() if few else set(self.masked.blocking())

    def _aggregate(self) -> bool:
        """End the phase; return False if Alice's own update was not usable."""
        if self.read_before:
            self.attempt, self.read_before = self.attempt + 1, False
            self._open_session()
            return True
        try:
            with one_thread(), products(self.model.precision):
                self.masked.advance()
        except Unreadable as error:
            self._reject(str(error))
            return True
        except WaffleError as error:
            self.stuck = str(error)
            return True
        if self.masked.phase != "done":
            return True
        server, now, codes, facts = self.masked.settled()
        if self.masked.usable:
            algorithm: Any = self.plan.algorithm
            with one_thread(), products(self.model.precision):
                server = algorithm.combine(server, self.masked.sums, now)
        found = {**recorded(facts, self._registered.alice), "received": now.received, "codes": codes}
        return self._conclude(server, found, now.intact)

    def _reject(self, reason: str) -> None:
        """Begin the round again, with other masks, unless that has failed too often."""
        self.failed += 1
        self.rejected.append(reason)
        if self.failed >= TRIES:
            self.stuck = f"round {self.masked.at.round} was rejected {TRIES} times: {reason}"
        else:
            self._open_session()

    def _copies(self, start: Any) -> Any:
        """Return None: the server of a masked run has no copy of what the agents keep."""
        return None
