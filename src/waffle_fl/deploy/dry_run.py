"""A dry run: one round at a single site on its own data, and a listing of everything that would leave the site."""

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
from waffle_fl.experiment import round_settings
from waffle_fl.models import FlatModel, builder, cross_entropy, squared_error
from waffle_fl.tensorfile import MAX_HEADER, parse_header


def dry_run(folder: Path, config: RunConfig) -> Iterator[str]:
    """Yield lines that describe every reply of the site in a run of one round; nothing is stored or sent."""
    if round_settings(config.settings).masks:
        raise WaffleError(
            "a dry run has one site, and masks need four: leave out --privacy, docs/privacy.md has the rest"
        )
    site = Site(folder)
    name = site.settings.name
    s = replace(config.settings, alice="0" if site.data.by_name else name, rounds=1)
    config = replace(config, settings=s)
    fields: dict[str, Any] = {"software": software(), "run": "dry-run", "agent": 0, "config": config.to_json()}
    with tempfile.TemporaryDirectory() as scratch:
        site.store, site.ledger = Store(Path(scratch) / "state"), Ledger(Path(scratch) / "ledger.jsonl")
        site.folder = Path(scratch)
        replies: list[tuple[str, Message]] = []

        def ask(stage: Stage, known: dict[str, Any]) -> Answers:
            reply = _respond(site, Message({**fields, "stage": stage, "known": known}))
            replies.append((f"survey, {stage}", reply))
            return {name: dict(reply.fields)}

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
            *("dry-run", config.label, algorithm, (name,), 0, samples, steps, 1, s.batch_size, s.guard, s.alice)
        )
        server_run = ServerRun(plan, model, initial_run_state(algorithm, model, s.seed, 1))
        for title in ("round 1", "after the last round"):
            request, payload = server_run.request_for(0)
            spec = {"model": model.fingerprint(), "digest": facts.digests[name]}
            fields_of_round = {"known": facts.known, **spec, "tasks": [request.to_json()]}
            reply = _respond(site, Message({**fields, **fields_of_round}, {plan.label: payload}))
            replies.append((title, reply))
            server_run.receive(0, reply.fields["courses"][plan.label], reply.payloads.get(plan.label))
            server_run.advance(1)
    for title, reply in replies:
        yield from _lines_of(title, reply)


def _respond(site: Site, request: Message) -> Message:
    with site.ledger.alone():
        reply = site.respond(request, "dry run")
    for fields in (reply.fields, *reply.fields.get("courses", {}).values()):
        if fields.get("error"):
            raise WaffleError(f"this site would refuse the request, or fail: {fields['error']}")
    return reply


def _lines_of(title: str, reply: Message) -> Iterator[str]:
    yield f"{title}: {reply.size} bytes"
    yield f"  fields: {json.dumps(reply.fields)}"
    for payload in reply.payloads.values():
        header = parse_header(payload[: 8 + MAX_HEADER], len(payload))
        labels = header.pop("__metadata__", {})
        yield f"  payload: {len(payload)} bytes, labelled {json.dumps(labels)}"
        for tensor, entry in header.items():
            start, end = entry["data_offsets"]
            yield f"    {tensor}: {entry['dtype']} {entry['shape']}, {end - start} bytes"
