"""A site's rules against a malicious server: requests go directly to `Site.answer`."""

from __future__ import annotations

import fcntl
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

pytest.importorskip("flwr")

from benchmarks.exposure import imprint, recovered

from waffle_fl.algorithms import for_model
from waffle_fl.config import RunConfig, check_run
from waffle_fl.deploy import membership
from waffle_fl.deploy.client_app import answered
from waffle_fl.deploy.dry_run import dry_run
from waffle_fl.deploy.policy import Refused
from waffle_fl.deploy.settings_files import change, read_site
from waffle_fl.deploy.signing import OPERATOR_KEY, load_operator_key, sign
from waffle_fl.deploy.site import Site, software
from waffle_fl.deploy.survey import Answers, Stage, Survey, survey
from waffle_fl.engines.flower.messages import Message, Request, packed
from waffle_fl.engines.flower.server_run import RunPlan, ServerRun, initial_run_state
from waffle_fl.errors import WaffleError
from waffle_fl.models import FlatModel, builder, cross_entropy
from waffle_fl.tensorfile import pack

ROWS = 40


def table(path: Path, rows: int = ROWS, names: int = ROWS) -> None:
    """Write a table of patients with a name, two numbers and a ward to predict."""
    lines = ["name,age,dose,ward"]
    for i in range(rows):
        lines.append(f"patient{i % names},{20 + i * 7 % 60},{(i * 13 % 11) / 3:.3f},{'AB'[(i * i + i // 3) % 2]}")
    path.write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    membership.init(tmp_path / "fed", ["north"], "127.0.0.1", 9443, "127.0.0.1")
    folder = tmp_path / "fed" / "sites" / "north"
    (folder / "data").mkdir()
    table(folder / "data" / "north.csv")
    return folder


def config(method: str = "fedavg", options: dict[str, Any] | None = None, **settings: Any) -> RunConfig:
    given = {"data": "hospitals", "target": "ward", "alice": "north", "batch_size": 8, "rounds": 2, "model": "linear"}
    given |= {"min_category": 5}
    return check_run(method, {**given, **settings}, options or {})


class Server:
    """A malicious server that sends requests to one site under one run name and config."""

    def __init__(self, site: Path, requested: RunConfig, run: str = "run") -> None:
        self.site, self.run, self.config = site, run, requested
        self.key = load_operator_key(site.parent.parent / "keys" / OPERATOR_KEY)

    def send(self, payloads: dict[str, bytes] | None = None, **words: Any) -> Message:
        common = {"software": software(), "run": self.run, "agent": 0, "config": self.config.to_json()}
        request = Message(json.loads(json.dumps({**common, **words})), payloads or {})
        return Site(self.site).answer(sign(request, self.key, "north"))

    def survey(self) -> Survey:
        def answers_at(stage: Stage, known: dict[str, Any]) -> Answers:
            words = self.send(stage=stage, known=known).fields
            if "error" in words:
                raise WaffleError(words["error"])
            return {"north": dict(words)}

        return survey(answers_at, self.config.settings)

    def server_run(self, facts: Survey) -> ServerRun:
        s = self.config.settings
        model = FlatModel(
            builder(s.model, s.data, facts.shape, facts.outputs), loss=cross_entropy, precision=s.precision
        )
        algorithm = for_model(self.config.algorithm(), model.layers)
        samples = (facts.samples["north"],)
        steps = (s.steps(samples[0]),)
        plan = RunPlan(
            self.run, "course", algorithm, ("north",), 0, samples, steps, s.rounds, s.batch_size, "off", "north"
        )
        return ServerRun(plan, model, initial_run_state(algorithm, model, s.seed, 1))

    def send_tasks(
        self, facts: Survey, server_run: ServerRun, *tasks: tuple[dict[str, Any], bytes], **words: Any
    ) -> Message:
        """Send these tasks in one otherwise honest message."""
        spec = {"known": facts.known, "digest": facts.digests["north"], "model": server_run.model.fingerprint()}
        payloads = {str(task["course"]): payload for task, payload in tasks}
        return self.send(payloads, **{**spec, "tasks": [task for task, _ in tasks], **words})


class SurveyedSite(NamedTuple):
    """A surveyed site and the first task of a run."""

    server: Server
    facts: Survey
    server_run: ServerRun
    task: dict[str, Any]
    payload: bytes

    def send_tasks(self, payload: bytes | None = None, **changes: Any) -> Message:
        """Send the first task with these fields changed."""
        return self.server.send_tasks(self.facts, self.server_run, ({**self.task, **changes}, payload or self.payload))

    def answer(self, payload: bytes | None = None, **changes: Any) -> dict[str, Any]:
        return next(iter(self.send_tasks(payload, **changes).fields["courses"].values()))  # type: ignore[no-any-return]

    def other_models(self) -> Iterator[bytes]:
        """Yield payloads with other models."""
        tensors = load(self.payload)
        for k in range(1, 1000):
            yield pack({name: value + 0.01 * k for name, value in tensors.items()}, {})


def surveyed_site(site: Path, requested: RunConfig | None = None, run: str = "run") -> SurveyedSite:
    server = Server(site, requested or config())
    server.run = run
    facts = server.survey()
    server_run = server.server_run(facts)
    task, payload = server_run.request_for(0)
    return SurveyedSite(server, facts, server_run, task.to_json(), payload)


@pytest.fixture
def first(site: Path) -> SurveyedSite:
    write_patients(site)
    return surveyed_site(site)


def write_patients(site: Path, count: int = 4, rows: int = ROWS) -> None:
    """Write the site's table with this many different names."""
    table(site / "data" / "north.csv", rows, count)


def ledger(site: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (site / "ledger.jsonl").read_text().splitlines()]


AIM = {"columns": [], "target": "ward", "task": "classification", "classes": ["A", "B"]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target": "name"}, {"stage": "hello", "known": {}}),
        ({"target": "age", "task": "classification"}, {"stage": "hello", "known": {}}),
        ({}, {"stage": "columns", "known": {"aim": AIM, "kinds": {"name": "categorical"}}}),
        ({}, {"stage": "columns", "known": {"aim": AIM, "kinds": {"age": "numeric", "name": "categorical"}}}),
    ],
)
def test_columns_with_too_many_texts_are_refused(settings: dict[str, Any], words: dict[str, Any], site: Path) -> None:
    """A site refuses to send patient names, as target or as column, with an error that contains none of them."""
    lines = [f"patient{i},{i / 7:.3f},{i % 5},{'AB'[i % 2]}" for i in range(150)]
    (site / "data" / "north.csv").write_text("\n".join(["name,age,dose,ward", *lines]))
    answer = json.dumps(Server(site, config(**settings)).send(**words).fields)
    assert "more than 100 different texts, which do not leave this site" in answer
    assert "patient" not in answer


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("name", {"stage": "hello", "known": {}}),
        ("ward", {"stage": "columns", "known": {"aim": AIM, "kinds": {"name": "categorical"}}}),
    ],
)
def test_a_unique_text_per_row_is_refused(target: str, words: dict[str, Any], site: Path) -> None:
    """A column with a different text in every row does not leave the site, even if the site has few rows."""
    answer = json.dumps(Server(site, config(target=target)).send(**words).fields)
    assert "column 'name' has a different text in every row, which do not leave this site" in answer
    assert "patient" not in answer


@pytest.mark.parametrize(
    "settings",
    [{"split_seed": 1}, {"test_share": 0.26}, {"validation": 0.1}, {"target": "name"}, {"categorical": ("dose",)}],
)
def test_a_second_survey_is_refused(settings: dict[str, Any], site: Path) -> None:
    """The site summarises its data in one way only, since means under two splits would reveal single rows."""
    write_patients(site)
    Server(site, config()).survey()
    for run in ("run", "another"):
        other = Server(site, config(**settings), run)
        with pytest.raises(WaffleError, match=r"for 1 way\(s\) of reading and splitting it, and this is one more"):
            other.survey()
        facts = Server(site, config(), run).survey()
        words = {"known": facts.known, "digest": facts.digests["north"], "model": "", "tasks": []}
        assert "is one more" in other.send(**words).fields["error"]
    change(site / "site.toml", surveys=2, categorical=["dose"], targets=["ward", "name"])
    Server(site, config(**settings)).survey()


def test_the_same_survey_is_free(site: Path) -> None:
    """Runs with other methods, seeds and Alices on the same data do not count as new surveys."""
    write_patients(site)
    facts = [
        Server(site, config(m, seed=k), f"run-{k}").survey() for k, m in enumerate(("waffle-paper", "ditto", "local"))
    ]
    assert len({json.dumps(found.prepared) for found in facts}) == 1


@pytest.mark.parametrize(
    "known",
    [
        {"aim": {**AIM, "classes": ["B", "A"]}, "kinds": {"age": "numeric"}},
        {"aim": {**AIM, "task": "regression"}, "kinds": {"age": "numeric"}},
        {"aim": {**AIM, "target": "dose"}, "kinds": {"age": "numeric"}},
        {"aim": AIM, "kinds": {"age": "categorical"}},
    ],
)
def test_a_changed_request_within_a_survey_is_refused(known: dict[str, Any], site: Path) -> None:
    """The server's target, classes and column kinds cannot change within a survey."""
    write_patients(site)
    server = Server(site, config())
    server.survey()
    assert set(server.send(stage="columns", known=known).fields) == {"error", "software"}


@pytest.mark.parametrize(("rows", "refused"), [(5, True), (7, False)])
def test_few_rows_are_not_summarised(rows: int, refused: bool, site: Path) -> None:
    """A mean over fewer than five training rows does not leave the site."""
    write_patients(site, rows=rows)
    change(site / "site.toml", targets=["ward"])
    answer = Server(site, config()).send(stage="counts", known={"aim": AIM}).fields
    assert answer.get("error", "") == (
        "this site has fewer than 5 training rows, too few to summarise" if refused else ""
    )


def test_few_held_out_rows_give_no_score(site: Path) -> None:
    """A site with fewer than five held-out rows sends no score, which would reveal their labels."""
    write_patients(site, rows=12)
    change(site / "site.toml", targets=["ward"])
    assert surveyed_site(site).answer(examine=True, round=0) == {
        "error": "this site has fewer than 5 held-out rows, too few to score a model"
    }


def test_a_preparation_must_match_the_site_s_columns(first: SurveyedSite) -> None:
    """The server can neither repeat nor omit a column, nor add more categories than allowed."""
    prepared = first.facts.prepared
    assert prepared is not None
    columns = prepared["columns"]
    many = [{**columns[0], "categories": [str(i) for i in range(101)]}, *columns[1:]]
    for changed in ({"columns": columns[1:]}, {"columns": [*columns, columns[0]]}, {"columns": many}):
        known = {**first.facts.known, "prepared": {**prepared, **changed}}
        reply = first.server.send_tasks(first.facts, first.server_run, (first.task, first.payload), known=known)
        assert "error" in reply.fields["courses"]["course"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"course": name} for name in ("../../evil", "", "a/b", ".", 1, None, ["a"])),
        *({"attempt": value} for value in ("1/../../evil", -1, 1.5, True, None, 1 << 50)),
        *({"round": value} for value in ("1", -1, 2.0, False)),
        *({"base": value} for value in ([0], [0, "../x"], [-1, 0], [0, 0, 0], "ab", {"a": 1, "b": 2})),
        *({"alice": value} for value in (0, None)),
        *({"examine": 1}, {"final": "yes"}, {"restored": None}, {"more": 1}),
    ],
)
def test_every_field_of_a_task_has_its_type(changes: dict[str, Any], first: SurveyedSite) -> None:
    """A task field of another type is rejected, and none becomes a path."""
    with pytest.raises(WaffleError):
        Request.from_json({**first.task, **changes})
    before = sorted(first.server.site.parent.rglob("*"))
    assert first.send_tasks(**changes).fields["error"] == "failed at the site (WaffleError); see the site's own log"
    assert sorted(first.server.site.parent.rglob("*")) == before


def test_a_final_model_is_not_overwritten(first: SurveyedSite) -> None:
    """A stored final model is replaced neither by another run nor by another final model of the same run."""
    models = first.server.site / "models"
    final = {"round": 0, "final": True}
    assert "metrics" in first.answer(**final)
    original = (models / "run-course" / "model.safetensors").read_bytes()
    other = next(first.other_models())
    assert "metrics" in first.answer(other, **final)
    assert "metrics" in first.answer(**final)
    clash = surveyed_site(first.server.site, run="run-course")
    assert "metrics" in clash.answer(other, course="2", **final)
    assert (models / "run-course" / "model.safetensors").read_bytes() == original
    assert sorted(path.name for path in models.iterdir()) == ["run-course", "run-course-2", "run-course.2"]


@pytest.mark.parametrize("task", [{}, {"round": 0, "examine": True}, {"round": 0, "final": True}])
def test_rules_apply_to_requests_without_training(
    task: dict[str, Any], first: SurveyedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disallowed method is not scored, and a disallowed module is not imported."""
    canary = first.server.site / "canary"
    (canary / "modules").mkdir(parents=True)
    (canary / "modules" / "hostile_module.py").write_text(f"open({str(canary / 'imported')!r}, 'w')")
    monkeypatch.setattr(sys, "path", [str(canary / "modules"), *sys.path])
    change(first.server.site / "site.toml", methods=["fedavg"])
    first.server.config = config("ditto")
    assert "takes part in fedavg, not in ditto" in first.send_tasks(**task).fields["error"]
    first.server.config = config(model="hostile_module:build")
    assert "does not import 'hostile_module:build'" in first.send_tasks(**task).fields["error"]
    assert not (canary / "imported").exists()


@pytest.mark.parametrize("task", [{}, {"round": 0, "examine": True}, {"round": 0, "final": True}])
def test_different_requests_are_counted(task: dict[str, Any], first: SurveyedSite) -> None:
    """At most `rounds` different updates or scores leave the site; repeating a request is free."""
    change(first.server.site / "site.toml", rounds=2)
    models = first.other_models()
    payloads = [first.payload, next(models)]
    for payload in (*payloads, *payloads):
        assert "error" not in first.answer(payload, **task)
    assert "answers at most 2 rounds in total" in first.answer(next(models), **task)["error"]
    assert (
        "answers at most 2 rounds in total"
        in surveyed_site(first.server.site, config(seed=2), "new").answer(next(models), **task)["error"]
    )


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"round": 2}, {"alice": "south"}])
def test_another_attempt_is_another_request(changes: dict[str, Any], first: SurveyedSite) -> None:
    """Another attempt, round or Alice counts as one more request."""
    change(first.server.site / "site.toml", rounds=1)
    assert "error" not in first.answer()
    assert "error" not in first.answer(course="again")
    assert "answers at most 1 rounds in total" in first.answer(**changes)["error"]


def test_a_resumed_server_repeats_its_request(site: Path) -> None:
    """A round requested again without its score, or with the state that the site holds, is the same request."""
    write_patients(site)
    change(site / "site.toml", rounds=1)
    begun = surveyed_site(site, config("scaffold"))
    begun.server_run.lost.add(0)
    restored, payload = begun.server_run.request_for(0)
    assert restored.restored
    for answer in (begun.answer(examine=True), begun.answer(), begun.answer(payload, restored=True)):
        assert "error" not in answer
    assert "answers at most 1 rounds in total" in begun.answer(attempt=1)["error"]


def test_an_honest_run_fits_its_round_limit(site: Path) -> None:
    """A run of R rounds with scores and final model fits rounds = R, and repeating it is free."""
    write_patients(site)
    change(site / "site.toml", rounds=2)
    for _ in range(2):
        honest = surveyed_site(site)
        server_run = honest.server_run
        for _ in range(3):
            task, payload = server_run.request_for(0)
            reply = honest.server.send_tasks(honest.facts, server_run, (task.to_json(), payload))
            server_run.receive(0, reply.fields["courses"]["course"], reply.payloads.get("course"))
            server_run.advance(1)
        assert server_run.finished


def test_a_non_finite_update_leaves_as_nan(first: SurveyedSite) -> None:
    """An update with one infinite number leaves the site as NaN throughout, whatever its norm."""
    change(first.server.site / "site.toml", max_norm=1e-9)
    tensors = load(first.payload)
    name = max(tensors, key=lambda each: tensors[each].numel())
    tensors[name].view(-1)[0] = torch.inf
    reply = first.send_tasks(pack(tensors, {}))
    sent = load(reply.payloads["course"])
    assert sent["dy"].isnan().all()
    assert first.answer() == {"error": "the update's norm is too large to leave this site, which allows 1e-09"}


class Up(NamedTuple):
    dy: Tensor
    stats: Tensor
    p: Tensor
    chosen: Tensor


def test_the_norm_limit_covers_every_tensor(site: Path) -> None:
    """The norm limit applies to every tensor but the statistics; one non-finite number blanks them all."""
    policy = replace(read_site(site).policy, max_norm=1.0)
    short, long = torch.full((1, 3), 0.1), torch.full((1, 3), 1e200, dtype=torch.float64)
    chosen = torch.tensor([[1]])
    assert policy.let_update_out(Up(short, long, short, chosen)).stats is long
    for up in (Up(long, short, short, chosen), Up(short, short, long, chosen)):
        with pytest.raises(Refused, match="norm is too large to leave"):
            policy.let_update_out(up)
    out = policy.let_update_out(Up(short, short * torch.nan, short, chosen))
    assert all(value.isnan().all() for value in out[:3])
    assert out.chosen.item() == 0


def test_no_exception_leaves_with_its_text(site: Path, tmp_path: Path) -> None:
    """Every exception at a site leaves as its type only, and Flower sees no exception of the package."""
    good = packed(Message({"software": software()}))
    for folder, content in ((tmp_path / "gone", good), (site, {"words": 1}), (site, None)):
        reply = answered(folder, content)
        assert reply.fields["error"].startswith("failed at the site (")
        assert str(tmp_path) not in json.dumps(reply.fields)
    (site / "site.toml").write_text("secret =")
    assert answered(site, good).fields["error"].startswith("failed at the site (WaffleError)")


def test_nothing_leaves_without_a_ledger_entry(first: SurveyedSite) -> None:
    """If the ledger cannot be written, nothing leaves the site."""
    path = first.server.site / "ledger.jsonl"
    path.unlink()
    path.mkdir()
    reply = first.send_tasks()
    assert reply.payloads == {}
    assert reply.fields["error"].startswith("failed at the site (")


@pytest.mark.parametrize(
    "requested",
    [
        config(epochs=10**12),
        config(batch_size=10**9),
        config("pfedme", {"inner_steps": 10**12}),
        config("ifca", {"clusters": 10**9}),
        config("fedfomo", {"models": 10**9}),
    ],
    ids=lambda each: each.method,
)
def test_work_is_bounded(requested: RunConfig, first: SurveyedSite) -> None:
    """Steps, batches and model copies beyond the site's limits are refused before any is created."""
    first.server.config = requested
    assert "this site" in first.answer()["error"]


def test_messages_are_bounded(first: SurveyedSite) -> None:
    """A message above the site's size limit is not read, and model copies beyond it are not created."""
    change(first.server.site / "site.toml", max_mb=1)
    assert (
        first.send_tasks(bytes(2 << 20)).fields["error"] == "a message needs more than the 1 MB that this site allows"
    )
    first.server.config = config("ifca", {"clusters": 10**5})
    assert first.answer()["error"] == "this model needs more than the 1 MB that this site allows"


def test_a_refused_run_does_not_affect_others(first: SurveyedSite) -> None:
    """With alice = all each run has its own error, and the ledger records what left the site."""
    broken = ({**first.task, "course": "broken"}, b"rubbish")
    reply = first.server.send_tasks(first.facts, first.server_run, broken, (first.task, first.payload))
    assert reply.fields["courses"].keys() == {"broken", "course"}
    assert reply.fields["courses"]["broken"]["error"].startswith("the server's payload cannot be read")
    assert reply.payloads.keys() == {"course"}
    lines = {line["course"]: line for line in ledger(first.server.site)[-2:]}
    assert "update" not in lines["broken"]
    assert lines["broken"]["said"] == reply.fields["courses"]["broken"]
    assert lines["course"]["update"]["bytes"] == len(reply.payloads["course"])
    twice = first.server.send_tasks(
        first.facts, first.server_run, (first.task, first.payload), (first.task, first.payload)
    )
    assert twice.fields["error"] == "a message contains two requests for the same run"


def test_the_ledger_records_every_reply(first: SurveyedSite) -> None:
    """The ledger records scores, final metrics and refusals as they left the site."""
    score = first.answer(round=0, examine=True)
    metrics = first.answer(round=0, final=True)
    first.server.run = "../evil"
    refusal = first.send_tasks().fields["error"]
    answer = [line.get("said") for line in ledger(first.server.site)[-3:]]
    assert answer == [score, metrics, {"error": refusal}]
    assert metrics["metrics"]["accuracy"] >= 0


def test_one_answer_at_a_time(site: Path) -> None:
    """While one process answers, another waits, so that both are counted."""
    site_ledger = Site(site).ledger
    with site_ledger.alone(), (site / ".ledger.jsonl.lock").open("ab") as stream, pytest.raises(BlockingIOError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_dry_run_reports_refusals(site: Path) -> None:
    """The dry run reports a run that the site would refuse."""
    write_patients(site)
    change(site / "site.toml", max_norm=1e-9)
    with pytest.raises(
        WaffleError, match="this site would refuse the request, or fail: the update's norm is too large to leave"
    ):
        list(dry_run(site, config()))


def test_values_of_a_numeric_column_do_not_leave(site: Path) -> None:
    """A server that declares ages or doses categorical gets no values unless site.toml lists the column."""
    write_patients(site)
    for name in ("age", "dose"):
        answer = Server(site, config()).send(stage="columns", known={"aim": AIM, "kinds": {name: "categorical"}}).fields
        assert answer["error"] == (
            f"column {name!r} holds numbers, and their values do not leave this site: to allow it, list the column "
            "under categorical in its site.toml"
        )
    change(site / "site.toml", categorical=["dose"], min_count=1, surveys=9)
    listed = Server(site, config(min_category=1))
    answer = listed.send(stage="columns", known={"aim": AIM, "kinds": {"dose": "categorical"}}).fields
    assert "0.333" in answer["categories"]["dose"]


@pytest.mark.parametrize("target", ["age", "dose", "name"])
def test_the_values_of_a_column_do_not_leave_as_classes(target: str, site: Path) -> None:
    """Naming another column as the target does not make its distinct values leave."""
    write_patients(site, 12)
    server = Server(site, config(target=target, task="classification"))
    answer = json.dumps(server.send(stage="hello", known={}).fields)
    assert "error" in answer
    assert "patient" not in answer
    assert "3.333" not in answer
    change(site / "site.toml", targets=["ward"])
    assert "lets runs predict ward" in server.send(stage="hello", known={}).fields["error"]
    assert (
        "lets runs predict ward"
        in (Server(site, config(target="age", task="regression")).send(stage="hello", known={}).fields["error"])
    )


def test_a_rare_category_does_not_leave(site: Path) -> None:
    """A category or class with fewer rows than the site's minimum does not leave."""
    table(site / "data" / "north.csv", rows=38, names=4)
    with (site / "data" / "north.csv").open("a") as stream:
        stream.write("\nrare1,33,1.5,A\nrare2,34,1.6,B\n")
    reply = Server(site, config()).send(stage="columns", known={"aim": AIM, "kinds": {"name": "categorical"}}).fields
    assert "patient0" in reply["categories"]["name"]
    assert "rare" not in json.dumps(reply)
    lenient = Server(site, config(min_category=1), "curious")
    change(site / "site.toml", surveys=9)
    answer = lenient.send(stage="columns", known={"aim": AIM, "kinds": {"name": "categorical"}}).fields
    assert "fewer than 5 rows does not leave this site: run with --min-category 5" in answer["error"]
    with (site / "data" / "north.csv").open("a") as stream:
        stream.write("patient0,33,1.5,C\n")
    assert (
        "a class of column 'ward' has fewer than 5 rows here"
        in (Server(site, config(), "third").send(stage="hello", known={}).fields["error"])
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"mean": 1e6},
        {"deviation": 1e-3},
        {"deviation": 0.0},
        {"mean": float("inf")},
        {"rows": 3},
        {"kind": "categorical", "categories": ["20"]},
    ],
)
def test_impossible_means_are_refused(changes: dict[str, Any], first: SurveyedSite) -> None:
    """A preparation that is impossible given this site's rows is refused before training."""
    prepared = first.facts.prepared
    assert prepared is not None
    columns = [{**c, **changes} if c["name"] == "age" else c for c in prepared["columns"]]
    known = {**first.facts.known, "prepared": {**prepared, "columns": columns}}
    reply = first.server.send_tasks(first.facts, first.server_run, (first.task, first.payload), known=known)
    answer = reply.fields["courses"]["course"]["error"]
    assert "the server's" in answer or "holds numbers, and" in answer
    assert not reply.payloads


@pytest.mark.parametrize("clip", [None, 0.1])
def test_another_bound_of_inputs_is_refused(clip: float | None, first: SurveyedSite) -> None:
    """A preparation that clips otherwise than this version is refused before training."""
    known = {**first.facts.known, "prepared": {**(first.facts.prepared or {}), "clip": clip}}
    reply = first.server.send_tasks(first.facts, first.server_run, (first.task, first.payload), known=known)
    assert "clips standardised inputs at" in reply.fields["courses"]["course"]["error"]
    assert not reply.payloads


def test_reported_categories_cannot_be_omitted(first: SurveyedSite) -> None:
    """A preparation without a category that this site reported is refused."""
    prepared = first.facts.prepared
    assert prepared is not None
    columns = [
        {**c, "categories": c["categories"][1:]} if c["kind"] == "categorical" else c for c in prepared["columns"]
    ]
    known = {**first.facts.known, "prepared": {**prepared, "columns": columns}}
    reply = first.server.send_tasks(first.facts, first.server_run, (first.task, first.payload), known=known)
    assert "lacks categories that this site reported" in reply.fields["courses"]["course"]["error"]


@pytest.mark.parametrize("where", ["omega", "psi", "model", "aggregation"])
def test_no_unlisted_module_is_imported(where: str, first: SurveyedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that site.toml does not list is not imported, whichever setting names it."""
    canary = first.server.site / "canary"
    (canary / "modules").mkdir(parents=True)
    (canary / "modules" / "hostile_rule.py").write_text(f"open({str(canary / 'imported')!r}, 'w')\nbuild = print")
    monkeypatch.setattr(sys, "path", [str(canary / "modules"), *sys.path])
    content = config("waffle-paper").to_json()
    part = "settings" if where in content["settings"] else "options"
    content[part][where] = "hostile_rule:build"
    reply = first.server.send(stage="hello", known={}, config=content)
    assert "does not import 'hostile_rule:build'" in reply.fields["error"]
    assert not (canary / "imported").exists()
    assert "hostile_rule" not in sys.modules


def test_small_updates_reveal_rows_and_trap_weights_are_refused(site: Path) -> None:
    """One step from chosen weights would reveal the rows; min_steps and max_exposed refuse such requests."""
    rng = random.Random(1)
    lines = [f"p{i % 4},{rng.gauss(50, 12):.2f},{rng.gauss(3, 1):.3f},{'AB'[i % 2]}" for i in range(80)]
    (site / "data" / "north.csv").write_text("\n".join(["name,age,dose,ward", *lines]))
    requested = config(model="mlp", batch_size=64, precision="float64")
    change(site / "site.toml", min_steps=1, max_exposed=1.0)
    trapped = surveyed_site(site, requested)
    payload = pack({**load(trapped.payload), "x": imprint(trapped.server_run.model)[None]}, {})
    update = load(trapped.send_tasks(payload).payloads["course"])["dy"].reshape(-1)
    rows = Site(site).data.federation(requested.settings, 0, trapped.facts.known)
    train = rows.x[rows.train[0]].double()
    assert recovered(trapped.server_run.model, update, train) >= len(train) // 3

    change(site / "site.toml", min_steps=2)
    assert "fewer than 2 reveals too much about its rows" in trapped.answer(payload, round=2)["error"]
    change(site / "site.toml", min_steps=1, max_exposed=0.1)
    assert "its update would reveal them" in trapped.answer(payload, round=3)["error"]
    assert "error" not in surveyed_site(site, requested, "honest").answer(round=4)


@pytest.mark.parametrize("stage", ["counts", "columns", "train"])
@pytest.mark.parametrize(
    ("settings", "aim"),
    [
        ({"target": "dose", "task": "regression"}, {"task": "classification", "classes": ["0", "0.333"]}),
        ({"target": "dose", "task": "regression"}, {"task": "regression", "classes": ["0.333"]}),
        ({"target": "dose", "task": "regression"}, {"target": "age", "task": "regression", "classes": []}),
        ({"target": "ward"}, {"classes": ["A"]}),
        ({"target": "ward"}, {"classes": ["A", "B", *(str(i) for i in range(200))]}),
    ],
)
def test_the_server_cannot_redefine_the_target(
    stage: str, settings: dict[str, Any], aim: dict[str, Any], site: Path
) -> None:
    """At no stage can the server declare numbers as classes, whose weights would each hold one row."""
    write_patients(site)
    change(site / "site.toml", surveys=9)
    server = Server(site, config(**settings))
    facts = server.survey()
    assert facts.prepared is not None
    changed = {**facts.prepared, **aim}
    if stage == "train":
        server_run = server.server_run(facts)
        task, payload = server_run.request_for(0)
        known = {**facts.known, "prepared": changed}
        reply = server.send_tasks(facts, server_run, (task.to_json(), payload), known=known)
        answer = reply.fields["courses"]["course"]["error"]
    else:
        reply = server.send(stage=stage, known={"aim": {**changed, "columns": []}, "kinds": {"age": "numeric"}})
        answer = reply.fields["error"]
    assert "the server" in answer or "cannot be classes" in answer
    assert not reply.payloads


def test_a_target_that_is_not_listed_is_refused_in_every_stage(site: Path) -> None:
    """Skipping the first stage does not bypass the list of targets."""
    write_patients(site)
    change(site / "site.toml", targets=["ward"])
    for stage in ("hello", "counts", "columns"):
        aim = {**AIM, "target": "name", "classes": [f"patient{i}" for i in range(4)]}
        answer = Server(site, config(target="name")).send(stage=stage, known={"aim": aim, "kinds": {}}).fields
        assert "lets runs predict ward, not 'name'" in answer["error"]


@pytest.mark.parametrize(
    "changes",
    [{"kind": "other", "categories": ["20"]}, {"kind": None}, {"mean": "0"}, {"rows": 1e18}, {"rows": 10**18}],
)
def test_every_field_of_a_preparation_has_its_type(changes: dict[str, Any], first: SurveyedSite) -> None:
    """An unknown column kind, or an implausible number of rows, does not bypass the rules."""
    prepared = first.facts.prepared
    assert prepared is not None
    columns = [{**c, **changes} if c["name"] == "age" else c for c in prepared["columns"]]
    known = {**first.facts.known, "prepared": {**prepared, "columns": columns}}
    reply = first.server.send_tasks(first.facts, first.server_run, (first.task, first.payload), known=known)
    assert "error" in reply.fields["courses"]["course"]
    assert not reply.payloads


@pytest.mark.parametrize("named", ["this:", "antigravity:x y", "this:s:d", ":this"])
def test_no_import_outside_the_list(named: str, first: SurveyedSite) -> None:
    """`imports` must list an import exactly."""
    for part, where in (("options", "omega"), ("options", "psi"), ("settings", "model")):
        content = config("waffle-paper").to_json()
        content[part][where] = named
        reply = first.server.send(stage="hello", known={}, config=content)
        assert "does not import" in reply.fields["error"]
    assert not {"this", "antigravity"} & set(sys.modules)
