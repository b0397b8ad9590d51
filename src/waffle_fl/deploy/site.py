"""A site's replies. Each depends only on the request, the site's files and its rules. Independent of Flower.

No part of a request is used before its signature is verified, and nothing that it names is imported before the site's
rules are checked.
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
from waffle_fl.algorithms import Net, for_model
from waffle_fl.atomic_files import write_atomically
from waffle_fl.config import RunConfig, Settings, check_name
from waffle_fl.deploy.exposure import exposed_shares, usual_shares
from waffle_fl.deploy.introductions import introduction_of
from waffle_fl.deploy.masked_site import MaskedSite, NotAlone, ReadBefore
from waffle_fl.deploy.policy import Refused
from waffle_fl.deploy.privacy_budget import PrivacyBudget, Spent
from waffle_fl.deploy.settings_files import data_of, make_private, read_site, secret_of
from waffle_fl.deploy.signing import OPERATOR_PUBLIC, load_trusted_keys, verify
from waffle_fl.deploy.site_arrays import FEWEST
from waffle_fl.deploy.site_data import SiteData
from waffle_fl.deploy.site_store import Ledger, Store
from waffle_fl.deploy.survey import Stage
from waffle_fl.engines.arithmetic import one_thread
from waffle_fl.engines.flower.masked_messages import INTRODUCE, READ_BEFORE, FirstRequest, digest_of_received
from waffle_fl.engines.flower.messages import Message, Request, Version, read_count
from waffle_fl.engines.flower.site_trainer import SiteTrainer
from waffle_fl.engines.masked_checks import masks_updates
from waffle_fl.engines.mixed_outputs import memory_of, models_in, output_of, tensors_in
from waffle_fl.engines.noise_checks import check_noise
from waffle_fl.engines.private_gradients import privacy_of
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime, model_name, model_of, round_settings
from waffle_fl.experiment.active_run import predictions
from waffle_fl.federation import Federation
from waffle_fl.metrics import measure
from waffle_fl.models import FlatModel
from waffle_fl.privacy.wire import read
from waffle_fl.randomness import Draw, noise
from waffle_fl.records import provenance, read_json, write_json
from waffle_fl.tensorfile import MAX_HEADER, digest, pack, parse_header, unpack
from waffle_fl.update_encoding import LONGEST_REASON, Header, seal
from waffle_fl.versions import RESULTS_VERSION, WIRE_VERSION

log = logging.getLogger("waffle_fl")
DIGEST_SECRET = "digest.secret"  # key of the hash of the data: without it, a guessed row could be confirmed
NO_MODELS = ("c",)  # broadcast fields with the shape of a model that are not models: SCAFFOLD's control variate


@cache
def software() -> str:
    """Versions that server and sites must share: results, wire format, and torch's release."""
    release = torch.__version__.partition("+")[0]
    return f"results version {RESULTS_VERSION}, wire version {WIRE_VERSION}, torch {release}"


def reason(error: Exception) -> str:
    """Return the part of an error that may leave, as one line: a refusal's message, else its type. Log the rest."""
    if isinstance(error, Refused):
        text = " ".join(str(error).split())[:LONGEST_REASON]
        log.warning("refused: %s", text)
        return text
    log.error("this request failed", exc_info=error)
    return f"failed at the site ({type(error).__name__}); see the site's own log"


def _describe_update(update: bytes, task: Request) -> dict[str, Any]:
    """Description of an update for the ledger: tensors with their shapes or the masked phase, size, and a hash."""
    if task.session:
        about = {"phase": task.phase, "session": task.session}
        return {"bytes": len(update), "sha256": hashlib.sha256(update).hexdigest(), "masked": about}
    header = parse_header(update[: 8 + MAX_HEADER], len(update))
    tensors = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return {"bytes": len(update), "sha256": hashlib.sha256(update).hexdigest(), "tensors": tensors}


class Site:
    """A site of the federation, read from its folder."""

    def __init__(self, folder: Path, data_dir: str = "") -> None:
        self.folder, self.settings = folder, read_site(folder)
        self.policy = self.settings.policy
        self.data = SiteData(self.settings.name, data_of(folder, self.settings), self.policy, data_dir)
        self.store, self.ledger = Store(folder / "state"), Ledger(folder / "ledger.jsonl")

    @cached_property
    def trusted(self) -> list[Ed25519PublicKey]:
        """The operator keys whose requests this site accepts."""
        return load_trusted_keys(self.folder / OPERATOR_PUBLIC)

    def answer(self, request: Message) -> Message:
        """Return the reply to any request. Errors become one line without paths or data."""
        with self.ledger.alone():
            reply = self._verify_and_respond(request)
        return replace(reply, fields={**reply.fields, "software": software()})

    def _verify_and_respond(self, request: Message) -> Message:
        """Verify the signature, then respond. A request that fails verification only adds a line to the ledger."""
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
            return self._refusal(error, "said", run=str(request.fields.get("run"))[:LONGEST_REASON], nonce=nonce)

    def _refusal(self, error: Exception, kind: str, **about: str) -> Message:
        """Return the reason as the reply, and record it in the ledger."""
        fields = {"error": reason(error)}
        with contextlib.suppress(OSError):  # on a full disk the refusal is still sent
            self.ledger.note(**about, **{kind: fields})
        return Message(fields)

    def respond(self, request: Message, nonce: str) -> Message:
        """Return the reply to a verified request; raise if it is refused."""
        fields = request.fields
        if fields.get("software") != software():
            raise Refused(
                f"the server runs {fields.get('software')}, this site {software()}: install the same versions"
            )
        run, agent = check_name(str(fields["run"])), read_count(fields, "agent")
        self.policy.admit(fields["config"], sum(map(len, request.payloads.values())))
        config = RunConfig.from_json(fields["config"])
        if fields.get("stage") == INTRODUCE:
            return self._introduce(run, agent, nonce)
        if "stage" in fields:
            return self._answer_survey(run, agent, config.settings, fields["stage"], fields["known"], nonce)
        questions = self._check_surveys(self.data.questions(config.settings))
        if self._digest(config.settings, agent, run) != fields["digest"]:
            raise Refused("this site's data has changed since the run began")
        tasks = [Request.from_json(content) for content in fields["tasks"]]
        if len({task.course for task in tasks}) < len(tasks):
            raise Refused("a message contains two requests for the same run")
        answers: dict[str, dict[str, Any]] = {}
        payloads: dict[str, bytes] = {}
        for task in tasks:
            run_config = replace(config, settings=replace(config.settings, alice=task.alice))
            handler = RequestHandler(self, run, agent, run_config, fields, task, dict(questions))
            update = None
            try:
                reply, update = handler.perform(request.payloads[task.course])
            except Exception as error:
                reply = {"error": reason(error), **({READ_BEFORE: True} if isinstance(error, ReadBefore) else {})}
            self.ledger.note(
                run=run,
                nonce=nonce,
                course=task.course,
                round=task.round,
                attempt=task.attempt,
                asked=handler.questions,
                said=reply,
                **({"update": _describe_update(update, task)} if update is not None else {}),
                **({"released": handler.released} if handler.released else {}),
                **({"read": handler.read} if handler.read else {}),
            )
            answers[task.course] = reply
            payloads |= {task.course: update} if update is not None else {}
        return Message({"courses": answers}, payloads)

    def _answer_survey(
        self, run: str, agent: int, s: Settings, stage: str, known: Mapping[str, Any], nonce: str
    ) -> Message:
        """Return the reply to one stage of the survey."""
        if stage not in get_args(Stage):
            raise Refused("unknown stage of the survey")
        self.data.check_names(s)
        questions = self._check_surveys(self.data.questions(s, stage, known))
        answer = self.data.answer_survey(s, agent, stage, known)
        reply = Message({**answer, "digest": self._digest(s, agent, run)})
        self.ledger.note(run=run, nonce=nonce, stage=stage, asked=questions, said=reply.fields)
        return reply

    def _digest(self, s: Settings, agent: int, run: str) -> str:
        """Return a hash of the data under a key that only this site knows, another one in every run."""
        secret = secret_of(self.folder / DIGEST_SECRET)
        return self.data.digest(s, agent, hashlib.blake2b(run.encode(), key=secret, digest_size=32).digest())

    def _introduce(self, run: str, agent: int, nonce: str) -> Message:
        """Return this site's signed public key for the private rounds of a job."""
        one = introduction_of(self.folder, run, agent)
        reply = Message({"public": one.public.hex(), "signature": one.signature.hex()})
        self.ledger.note(run=run, nonce=nonce, stage=INTRODUCE, said=reply.fields)
        return reply

    def _check_surveys(self, questions: dict[str, str]) -> dict[str, str]:
        """Return the questions about the data; refuse if they exceed the `surveys` budget."""
        for kind, question in questions.items():
            self.policy.check_surveys(self.ledger.different(kind, question))
        return questions


class RequestHandler:
    """Handles the request of one run; `questions` collects the hashes of its questions for the ledger."""

    def __init__(
        self,
        site: Site,
        run: str,
        agent: int,
        config: RunConfig,
        fields: Mapping[str, Any],
        task: Request,
        questions: dict[str, str],
    ) -> None:
        self.site, self.run, self.agent, self.config, self.fields = site, run, agent, config, fields
        self.task, self.questions = task, questions
        self.released: dict[str, Any] | None = None  # what the reply costs of the privacy budget
        self.read: dict[str, str] = {}  # the sum that the server can read with the reply

    @cached_property
    def _data_and_model(self) -> tuple[Federation, FlatModel]:
        """The agent's data and the run's model, which the rules allow."""
        s = self.config.settings
        federation = self.site.data.federation(s, self.agent, self.fields["known"])
        model = model_of(s, federation, Runtime(), torch.device("cpu"))
        if model.fingerprint() != self.fields["model"]:
            raise Refused(
                f"the server's model {s.model} has the fingerprint {self.fields['model']}, "
                f"this site's has {model.fingerprint()}: install the same versions"
            )
        size = model.size * model.dtype.itemsize
        self.site.policy.check_work(self.config, len(federation.train[0]), size)
        return federation, model

    @cached_property
    def trainer(self) -> SiteTrainer:
        """The agent's trainer, made after the rules are checked."""
        s, (federation, model) = self.config.settings, self._data_and_model
        try:
            check_noise(for_model(self.config.algorithm(), model.layers), model, federation, round_settings(s))
        except WaffleError as error:
            raise Refused(str(error)) from None
        return SiteTrainer(self.config.algorithm(), federation, model, s.seed, round_settings(s))

    def perform(self, payload: bytes) -> tuple[dict[str, Any], bytes | None]:
        """Train and evaluate as requested, within the site's rules; return (reply, update or model)."""
        task, first = self.task, None
        if bool(task.session) != self.masks and (task.session or task.round):
            wanted = "masked" if self.masks else "no masks"
            raise Refused(f"this run has {wanted} (privacy = {self.config.settings.privacy}), and the request does not")
        if self.masks and task.restored:  # with a state of its choice the server would know the update
            raise Refused("in a masked run no site trains from a state that the server sends")
        if task.session and not task.round:
            return self._go_on(payload)
        if task.session:
            first = self._first_of(payload)
            payload = first.model
        down, restored = self._read(payload)
        agents = restored if task.restored else self._stored_state()
        if agents is None:
            return {"lost": True}, None
        if task.round:
            self._count_question("update", (down, agents), task.round, task.attempt)
        net = self._model_to_score(down, agents) if task.examine or task.final else None
        reply: dict[str, Any] = {}
        update = None
        if task.round:
            try:
                update = self._begin(first, down, agents) if first else self._train(down, agents)
            except (Spent, NotAlone) as spent:
                reply["spent"] = str(spent)
        if net and task.examine:
            reply["score"] = self._evaluate(net)
        if net and task.final:
            reply["metrics"] = self._finish(net)
            update = self._model_payload(down, agents, net)
        return reply, update

    def _model_to_score(self, down: Any, agents: Any) -> Net:
        """Return the model to score. Refused for few held-out rows: scores would then reveal their labels."""
        if len(self.trainer.federation.test[0]) < FEWEST:
            raise Refused(f"this site has fewer than {FEWEST} held-out rows, too few to score a model")
        net = self.trainer.own_model(down, agents)
        self._count_question("score", (net,))
        return net

    def _count_question(self, kind: str, states: tuple[Any, ...], *when: int) -> None:
        """Count a question against `rounds`. Two questions are equal if everything that determines the reply is."""
        what = json.dumps([self.config.to_json(), self.fields["known"], self.agent, *when], sort_keys=True)
        tensors = {f"{i}.{name}": value for i, state in enumerate(states) for name, value in state._asdict().items()}
        question = digest(tensors, {"what": what})
        self.site.policy.check_rounds(self.site.ledger.different(kind, question))
        self.questions[kind] = question

    def _read(self, payload: bytes) -> tuple[Any, Any]:
        """Return (the broadcast, the restored state or None); names, shapes and types must match exactly."""
        down, agents = self.trainer.blank_down(), self.trainer.start()
        template: dict[str, Tensor] = dict(down._asdict())
        if self.task.restored:
            template |= {f"agents.{name}": value for name, value in agents._asdict().items()}
        try:
            _, tensors = unpack(payload, template)
        except WaffleError as error:
            raise Refused(f"the server's payload cannot be read: {error}") from None
        restored = type(agents)(*(tensors[f"agents.{name}"] for name in agents._fields)) if self.task.restored else None
        return type(down)(*(tensors[name] for name in down._fields)), restored

    def _stored_state(self) -> Any | None:
        """Return the state that training starts from, or None if it is lost."""
        task, start = self.task, self.trainer.start()
        if task.base == Version() or not start._fields:
            return start
        return self.site.store.load(self.run, task.course, task.base, start)

    @cached_property
    def masks(self) -> bool:
        """Whether the run's updates leave masked only."""
        return masks_updates(self.config.algorithm(), round_settings(self.config.settings))

    @cached_property
    def masked(self) -> MaskedSite:
        """This site's side of the run's private rounds."""
        s, site, (federation, model) = self.config.settings, self.site, self._data_and_model
        where = site.folder, site.settings.name, site.policy, site.ledger, self.run, self.task.course, self.agent
        steps = s.steps(len(federation.train[0]))
        algorithm = for_model(self.config.algorithm(), model.layers)
        return MaskedSite(*where, algorithm, model.init(s.seed), steps, round_settings(s), s.seed)

    def _first_of(self, payload: bytes) -> FirstRequest:
        try:
            return read(payload, FirstRequest)
        except WaffleError as error:
            raise Refused(str(error)) from None

    def _begin(self, first: FirstRequest, down: Any, agents: Any) -> bytes:
        """Train, and return the reply to the first phase of a private round."""
        question, model = self.questions["update"], self._data_and_model[1]
        received = digest_of_received(
            self.config.to_json(), self.fields["known"], model.fingerprint(), self.masked.algorithm, down
        )
        reply, self.read = self.masked.begin(
            self.task, first, question, received, lambda: (down, agents, self._trained(down, agents))
        )
        return reply

    def _go_on(self, payload: bytes) -> tuple[dict[str, Any], bytes | None]:
        """Return the reply to a later phase of a private round."""
        try:
            reply, self.read = self.masked.go_on(self.task, payload)
        except NotAlone as alone:
            return {"spent": str(alone)}, None
        return {}, reply

    def _train(self, down: Any, agents: Any) -> bytes:
        up, task = self._trained(down, agents), self.task
        header = Header(f"{self.run}/{task.course}/{task.attempt}", task.round, self.trainer.model.fingerprint())
        return seal(up, 0, header, self.trainer.steps)

    def _trained(self, down: Any, agents: Any) -> Any:
        """Return the update, if it may leave, and store the agent's new state."""
        task = self.task
        if not self.site.policy.epsilon:  # the check reads rows without noise, and a refusal would reveal its result
            self._check_exposed(down, agents)
        after, up = self.trainer.train(down, agents, task.round, task.attempt, self._draws())
        up = self.site.policy.let_update_out(up)
        if after._fields:
            if task.restored:
                self.site.store.save(self.run, task.course, task.base, task.base, agents)
            self.site.store.save(self.run, task.course, Version(task.round, task.attempt), task.base, after)
        return up

    def _draws(self) -> Draw:
        """Return the random numbers of noise and samples, after charging the update to the site's privacy budget."""
        s, site = self.config.settings, self.site
        if not round_settings(s).adds_noise:
            return noise
        budget = PrivacyBudget.at(site.folder, site.ledger, site.policy, self.config, self.run, self.task.course)
        # Other data, or other arithmetic, must not get the same noise.
        question = f"{self.questions['update']}/{self.trainer.federation.digest()}/{software()}"
        self.released = budget.charge(question, len(self.trainer.federation.train[0]), self.agent)
        return budget.draws_for(question)

    def _check_exposed(self, down: Any, agents: Any) -> None:
        """Refuse to train if the agent's model, or any model in the broadcast, singles out rows."""
        trainer = self.trainer
        own = trainer.own_model(down, agents)
        start = trainer.algorithm.begin(down, agents)._asdict()
        fields = [value for name, value in down._asdict().items() if name not in NO_MODELS]
        fields += [start[name] for name in ("y",) if name in start]  # the model that is trained
        sent = [value.reshape(-1, trainer.model.size) for value in fields if value.shape[-1:] == (trainer.model.size,)]
        models = models_in(trainer.algorithm, trainer.model, own)
        known = [one.params for one in models]
        others = [params for value in sent for params in value if not any(torch.equal(params, one) for one in known)]
        usual = cache(lambda: usual_shares(trainer.model, trainer.federation))
        with one_thread():
            for one in (*models, *(Net(params, models[0].stats) for params in others)):
                shares = exposed_shares(trainer.model, one, trainer.federation)
                self.site.policy.check_exposed(shares, usual)

    def _evaluate(self, net: Net) -> dict[str, Any]:
        scores = self.trainer.evaluate(net)
        return {"finite": math.isfinite(scores["loss"]), **self.site.policy.let_out(scores)}

    def _finish(self, net: Net) -> dict[str, Any]:
        """Store Alice's final model as a run folder for `waffle predict`; return the metrics that may leave."""
        trainer, s = self.trainer, self.config.settings
        f = trainer.federation
        memory = memory_of(trainer.algorithm, trainer.model, net, f)
        predicted = predictions(trainer.model, output_of(trainer.algorithm, trainer.model, net, memory), f)
        metrics = measure(predicted["output"], predicted["target"])
        model = pack(tensors_in(trainer.algorithm, trainer.model, net, memory), {"round": str(s.rounds)})
        folder = self._model_folder(model)
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
            parameters=trainer.model.size,
            test_samples=len(f.test[0]),
            statistics="",
            **privacy_of([len(f.train[0])], [self.agent], round_settings(s), noise="secret"),
            notes=[],
        )
        write_json(folder / "config.json", self.config.to_json())
        write_json(folder / "provenance.json", about)
        if f.preprocessing:
            write_json(folder / "preprocessing.json", f.preprocessing.to_json())
        if f.scaling:
            write_json(folder / "scaling.json", f.scaling.to_json())
        write_atomically(folder / "model.safetensors", model)
        write_json(folder / "result.json", {"schema": 1, "status": "finished", "rounds": s.rounds, "metrics": metrics})
        manifest.seal(folder)
        make_private(self.site.folder, str(folder.relative_to(self.site.folder)))
        return self.site.policy.let_out(metrics)

    def _model_folder(self, model: bytes) -> Path:
        """Return the folder for a final model; a different model is never overwritten."""
        name, config = f"{self.run}-{self.task.course}", self.config.to_json()

        def is_usable(folder: Path) -> bool:
            kept = folder / "model.safetensors"
            same = kept.exists() and kept.read_bytes() == model
            return not kept.exists() or (
                same and RunConfig.from_json(read_json(folder / "config.json")).to_json() == config
            )

        names = itertools.chain([name], (f"{name}.{n}" for n in itertools.count(2)))
        return next(filter(is_usable, (self.site.folder / "models" / candidate for candidate in names)))

    def _model_payload(self, down: Any, agents: Any, net: Net) -> bytes | None:
        """Return Alice's model if it is a personal model and `model_may_leave` is set, else None."""
        blank = type(agents)(*(torch.full_like(value, torch.nan) for value in agents))
        is_personal = bool(self.trainer.own_model(down, blank).params.isnan().any())
        if not is_personal or not self.site.policy.model_may_leave:
            return None
        return pack({"params": net.params, "stats": net.stats}, {"run": self.run})
