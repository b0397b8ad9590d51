"""The server's side of one run, round by round: requests to the agents, and aggregation of their replies.

One message per agent and round carries both training and evaluation. Round r is aggregated when its updates have
arrived. Alice scores it with the message of round r + 1; only then is it recorded and saved. A crash loses at most one
aggregated round, which every site trains again with the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net
from waffle_fl.algorithms.averaged_models import AVERAGED
from waffle_fl.algorithms.kept_momentum import VELOCITY
from waffle_fl.algorithms.mixture import ALONE
from waffle_fl.engines.aggregation import Registered, aggregate, participants_of, screened_of
from waffle_fl.engines.arithmetic import one_thread, products
from waffle_fl.engines.flower.messages import OVERHEAD, SCORES, Request, Version
from waffle_fl.engines.outcomes import diverged, to_numbers
from waffle_fl.engines.participation import Cohorts, asking, expecting
from waffle_fl.engines.run_spec import ATTEMPTS, RoundSettings
from waffle_fl.engines.tree import rows_of, tree_map
from waffle_fl.errors import Diverged
from waffle_fl.guard import NOT_ASKED, OK, Guard
from waffle_fl.models import FlatModel
from waffle_fl.privacy.keys import Introduction
from waffle_fl.tensorfile import pack
from waffle_fl.update_encoding import LONGEST_REASON, Header, UpdateCollector


@dataclass(frozen=True)
class RunState:
    """State of a run after a round: the server's state, and the version of each agent's state."""

    round: int
    server: Any
    versions: tuple[Version, ...]


@dataclass(frozen=True)
class EvaluatedRound:
    """A scored round: its line for the record, and the state to save."""

    measured: dict[str, Any]
    state: RunState


@dataclass(frozen=True)
class Masking:
    """What private rounds need besides the plan of a run."""

    settings: RoundSettings
    sites: tuple[str, ...]  # by agent
    introductions: tuple[Introduction, ...]  # by agent
    config: Any  # as sent to the sites, in JSON
    known: Any  # likewise, of the preprocessing


@dataclass(frozen=True)
class RunPlan:
    """Constants of a run."""

    run: str  # the job's id on the wire; the same after a resume
    label: str  # of this run within the job; the wire key is `course`
    algorithm: Algorithm
    names: tuple[str, ...]
    alice: int
    samples: tuple[int, ...]
    steps: tuple[int, ...]  # K_i
    rounds: int
    batch_size: int
    guard: Guard
    handle: str  # Alice's name in the config
    scores: tuple[str, ...] = SCORES  # scores that are recorded per round
    cohorts: Cohorts | None = None  # the agents that take part in each round; None: all
    attempts: int = ATTEMPTS  # how often a round is tried
    masking: Masking | None = None  # of private rounds


@dataclass
class ServerRun:
    """A run in progress. `request_for` makes requests, `receive` takes replies, `advance` aggregates when possible."""

    plan: RunPlan
    model: FlatModel
    state: RunState
    attempt: int = 0
    pending: tuple[RunState, int, dict[str, Any]] | None = None  # unscored round: state, attempt, line for the record
    score: dict[str, Any] | None = None
    final_reply: tuple[Any, bytes | None] | None = None  # from Alice: metrics, and possibly her personal model
    lost: set[int] = field(default_factory=set)  # agents that lost their state and must be sent it
    resend: set[int] = field(default_factory=set)  # agents that reported the loss since the last `advance`
    notes: list[tuple[int, str]] = field(default_factory=list)
    stuck: str = ""  # why the run cannot continue, whichever agents reply
    rejected: list[str] = field(default_factory=list)  # why a round was begun again since they were last read
    spent: set[int] = field(default_factory=set)  # agents without privacy budget; without Alice's, the run ends

    def __post_init__(self) -> None:
        plan = self.plan
        self._agents = plan.algorithm.init(self.model.init(0), len(plan.names))[1]
        server, agents = plan.algorithm.init(self.model.init(0), 1)
        down = plan.algorithm.broadcast(server, 1)
        _, self._up = plan.algorithm.finish(down, agents, plan.algorithm.begin(down, agents))
        asked = torch.ones(len(plan.names), dtype=torch.bool)
        facts = torch.tensor(plan.samples), torch.tensor(plan.steps), torch.tensor(plan.alice)
        self._registered = Registered(*facts, asked)
        self._open_round()

    @property
    def latest(self) -> RunState:
        """The latest state, scored or not."""
        return self.pending[0] if self.pending else self.state

    @property
    def training(self) -> bool:
        return self.latest.round < self.plan.rounds and self.plan.alice not in self.spent

    @property
    def finished(self) -> bool:
        return self.pending is None and not self.training and self.final_reply is not None

    @property
    def cohort(self) -> tuple[int, ...]:
        """The agents that take part in the next round."""
        plan = self.plan
        return plan.cohorts(self.latest.round + 1) if plan.cohorts else tuple(range(len(plan.names)))

    @property
    def awaited(self) -> set[int]:
        """The agents whose reply is still needed."""
        training = self._lacking() - self.spent if self.training else set()
        return training | ({self.plan.alice} if self._awaits_score or self._awaits_end else set())

    def _lacking(self) -> set[int]:
        """The agents that have not replied to this round's request."""
        return {i for i in self.cohort if self.plan.samples[i]} - self.collector.rows.keys()

    @property
    def _awaits_score(self) -> bool:
        return self.pending is not None and self.score is None

    @property
    def _awaits_end(self) -> bool:
        return not self.training and self.final_reply is None

    def request_for(self, agent: int) -> tuple[Request, bytes]:
        """Return the request to an agent, and its payload."""
        plan, latest = self.plan, self.latest
        trains = self.training and agent in self.cohort and agent in self._lacking()
        request = Request(
            plan.label,
            plan.handle,
            latest.versions[agent],
            latest.round + 1 if trains else 0,
            self.attempt,
            examine=agent == plan.alice and self.pending is not None and self.score is None,
            final=not self.training,
            restored=agent in self.lost,
        )
        down = rows_of(plan.algorithm.broadcast(self._server(), len(plan.names)), slice(agent, agent + 1))
        tensors = down._asdict()
        if agent in self.lost:
            own = self._copy_of(agent)
            assert own is not None
            tensors = {**tensors, **{f"agents.{name}": value for name, value in own._asdict().items()}}
        return request, pack(tensors, {"run": plan.run, "course": plan.label, "round": str(request.round)})

    def _server(self) -> Any:
        """Return the server's state at the start of the next round."""
        if not self.training:
            return self.latest.server
        return expecting(self.plan.algorithm, self.latest.server, self.cohort, self._registered)

    def receive(self, agent: int, fields: Mapping[str, Any], payload: bytes | None) -> None:
        """Store the reply that the transport received from this agent."""
        if fields.get("error"):
            self.notes.append((agent, one_line(fields["error"])))
        elif fields.get("lost"):
            self._handle_lost_state(agent, again=agent in self.lost)
        else:
            if agent == self.plan.alice and self.pending and isinstance(fields.get("score"), Mapping):
                self.score = dict(fields["score"])
            if fields.get("spent"):
                self.notes.append((agent, one_line(fields["spent"])))
                self.spent.add(agent)
            elif not self.training and agent == self.plan.alice:
                self.final_reply = fields.get("metrics"), payload
            elif payload is not None:
                self._deliver(agent, payload)

    def _deliver(self, agent: int, payload: bytes) -> None:
        self.collector.deliver(agent, payload)

    def advance(self, quorum: int) -> tuple[EvaluatedRound | None, Diverged | None]:
        """Aggregate and score as far as the received replies allow; nothing advances without Alice's reply."""
        evaluated, resent, self.resend = None, self.resend & self.awaited, set()
        if self.stuck:
            return None, None
        if self.pending:
            if self.score is None:
                return None, None
            evaluated, retry = self._settle(self.score)
            if retry:
                return None, self._retry()
        blocking = self._blocking(quorum) if self.training else set()
        if blocking and blocking <= self.spent:
            self.stuck = f"round {self.latest.round + 1} needs more agents than have privacy budget left"
        if not self.training or resent or blocking:
            return evaluated, None
        return evaluated, None if self._aggregate() else self._retry()

    def _blocking(self, quorum: int) -> set[int]:
        """The agents without whose reply a round cannot end: Alice, or all that lack for the quorum."""
        lacking = self._lacking()
        if self.plan.alice in lacking & set(self.cohort):
            return {self.plan.alice}
        return lacking if self._lacks_updates(quorum) else set()

    def _lacks_updates(self, quorum: int) -> bool:
        """Whether fewer updates have arrived than a round needs: the quorum, or the whole cohort if it is smaller."""
        return len(self.collector.rows) < min(max(quorum, 1), len(self.cohort))

    def waiting_for(self, quorum: int) -> list[str]:
        """The agents that block the round: Alice, or those missing for the quorum."""
        blocking = self._blocking(quorum) if self.training else set()
        if self._awaits_score or self._awaits_end:
            blocking = {self.plan.alice}
        return [self.plan.names[i] for i in sorted(blocking & self.awaited - self.resend)]

    @property
    def largest_reply(self) -> int:
        """Upper bound on the bytes of a reply to this run."""
        return self.collector.max_bytes

    def own_model(self) -> Net | None:
        """Alice's model, or None if only her site has it (a personal model)."""
        unknown = type(self._agents)(*(torch.full_like(value, torch.nan) for value in self._agents))
        agents = unknown if (copies := self._copies(unknown)) is None else copies
        net = self.plan.algorithm.personal(self.latest.server, agents, len(self.plan.names))
        own = tree_map(lambda field: field[self.plan.alice], net)
        return None if own.params.isnan().any() else own

    def blank_model(self) -> Net:
        """Return a model with the shapes of Alice's."""
        net = self.plan.algorithm.personal(self.latest.server, self._agents, len(self.plan.names))
        return tree_map(lambda field: field[self.plan.alice], net)  # type: ignore[no-any-return]

    def _open_round(self) -> None:
        plan = self.plan
        header = Header(f"{plan.run}/{plan.label}/{self.attempt}", self.latest.round + 1, self.model.fingerprint())
        self.collector = UpdateCollector({n: v[0] for n, v in self._up._asdict().items()}, header, list(plan.steps))

    def _settle(self, score: Mapping[str, Any]) -> tuple[EvaluatedRound | None, bool]:
        """Return (the pending round with its score, whether to retry it because the model is not finite)."""
        assert self.pending
        state, attempt, measured = self.pending
        self.pending, self.score = None, None
        if score.get("finite") is not True:
            self.attempt = attempt
            return None, True
        scores = {name: finite_or_none(value) for name, value in score.items() if name in self.plan.scores}
        scores.setdefault("loss", None)
        self.state = state
        return EvaluatedRound({"round": state.round, **scores, **measured}, state), False

    def _aggregate(self) -> bool:
        """A2.13-16; return False if Alice's own update was not usable."""
        plan, before = self.plan, self.latest
        up, present = self.collector.updates(type(self._up))
        known = asking(self._registered, self.cohort)
        present = present & known.asked & (known.samples > 0)
        settings = RoundSettings(plan.rounds, plan.batch_size, guard=plan.guard)
        states = (self._server(), self._agents, self._agents)
        with one_thread(), products(self.model.precision):
            result = aggregate(plan.algorithm, before.round + 1, settings, *states, up, present, known)
        self.notes = [*self.collector.log, *self.notes]
        return self._conclude(result.server, result.measured)

    def _conclude(self, server: Any, found: dict[str, Any], intact: Tensor | None = None) -> bool:
        """Set the next state, which Alice will score; return False if her own update was not usable.

        `intact` are the agents whose state has advanced, if not all whose update was used.
        """
        plan, before = self.plan, self.latest
        (measured,) = to_numbers([found])
        received, codes = measured.pop("received"), measured.pop("codes")
        if not received[plan.alice] and codes[plan.alice] != NOT_ASKED:
            return False
        screened, participants = screened_of(codes, plan.names, plan.samples), participants_of(codes, plan.names)
        measured |= {"participants": participants} if participants else {}
        refused = [[plan.names[i], one_line(reason)] for i, reason in self.notes]
        measured |= {**({"screened": screened} if screened else {}), **({"refused": refused} if refused else {})}
        version = Version(before.round + 1, self.attempt)
        advanced = [code == OK for code in codes] if intact is None else intact.tolist()
        versions = [version if new else old for new, old in zip(advanced, before.versions, strict=True)]
        self.pending = RunState(before.round + 1, server, tuple(versions)), self.attempt, measured
        self.attempt, self.notes, self.lost = 0, [], set()
        self._open_round()
        return True

    def _retry(self) -> Diverged | None:
        """Retry the round after the last recorded one with new batches; after `attempts` tries the run has diverged."""
        self.pending, self.score, self.attempt = None, None, self.attempt + 1
        if self.attempt < self.plan.attempts:
            self._open_round()
            return None
        return diverged(self.state.round + 1, self.plan.names[self.plan.alice], self.plan.attempts)

    def _copies(self, start: Any) -> Any:
        """The agents' states, or None if the server has no copy of them.

        Velocities, averages and models trained alone are those of `start`: an agent can start them anew.
        """
        fields, server = type(self._agents)._fields, self.latest.server
        if not all(hasattr(server, name) or _restartable(name) for name in fields):
            return None
        return type(self._agents)(*(getattr(server, name, getattr(start, name)) for name in fields))

    def _copy_of(self, agent: int) -> Any:
        copies = self._copies(self._agents)
        return None if copies is None else rows_of(copies, slice(agent, agent + 1))

    def _handle_lost_state(self, agent: int, again: bool) -> None:
        name, round_ = self.plan.names[agent], self.latest.versions[agent].round
        if again:
            self.notes.append((agent, "rejects the state that the server restored"))
        elif self._copy_of(agent) is not None:
            self.lost.add(agent)
            self.resend.add(agent)
            fields = self._agents._fields
            more = "; its momentum starts at zero" if any(name.endswith(VELOCITY) for name in fields) else ""
            more += "; its average starts anew" if any(name.startswith(AVERAGED) for name in fields) else ""
            more += "; its model trained alone starts anew" if any(name.startswith(ALONE) for name in fields) else ""
            self.notes.append((agent, f"lost its state of round {round_}; the server restored it{more}"))
        elif agent == self.plan.alice:
            self.stuck = (
                f"Alice ({name}) lost her personal model of round {round_}, and the server has no copy of it: restore "
                "the site's `state` folder from a backup, or start a new run"
            )
        else:
            self.notes.append((agent, f"lost its personal model of round {round_}: restore the site's `state` folder"))


def _restartable(name: str) -> bool:
    """Whether a field of an agent's state can start anew if the agent has lost it."""
    return name.endswith(VELOCITY) or name.startswith((AVERAGED, ALONE))


def tensors_of(state: RunState) -> dict[str, Tensor]:
    """The tensors of a run state, as stored in a checkpoint."""
    versions = torch.tensor(state.versions, dtype=torch.int64)
    return {"versions": versions, **{f"server.{name}": value for name, value in state.server._asdict().items()}}


def run_state_of(r: int, tensors: Mapping[str, Tensor], like: RunState) -> RunState:
    server = type(like.server)(*(tensors[f"server.{name}"] for name in like.server._fields))
    return RunState(r, server, tuple(Version(*pair) for pair in tensors["versions"].tolist()))


def initial_run_state(algorithm: Algorithm, model: FlatModel, seed: int, agents: int) -> RunState:
    """A2.1: the same random model for all agents."""
    return RunState(0, algorithm.init(model.init(seed), agents)[0], (Version(),) * agents)


def finite_or_none(value: Any) -> float | None:
    """Return a site's number as a float, or None if it is not a finite number."""
    return float(value) if type(value) in (int, float) and abs(value) <= sys.float_info.max else None


def one_line(text: Any) -> str:
    """Return any text from a site as one printable line of bounded length."""
    try:
        line = " ".join(str(text)[: 10 * LONGEST_REASON].split())
    except RecursionError:
        line = "content nested too deeply"
    return "".join(char for char in line if char.isprintable())[:LONGEST_REASON]


def largest_message(runs: Sequence[ServerRun]) -> int:
    """Upper bound on the bytes of a message, known before the first round."""
    server: list[Tensor] = [value for run in runs for value in run.latest.server]
    down = sum(value.numel() * value.element_size() for value in server)
    return down + largest_reply(runs)


def largest_reply(runs: Sequence[ServerRun]) -> int:
    """Upper bound on the bytes of a reply: per run an update or a model, and its JSON fields."""
    return OVERHEAD + sum(run.largest_reply + OVERHEAD for run in runs)
