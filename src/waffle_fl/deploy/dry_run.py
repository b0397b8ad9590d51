"""A dry run: one round of a site alone, on its own data, and a list of all that would have left it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from waffle_fl.algorithms import for_model
from waffle_fl.config import RunConfig
from waffle_fl.deploy.site import Site, software
from waffle_fl.deploy.site_store import Ledger, Store
from waffle_fl.deploy.survey import Answers, Stage, survey
from waffle_fl.engines.flower.messages import Message
from waffle_fl.engines.flower.server_run import RunPlan, ServerRun, initial_run_state
from waffle_fl.errors import WaffleError
from waffle_fl.models import FlatModel, builder, cross_entropy, squared_error
from waffle_fl.tensorfile import MAX_HEADER, parse_header


def rehearse(folder: Path, config: RunConfig) -> Iterator[str]:
    """What the site would say and send in a run of one round, byte for byte; nothing of it is kept or sent."""
    site = Site(folder)
    name = site.settings.name
    s = replace(config.settings, alice="0" if site.holdings.by_name else name, rounds=1)
    config = replace(config, settings=s)
    words: dict[str, Any] = {"software": software(), "run": "rehearsal", "agent": 0, "config": config.to_json()}
    with tempfile.TemporaryDirectory() as scratch:
        site.store, site.ledger = Store(Path(scratch) / "state"), Ledger(Path(scratch) / "ledger.jsonl")
        site.folder = Path(scratch)
        said: list[tuple[str, Message]] = []

        def ask(stage: Stage, known: dict[str, Any]) -> Answers:
            reply = _answered(site, Message({**words, "stage": stage, "known": known}))
            said.append((f"survey, {stage}", reply))
            return {name: dict(reply.words)}

        facts = survey(ask, s)
        model = FlatModel(
            builder(s.model, s.data, facts.shape, facts.outputs),
            loss=squared_error if facts.task == "regression" else cross_entropy,
            precision=s.precision,
        )
        samples = (facts.samples[name],)
        steps = (s.steps(samples[0]),)
        algorithm = for_model(config.algorithm(), model.layers)
        plan = RunPlan(
            *("rehearsal", config.label, algorithm, (name,), 0, samples, steps, 1, s.batch_size, s.guard, s.alice)
        )
        course = ServerRun(plan, model, initial_run_state(algorithm, model, s.seed, 1))
        for title in ("round 1", "after the last round"):
            task, payload = course.task(0)
            spec = {"model": model.fingerprint(), "digest": facts.digests[name]}
            more = {"known": facts.known, **spec, "tasks": [task.to_json()]}
            reply = _answered(site, Message({**words, **more}, {plan.course: payload}))
            said.append((title, reply))
            course.receive(0, reply.words["courses"][plan.course], reply.payloads.get(plan.course))
            course.turn(1)
    for title, reply in said:
        yield from _listed(title, reply)


def _answered(site: Site, request: Message) -> Message:
    with site.ledger.alone():
        reply = site.respond(request, "dry run")
    for words in (reply.words, *reply.words.get("courses", {}).values()):
        if words.get("error"):
            raise WaffleError(f"this site would refuse, or fail: {words['error']}")
    return reply


def _listed(title: str, reply: Message) -> Iterator[str]:
    yield f"{title}: {reply.size} bytes"
    yield f"  words: {json.dumps(reply.words)}"
    for payload in reply.payloads.values():
        header = parse_header(payload[: 8 + MAX_HEADER], len(payload))
        labels = header.pop("__metadata__", {})
        yield f"  payload: {len(payload)} bytes, labelled {json.dumps(labels)}"
        for tensor, entry in header.items():
            start, end = entry["data_offsets"]
            yield f"    {tensor}: {entry['dtype']} {entry['shape']}, {end - start} bytes"
