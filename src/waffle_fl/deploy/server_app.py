"""The server's Flower app: survey, rounds, records. Run folders have the simulator's format."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from waffle_fl.algorithms import for_model
from waffle_fl.config import ALL_ALICES, RunConfig
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.keys import wire_form
from waffle_fl.deploy.preflight import check_deployable
from waffle_fl.deploy.settings_files import public_keys, read_server
from waffle_fl.deploy.signing import OPERATOR_KEY, load_operator_key, sign
from waffle_fl.deploy.site import software
from waffle_fl.deploy.survey import Answers, Stage, Survey, survey
from waffle_fl.engines.flower.masked_messages import INTRODUCE
from waffle_fl.engines.flower.masked_server_run import MaskedServerRun
from waffle_fl.engines.flower.messages import METRICS, SCORES, Message
from waffle_fl.engines.flower.server_run import (
    EvaluatedRound,
    Masking,
    RunPlan,
    ServerRun,
    finite_or_none,
    initial_run_state,
    largest_message,
    largest_reply,
    one_line,
    run_state_of,
    tensors_of,
)
from waffle_fl.engines.flower.transport import MessageFactory, Transport
from waffle_fl.engines.masked_checks import masking_problem, masks_updates
from waffle_fl.engines.mixed_outputs import tensors_in
from waffle_fl.engines.noise_checks import check_noise_covers
from waffle_fl.engines.participation import Cohorts
from waffle_fl.engines.private_gradients import privacy_of
from waffle_fl.errors import Diverged, WaffleError
from waffle_fl.experiment import model_name, round_settings
from waffle_fl.federation import index_of
from waffle_fl.guard import ABSENT, CLIPPED, OK, REASONS
from waffle_fl.models import STATS_POLICY, FlatModel, Net, builder, cross_entropy, squared_error
from waffle_fl.privacy.keys import Introduction
from waffle_fl.records import Run, provenance, read_rounds, summary
from waffle_fl.tensorfile import unpack


class Stopped(WaffleError):
    """The operator stopped the job; it can be resumed."""


HANDSHAKE_BYTES = 8 << 20
OTHER = {"classification": "rmse", "regression": "accuracy"}  # score that does not apply to the task
USED = (REASONS[OK], REASONS[CLIPPED])


def main(folder: Path, grid: Any, job_name: str) -> None:
    """Run one job until it ends or fails; errors are written to the job's log.

    Flower restarts a killed ServerApp. If the job was submitted again meanwhile, the restarted one returns at once.
    """
    job = Job.open(folder, job_name)
    with job.exclusive() as acquired:
        if not acquired:
            return
        job.journal.write(conducted=True)  # earlier lines belong to an earlier process
        try:
            JobRunner(folder, job, grid).run_all()
        except WaffleError as error:
            job.update_state(status="stopped" if isinstance(error, Stopped) else "failed", error=str(error), waiting=[])
            job.journal.write(error=str(error))
            raise
        except BaseException as error:
            text = f"the ServerApp stopped: {type(error).__name__}: {one_line(error)}"
            job.journal.write(error=text)
            job.update_state(status="stopped", error=text, waiting=[])
            raise
        job.update_state(status="finished", waiting=[])
        job.journal.write(done=True)


@dataclass
class Entry:
    """A run of the job, its run folder, and the mapping from agents to sites."""

    server_run: ServerRun
    run: Run
    config: RunConfig
    members: tuple[int, ...]  # index of each agent's site
    quorum: int
    clock: float  # when the last round ended, in monotonic seconds
    misses: int = 0


class JobRunner:
    """Executes all runs of a job with one message per site and round."""

    def __init__(self, folder: Path, job: Job, grid: Any) -> None:
        self.job, self.settings, self.sites = job, read_server(folder), job.sites
        own = job.config.settings.is_own
        self.names = self.sites if own else tuple(f"agent {i}" for i in range(len(self.sites)))
        members = [site for site in self.sites if site in self.settings.members]
        keys = {wire_form(path): site for site, path in public_keys(folder, members).items()}
        self.operator = load_operator_key(folder / "keys" / OPERATOR_KEY)
        self.transport = Transport(grid, keys, HANDSHAKE_BYTES, self._watch)
        self._shown: tuple[Any, ...] = ()
        check_deployable(job.config, self.settings)

    def _watch(self, online: Collection[str] | None, waiting: Collection[str]) -> None:
        """Update the job's state when the connected or awaited sites change."""
        connected = None if online is None else sorted(online)
        away = [site for site in waiting if online is not None and site not in online]
        shown = connected, sorted(waiting), away
        if shown == self._shown:
            return
        before, self._shown = self._shown, shown
        self.job.update_state(connected=connected or [], waiting=sorted(waiting))
        if away and (not before or away != before[2]):
            self.job.journal.write(note="waiting for " + ", ".join(f"{site} (not connected)" for site in away))

    def run_all(self) -> None:
        """Run the survey and all rounds of all runs."""
        self.job.clear_stop_request()
        rounds = self.job.config.settings.rounds
        self.job.update_state(status="running", rounds=rounds, error="", round=self.job.state.get("round", 0))
        if self.job.config.method == "waffle-paper" and len(self.sites) == 2:
            self.job.journal.write(
                note="with two sites WAFFLE's weights are fixed: equal for 95 % of the rounds, then Alice's grows"
            )
        facts = self._survey()
        with contextlib.ExitStack() as stack:
            introductions = self._introductions()
            entries = [self._open(stack, *run, facts, introductions) for run in self.job.runs(self.names, facts)]
            if self.job.force:
                self.job.write(force=False)  # --force applies once
            live = [entry for entry in entries if entry is not None]
            if not live:
                self.job.journal.write(
                    note="this run has already ended, nothing was trained: choose another --out for a new run"
                )
                return
            server_runs = [entry.server_run for entry in live]
            needed = largest_message(server_runs)
            if needed > self.settings.message_mb << 20:
                raise WaffleError(
                    f"a message of this model needs up to {-(-needed >> 20)} MB, server.toml allows "
                    f"{self.settings.message_mb}: raise message_mb, or train a smaller model"
                )
            self.transport.max_bytes = largest_reply(server_runs)
            unreachable = self._rounds(live, facts)
        if unreachable:
            raise WaffleError(
                "; ".join(unreachable) + "; all rounds so far are saved: continue with waffle deploy resume"
            )

    def _survey(self) -> Survey:
        """Return the survey of all sites' data: requested once, then stored with the job."""
        known, alice = self.job.survey, self.job.config.settings.alice
        needed = set(self.sites) if known is None else set()
        if known is not None and alice != ALL_ALICES:
            needed = {self.sites[index_of(alice, self.names)]}

        def suffice(online: Collection[str]) -> bool:
            return needed <= set(online) and len(online) >= self.settings.quorum

        missing = self.transport.wait(self.sites, self.settings.start_timeout, suffice)
        if not suffice(set(self.sites).difference(missing)):
            raise WaffleError(
                f"{len(missing)} of {len(self.sites)} sites did not connect within {self.settings.start_timeout:g} "
                f"seconds: {', '.join(missing)}; start them (waffle deploy site), then run waffle deploy resume"
            )
        if known is not None:
            return known
        self.job.journal.write(note="all sites are online")
        found = survey(self._ask, self.job.config.settings)
        self.job.save_survey(found)
        return found

    def _introductions(self) -> tuple[Introduction, ...]:
        """Return the sites' signed keys for private rounds, requested once per run; empty if updates are not masked."""
        if not masks_updates(self.job.config.algorithm(), round_settings(self.job.config.settings)):
            return ()
        found = self.job.introductions
        if found is None:
            found = {site: dict(answer) for site, answer in self._ask(INTRODUCE, {}).items()}
            self.job.save_introductions(found)
        try:
            keys = [
                (bytes.fromhex(found[site]["public"]), bytes.fromhex(found[site]["signature"])) for site in self.sites
            ]
        except (KeyError, TypeError, ValueError):
            raise WaffleError("a site's signed key for private rounds cannot be read: see the sites' logs") from None
        return tuple(Introduction(i, *pair) for i, pair in enumerate(keys))

    def _ask(self, stage: Stage | Literal["introduce"], known: dict[str, Any]) -> Answers:
        fields = {**self._common_fields(), "stage": stage, "known": known}
        requests = {site: partial(Message, {**fields, "agent": i}) for i, site in enumerate(self.sites)}
        answers = {site: dict(reply.fields) for site, reply in self._exchange(requests, "query")}
        for site in self.sites:
            if site not in answers:
                raise WaffleError(
                    f"{site} did not answer within {self.settings.deadline:g} seconds, or was offline for "
                    f"{self.settings.grace:g}: start it (waffle deploy site), then run waffle deploy resume"
                )
            answer = answers[site]
            if answer.get("error"):
                raise WaffleError(f"{site}: {one_line(answer['error'])}")
            if answer.get("software") != software():
                other = one_line(answer.get("software"))
                raise WaffleError(f"{site} runs {other}, the server {software()}: install the same versions")
        return {site: answers[site] for site in self.sites}

    def _common_fields(self) -> dict[str, Any]:
        return {"software": software(), "run": self.job.run, "config": self.job.config.to_json()}

    def _exchange(self, requests: Mapping[str, MessageFactory], kind: str) -> Iterator[tuple[str, Message]]:
        """Send signed requests and yield the replies that arrive in time."""
        signed = {site: partial(self._signed, site, factory) for site, factory in requests.items()}
        yield from self.transport.exchange(signed, kind, self.settings.deadline, self.settings.grace)
        for site, what in self.transport.log:
            self.job.journal.write(note=f"{site}: {what}")
        self.transport.log.clear()

    def _signed(self, site: str, factory: MessageFactory) -> Message:
        """Return the request, addressed to one site and signed with the current time."""
        return sign(factory(), self.operator, site)

    def _open(
        self,
        stack: contextlib.ExitStack,
        config: RunConfig,
        folder: Path,
        facts: Survey,
        introductions: tuple[Introduction, ...],
    ) -> Entry | None:
        """Lock a run's folder and restore its latest state; return None if the run has ended."""
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
        check_noise_covers(algorithm, model, max(samples), round_settings(s))
        if problem := masking_problem(algorithm, sum(n > 0 for n in samples), round_settings(s)):
            raise WaffleError(problem)
        presence = s.rounds, s.participation, round_settings(s).needs_alice
        plan = RunPlan(
            run=self.job.run,
            label=config.label,
            algorithm=algorithm,
            names=tuple(self.names[i] for i in members),
            alice=members.index(alice),
            samples=samples,
            steps=tuple(s.steps(n) for n in samples),
            rounds=s.rounds,
            batch_size=s.batch_size,
            guard=s.guard,
            handle=s.alice,
            cohorts=Cohorts(algorithm, samples, members, members.index(alice), s.seed, *presence),
            attempts=round_settings(s).attempts,
            scores=tuple(name for name in SCORES if not name.endswith(OTHER[facts.task])),
            masking=Masking(round_settings(s), self.sites, introductions, config.to_json(), facts.known)
            if introductions
            else None,
        )
        run = stack.enter_context(
            Run.opened(folder, config, self._provenance(config, facts, model, alice), self.job.force)
        )
        if run.result is not None:
            return None
        if facts.prepared and s.preprocessing == "federated":
            run.keep("preprocessing.json", facts.prepared)
        if facts.scaling and s.preprocessing == "federated":
            run.keep("scaling.json", facts.scaling)
        start = initial_run_state(algorithm, model, s.seed, len(members))
        r, tensors, warnings = run.resume(tensors_of(start))
        for warning in warnings:
            self.job.journal.write(note=warning)
        kind = MaskedServerRun if plan.masking else ServerRun
        server_run = kind(plan, model, run_state_of(r, tensors, start) if tensors else start)
        able = sum(n > 0 for n in samples)
        return Entry(server_run, run, config, members, min(self.settings.quorum, able), time.monotonic())

    def _provenance(self, config: RunConfig, facts: Survey, model: FlatModel, alice: int) -> dict[str, Any]:
        s = round_settings(config.settings)
        digests = "".join(facts.digests[site] for site in self.sites)
        return provenance(
            "cpu",
            hashlib.sha256(digests.encode()).hexdigest(),
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
            **privacy_of([facts.samples[site] for site in self.sites], range(len(self.sites)), s, noise="secret"),
            notes=[],
        )

    def _rounds(self, live: list[Entry], facts: Survey) -> list[str]:
        """Run rounds until every run has ended or its agents are unreachable; return the reasons of the latter."""
        unreachable: list[str] = []
        while live:
            if self.job.stop_requested:
                raise Stopped(f"stopped by the operator after round {self.job.state.get('round', 0)}")
            self._exchange_round(live, facts)
            for entry in list(live):
                ended = self._advance(entry)
                if ended is not None or entry.server_run.finished:
                    live.remove(entry)
                if ended:
                    unreachable.append(ended)
            if live and all(entry.misses for entry in live):
                time.sleep(self.settings.backoff * 2 ** (min(entry.misses for entry in live) - 1))
        return unreachable

    def _exchange_round(self, live: list[Entry], facts: Survey) -> None:
        """Send one message to every awaited site and pass its replies to the runs."""
        awaited = {
            site: [e for e in live if i in e.members and e.members.index(i) in e.server_run.awaited]
            for i, site in enumerate(self.sites)
        }
        requests = {site: partial(self._request, site, entries, facts) for site, entries in awaited.items() if entries}
        for site, reply in self._exchange(requests, "train"):
            i, error = self.sites.index(site), reply.fields.get("error")
            if error:
                self.job.journal.write(note=f"{site}: {one_line(error)}")
            replies = reply.fields.get("courses")
            for entry in awaited[site]:
                label = entry.server_run.plan.label
                fields = replies.get(label) if isinstance(replies, dict) else None
                if error or not isinstance(fields, dict):
                    fields = {"error": error or "the reply lacks this run"}
                entry.server_run.receive(entry.members.index(i), fields, reply.payloads.get(label))

    def _request(self, site: str, entries: list[Entry], facts: Survey) -> Message:
        """Return the message to a site: the requests of all runs that wait for it."""
        i = self.sites.index(site)
        requests = [entry.server_run.request_for(entry.members.index(i)) for entry in entries]
        fields = {
            **self._common_fields(),
            "agent": i,
            "known": facts.known,
            "digest": facts.digests[site],
            "model": entries[0].server_run.model.fingerprint(),
            "tasks": [request.to_json() for request, _ in requests],
        }
        return Message(fields, {request.course: payload for request, payload in requests})

    def _advance(self, entry: Entry) -> str | None:
        """Advance a run and record it. Return None while it continues, else why it ended early ("" if diverged)."""
        server_run = entry.server_run
        missing, r = server_run.waiting_for(entry.quorum), server_run.latest.round + server_run.training
        evaluated, diverged = server_run.advance(entry.quorum)
        for reason in server_run.rejected:
            self.job.journal.write(note=f"round {r} begins again, with other masks: {reason}")
        server_run.rejected.clear()
        if evaluated:
            self._record(entry, evaluated)
        if server_run.stuck:
            return server_run.stuck
        if diverged:
            self._diverged(entry, diverged)
            return ""
        if server_run.finished:
            self._close(entry)
            return None
        entry.misses = entry.misses + 1 if missing else 0
        if not missing:
            return None
        alice = server_run.plan.names[server_run.plan.alice]
        who = f"Alice ({alice})" if alice in missing else ", ".join(missing)
        why = next((reason for i, reason in reversed(server_run.notes) if server_run.plan.names[i] in missing), "")
        text = f"{who} unreachable in round {r}{f' ({why})' if why else ''}"
        if entry.misses > self.settings.retries:
            return text
        self.job.journal.write(note=f"{text}: retry {entry.misses} of {self.settings.retries}")
        return None

    def _record(self, entry: Entry, evaluated: EvaluatedRound) -> None:
        began, entry.clock = entry.clock, time.monotonic()
        entry.run.append({**evaluated.measured, "seconds": round(entry.clock - began, 6)})
        entry.run.checkpoint(evaluated.state.round, tensors_of(evaluated.state))
        plan, screened = entry.server_run.plan, evaluated.measured.get("screened", {})
        r = evaluated.state.round
        sites = [self.sites[i] for i in entry.members]
        alice, weights = sites[plan.alice], dict(zip(sites, evaluated.measured.get("weights") or [], strict=False))
        site_of = dict(zip(plan.names, sites, strict=True))
        before, seen = self.job.state.get("weights", {}), {site_of[name]: why for name, why in screened.items()}
        self.job.update_state(round=r, weights={**before, alice: weights}, screened=seen)
        for name, reason in seen.items():
            descriptions = {REASONS[CLIPPED]: "update clipped", REASONS[ABSENT]: "did not answer"}
            self.job.journal.write(note=f"round {r}: {name} {descriptions.get(reason, f'screened: {reason}')}")
        asked = evaluated.measured.get("participants", plan.names)
        others = [name for i, name in enumerate(plan.names) if plan.samples[i] and i != plan.alice and name in asked]
        if others and all(screened.get(name, REASONS[OK]) not in USED for name in others):
            self.job.journal.write(note=f"round {r}: only Alice's own update was used, so this was a local step")

    def _diverged(self, entry: Entry, error: Diverged) -> None:
        entry.run.close(summary(read_rounds(entry.run.folder / "rounds.jsonl"), "diverged", str(error)))
        self.job.journal.write(note=str(error))

    def _close(self, entry: Entry) -> None:
        """Write the result of a finished run, and Alice's model if the server has it or her site sent it."""
        server_run = entry.server_run
        assert server_run.final_reply is not None
        metrics, payload = server_run.final_reply
        result = summary(read_rounds(entry.run.folder / "rounds.jsonl"), "finished")
        if isinstance(metrics, dict):
            names = [name for name in (*server_run.plan.scores, *METRICS) if name in metrics]
            result["metrics"] = {name: finite_or_none(metrics[name]) for name in names}
        net = server_run.own_model()
        if net is None and payload is not None:
            try:
                net = Net(**unpack(payload, server_run.blank_model()._asdict())[1])
            except WaffleError as error:
                self.job.journal.write(note=f"Alice's model could not be read: {one_line(error)}")
        algorithm = server_run.plan.algorithm
        entry.run.close(result, tensors_in(algorithm, server_run.model, net) if net else None)
