"""A site's side of private rounds: it answers each phase in another process, and keeps what it needs on disk.

    masks.session  the round, its terms, 32 random bytes from which all secrets of the session derive, and the requests
                   answered so far; written before a reply leaves
    masks.update   what the agent has computed in the round, which never leaves unmasked

A session has a number that exceeds those of all earlier ones, so a restarted site, or a server that begins a round
again, never uses a mask twice. A repeated request gets the same reply; another one in the same phase is refused. For
one update a site helps to read one sum: the ledger has which.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from waffle_fl.algorithms import Net
from waffle_fl.atomic_files import write_atomically
from waffle_fl.deploy.introductions import secrets_with_others
from waffle_fl.deploy.policy import Policy, Refused
from waffle_fl.deploy.site_store import PRIVATE, Ledger
from waffle_fl.engines.flower.masked_messages import FirstRequest, SessionTerms
from waffle_fl.engines.flower.messages import Request
from waffle_fl.engines.masked_agent import UpdateReader, round_agent
from waffle_fl.engines.masked_parts import TrainedRow
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.errors import WaffleError
from waffle_fl.privacy.agent import MaskingAgent
from waffle_fl.privacy.masks import entropy_of
from waffle_fl.privacy.messages import RoundId
from waffle_fl.privacy.phases import REQUESTS, AloneRequest, OpenRequest, PhaseRequest, UnmaskRequest
from waffle_fl.privacy.wire import read, written
from waffle_fl.tensorfile import digest, read_tensors, write_tensors

SESSION, UPDATE = "masks.session", "masks.update"


class ReadBefore(Refused):
    """This site has helped to read another sum of the same update."""


class NotAlone(Refused):
    """Alice holds all weight, and her site sends no update that others do not hide: the run ends."""


@dataclass(frozen=True)
class Answered:
    """A request that this site has answered."""

    phase: str
    content: bytes


@dataclass(frozen=True)
class KeptSession:
    """A session, as stored."""

    session: int
    round: int
    attempt: int
    question: str  # a hash of everything that determines the update
    received: str  # a hash of the settings and the model, which all agents must have received
    update: str  # a hash of the update
    terms: SessionTerms
    seed: bytes
    answered: tuple[Answered, ...]


@dataclass(frozen=True)
class MaskedSite:
    """One run's private rounds at one site."""

    home: Path  # the site's folder
    name: str
    policy: Policy
    ledger: Ledger
    run: str
    label: str
    agent: int
    algorithm: Any
    net: Net  # with the sizes of the model
    steps: int
    settings: RoundSettings
    seed: int

    def begin(
        self,
        task: Request,
        first: FirstRequest,
        question: str,
        received: str,
        train: Callable[[], tuple[Any, Any, Any]],
    ) -> tuple[bytes, dict[str, str]]:
        """Train, and return the reply to the first phase of a session, and what the ledger has of it.

        `train` returns the broadcast, the agent's state before, and its update.
        """
        kept, start = self._kept(), Answered(task.phase, first.request)
        if type(self._request(start)) not in (OpenRequest, AloneRequest):
            raise Refused("expected a private round to begin with the phase open or alone")
        if kept and task.session <= kept.session:
            same = kept.session, kept.question, kept.terms, kept.answered[:1]
            if same != (task.session, question, first.terms, (start,)):
                raise Refused(
                    "expected a session of masks that was never used, got an earlier one: if the server's clock was "
                    "set back, correct it"
                )
        self._check_alone(start)
        if self.policy.min_contributors > 1 and hasattr(self.algorithm, "sent_to_each"):
            raise Refused(
                f"this site sends sums of at least {self.policy.min_contributors:g} contributors only "
                "(min_contributors), which it cannot ensure with this method: the server chooses from which model each "
                "of the others starts"
            )
        self._secrets(first.terms)
        states = train()
        update = digest(states[-1]._asdict(), {})
        if kept and kept.session == task.session and kept.update != update:  # two updates under one mask
            raise Refused("this site's update differs from that of the session: begin the round again")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_tensors(self._folder / UPDATE, {"session": str(task.session)}, _named(states))
        (self._folder / UPDATE).chmod(PRIVATE)
        if kept is None or kept.session < task.session:
            seed = secrets.token_bytes(32)
            kept = KeptSession(
                task.session, task.round, task.attempt, question, received, update, first.terms, seed, ()
            )
        return self._answer(kept, start)

    def go_on(self, task: Request, content: bytes) -> tuple[bytes, dict[str, str]]:
        """Return the reply to a later phase, and what the ledger has of it."""
        kept = self._kept()
        if kept is None or kept.session != task.session:
            raise Refused("this site takes no part in this session of the round: it was not asked to open it")
        one = Answered(task.phase, content)
        self._check_alone(one)
        return self._answer(kept, one)

    def _summed(self, kept: KeptSession, request: PhaseRequest, content: bytes) -> dict[str, str]:
        """Return the ledger's entry for a reply with which a sum can be read; refuse a second one of a kind.

        Each sum has other weights, so from as many sums as agents a server could compute every update. A model that
        differs in its last digit gives another update that is nearly the same, so the same holds for one attempt at a
        round.
        """
        if not isinstance(request, UnmaskRequest | AloneRequest):
            return {}
        kind = " first" if isinstance(request, UnmaskRequest) and request.first else ""
        at = f"{self.run}/{self.label}, round {kept.round}, attempt {kept.attempt}{kind}"
        read = hashlib.sha256(type(request).__name__.encode() + content).hexdigest()
        entry = {"of": kept.update + kind, "at": at, "sum": read}
        before = (line["read"] for line in self.ledger.lines() if "read" in line)
        same = (one for one in before if one["of"] == entry["of"] or one.get("at") == at)
        if any((one["of"], one["sum"]) != (entry["of"], read) for one in same):
            raise ReadBefore("this site has already helped to read another sum of the same updates")
        return entry

    def _answer(self, kept: KeptSession, one: Answered) -> tuple[bytes, dict[str, str]]:
        """Return the reply to a request, after all requests before it; keep the request before the reply leaves."""
        phases = [answered.phase for answered in kept.answered]
        place = phases.index(one.phase) if one.phase in phases else len(phases)
        if place < len(phases) and kept.answered[place] != one:
            raise Refused(f"this site has answered another request of the phase {one.phase}: refuse the round")
        request = self._request(one)
        entry = self._summed(kept, request, one.content)
        reader = UpdateReader(self.algorithm, self.settings, self.seed)
        numbers = reader.read(self._trained(kept), self.agent, kept.round, kept.attempt)
        at = RoundId(f"{self.run}/{self.label}", kept.round, kept.attempt, kept.session, kept.received)
        floor = max(self.policy.min_contributors, self.settings.min_contributors)
        shared = self._secrets(kept.terms)

        def side_at(at: RoundId) -> MaskingAgent:
            draw = entropy_of(kept.seed + at.part.encode())
            return MaskingAgent(self.agent, kept.terms.group, at, shared, floor, draw)

        try:
            agent = round_agent(self.algorithm, numbers, at, kept.terms.alice, side_at)
            for earlier in kept.answered[:place]:
                agent.recall(self._request(earlier))
            reply = written(agent.answer(request))
        except Refused:
            raise
        except WaffleError as error:
            raise Refused(str(error)) from None
        if place == len(phases):
            kept = replace(kept, answered=(*kept.answered, one))
            write_atomically(self._folder / SESSION, written(kept))
            (self._folder / SESSION).chmod(PRIVATE)
        return reply, entry

    def _check_alone(self, one: Answered) -> None:
        if isinstance(self._request(one), AloneRequest) and self.policy.min_contributors > 1:
            raise NotAlone(
                f"all weight is this site's, and it sends sums of at least {self.policy.min_contributors:g} "
                "contributors only (min_contributors): the run ends with the model of the last round"
            )

    def _request(self, one: Answered) -> PhaseRequest:
        if one.phase not in REQUESTS:
            raise Refused("unknown phase of a private round")
        try:
            return read(one.content, REQUESTS[one.phase])
        except WaffleError as error:
            raise Refused(str(error)) from None

    def _secrets(self, terms: SessionTerms) -> dict[int, bytes]:
        if self.agent not in terms.group:
            raise Refused("expected this site among the agents of the round: refuse the round")
        return secrets_with_others(self.home, self.name, self.run, self.agent, terms)

    def _trained(self, kept: KeptSession) -> TrainedRow:
        """Return what the agent has computed in this session's round."""
        algorithm = self.algorithm
        server, agents = algorithm.init(self.net, 1)
        down = algorithm.broadcast(server, 1)
        blank = down, agents, algorithm.finish(down, agents, algorithm.begin(down, agents))[1]
        labels, tensors = read_tensors(self._folder / UPDATE, _named(blank))
        if labels.get("session") != str(kept.session):
            raise Refused("this site's update of the round is gone: begin the round again")
        found = iter(_named(blank))
        down, agents, up = (type(state)(*(tensors[next(found)] for _ in state)) for state in blank)
        return TrainedRow(down, agents, up, torch.tensor([self.steps]))

    def _kept(self) -> KeptSession | None:
        path = self._folder / SESSION
        return read(path.read_bytes(), KeptSession) if path.exists() else None

    @property
    def _folder(self) -> Path:
        return self.home / "state" / self.run / self.label


def _named(states: tuple[Any, Any, Any]) -> dict[str, Tensor]:
    """Return the tensors of a broadcast, an agent's state and an update, by name."""
    pairs = zip(("down", "agents", "up"), states, strict=True)
    return {f"{kind}.{name}": value for kind, state in pairs for name, value in state._asdict().items()}
