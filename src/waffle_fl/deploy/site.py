"""A site's answers. Each is a function of the request, the site's files and its rules; Flower is not known here."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from waffle_fl import __version__
from waffle_fl.algorithms import Net
from waffle_fl.config import RunConfig, check_name
from waffle_fl.deploy.folders import data_of, read_site
from waffle_fl.deploy.holdings import Holdings
from waffle_fl.deploy.policy import Refused
from waffle_fl.deploy.store import Ledger, Store
from waffle_fl.engines.closing import answering
from waffle_fl.engines.flower.messages import Parcel, Task, Version
from waffle_fl.engines.flower.rows import Row
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Place, model_of
from waffle_fl.experiment.jobs import predictions
from waffle_fl.metrics import measure
from waffle_fl.records import DECIDING, digest_of, provenance, write_json
from waffle_fl.tensorfile import pack, unpack, write_tensors
from waffle_fl.wire import Envelope, seal

log = logging.getLogger("waffle_fl")


SHARED = (  # besides what decides results: how data is read, and what is sent
    *("own", "data", "deploy", "experiment", "config"),
    *("wire.py", "tensorfile.py", "augment.py", "metrics.py", "folders.py", "records.py"),
)


@cache
def software() -> str:
    """What must be the same at both ends: the version, a hash of the modules that decide bits, and torch's release."""
    release = torch.__version__.partition("+")[0]
    return f"waffle-fl {__version__} ({digest_of(*DECIDING, *SHARED)}) with torch {release}"


class Site:
    """One end of the federation, from its folder."""

    def __init__(self, folder: Path, data_dir: str = "") -> None:
        self.folder, self.settings = folder, read_site(folder)
        self.policy = self.settings.policy
        self.holdings = Holdings(self.settings.name, data_of(folder, self.settings), data_dir)
        self.store, self.ledger = Store(folder / "state"), Ledger(folder / "ledger.jsonl")

    def answer(self, request: Parcel) -> Parcel:
        """A reply to any request; what went wrong here is told in one line that names neither paths nor data."""
        try:
            reply = self._answer(request)
        except Refused as error:
            log.warning("refused: %s", error)
            reply = Parcel({"error": str(error)})
        except Exception as error:
            log.exception("this request could not be answered")
            reply = Parcel({"error": f"it failed there ({type(error).__name__}); the site's own log says why"})
        return replace(reply, words={**reply.words, "software": software()})

    def _answer(self, request: Parcel) -> Parcel:
        words = request.words
        if words.get("software") != software():
            raise Refused(f"the server runs {words.get('software')}, this site {software()}: install the same")
        run, agent, config = check_name(str(words["run"])), int(words["agent"]), RunConfig.from_json(words["config"])
        if "stage" in words:
            self.policy.admit(config, self.ledger.rounds(run, 1))
            told = self.holdings.tell(config.settings, agent, str(words["stage"]), words["known"])
            reply = Parcel({**told, "digest": self.holdings.digest(config.settings, agent, run)})
            self.ledger.note(run=run, what="summaries", stage=words["stage"], bytes=reply.size)
            return reply
        if self.holdings.digest(config.settings, agent, run) != words["digest"]:
            raise Refused("this site's data is no longer what it was when the run began")
        answers = {}
        payloads: dict[str, bytes] = {}
        for content in words["tasks"]:
            task = Task.from_json(content)
            visit = Visit(self, run, agent, replace(config, settings=replace(config.settings, alice=task.alice)), words)
            said, update = visit.perform(task, request.payloads[task.course])
            answers[task.course] = said
            payloads |= {task.course: update} if update is not None else {}
        return Parcel({"courses": answers}, payloads)


class Visit:
    """One task of one course at this site."""

    def __init__(self, site: Site, run: str, agent: int, config: RunConfig, words: Mapping[str, Any]) -> None:
        self.site, self.run, self.agent, self.config, self.words = site, run, agent, config, words

    @cached_property
    def row(self) -> Row:
        s = self.config.settings
        federation = self.site.holdings.federation(s, self.agent, self.words["known"])
        model = model_of(s, federation, Place(), torch.device("cpu"))
        if model.fingerprint() != self.words["model"]:
            raise Refused(
                f"the server's model {s.model} has the fingerprint {self.words['model']}, "
                f"this site's {model.fingerprint()}"
            )
        return Row(self.config.algorithm(), federation, model, s.seed, s.batch_size, s.epochs, s.augment)

    def perform(self, task: Task, payload: bytes) -> tuple[dict[str, Any], bytes | None]:
        """(words, an update): train and examine, as far as the site's rules go."""
        policy, ledger = self.site.policy, self.site.ledger
        if task.round:
            policy.admit(self.config, ledger.rounds(self.run, task.round))
        down, given = self._read(task, payload)
        agents = given if task.restored else self._held(task)
        if agents is None:
            return {"lost": True}, None
        said: dict[str, Any] = {}
        update = self._train(task, down, agents) if task.round else None
        if task.examine:
            said["score"] = self._examine(task, self.row.own_model(down, agents))
        if task.final:
            net = self.row.own_model(down, agents)
            said |= self._close(task, net)
            update = self._model(down, agents, net)
        ledger.note(
            run=self.run,
            course=task.course,
            round=task.round,
            attempt=task.attempt,
            told=sorted(said.get("score", {})),
            bytes=len(update or b""),
        )
        return said, update

    def _read(self, task: Task, payload: bytes) -> tuple[Any, Any]:
        """What was sent down, and the agent's own state where it was restored; exact names, shapes and types."""
        down, agents = self.row.blank_down(), self.row.start()
        template: dict[str, Tensor] = dict(down._asdict())
        if task.restored:
            template |= {f"agents.{name}": value for name, value in agents._asdict().items()}
        try:
            _, tensors = unpack(payload, template)
        except WaffleError as error:
            raise Refused(f"what the server sent cannot be read: {error}") from None
        given = type(agents)(*(tensors[f"agents.{name}"] for name in agents._fields)) if task.restored else None
        return type(down)(*(tensors[name] for name in down._fields)), given

    def _held(self, task: Task) -> Any | None:
        """The state to go on from, or None if it is lost."""
        start = self.row.start()
        if task.base == Version() or not start._fields:
            return start
        return self.site.store.load(self.run, task.course, task.base, start)

    def _train(self, task: Task, down: Any, agents: Any) -> bytes:
        after, up = self.row.train(down, agents, task.round, task.attempt)
        if hasattr(up, "dy"):
            self.site.policy.check_norm(up.dy[0])
        if after._fields:
            if task.restored:
                self.site.store.save(self.run, task.course, task.base, task.base, agents)
            self.site.store.save(self.run, task.course, Version(task.round, task.attempt), task.base, after)
        envelope = Envelope(f"{self.run}/{task.course}/{task.attempt}", task.round, self.row.model.fingerprint())
        return seal(up, 0, envelope, self.row.steps)

    def _examine(self, task: Task, net: Net) -> dict[str, Any]:
        scores = self.row.examine(net)
        return {"finite": math.isfinite(scores["loss"]), **self.site.policy.let_out(scores)}

    def _close(self, task: Task, net: Net) -> dict[str, Any]:
        """The end of a run for Alice: her model is kept here, ready for `waffle predict`, and its metrics are told."""
        row, s = self.row, self.config.settings
        f = row.federation
        said = predictions(row.model, answering(row.algorithm, row.model, net, f), f)
        metrics = measure(said["output"], said["target"])
        folder = self.site.folder / "models" / f"{self.run}-{task.course}"
        folder.mkdir(parents=True, exist_ok=True)
        about = provenance(
            "cpu",
            f.digest(),
            agents=[self.site.settings.name],
            alice=0,
            task=f.task,
            classes=list(f.class_names),
            sample=list(f.shape),
            parameters=row.model.size,
            test_samples=len(f.test[0]),
            statistics="",
            notes=[],
        )
        write_json(folder / "config.json", self.config.to_json())
        write_json(folder / "provenance.json", about)
        if f.preprocessing:
            write_json(folder / "preprocessing.json", f.preprocessing.to_json())
        write_tensors(folder / "model.safetensors", {"round": str(s.rounds)}, row.model.state_dict(net))
        write_json(folder / "result.json", {"schema": 1, "status": "finished", "rounds": s.rounds, "metrics": metrics})
        return {"metrics": self.site.policy.let_out(metrics)}

    def _model(self, down: Any, agents: Any, net: Net) -> bytes | None:
        """Alice's model, where it is hers alone and she lets it out."""
        blank = type(agents)(*(torch.full_like(value, torch.nan) for value in agents))
        hers = bool(self.row.own_model(down, blank).params.isnan().any())
        if not hers or not self.site.policy.model_may_leave:
            return None
        return pack({"params": net.params, "stats": net.stats}, {"run": self.run})
