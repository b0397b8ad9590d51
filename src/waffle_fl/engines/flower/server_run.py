"""The server's side of one run, a round at a time: what to ask of each agent, and what to make of the answers.

One message an agent and round carries training and evaluation. So round r is closed when its updates are there, and
scored by Alice in the message of round r + 1; only then is it settled, that is recorded and saved. A crash loses the
closed round at most, which every site trains again in the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net
from waffle_fl.algorithms.kept_momentum import VELOCITY
from waffle_fl.engines.aggregation import Registered, aggregate, screened_of
from waffle_fl.engines.arithmetic import one_thread, products
from waffle_fl.engines.flower.messages import SCORES, WORDS, Request, Version
from waffle_fl.engines.outcomes import ATTEMPTS, diverged, to_numbers
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.engines.tree import rows_of, tree_map
from waffle_fl.errors import Diverged
from waffle_fl.guard import OK, Guard
from waffle_fl.models import FlatModel
from waffle_fl.tensorfile import pack
from waffle_fl.update_encoding import LONGEST_REASON, Header, UpdateCollector


@dataclass(frozen=True)
class RunState:
    """Where a run stands after a round: the server's state, and which state each agent holds."""

    round: int
    server: Any
    versions: tuple[Version, ...]


@dataclass(frozen=True)
class EvaluatedRound:
    """A round that was scored: its line for the record, and the state to save."""

    measured: dict[str, Any]
    stand: RunState


@dataclass(frozen=True)
class RunPlan:
    """What does not change in a run."""

    run: str  # the run's own name on the wire, the same after a resumption
    course: str
    algorithm: Algorithm
    names: tuple[str, ...]
    alice: int
    samples: tuple[int, ...]
    steps: tuple[int, ...]  # K_i
    rounds: int
    batch_size: int
    guard: Guard
    handle: str  # what the config calls Alice
    scores: tuple[str, ...] = SCORES  # what may be told of a round


@dataclass
class ServerRun:
    """One run on its way. `tasks` says what to ask now, `hear` takes an answer in, `turn` closes what can be closed."""

    plan: RunPlan
    model: FlatModel
    stand: RunState
    attempt: int = 0
    closed: tuple[RunState, int, dict[str, Any]] | None = (
        None  # a round, its attempt and line, that waits for its score
    )
    score: dict[str, Any] | None = None
    parting: tuple[Any, bytes | None] | None = None  # Alice's last words: metrics, and maybe a model that is hers alone
    lost: set[int] = field(default_factory=set)  # agents that have to be sent their state
    found: set[int] = field(default_factory=set)  # those of them that have said so just now: they are asked once more
    notes: list[tuple[int, str]] = field(default_factory=list)
    stuck: str = ""  # why this course cannot go on, whoever answers

    def __post_init__(self) -> None:
        plan = self.plan
        self._agents = plan.algorithm.init(self.model.init(0), len(plan.names))[1]
        server, agents = plan.algorithm.init(self.model.init(0), 1)
        down = plan.algorithm.broadcast(server, 1)
        _, self._up = plan.algorithm.finish(down, agents, plan.algorithm.begin(down, agents))
        self._registered = Registered(torch.tensor(plan.samples), torch.tensor(plan.steps), torch.tensor(plan.alice))
        self._open()

    @property
    def now(self) -> RunState:
        """The newest state, scored or not."""
        return self.closed[0] if self.closed else self.stand

    @property
    def training(self) -> bool:
        return self.now.round < self.plan.rounds

    @property
    def finished(self) -> bool:
        return self.closed is None and self.stand.round == self.plan.rounds and self.parting is not None

    @property
    def awaited(self) -> set[int]:
        """The agents whose answer is still wanted."""
        able = {i for i, n in enumerate(self.plan.samples) if n}
        training = able - self.inbox.rows.keys() if self.training else set()
        unscored = self.closed is not None and self.score is None
        unparted = not self.training and self.parting is None
        return training | ({self.plan.alice} if unscored or unparted else set())

    def task(self, agent: int) -> tuple[Request, bytes]:
        """What to ask of an agent, and the payload that goes with it."""
        plan, now = self.plan, self.now
        trains = self.training and agent not in self.inbox.rows
        requested = Request(
            plan.course,
            plan.handle,
            now.versions[agent],
            now.round + 1 if trains else 0,
            self.attempt,
            examine=agent == plan.alice and self.closed is not None and self.score is None,
            final=now.round == plan.rounds,
            restored=agent in self.lost,
        )
        down = rows_of(plan.algorithm.broadcast(now.server, len(plan.names)), slice(agent, agent + 1))
        tensors = down._asdict()
        if agent in self.lost:
            own = self._copy_of(agent)
            assert own is not None
            tensors = {**tensors, **{f"agents.{name}": value for name, value in own._asdict().items()}}
        return requested, pack(tensors, {"run": plan.run, "course": plan.course, "round": str(requested.round)})

    def receive(self, agent: int, words: Mapping[str, Any], payload: bytes | None) -> None:
        """Take in what the transport says came from this agent."""
        if words.get("error"):
            self.notes.append((agent, one_line(words["error"])))
        elif words.get("lost"):
            self._find_copy(agent, again=agent in self.lost)
        else:
            if agent == self.plan.alice and self.closed and isinstance(words.get("score"), Mapping):
                self.score = dict(words["score"])
            if not self.training and agent == self.plan.alice:
                self.parting = words.get("metrics"), payload
            elif payload is not None:
                self.inbox.deliver(agent, payload)

    def turn(self, quorum: int) -> tuple[EvaluatedRound | None, Diverged | None]:
        """Close what can be closed now that no more answers come; Alice's are indispensable."""
        settled, coming, self.found = None, self.found & self.awaited, set()
        if self.closed:
            if self.score is None:
                return None, None
            settled, retry = self._scored(self.score)
            if retry:
                return None, self._again()
        alice_trained = self.plan.alice in self.inbox.rows
        if not self.training or not alice_trained or coming or len(self.inbox.rows) < quorum:
            return settled, None
        return settled, None if self._close() else self._again()

    def held_by(self, quorum: int) -> list[str]:
        """Who the round waits for, when the others have answered."""
        awaited = self.awaited - self.found
        if self.plan.alice in awaited:
            return [self.plan.names[self.plan.alice]]
        short = self.training and len(self.inbox.rows) < quorum
        return [self.plan.names[i] for i in sorted(awaited)] if short else []

    def own_model(self) -> Net | None:
        """Alice's model, where the server holds it; None where it is her own."""
        marked = type(self._agents)(*(torch.full_like(value, torch.nan) for value in self._agents))
        agents = marked if (copies := self._copies()) is None else copies
        net = self.plan.algorithm.personal(self.now.server, agents, len(self.plan.names))
        own = tree_map(lambda field: field[self.plan.alice], net)
        return None if own.params.isnan().any() else own

    def _open(self) -> None:
        plan = self.plan
        envelope = Header(f"{plan.run}/{plan.course}/{self.attempt}", self.now.round + 1, self.model.fingerprint())
        self.inbox = UpdateCollector({n: v[0] for n, v in self._up._asdict().items()}, envelope, list(plan.steps))

    def _scored(self, score: Mapping[str, Any]) -> tuple[EvaluatedRound | None, bool]:
        """The closed round with its score; one whose model is not finite is not applied."""
        assert self.closed
        stand, attempt, measured = self.closed
        self.closed, self.score = None, None
        if score.get("finite") is not True:
            self.attempt = attempt
            return None, True
        told = {name: number(value) for name, value in score.items() if name in self.plan.scores}
        told.setdefault("loss", None)
        self.stand = stand
        return EvaluatedRound({"round": stand.round, **told, **measured}, stand), False

    def _close(self) -> bool:
        """A2.13-16; False if Alice's own update was not usable."""
        plan, before = self.plan, self.now
        up, present = self.inbox.updates(type(self._up))
        present = present & (self._registered.samples > 0)
        settings = RoundSettings(plan.rounds, plan.batch_size, guard=plan.guard)
        states = (before.server, self._agents, self._agents)
        with one_thread(), products(self.model.precision):
            done = aggregate(plan.algorithm, before.round + 1, settings, *states, up, present, self._registered)
        (measured,) = to_numbers([done.measured])
        received, codes = measured.pop("received"), measured.pop("codes")
        if not received[plan.alice]:
            return False
        screened = screened_of(codes, plan.names, plan.samples)
        refused = [[plan.names[i], one_line(reason)] for i, reason in (*self.inbox.log, *self.notes)]
        measured |= {**({"screened": screened} if screened else {}), **({"refused": refused} if refused else {})}
        made = Version(before.round + 1, self.attempt)
        versions = [made if code == OK else old for code, old in zip(codes, before.versions, strict=True)]
        self.closed = RunState(before.round + 1, done.server, tuple(versions)), self.attempt, measured
        self.attempt, self.notes, self.lost = 0, [], set()
        self._open()
        return True

    def _again(self) -> Diverged | None:
        """The round after the last settled one, with batches drawn anew; too often, and the run has diverged."""
        self.closed, self.score, self.attempt = None, None, self.attempt + 1
        if self.attempt < ATTEMPTS:
            self._open()
            return None
        return diverged(self.stand.round + 1, self.plan.names[self.plan.alice])

    def _copies(self) -> Any:
        """The agents' states as the server knows them, velocities at zero, or None where it does not know them."""
        fields, server = type(self._agents)._fields, self.now.server
        if not all(hasattr(server, name) or name.endswith(VELOCITY) for name in fields):
            return None
        return type(self._agents)(*(getattr(server, name, getattr(self._agents, name)) for name in fields))

    def _copy_of(self, agent: int) -> Any:
        copies = self._copies()
        return None if copies is None else rows_of(copies, slice(agent, agent + 1))

    def _find_copy(self, agent: int, again: bool) -> None:
        name, round_ = self.plan.names[agent], self.now.versions[agent].round
        if again:
            self.notes.append((agent, "does not take the state that the server restored"))
        elif self._copy_of(agent) is not None:
            self.lost.add(agent)
            self.found.add(agent)
            velocity = any(name.endswith(VELOCITY) for name in self._agents._fields)
            more = "; its momentum starts at zero" if velocity else ""
            self.notes.append((agent, f"had lost its state of round {round_}, which the server restored{more}"))
        elif agent == self.plan.alice:
            self.stuck = (
                f"Alice ({name}) has lost her own model of round {round_}, and the server has no copy of it: restore "
                "the site's `state` folder from a backup, or start another run"
            )
        else:
            self.notes.append((agent, f"has lost its own model of round {round_}: restore the site's `state` folder"))


def tensors_of(stand: RunState) -> dict[str, Tensor]:
    """A stand as a checkpoint holds it."""
    versions = torch.tensor(stand.versions, dtype=torch.int64)
    return {"versions": versions, **{f"server.{name}": value for name, value in stand.server._asdict().items()}}


def run_state_of(r: int, tensors: Mapping[str, Tensor], like: RunState) -> RunState:
    server = type(like.server)(*(tensors[f"server.{name}"] for name in like.server._fields))
    return RunState(r, server, tuple(Version(*pair) for pair in tensors["versions"].tolist()))


def initial_run_state(algorithm: Algorithm, model: FlatModel, seed: int, agents: int) -> RunState:
    """A2.1: one random model for everyone."""
    return RunState(0, algorithm.init(model.init(seed), agents)[0], (Version(),) * agents)


def number(value: Any) -> float | None:
    """A finite number that a site tells; anything else is none."""
    return float(value) if type(value) in (int, float) and abs(value) <= sys.float_info.max else None


def one_line(text: Any) -> str:
    """One line of moderate length that a terminal takes for text, whatever a site has sent."""
    try:
        words = " ".join(str(text)[: 10 * LONGEST_REASON].split())
    except RecursionError:
        words = "something nested too deeply"
    return "".join(letter for letter in words if letter.isprintable())[:LONGEST_REASON]


def largest_message(courses: Sequence[ServerRun]) -> int:
    """Bytes of the largest message of a round, known before the first."""
    server: list[Tensor] = [value for course in courses for value in course.now.server]
    down = sum(value.numel() * value.element_size() for value in server)
    return down + largest_reply(courses)


def largest_reply(courses: Sequence[ServerRun]) -> int:
    """Bytes of the largest answer: for each course an update, or a model, and what is said of it."""
    return WORDS + sum(course.inbox.max_bytes + WORDS for course in courses)
