"""A site's answers. Each is a function of the request, the site's files and its rules; Flower is not known here.

Nothing in a request is used before its signature has been checked, and nothing that it names is imported before the
site's rules have been asked.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from torch import Tensor

from waffle_fl import manifest
from waffle_fl.algorithms import Net
from waffle_fl.atomic_files import write_atomically
from waffle_fl.config import RunConfig, Settings, check_name
from waffle_fl.deploy.exposure import exposed_shares, usual_shares
from waffle_fl.deploy.policy import Refused
from waffle_fl.deploy.settings_files import data_of, make_private, read_site
from waffle_fl.deploy.signing import OPERATOR_PUBLIC, load_trusted_keys, verify
from waffle_fl.deploy.site_data import FEWEST, SiteData
from waffle_fl.deploy.site_store import Ledger, Store
from waffle_fl.deploy.survey import Stage
from waffle_fl.engines.arithmetic import one_thread
from waffle_fl.engines.evaluation import answering
from waffle_fl.engines.flower.messages import Message, Request, Version, number_of
from waffle_fl.engines.flower.site_trainer import Row
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, model_name, model_of
from waffle_fl.experiment.active_run import predictions
from waffle_fl.metrics import measure
from waffle_fl.records import provenance, read_json, write_json
from waffle_fl.tensorfile import MAX_HEADER, digest, pack, parse_header, unpack
from waffle_fl.update_encoding import LONGEST_REASON, Header, seal
from waffle_fl.versions import RESULTS_VERSION, WIRE_VERSION

log = logging.getLogger("waffle_fl")
NO_MODELS = ("c",)  # what is sent down in a model's shape without being one: SCAFFOLD's control variate


@cache
def software() -> str:
    """What must be the same at both ends: the results, the messages, and torch's release."""
    release = torch.__version__.partition("+")[0]
    return f"results version {RESULTS_VERSION}, wire version {WIRE_VERSION}, torch {release}"


def reason(error: Exception) -> str:
    """What may be told of an error, in one line: a site's own words, or else its kind alone; the log has the rest."""
    if isinstance(error, Refused):
        told = " ".join(str(error).split())[:LONGEST_REASON]
        log.warning("refused: %s", told)
        return told
    log.error("this request could not be answered", exc_info=error)
    return f"it failed there ({type(error).__name__}); the site's own log says why"


def _described(update: bytes) -> dict[str, Any]:
    """An update in the ledger: its tensors and their shapes, its size, and a hash to know it again by."""
    header = parse_header(update[: 8 + MAX_HEADER], len(update))
    tensors = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return {"bytes": len(update), "sha256": hashlib.sha256(update).hexdigest(), "tensors": tensors}


class Site:
    """One end of the federation, from its folder."""

    def __init__(self, folder: Path, data_dir: str = "") -> None:
        self.folder, self.settings = folder, read_site(folder)
        self.policy = self.settings.policy
        self.holdings = SiteData(self.settings.name, data_of(folder, self.settings), self.policy, data_dir)
        self.store, self.ledger = Store(folder / "state"), Ledger(folder / "ledger.jsonl")

    @cached_property
    def trusted(self) -> list[Ed25519PublicKey]:
        """The operator keys whose requests this site obeys."""
        return load_trusted_keys(self.folder / OPERATOR_PUBLIC)

    def answer(self, request: Message) -> Message:
        """A reply to any request; what went wrong here is told in one line that names neither paths nor data."""
        with self.ledger.alone():
            reply = self._checked(request)
        return replace(reply, words={**reply.words, "software": software()})

    def _checked(self, request: Message) -> Message:
        """Check who asks; then answer. A request that fails the check costs nothing but a line in the ledger."""
        try:
            self.ledger.check()
            used = self.ledger.nonces()
        except Exception as error:
            return Message({"error": reason(error)})
        try:
            nonce = verify(request, self.trusted, self.settings.name, used, self.settings.max_age)
        except Exception as error:
            return self._refusal(error, "rejected")
        try:
            return self.respond(request, nonce)
        except Exception as error:
            return self._refusal(error, "said", run=str(request.words.get("run"))[:LONGEST_REASON], nonce=nonce)

    def _refusal(self, error: Exception, kind: str, **about: str) -> Message:
        """Say why there is no answer, and put it into the ledger."""
        words = {"error": reason(error)}
        with contextlib.suppress(OSError):  # a full disk keeps all else here, but not the line that says so
            self.ledger.note(**about, **{kind: words})
        return Message(words)

    def respond(self, request: Message, nonce: str) -> Message:
        """The answer to a request whose sender is known; raises where there is none."""
        words = request.words
        if words.get("software") != software():
            raise Refused(f"the server runs {words.get('software')}, this site {software()}: install the same")
        run, agent = check_name(str(words["run"])), number_of(words, "agent")
        self.policy.admit(words["config"], sum(map(len, request.payloads.values())))
        config = RunConfig.from_json(words["config"])
        if "stage" in words:
            return self._tell(run, agent, config.settings, words["stage"], words["known"], nonce)
        asked = self._surveyed(self.holdings.questions(config.settings))
        if self.holdings.digest(config.settings, agent, run) != words["digest"]:
            raise Refused("this site's data is no longer what it was when the run began")
        tasks = [Request.from_json(content) for content in words["tasks"]]
        if len({task.course for task in tasks}) < len(tasks):
            raise Refused("one course is asked for twice in a message")
        answers: dict[str, dict[str, Any]] = {}
        payloads: dict[str, bytes] = {}
        for task in tasks:
            own = replace(config, settings=replace(config.settings, alice=task.alice))
            visit = RequestHandler(self, run, agent, own, words, task, dict(asked))
            update = None
            try:
                said, update = visit.perform(request.payloads[task.course])
            except Exception as error:
                said = {"error": reason(error)}
            self.ledger.note(
                run=run,
                nonce=nonce,
                course=task.course,
                round=task.round,
                attempt=task.attempt,
                asked=visit.asked,
                said=said,
                **({"update": _described(update)} if update is not None else {}),
            )
            answers[task.course] = said
            payloads |= {task.course: update} if update is not None else {}
        return Message({"courses": answers}, payloads)

    def _tell(self, run: str, agent: int, s: Settings, stage: str, known: Mapping[str, Any], nonce: str) -> Message:
        """The answer to one question of the survey."""
        if stage not in get_args(Stage):
            raise Refused("a survey has no such stage")
        self.holdings.check_names(s)
        asked = self._surveyed(self.holdings.questions(s, stage, known))
        told = self.holdings.tell(s, agent, stage, known)
        reply = Message({**told, "digest": self.holdings.digest(s, agent, run)})
        self.ledger.note(run=run, nonce=nonce, stage=stage, asked=asked, said=reply.words)
        return reply

    def _surveyed(self, asked: dict[str, str]) -> dict[str, str]:
        """The questions, if they are among the few about the data that this site answers."""
        for kind, question in asked.items():
            self.policy.check_surveys(self.ledger.different(kind, question))
        return asked


class RequestHandler:
    """One task of one course at this site; `asked` is what it has told, or tried to."""

    def __init__(
        self,
        site: Site,
        run: str,
        agent: int,
        config: RunConfig,
        words: Mapping[str, Any],
        task: Request,
        asked: dict[str, str],
    ) -> None:
        self.site, self.run, self.agent, self.config, self.words = site, run, agent, config, words
        self.task, self.asked = task, asked

    @cached_property
    def row(self) -> Row:
        s = self.config.settings
        federation = self.site.holdings.federation(s, self.agent, self.words["known"])
        model = model_of(s, federation, Runtime(), torch.device("cpu"))
        if model.fingerprint() != self.words["model"]:
            raise Refused(
                f"the server's model {s.model} has the fingerprint {self.words['model']}, "
                f"this site's {model.fingerprint()}"
            )
        size = model.size * model.dtype.itemsize
        self.site.policy.check_work(self.config, len(federation.train[0]), size)
        return Row(self.config.algorithm(), federation, model, s.seed, s.batch_size, s.epochs, s.augment, s.remainder)

    def perform(self, payload: bytes) -> tuple[dict[str, Any], bytes | None]:
        """(words, an update): train and examine, as far as the site's rules go."""
        task = self.task
        down, given = self._read(payload)
        agents = given if task.restored else self._held()
        if agents is None:
            return {"lost": True}, None
        if task.round:
            self._ask("update", (down, agents), task.round, task.attempt)
        net = self._scored(down, agents) if task.examine or task.final else None
        said: dict[str, Any] = {}
        update = self._train(down, agents) if task.round else None
        if net and task.examine:
            said["score"] = self._examine(net)
        if net and task.final:
            said["metrics"] = self._close(net)
            update = self._model(down, agents, net)
        return said, update

    def _scored(self, down: Any, agents: Any) -> Net:
        """The model that the held-out rows are to judge; whose model is right on a few of them knows their labels."""
        if len(self.row.federation.test[0]) < FEWEST:
            raise Refused(f"fewer than {FEWEST} held-out rows score no model")
        net = self.row.own_model(down, agents)
        self._ask("score", (net,))
        return net

    def _ask(self, kind: str, states: tuple[Any, ...], *when: int) -> None:
        """Count what is asked; it is the same again where all that decides the answer's bits is."""
        what = json.dumps([self.config.to_json(), self.words["known"], self.agent, *when], sort_keys=True)
        tensors = {f"{i}.{name}": value for i, state in enumerate(states) for name, value in state._asdict().items()}
        question = digest(tensors, {"what": what})
        self.site.policy.check_rounds(self.site.ledger.different(kind, question))
        self.asked[kind] = question

    def _read(self, payload: bytes) -> tuple[Any, Any]:
        """What was sent down, and the agent's own state where it was restored; exact names, shapes and types."""
        down, agents = self.row.blank_down(), self.row.start()
        template: dict[str, Tensor] = dict(down._asdict())
        if self.task.restored:
            template |= {f"agents.{name}": value for name, value in agents._asdict().items()}
        try:
            _, tensors = unpack(payload, template)
        except WaffleError as error:
            raise Refused(f"what the server sent cannot be read: {error}") from None
        given = type(agents)(*(tensors[f"agents.{name}"] for name in agents._fields)) if self.task.restored else None
        return type(down)(*(tensors[name] for name in down._fields)), given

    def _held(self) -> Any | None:
        """The state to go on from, or None if it is lost."""
        task, start = self.task, self.row.start()
        if task.base == Version() or not start._fields:
            return start
        return self.site.store.load(self.run, task.course, task.base, start)

    def _train(self, down: Any, agents: Any) -> bytes:
        task = self.task
        self._check_exposed(down, agents)
        after, up = self.row.train(down, agents, task.round, task.attempt)
        up = self.site.policy.let_update_out(up)
        if after._fields:
            if task.restored:
                self.site.store.save(self.run, task.course, task.base, task.base, agents)
            self.site.store.save(self.run, task.course, Version(task.round, task.attempt), task.base, after)
        envelope = Header(f"{self.run}/{task.course}/{task.attempt}", task.round, self.row.model.fingerprint())
        return seal(up, 0, envelope, self.row.steps)

    def _check_exposed(self, down: Any, agents: Any) -> None:
        """Refuse to train from a model, among those that were sent, that singles out rows."""
        row = self.row
        own = row.own_model(down, agents)
        models = [value for name, value in down._asdict().items() if name not in NO_MODELS]
        sent = [value.reshape(-1, row.model.size) for value in models if value.shape[-1:] == (row.model.size,)]
        with one_thread():
            for params in torch.cat([own.params[None], *sent]):
                shares = exposed_shares(row.model, Net(params, own.stats), row.federation)
                self.site.policy.check_exposed(shares, lambda: usual_shares(row.model, row.federation))

    def _examine(self, net: Net) -> dict[str, Any]:
        scores = self.row.examine(net)
        return {"finite": math.isfinite(scores["loss"]), **self.site.policy.let_out(scores)}

    def _close(self, net: Net) -> dict[str, Any]:
        """The end of a run for Alice: her model is kept here, ready for `waffle predict`, and its metrics are told."""
        row, s = self.row, self.config.settings
        f = row.federation
        said = predictions(row.model, answering(row.algorithm, row.model, net, f), f)
        metrics = measure(said["output"], said["target"])
        model = pack(row.model.state_dict(net), {"round": str(s.rounds)})
        folder = self._place(model)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = provenance(
            "cpu",
            f.digest(),
            agents=[self.site.settings.name],
            alice=0,
            task=f.task,
            classes=list(f.class_names),
            sample=list(f.shape),
            model=model_name(s, f.shape),
            parameters=row.model.size,
            test_samples=len(f.test[0]),
            statistics="",
            notes=[],
        )
        write_json(folder / "config.json", self.config.to_json())
        write_json(folder / "provenance.json", about)
        if f.preprocessing:
            write_json(folder / "preprocessing.json", f.preprocessing.to_json())
        write_atomically(folder / "model.safetensors", model)
        write_json(folder / "result.json", {"schema": 1, "status": "finished", "rounds": s.rounds, "metrics": metrics})
        manifest.seal(folder)
        make_private(self.site.folder, str(folder.relative_to(self.site.folder)))
        return self.site.policy.let_out(metrics)

    def _place(self, model: bytes) -> Path:
        """Where a final model goes: another that is kept there, of this run or not, is never written over."""
        name, config = f"{self.run}-{self.task.course}", self.config.to_json()

        def is_ours(folder: Path) -> bool:
            kept = folder / "model.safetensors"
            same = kept.exists() and kept.read_bytes() == model
            return not kept.exists() or (
                same and RunConfig.from_json(read_json(folder / "config.json")).to_json() == config
            )

        names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(2)))
        return next(filter(is_ours, (self.site.folder / "models" / runtime for runtime in names)))

    def _model(self, down: Any, agents: Any, net: Net) -> bytes | None:
        """Alice's model, where it is hers alone and she lets it out."""
        blank = type(agents)(*(torch.full_like(value, torch.nan) for value in agents))
        hers = bool(self.row.own_model(down, blank).params.isnan().any())
        if not hers or not self.site.policy.model_may_leave:
            return None
        return pack({"params": net.params, "stats": net.stats}, {"run": self.run})
