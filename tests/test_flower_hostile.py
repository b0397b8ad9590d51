"""A site's rules against a server that asks for more than it may: its messages go straight to `Site.answer`."""

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


def table(path: Path, rows: int = ROWS, people: int = ROWS) -> None:
    """Patients with a name each, two numbers, a ward to predict."""
    lines = ["name,age,dose,ward"]
    for i in range(rows):
        lines.append(f"patient{i % people},{20 + i * 7 % 60},{(i * 13 % 11) / 3:.3f},{'AB'[(i * i + i // 3) % 2]}")
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
    """Whoever holds the server: what he asks of one site under one run's name and config."""

    def __init__(self, site: Path, asked: RunConfig, run: str = "run") -> None:
        self.site, self.run, self.config = site, run, asked
        self.key = load_operator_key(site.parent.parent / "keys" / OPERATOR_KEY)

    def send(self, payloads: dict[str, bytes] | None = None, **words: Any) -> Message:
        common = {"software": software(), "run": self.run, "agent": 0, "config": self.config.to_json()}
        request = Message(json.loads(json.dumps({**common, **words})), payloads or {})
        return Site(self.site).answer(sign(request, self.key, "north"))

    def survey(self) -> Survey:
        def ask(stage: Stage, known: dict[str, Any]) -> Answers:
            words = self.send(stage=stage, known=known).fields
            if "error" in words:
                raise WaffleError(words["error"])
            return {"north": dict(words)}

        return survey(ask, self.config.settings)

    def course(self, facts: Survey) -> ServerRun:
        s = self.config.settings
        model = FlatModel(
            builder(s.model, s.data, facts.shape, facts.outputs), loss=cross_entropy, precision=s.precision
        )
        algorithm = for_model(self.config.algorithm(), model.layers)
        samples = (facts.samples["north"],)
        steps = (s.epochs * -(-samples[0] // s.batch_size),)
        plan = RunPlan(
            self.run, "course", algorithm, ("north",), 0, samples, steps, s.rounds, s.batch_size, "off", "north"
        )
        return ServerRun(plan, model, initial_run_state(algorithm, model, s.seed, 1))

    def order(self, facts: Survey, course: ServerRun, *tasks: tuple[dict[str, Any], bytes], **words: Any) -> Message:
        """These tasks in one message, honest in all besides."""
        spec = {"known": facts.known, "digest": facts.digests["north"], "model": course.model.fingerprint()}
        payloads = {str(task["course"]): payload for task, payload in tasks}
        return self.send(payloads, **{**spec, "tasks": [task for task, _ in tasks], **words})


class Scene(NamedTuple):
    """A site that has been surveyed, and the first task of a run."""

    server: Server
    facts: Survey
    course: ServerRun
    task: dict[str, Any]
    payload: bytes

    def order(self, payload: bytes | None = None, **changes: Any) -> Message:
        """The first task with these fields changed."""
        return self.server.order(self.facts, self.course, ({**self.task, **changes}, payload or self.payload))

    def said(self, payload: bytes | None = None, **changes: Any) -> dict[str, Any]:
        return next(iter(self.order(payload, **changes).fields["courses"].values()))  # type: ignore[no-any-return]

    def other_models(self) -> Iterator[bytes]:
        """Payloads with other models in them."""
        tensors = load(self.payload)
        for k in range(1, 1000):
            yield pack({name: value + 0.01 * k for name, value in tensors.items()}, {})


def scene(site: Path, asked: RunConfig | None = None, run: str = "run") -> Scene:
    server = Server(site, asked or config())
    server.run = run
    facts = server.survey()
    course = server.course(facts)
    task, payload = course.request_for(0)
    return Scene(server, facts, course, task.to_json(), payload)


@pytest.fixture
def first(site: Path) -> Scene:
    people(site)
    return scene(site)


def people(site: Path, count: int = 4, rows: int = ROWS) -> None:
    """The site's table anew, with so many different names in it."""
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
def test_more_texts_than_may_be_categories_stay(settings: dict[str, Any], words: dict[str, Any], site: Path) -> None:
    """Names of patients are refused by the site itself, as target or as column, in one line without any of them."""
    lines = [f"patient{i},{i / 7:.3f},{i % 5},{'AB'[i % 2]}" for i in range(150)]
    (site / "data" / "north.csv").write_text("\n".join(["name,age,dose,ward", *lines]))
    said = json.dumps(Server(site, config(**settings)).send(**words).fields)
    assert "more than 100 different texts, which do not leave this site" in said
    assert "patient" not in said


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("name", {"stage": "hello", "known": {}}),
        ("ward", {"stage": "columns", "known": {"aim": AIM, "kinds": {"name": "categorical"}}}),
    ],
)
def test_an_identifier_stays_however_few_there_are(target: str, words: dict[str, Any], site: Path) -> None:
    """A text of its own in every row is a name, also where the site has few rows."""
    said = json.dumps(Server(site, config(target=target)).send(**words).fields)
    assert "column 'name' has a different text in every row, which do not leave this site" in said
    assert "patient" not in said


@pytest.mark.parametrize(
    "settings",
    [{"split_seed": 1}, {"test_share": 0.26}, {"validation": 0.1}, {"target": "name"}, {"categorical": ("dose",)}],
)
def test_a_second_survey_is_refused(settings: dict[str, Any], site: Path) -> None:
    """Means under another split would give single rows by subtraction: the data is summarised in one way only."""
    people(site)
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
    """Runs of other methods, seeds and Alices on the same data, read alike, ask nothing new."""
    people(site)
    facts = [Server(site, config(m, seed=k), f"run-{k}").survey() for k, m in enumerate(("waffle", "ditto", "local"))]
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
def test_other_questions_within_a_survey_are_refused(known: dict[str, Any], site: Path) -> None:
    """What the server itself says of target, classes and kinds of columns is part of the one survey."""
    people(site)
    server = Server(site, config())
    server.survey()
    assert set(server.send(stage="columns", known=known).fields) == {"error", "software"}


@pytest.mark.parametrize(("rows", "refused"), [(5, True), (7, False)])
def test_few_rows_are_not_summarised(rows: int, refused: bool, site: Path) -> None:
    """A mean of fewer than five training rows does not leave."""
    people(site, rows=rows)
    change(site / "site.toml", targets=["ward"])
    said = Server(site, config()).send(stage="counts", known={"aim": AIM}).fields
    assert said.get("error", "") == (
        "this site has fewer than 5 training rows, too few to summarise" if refused else ""
    )


def test_few_rows_score_no_model(site: Path) -> None:
    """Fewer than five held-out rows tell nothing of a model: it would tell their labels."""
    people(site, rows=12)
    change(site / "site.toml", targets=["ward"])
    assert scene(site).said(examine=True, round=0) == {
        "error": "this site has fewer than 5 held-out rows, too few to score a model"
    }


def test_a_preparation_is_of_the_site_s_own_columns(first: Scene) -> None:
    """The server cannot have a column counted twice, left out, or made of more texts than may be categories."""
    prepared = first.facts.prepared
    assert prepared is not None
    columns = prepared["columns"]
    many = [{**columns[0], "categories": [str(i) for i in range(101)]}, *columns[1:]]
    for changed in ({"columns": columns[1:]}, {"columns": [*columns, columns[0]]}, {"columns": many}):
        known = {**first.facts.known, "prepared": {**prepared, **changed}}
        reply = first.server.order(first.facts, first.course, (first.task, first.payload), known=known)
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
def test_every_field_of_a_task_has_its_type(changes: dict[str, Any], first: Scene) -> None:
    """What a server writes into a task becomes neither a path nor anything but what the field is for."""
    with pytest.raises(WaffleError):
        Request.from_json({**first.task, **changes})
    before = sorted(first.server.site.parent.rglob("*"))
    assert first.order(**changes).fields["error"] == "failed at the site (WaffleError); see the site's own log"
    assert sorted(first.server.site.parent.rglob("*")) == before


def test_a_final_model_is_not_written_over(first: Scene) -> None:
    """Neither another run nor another final model of the same run takes the place of one that is kept."""
    models = first.server.site / "models"
    final = {"round": 0, "final": True}
    assert "metrics" in first.said(**final)
    kept = (models / "run-course" / "model.safetensors").read_bytes()
    other = next(first.other_models())
    assert "metrics" in first.said(other, **final)
    assert "metrics" in first.said(**final)
    clash = scene(first.server.site, run="run-course")
    assert "metrics" in clash.said(other, course="2", **final)
    assert (models / "run-course" / "model.safetensors").read_bytes() == kept
    assert sorted(path.name for path in models.iterdir()) == ["run-course", "run-course-2", "run-course.2"]


@pytest.mark.parametrize("task", [{}, {"round": 0, "examine": True}, {"round": 0, "final": True}])
def test_rules_hold_without_training(task: dict[str, Any], first: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is not allowed is not scored either, and a module that is not allowed is never imported."""
    canary = first.server.site / "canary"
    (canary / "modules").mkdir(parents=True)
    (canary / "modules" / "hostile_module.py").write_text(f"open({str(canary / 'sung')!r}, 'w')")
    monkeypatch.setattr(sys, "path", [str(canary / "modules"), *sys.path])
    change(first.server.site / "site.toml", methods=["fedavg"])
    first.server.config = config("ditto")
    assert "takes part in fedavg, not in ditto" in first.order(**task).fields["error"]
    first.server.config = config(model="hostile_module:build")
    assert "does not import 'hostile_module:build'" in first.order(**task).fields["error"]
    assert not (canary / "sung").exists()


@pytest.mark.parametrize("task", [{}, {"round": 0, "examine": True}, {"round": 0, "final": True}])
def test_different_questions_are_counted(task: dict[str, Any], first: Scene) -> None:
    """Of a round with other models only so many updates leave, or scores, as `rounds` says; the same again is free."""
    change(first.server.site / "site.toml", rounds=2)
    models = first.other_models()
    asked = [first.payload, next(models)]
    for payload in (*asked, *asked):
        assert "error" not in first.said(payload, **task)
    assert "answers at most 2 rounds in total" in first.said(next(models), **task)["error"]
    assert (
        "answers at most 2 rounds in total"
        in scene(first.server.site, config(seed=2), "new").said(next(models), **task)["error"]
    )


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"round": 2}, {"alice": "south"}])
def test_another_attempt_is_another_question(changes: dict[str, Any], first: Scene) -> None:
    """Other batches, another round or another Alice tell more of the rows: each is one more."""
    change(first.server.site / "site.toml", rounds=1)
    assert "error" not in first.said()
    assert "error" not in first.said(course="again")
    assert "answers at most 1 rounds in total" in first.said(**changes)["error"]


def test_a_resumed_server_asks_the_same(site: Path) -> None:
    """A round asked for again without its score, or with the state that the site holds, is the same question."""
    people(site)
    change(site / "site.toml", rounds=1)
    begun = scene(site, config("scaffold"))
    begun.course.lost.add(0)
    restored, payload = begun.course.request_for(0)
    assert restored.restored
    for said in (begun.said(examine=True), begun.said(), begun.said(payload, restored=True)):
        assert "error" not in said
    assert "answers at most 1 rounds in total" in begun.said(attempt=1)["error"]


def test_an_honest_run_of_so_many_rounds(site: Path) -> None:
    """A run of R rounds fits into rounds = R, its scores and its final model too, and the whole of it again is free."""
    people(site)
    change(site / "site.toml", rounds=2)
    for _ in range(2):
        honest = scene(site)
        course = honest.course
        for _ in range(3):
            task, payload = course.request_for(0)
            reply = honest.server.order(honest.facts, course, (task.to_json(), payload))
            course.receive(0, reply.fields["courses"]["course"], reply.payloads.get("course"))
            course.advance(1)
        assert course.finished


def test_what_is_not_finite_tells_nothing(first: Scene) -> None:
    """An update with one infinite number leaves as NaN from end to end, however long it is."""
    change(first.server.site / "site.toml", max_norm=1e-9)
    tensors = load(first.payload)
    name = max(tensors, key=lambda each: tensors[each].numel())
    tensors[name].view(-1)[0] = torch.inf
    reply = first.order(pack(tensors, {}))
    sent = load(reply.payloads["course"])
    assert sent["dy"].isnan().all()
    assert first.said() == {"error": "the update's norm is too large to leave this site, which allows 1e-09"}


class Up(NamedTuple):
    dy: Tensor
    stats: Tensor
    p: Tensor
    chosen: Tensor


def test_all_of_an_update_is_measured(site: Path) -> None:
    """Every tensor but the statistics has to be short enough, and each is blanked if any number is not finite."""
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
    """Whatever breaks before or in an answer is told by its kind: Flower never sees an exception of ours."""
    good = packed(Message({"software": software()}))
    for folder, content in ((tmp_path / "gone", good), (site, {"words": 1}), (site, None)):
        reply = answered(folder, content)
        assert reply.fields["error"].startswith("failed at the site (")
        assert str(tmp_path) not in json.dumps(reply.fields)
    (site / "site.toml").write_text("secret =")
    assert answered(site, good).fields["error"].startswith("failed at the site (WaffleError)")


def test_the_ledger_that_cannot_be_written(first: Scene) -> None:
    """What cannot be written down does not leave."""
    path = first.server.site / "ledger.jsonl"
    path.unlink()
    path.mkdir()
    reply = first.order()
    assert reply.payloads == {}
    assert reply.fields["error"].startswith("failed at the site (")


@pytest.mark.parametrize(
    "asked",
    [
        config(epochs=10**12),
        config(batch_size=10**9),
        config("pfedme", {"inner_steps": 10**12}),
        config("ifca", {"clusters": 10**9}),
        config("fedfomo", {"models": 10**9}),
    ],
    ids=lambda each: each.method,
)
def test_work_is_bounded(asked: RunConfig, first: Scene) -> None:
    """Steps, batches and copies of the model beyond what the site allows are refused before any is made."""
    first.server.config = asked
    assert "this site" in first.said()["error"]


def test_messages_are_bounded(first: Scene) -> None:
    """A message of more megabytes than the site allows is not read, nor are copies of a model beyond them made."""
    change(first.server.site / "site.toml", max_mb=1)
    assert first.order(bytes(2 << 20)).fields["error"] == "a message needs more than the 1 MB that this site allows"
    first.server.config = config("ifca", {"clusters": 10**5})
    assert first.said()["error"] == "this model needs more than the 1 MB that this site allows"


def test_one_course_that_is_refused_costs_no_other(first: Scene) -> None:
    """With alice = all each run has its own error, and the ledger records what left."""
    broken = ({**first.task, "course": "broken"}, b"rubbish")
    reply = first.server.order(first.facts, first.course, broken, (first.task, first.payload))
    assert reply.fields["courses"].keys() == {"broken", "course"}
    assert reply.fields["courses"]["broken"]["error"].startswith("the server's payload cannot be read")
    assert reply.payloads.keys() == {"course"}
    lines = {line["course"]: line for line in ledger(first.server.site)[-2:]}
    assert "update" not in lines["broken"]
    assert lines["broken"]["said"] == reply.fields["courses"]["broken"]
    assert lines["course"]["update"]["bytes"] == len(reply.payloads["course"])
    twice = first.server.order(first.facts, first.course, (first.task, first.payload), (first.task, first.payload))
    assert twice.fields["error"] == "a message contains two requests for the same run"


def test_the_ledger_has_all_that_was_said(first: Scene) -> None:
    """Scores, final metrics and refusals stand in the ledger as they left."""
    score = first.said(round=0, examine=True)
    metrics = first.said(round=0, final=True)
    first.server.run = "../evil"
    refusal = first.order().fields["error"]
    said = [line.get("said") for line in ledger(first.server.site)[-3:]]
    assert said == [score, metrics, {"error": refusal}]
    assert metrics["metrics"]["accuracy"] >= 0


def test_one_answer_at_a_time(site: Path) -> None:
    """While one process answers, another waits: neither counts without the other."""
    own = Site(site).ledger
    with own.alone(), (site / ".ledger.jsonl.lock").open("ab") as stream, pytest.raises(BlockingIOError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_dry_run_says_what_would_be_refused(site: Path) -> None:
    """The dry run reports a run that the site would refuse."""
    people(site)
    change(site / "site.toml", max_norm=1e-9)
    with pytest.raises(
        WaffleError, match="this site would refuse the request, or fail: the update's norm is too large to leave"
    ):
        list(dry_run(site, config()))


def test_the_values_of_a_numeric_column_stay(site: Path) -> None:
    """A server that calls ages or doses categories gets none of them, unless the site lists the column itself."""
    people(site)
    for name in ("age", "dose"):
        said = Server(site, config()).send(stage="columns", known={"aim": AIM, "kinds": {name: "categorical"}}).fields
        assert said["error"] == (
            f"column {name!r} holds numbers, and their values do not leave this site: to allow it, list the column "
            "under categorical in its site.toml"
        )
    change(site / "site.toml", categorical=["dose"], min_count=1, surveys=9)
    listed = Server(site, config(min_category=1))
    said = listed.send(stage="columns", known={"aim": AIM, "kinds": {"dose": "categorical"}}).fields
    assert "0.333" in said["categories"]["dose"]


@pytest.mark.parametrize("target", ["age", "dose", "name"])
def test_the_values_of_a_column_do_not_leave_as_classes(target: str, site: Path) -> None:
    """Naming another column as the target does not make its distinct values leave."""
    people(site, 12)
    asked = Server(site, config(target=target, task="classification"))
    said = json.dumps(asked.send(stage="hello", known={}).fields)
    assert "error" in said
    assert "patient" not in said
    assert "3.333" not in said
    change(site / "site.toml", targets=["ward"])
    assert "lets runs predict ward" in asked.send(stage="hello", known={}).fields["error"]
    assert (
        "lets runs predict ward"
        in (Server(site, config(target="age", task="regression")).send(stage="hello", known={}).fields["error"])
    )


def test_a_rare_category_stays(site: Path) -> None:
    """A category, or a class, that fewer rows have than the site's rule says does not leave."""
    table(site / "data" / "north.csv", rows=38, people=4)
    with (site / "data" / "north.csv").open("a") as stream:
        stream.write("\nrare1,33,1.5,A\nrare2,34,1.6,B\n")
    told = Server(site, config()).send(stage="columns", known={"aim": AIM, "kinds": {"name": "categorical"}}).fields
    assert "patient0" in told["categories"]["name"]
    assert "rare" not in json.dumps(told)
    curious = Server(site, config(min_category=1), "curious")
    change(site / "site.toml", surveys=9)
    said = curious.send(stage="columns", known={"aim": AIM, "kinds": {"name": "categorical"}}).fields
    assert "fewer than 5 rows does not leave this site: run with --min-category 5" in said["error"]
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
def test_made_up_means_are_not_believed(changes: dict[str, Any], first: Scene) -> None:
    """A preparation that no rows with this site's among them can have is refused before anything is trained."""
    prepared = first.facts.prepared
    assert prepared is not None
    columns = [{**c, **changes} if c["name"] == "age" else c for c in prepared["columns"]]
    known = {**first.facts.known, "prepared": {**prepared, "columns": columns}}
    reply = first.server.order(first.facts, first.course, (first.task, first.payload), known=known)
    said = reply.fields["courses"]["course"]["error"]
    assert "the server's" in said or "holds numbers, and" in said
    assert not reply.payloads


def test_categories_that_were_told_cannot_be_left_out(first: Scene) -> None:
    prepared = first.facts.prepared
    assert prepared is not None
    columns = [
        {**c, "categories": c["categories"][1:]} if c["kind"] == "categorical" else c for c in prepared["columns"]
    ]
    known = {**first.facts.known, "prepared": {**prepared, "columns": columns}}
    reply = first.server.order(first.facts, first.course, (first.task, first.payload), known=known)
    assert "lacks categories that this site reported" in reply.fields["courses"]["course"]["error"]


@pytest.mark.parametrize("where", ["omega", "psi", "model", "aggregation"])
def test_nothing_that_a_request_names_is_imported(where: str, first: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules come first: a module that site.toml does not list is not even looked for, wherever it is named."""
    canary = first.server.site / "canary"
    (canary / "modules").mkdir(parents=True)
    (canary / "modules" / "hostile_rule.py").write_text(f"open({str(canary / 'sung')!r}, 'w')\nbuild = print")
    monkeypatch.setattr(sys, "path", [str(canary / "modules"), *sys.path])
    content = config("waffle").to_json()
    part = "settings" if where in content["settings"] else "options"
    content[part][where] = "hostile_rule:build"
    reply = first.server.send(stage="hello", known={}, config=content)
    assert "does not import 'hostile_rule:build'" in reply.fields["error"]
    assert not (canary / "sung").exists()
    assert "hostile_rule" not in sys.modules


def test_small_updates_reveal_rows_and_trap_weights_are_refused(site: Path) -> None:
    """One step from chosen weights hands over the rows; the site's floor and its look at the model refuse that."""
    rng = random.Random(1)
    lines = [f"p{i % 4},{rng.gauss(50, 12):.2f},{rng.gauss(3, 1):.3f},{'AB'[i % 2]}" for i in range(80)]
    (site / "data" / "north.csv").write_text("\n".join(["name,age,dose,ward", *lines]))
    asked = config(model="mlp", batch_size=64, precision="float64")
    change(site / "site.toml", min_steps=1, max_exposed=1.0)
    trapped = scene(site, asked)
    payload = pack({**load(trapped.payload), "x": imprint(trapped.course.model)[None]}, {})
    update = load(trapped.order(payload).payloads["course"])["dy"].reshape(-1)
    rows = Site(site).data.federation(asked.settings, 0, trapped.facts.known)
    train = rows.x[rows.train[0]].double()
    assert recovered(trapped.course.model, update, train) >= len(train) // 3

    change(site / "site.toml", min_steps=2)
    assert "fewer than 2 reveals too much about its rows" in trapped.said(payload, round=2)["error"]
    change(site / "site.toml", min_steps=1, max_exposed=0.1)
    assert "its update would reveal them" in trapped.said(payload, round=3)["error"]
    assert "error" not in scene(site, asked, "honest").said(round=4)


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
def test_the_server_s_word_on_the_target_is_not_believed(
    stage: str, settings: dict[str, Any], aim: dict[str, Any], site: Path
) -> None:
    """Numbers cannot be declared classes, whose weights would each hold a row; in no stage, `hello` skipped or not."""
    people(site)
    change(site / "site.toml", surveys=9)
    server = Server(site, config(**settings))
    facts = server.survey()
    assert facts.prepared is not None
    changed = {**facts.prepared, **aim}
    if stage == "train":
        course = server.course(facts)
        task, payload = course.request_for(0)
        known = {**facts.known, "prepared": changed}
        reply = server.order(facts, course, (task.to_json(), payload), known=known)
        said = reply.fields["courses"]["course"]["error"]
    else:
        reply = server.send(stage=stage, known={"aim": {**changed, "columns": []}, "kinds": {"age": "numeric"}})
        said = reply.fields["error"]
    assert "the server" in said or "cannot be classes" in said
    assert not reply.payloads


def test_a_target_that_is_not_listed_is_refused_in_every_stage(site: Path) -> None:
    """Leaving out the first question does not help."""
    people(site)
    change(site / "site.toml", targets=["ward"])
    for stage in ("hello", "counts", "columns"):
        aim = {**AIM, "target": "name", "classes": [f"patient{i}" for i in range(4)]}
        said = Server(site, config(target="name")).send(stage=stage, known={"aim": aim, "kinds": {}}).fields
        assert "lets runs predict ward, not 'name'" in said["error"]


@pytest.mark.parametrize(
    "changes",
    [{"kind": "other", "categories": ["20"]}, {"kind": None}, {"mean": "0"}, {"rows": 1e18}, {"rows": 10**18}],
)
def test_every_field_of_a_preparation_has_its_type(changes: dict[str, Any], first: Scene) -> None:
    """A kind that nobody knows is no way around the rules, and no number of rows makes any mean possible."""
    prepared = first.facts.prepared
    assert prepared is not None
    columns = [{**c, **changes} if c["name"] == "age" else c for c in prepared["columns"]]
    known = {**first.facts.known, "prepared": {**prepared, "columns": columns}}
    reply = first.server.order(first.facts, first.course, (first.task, first.payload), known=known)
    assert "error" in reply.fields["courses"]["course"]
    assert not reply.payloads


@pytest.mark.parametrize("named", ["this:", "antigravity:x y", "this:s:d", ":this"])
def test_nothing_with_a_colon_is_imported(named: str, first: Scene) -> None:
    """Whatever the import would be made of, `imports` must list it word for word."""
    for part, where in (("options", "omega"), ("options", "psi"), ("settings", "model")):
        content = config("waffle").to_json()
        content[part][where] = named
        reply = first.server.send(stage="hello", known={}, config=content)
        assert "does not import" in reply.fields["error"]
    assert not {"this", "antigravity"} & set(sys.modules)
