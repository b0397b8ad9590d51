"""The server's end of Flower: survey, rounds, records. The run folders are those of the simulator."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from waffle_fl.algorithms import for_model
from waffle_fl.config import ALL_ALICES, RunConfig
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.keys import wire_form
from waffle_fl.deploy.preflight import check_deployable
from waffle_fl.deploy.settings_files import public_keys, read_server
from waffle_fl.deploy.signing import OPERATOR_KEY, load_operator_key, sign
from waffle_fl.deploy.site import software
from waffle_fl.deploy.survey import Answers, Stage, Survey, survey
from waffle_fl.engines.flower.messages import METRICS, SCORES, Message
from waffle_fl.engines.flower.server_run import (
    EvaluatedRound,
    RunPlan,
    ServerRun,
    initial_run_state,
    largest_message,
    largest_reply,
    number,
    one_line,
    run_state_of,
    tensors_of,
)
from waffle_fl.engines.flower.transport import MessageFactory, Transport
from waffle_fl.errors import Diverged, WaffleError
from waffle_fl.experiment import model_name
from waffle_fl.federation import index_of
from waffle_fl.guard import ABSENT, CLIPPED, OK, REASONS
from waffle_fl.models import STATS_POLICY, FlatModel, Net, builder, cross_entropy, squared_error
from waffle_fl.records import Run, provenance, read_rounds, summary
from waffle_fl.tensorfile import unpack


class Stopped(WaffleError):
    """The operator has stopped the job; it can be resumed."""


HANDSHAKE_BYTES = 8 << 20
OTHER = {"classification": "rmse", "regression": "accuracy"}  # what is no score of this task
HEARD = (REASONS[OK], REASONS[CLIPPED])


def main(folder: Path, grid: Any, job_name: str) -> None:
    """What Flower runs: one job, to its end or to an error that its journal keeps.

    Flower starts another in place of one that was killed; where the job was submitted anew by then, that stands back.
    """
    job = Job.open(folder, job_name)
    with job.conducting() as alone:
        if not alone:
            return
        job.journal.say(conducted=True)  # whatever was said before was another's
        try:
            JobRunner(folder, job, grid).conduct()
        except WaffleError as error:
            job.show(status="stopped" if isinstance(error, Stopped) else "failed", error=str(error), waiting=[])
            job.journal.say(error=str(error))
            raise
        except BaseException as error:
            text = f"the ServerApp stopped: {type(error).__name__}: {one_line(error)}"
            job.journal.say(error=text)
            job.show(status="stopped", error=text, waiting=[])
            raise
        job.show(status="finished", waiting=[])
        job.journal.say(done=True)


@dataclass
class Entry:
    """A course, the folder that records it, and which site is which of its agents."""

    course: ServerRun
    run: Run
    config: RunConfig
    members: tuple[int, ...]  # sites, by agent of the course
    quorum: int
    misses: int = 0
    clock: float = field(default_factory=time.monotonic)


class JobRunner:
    """All courses of a job, a message to each site and round."""

    def __init__(self, folder: Path, job: Job, grid: Any) -> None:
        self.job, self.settings, self.sites = job, read_server(folder), job.sites
        own = job.config.settings.is_own
        self.names = self.sites if own else tuple(f"agent {i}" for i in range(len(self.sites)))
        members = [site for site in self.sites if site in self.settings.members]
        keys = {wire_form(path): site for site, path in public_keys(folder, members).items()}
        self.operator = load_operator_key(folder / "keys" / OPERATOR_KEY)
        self.post = Transport(grid, keys, HANDSHAKE_BYTES, self._watch)
        self._shown: tuple[Any, ...] = ()
        check_deployable(job.config, self.settings)

    def _watch(self, online: Collection[str] | None, waiting: Collection[str]) -> None:
        """Put on record who is connected and who is waited for, whenever that changes."""
        connected = None if online is None else sorted(online)
        away = [site for site in waiting if online is not None and site not in online]
        shown = connected, sorted(waiting), away
        if shown == self._shown:
            return
        before, self._shown = self._shown, shown
        self.job.show(connected=connected or [], waiting=sorted(waiting))
        if away and (not before or away != before[2]):
            self.job.journal.say(note="waiting for " + ", ".join(f"{site} (not connected)" for site in away))

    def conduct(self) -> None:
        self.job.go_on()
        rounds = self.job.config.settings.rounds
        self.job.show(status="running", rounds=rounds, error="", round=self.job.state.get("round", 0))
        if self.job.config.method == "waffle" and len(self.sites) == 2:
            self.job.journal.say(
                note="two sites: WAFFLE's weights are then fixed, equal until 95 % of the rounds; then Alice's grows"
            )
        facts = self._survey()
        with contextlib.ExitStack() as stack:
            entries = [self._open(stack, *run, facts) for run in self.job.runs(self.names, facts)]
            if self.job.force:
                self.job.write(force=False)  # it was meant for this time
            live = [entry for entry in entries if entry is not None]
            if not live:
                self.job.journal.say(note="this run has ended already: nothing was trained; another --out starts anew")
                return
            courses = [entry.course for entry in live]
            needed = largest_message(courses)
            if needed > self.settings.message_mb << 20:
                raise WaffleError(
                    f"a message of this model takes up to {-(-needed >> 20)} MB, server.toml allows "
                    f"{self.settings.message_mb}: raise message_mb, or train a smaller model"
                )
            self.post.max_bytes = largest_reply(courses)
            unreachable = self._rounds(live, facts)
        if unreachable:
            raise WaffleError("; ".join(unreachable) + "; all rounds so far are saved: waffle deploy resume goes on")

    def _survey(self) -> Survey:
        """What is known of everyone's data: asked of all sites once, and kept with the job."""
        known, alice = self.job.survey, self.job.config.settings.alice
        needed = set(self.sites) if known is None else set()
        if known is not None and alice != ALL_ALICES:
            needed = {self.sites[index_of(alice, self.names)]}

        def suffice(online: Collection[str]) -> bool:
            return needed <= set(online) and len(online) >= self.settings.quorum

        missing = self.post.wait(self.sites, self.settings.start_timeout, suffice)
        if not suffice(set(self.sites).difference(missing)):
            raise WaffleError(
                f"{len(missing)} of {len(self.sites)} sites did not come within {self.settings.start_timeout:g} "
                f"seconds: {', '.join(missing)}; start them (waffle deploy site), then waffle deploy resume"
            )
        if known is not None:
            return known
        self.job.journal.say(note="all sites are online")
        found = survey(self._ask, self.job.config.settings)
        self.job.keep(found)
        return found

    def _ask(self, stage: Stage, known: dict[str, Any]) -> Answers:
        words = {**self._words(), "stage": stage, "known": known}
        letters = {site: partial(Message, {**words, "agent": i}) for i, site in enumerate(self.sites)}
        answers = {site: dict(reply.words) for site, reply in self._exchange(letters, "query")}
        for site in self.sites:
            if site not in answers:
                raise WaffleError(
                    f"{site} did not answer within {self.settings.deadline:g} seconds, or was offline for "
                    f"{self.settings.grace:g}: start it (waffle deploy site), then waffle deploy resume"
                )
            told = answers[site]
            if told.get("error"):
                raise WaffleError(f"{site}: {one_line(told['error'])}")
            if told.get("software") != software():
                other = one_line(told.get("software"))
                raise WaffleError(f"{site} runs {other}, the server {software()}: install the same")
        return {site: answers[site] for site in self.sites}

    def _words(self) -> dict[str, Any]:
        return {"software": software(), "run": self.job.run, "config": self.job.config.to_json()}

    def _exchange(self, letters: Mapping[str, MessageFactory], kind: str) -> Iterator[tuple[str, Message]]:
        """Send signed requests and give the replies that come in time."""
        signed = {site: partial(self._signed, site, letter) for site, letter in letters.items()}
        yield from self.post.exchange(signed, kind, self.settings.deadline, self.settings.grace)
        for site, what in self.post.log:
            self.job.journal.say(note=f"{site}: {what}")
        self.post.log.clear()

    def _signed(self, site: str, letter: MessageFactory) -> Message:
        """A request as it goes out: addressed to one site, with its time, and signed when it is sent."""
        return sign(letter(), self.operator, site)

    def _open(self, stack: contextlib.ExitStack, config: RunConfig, folder: Path, facts: Survey) -> Entry | None:
        """Lock a run's folder and find out where it stands; None if it has ended."""
        s = config.settings
        alice = index_of(s.alice, self.names)
        if not facts.samples[self.sites[alice]] or not facts.test[self.sites[alice]]:
            raise WaffleError(f"Alice ({self.names[alice]}) has no samples to train or to test on")
        members = (alice,) if config.method == "local" else tuple(range(len(self.sites)))
        samples = tuple(facts.samples[self.sites[i]] for i in members)
        model = FlatModel(
            builder(s.model, s.data, facts.shape, facts.outputs),
            loss=squared_error if facts.task == "regression" else cross_entropy,
            precision=s.precision,
        )
        algorithm = for_model(config.algorithm(), model.layers)
        plan = RunPlan(
            run=self.job.run,
            course=config.label,
            algorithm=algorithm,
            names=tuple(self.names[i] for i in members),
            alice=members.index(alice),
            samples=samples,
            steps=tuple(s.steps(n) for n in samples),
            rounds=s.rounds,
            batch_size=s.batch_size,
            guard=s.guard,
            handle=s.alice,
            scores=tuple(name for name in SCORES if not name.endswith(OTHER[facts.task])),
        )
        run = stack.enter_context(Run.opened(folder, config, self._origin(config, facts, model, alice), self.job.force))
        if run.result is not None:
            return None
        if facts.prepared and s.preprocessing == "federated":
            run.keep("preprocessing.json", facts.prepared)
        start = initial_run_state(algorithm, model, s.seed, len(members))
        r, tensors, warnings = run.resume(tensors_of(start))
        for warning in warnings:
            self.job.journal.say(note=warning)
        course = ServerRun(plan, model, run_state_of(r, tensors, start) if tensors else start)
        able = sum(n > 0 for n in samples)
        return Entry(course, run, config, members, min(self.settings.quorum, able))

    def _origin(self, config: RunConfig, facts: Survey, model: FlatModel, alice: int) -> dict[str, Any]:
        told = "".join(facts.digests[site] for site in self.sites)
        return provenance(
            "cpu",
            hashlib.sha256(told.encode()).hexdigest(),
            agents=list(self.names),
            alice=alice,
            label_counts=[],
            test_samples=facts.test[self.sites[alice]],
            task=facts.task,
            classes=list(facts.classes),
            sample=list(facts.shape),
            statistics=STATS_POLICY if model.stats_size else "this model has no running statistics",
            model=model_name(config.settings, facts.shape),
            parameters=model.size,
            engine={
                "rows": "flower",
                "sites": list(self.sites),
                "run": self.job.run,
                "tls": not self.settings.insecure,
            },
            notes=[],
        )

    def _rounds(self, live: list[Entry], facts: Survey) -> list[str]:
        """Until every course has ended, or waits in vain; those are named."""
        unreachable: list[str] = []
        while live:
            if self.job.is_to_stop:
                raise Stopped(f"stopped by the operator after round {self.job.state.get('round', 0)}")
            self._message(live, facts)
            for entry in list(live):
                told = self._turn(entry)
                if told is not None or entry.course.finished:
                    live.remove(entry)
                if told:
                    unreachable.append(told)
            if live and all(entry.misses for entry in live):
                time.sleep(self.settings.backoff * 2 ** (min(entry.misses for entry in live) - 1))
        return unreachable

    def _message(self, live: list[Entry], facts: Survey) -> None:
        """One message to every site that is still awaited, and its answer to each course."""
        asked = {
            site: [e for e in live if i in e.members and e.members.index(i) in e.course.awaited]
            for i, site in enumerate(self.sites)
        }
        letters = {site: partial(self._letter, site, entries, facts) for site, entries in asked.items() if entries}
        for site, reply in self._exchange(letters, "train"):
            i, error = self.sites.index(site), reply.words.get("error")
            if error:
                self.job.journal.say(note=f"{site}: {one_line(error)}")
            said = reply.words.get("courses")
            for entry in asked[site]:
                label = entry.course.plan.course
                own = said.get(label) if isinstance(said, dict) else None
                if error or not isinstance(own, dict):
                    own = {"error": error or "no answer to what was asked"}
                entry.course.receive(entry.members.index(i), own, reply.payloads.get(label))

    def _letter(self, site: str, entries: list[Entry], facts: Survey) -> Message:
        """What is asked of a site, by all courses that wait for it."""
        i = self.sites.index(site)
        tasks = [entry.course.task(entry.members.index(i)) for entry in entries]
        words = {
            **self._words(),
            "agent": i,
            "known": facts.known,
            "digest": facts.digests[site],
            "model": entries[0].course.model.fingerprint(),
            "tasks": [task.to_json() for task, _ in tasks],
        }
        return Message(words, {task.course: payload for task, payload in tasks})

    def _turn(self, entry: Entry) -> str | None:
        """Close, record and save what can be; a text if the course ends here without having finished."""
        course = entry.course
        if course.stuck:
            return course.stuck
        held, r = course.held_by(entry.quorum), course.now.round + course.training
        settled, diverged = course.turn(entry.quorum)
        if settled:
            self._record(entry, settled)
        if diverged:
            self._diverged(entry, diverged)
            return ""
        if course.finished:
            self._close(entry)
            return None
        entry.misses = entry.misses + 1 if held else 0
        if not held:
            return None
        alice = course.plan.names[course.plan.alice]
        who = f"Alice ({alice})" if alice in held else ", ".join(held)
        why = next((reason for i, reason in reversed(course.notes) if course.plan.names[i] in held), "")
        text = f"{who} unreachable in round {r}{f' ({why})' if why else ''}"
        if entry.misses > self.settings.retries:
            return text
        self.job.journal.say(note=f"{text}: asked again, {entry.misses} of {self.settings.retries}")
        return None

    def _record(self, entry: Entry, settled: EvaluatedRound) -> None:
        began, entry.clock = entry.clock, time.monotonic()
        entry.run.append({**settled.measured, "seconds": round(entry.clock - began, 6)})
        entry.run.checkpoint(settled.stand.round, tensors_of(settled.stand))
        plan, screened = entry.course.plan, settled.measured.get("screened", {})
        r = settled.stand.round
        sites = [self.sites[i] for i in entry.members]
        alice, weights = sites[plan.alice], dict(zip(sites, settled.measured.get("weights") or [], strict=False))
        site_of = dict(zip(plan.names, sites, strict=True))
        before, seen = self.job.state.get("weights", {}), {site_of[name]: why for name, why in screened.items()}
        self.job.show(round=r, weights={**before, alice: weights}, screened=seen)
        for name, reason in seen.items():
            plainly = {REASONS[CLIPPED]: "update shortened", REASONS[ABSENT]: "did not answer"}
            self.job.journal.say(note=f"round {r}: {name} {plainly.get(reason, f'screened: {reason}')}")
        others = [name for i, name in enumerate(plan.names) if plan.samples[i] and i != plan.alice]
        if others and all(screened.get(name, REASONS[OK]) not in HEARD for name in others):
            self.job.journal.say(note=f"round {r}: no update but Alice's was used, so this was a local step")

    def _diverged(self, entry: Entry, error: Diverged) -> None:
        entry.run.close(summary(read_rounds(entry.run.folder / "rounds.jsonl"), "diverged", str(error)))
        self.job.journal.say(note=str(error))

    def _close(self, entry: Entry) -> None:
        """How the run ended, with Alice's model where the server holds it or she sent it."""
        course = entry.course
        assert course.parting is not None
        told, payload = course.parting
        result = summary(read_rounds(entry.run.folder / "rounds.jsonl"), "finished")
        if isinstance(told, dict):
            names = [name for name in (*course.plan.scores, *METRICS) if name in told]
            result["metrics"] = {name: number(told[name]) for name in names}
        net = course.own_model()
        if net is None and payload is not None:
            blank = course.model.init(0)
            try:
                net = Net(**unpack(payload, blank._asdict())[1])
            except WaffleError as error:
                self.job.journal.say(note=f"Alice's model could not be read: {one_line(error)}")
        entry.run.close(result, course.model.state_dict(net) if net else None)
