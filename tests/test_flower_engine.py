"""The engine for real machines, its sites in this process: the same bits as the simulator, whatever happens to it."""

from __future__ import annotations

import fcntl
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("flwr")

from conftest import FakeClock
from flower_harness import Grid, bits, conduct, federation, simulated
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.cli import _run, job_watcher
from waffle_fl.cli.display import ProgressDisplay
from waffle_fl.cli.progress import ProgressFlags
from waffle_fl.config import RunConfig, check_run
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.preflight import check_deployable
from waffle_fl.deploy.server_app import JobRunner, main
from waffle_fl.deploy.settings_files import change, read_server
from waffle_fl.deploy.site import software
from waffle_fl.engines.flower import transport
from waffle_fl.engines.flower.messages import Message
from waffle_fl.errors import WaffleError
from waffle_fl.inference.trained_run import open_run
from waffle_fl.results import read_runs
from waffle_fl.tensorfile import pack, parse_header

SITES = ("a", "b", "c")


def config(method: str = "waffle", **settings: Any) -> RunConfig:
    given = {
        "data": "digits",
        "agents": 3,
        "samples_per_agent": 40,
        "batch_size": 16,
        "rounds": 3,
        "precision": "float64",
        "guard": "standard",
        "model": "mlp",
    }
    return check_run(method, {**given, **settings}, {})


def hospitals(folder: Path, target: str = "ward") -> Path:
    """Two tables with numbers, categories, a column of both, missing cells, and either class or number to predict."""
    folder.mkdir()
    for name, n, shift in (("north", 37, 0.0), ("south", 23, 1.5)):
        lines = ["age,sex,dose,ward,cost"]
        for i in range(n):
            dose = "" if i % 7 == 3 else f"{(i * 13 % 11) / 3 + shift:.3f}"
            sex = ("m", "f", "?")[i % 3]
            lines.append(f"{20 + i * 7 % 60},{sex},{dose},{'AB'[(i * i + i // 3) % 2]},{i * 1.37 + shift:.2f}")
        (folder / f"{name}.csv").write_text("\n".join(lines))
    return folder


def tables(method: str = "waffle", **settings: Any) -> RunConfig:
    given = {"target": "ward", "alice": "south", "batch_size": 8, "rounds": 3, "precision": "float64"}
    given |= {"min_category": 5}
    return check_run(method, {"data": "hospitals", "guard": "standard", **given, **settings}, {})


@pytest.mark.parametrize("settings", [{}, {"preprocessing": "local"}, {"target": "cost"}, {"validation": 0.2}])
def test_tables_end_in_the_simulator_s_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    """Sites that each hold one table agree on its columns from summaries alone, and train in the simulator's bits."""
    own = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "own", ("north", "south"), str(own))
    grid = Grid(folder)
    conduct(folder, tables(**settings), tmp_path / "run", grid)
    model, rounds, result = bits(tmp_path / "run")
    twin = bits(simulated(tables(data=str(own), **settings), tmp_path / "twin"))
    assert (model, rounds) == twin[:2]
    assert result["metrics"] == twin[2]["metrics"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "federation", SITES)


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_every_method_ends_in_the_simulator_s_bits(method: str, folder: Path, tmp_path: Path) -> None:
    """F16: sites that answer one by one, each from its own files, give the simulator's model and record in all bits."""
    conduct(folder, config(method), tmp_path / "run")
    model, rounds, result = bits(tmp_path / "run")
    twin = bits(simulated(config(method), tmp_path / "twin"))
    assert (model, rounds) == twin[:2]
    assert {k: v for k, v in result.items() if k != "metrics"} == {k: v for k, v in twin[2].items() if k != "metrics"}
    assert result["metrics"] == twin[2]["metrics"]


@pytest.mark.parametrize("method", ["knn-per", "fedfomo", "ifca", "fedala", "fedrep"])
@pytest.mark.parametrize("settings", [{"validation": 0.2}, {"target": "cost"}])
def test_optional_hooks(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Methods that judge models on own samples, rehearse, answer with neighbours or cut a model: the same bits."""
    own = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "own", ("north", "south"), str(own))
    conduct(folder, tables(method, **settings), tmp_path / "run")
    twin = bits(simulated(tables(method, data=str(own), **settings), tmp_path / "twin"))
    assert bits(tmp_path / "run")[:2] == twin[:2]


@pytest.mark.parametrize("method", ["waffle", "ditto", "fedfomo", "ifca", "cfl", "knn-per", "fedala", "fedper"])
def test_alice_all(method: str, folder: Path, tmp_path: Path) -> None:
    """With alice = "all" one message carries every Alice's federation, and each run ends in its simulation's bits."""
    wanted = config(method, alice="all", rounds=2)
    grid = Grid(folder)
    conduct(folder, wanted, tmp_path / "runs", grid)
    assert len([request for _, request in grid.requests if "tasks" in request.fields]) == 3 * 2 + 3
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    for run in runs:
        alice = read_runs([run])[0].config
        assert bits(run)[:2] == bits(simulated(alice, tmp_path / f"twin-{run.name}"))[:2]


def test_a_run_folder_is_like_any_other(folder: Path, tmp_path: Path) -> None:
    """The server's folder can be reported and asked, and so can the model that stays at Alice's site."""
    job = conduct(folder, config(), tmp_path / "run")
    (finished,) = read_runs([tmp_path / "run"])
    assert finished.result["status"] == "finished"
    x = torch.zeros(2, 1, 8, 8)
    (fit_locally,) = (folder / "sites" / "a" / "models").iterdir()
    assert fit_locally.name.startswith(job.run)
    assert torch.equal(open_run(tmp_path / "run").outputs(x), open_run(fit_locally).outputs(x))


@pytest.mark.parametrize("method", ["waffle", "waffle-kin"])
def test_a_model_that_the_server_made_need_not_be_let_out(method: str, folder: Path, tmp_path: Path) -> None:
    """Where Alice's model is made of what the server sent, its run folder has it, whatever her site lets out."""
    for site in (folder / "sites").iterdir():
        change(site / "site.toml", model_may_leave=False)
    conduct(folder, config(method), tmp_path / "run")
    assert bits(tmp_path / "run")[0] == bits(simulated(config(method), tmp_path / "twin"))[0]


@pytest.mark.parametrize("losers", [("a", "b"), ("b",)])
@pytest.mark.parametrize("method", ["scaffold", "waffle", "waffle-kin", "ifca"])
def test_f4_a_lost_state_is_restored(method: str, losers: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """F4: sites whose disk was lost get their state from the server's copy, and no bit changes."""
    seen: list[int] = []

    def lose(name: str, request: Message, reply: Message) -> Message:
        (task,) = request.fields.get("tasks", [{}])
        if task.get("round") == 2 and name in losers and len(seen) < len(losers):
            seen.append(1)
            shutil.rmtree(folder / "sites" / name / "state")
        return reply

    conduct(folder, config(method), tmp_path / "run", Grid(folder, lose))
    restored = [line.get("refused") for line in bits(tmp_path / "run")[1]]
    assert [len(notes or ()) for notes in restored] == [0, 0, len(losers)]
    model, rounds, _ = bits(tmp_path / "run")
    twin = bits(simulated(config(method), tmp_path / "twin"))
    assert model == twin[0]
    assert [{k: v for k, v in line.items() if k != "refused"} for line in rounds] == twin[1]


def test_f4_alice_s_own_model_is_not_guessed(folder: Path, tmp_path: Path) -> None:
    """F4: a personal model of Alice that is lost cannot be restored by the server: the run stops and says so."""

    def lose(name: str, request: Message, reply: Message) -> Message:
        if request.fields.get("tasks", [{}])[0].get("round") == 2 and name == "a":
            shutil.rmtree(folder / "sites" / name / "state")
        return reply

    with pytest.raises(WaffleError, match="lost her personal model of round 2"):
        conduct(folder, config("ditto"), tmp_path / "run", Grid(folder, lose))


@pytest.mark.parametrize("resumed", [False, True])
def test_f4_one_alice_s_loss_is_her_own(resumed: bool, folder: Path, tmp_path: Path) -> None:
    """F4: of many Alices one that lost her personal model ends her run alone; all others finish theirs."""
    wanted = config("ditto", alice="all", rounds=2)

    def lost(name: str, request: Message, reply: Message) -> Message:
        course = next((task["course"] for task in request.fields.get("tasks", []) if task["examine"]), "")
        if name != "b" or not course:
            return reply
        return Message({**reply.fields, "courses": {**reply.fields["courses"], course: {"lost": True}}}, reply.payloads)

    for _ in range(1 + resumed):
        with pytest.raises(
            WaffleError,
            match=r"^Alice \(agent 1\) lost her personal model of round 1.*continue with waffle deploy resume$",
        ):
            conduct(folder, wanted, tmp_path / "runs", Grid(folder, lost))
    ended = sorted(path.parent.name for path in (tmp_path / "runs").glob("*/result.json"))
    assert ended == ["digits-C-ditto-1", "digits-C-ditto-1-2"]


UNTOLD = {"accuracy": 10**400, "loss": None, "validation_loss": "low", "rmse": 0.5, "more": 1}


@pytest.mark.parametrize("r", [1, 2, 3])
def test_what_alice_tells_is_a_number_or_nothing(r: int, folder: Path, tmp_path: Path) -> None:
    """A score that is no finite number of this task is recorded as none, and the run finishes."""

    def boast(name: str, request: Message, reply: Message) -> Message:
        (task,) = request.fields.get("tasks", [{}])
        if not task.get("examine") or task["base"][0] != r:
            return reply
        said = {**reply.fields["courses"][task["course"]], "score": {"finite": True, **UNTOLD}}
        if task["final"]:
            said["metrics"] = {"auc": float("inf"), "log_loss": 10**400, "loss": True, **UNTOLD}
        return Message({**reply.fields, "courses": {task["course"]: said}}, reply.payloads)

    conduct(folder, config(), tmp_path / "run", Grid(folder, boast))
    _, rounds, result = bits(tmp_path / "run")
    assert [line["accuracy"] is None for line in rounds] == [line["round"] == r for line in rounds]
    assert all("rmse" not in line and "more" not in line for line in rounds)
    assert result["best"]["round"] != r
    assert r != 3 or result["metrics"] == dict.fromkeys(("accuracy", "loss", "validation_loss", "auc", "log_loss"))


@pytest.mark.parametrize(
    "told",
    [
        {"moments": {"age": [3, float("nan"), 1.0], "dose": [3, 1.0, 1.0]}},
        {"moments": {"age": [3, 40.0, float("inf")], "dose": [3, 1.0, 1.0]}},
        {"moments": {"age": [3, 40.0, -1.0], "dose": [3, 1.0, 1.0]}},
        {"moments": {"age": [-3, 40.0, 1.0], "dose": [3, 1.0, 1.0]}},
        {"moments": {"age": [float("inf"), 40.0, 1.0], "dose": [3, 1.0, 1.0]}},
        {"moments": {"age": [3, 1e300, 1.0], "dose": [3, 1.0, 1.0]}},
        {"moments": {"age": [3, 10**400, 1.0], "dose": [3, 1.0, 1.0]}},
        {"moments": 3},
        {"categories": {"sex": 3}},
        {"categories": None},
        {"counts": {"age": [-1, 0, 0]}},
        {"counts": {"age": [float("inf"), 0, 0]}},
        {"samples": -1},
        {"samples": float("inf")},
        {"columns": 3},
        {"values": 3},
        {"categorical": {}},
        {"target": {}},
        {"digest": None},
    ],
)
def test_summaries_are_checked(told: dict[str, Any], tmp_path: Path) -> None:
    """A site that tells of its data what cannot be is named before the first round."""
    own = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "own", ("north", "south"), str(own))

    def lie(name: str, request: Message, reply: Message) -> Message:
        replaced = {key: value for key, value in told.items() if key in reply.fields}
        return Message({**reply.fields, **replaced}) if name == "south" else reply

    with pytest.raises(WaffleError, match=r"^south sent a survey reply that cannot be read: [^\n]+$"):
        conduct(folder, tables(), tmp_path / "run", Grid(folder, lie))


def test_a_model_is_not_made_for_one_site_s_classes(folder: Path, tmp_path: Path) -> None:
    """W6: a site that tells of a million classes is refused before a model is made for them."""

    def lie(name: str, request: Message, reply: Message) -> Message:
        return Message({**reply.fields, "classes": ["x"] * 1_000_000}) if name == "b" else reply

    with pytest.raises(WaffleError, match=r"^b sent a survey reply .*: 1000000 classes, more than 10000$"):
        conduct(folder, config(), tmp_path / "run", Grid(folder, lie))


@pytest.mark.parametrize("kind", [["tables"], None, "\x1b[31mred"])
def test_another_kind_of_data(kind: Any, tmp_path: Path) -> None:
    """Sites that hold different kinds of data are told so, in a line that no terminal takes for orders."""
    folder = federation(tmp_path / "own", ("north", "south"), str(hospitals(tmp_path / "hospitals")))

    def lie(name: str, request: Message, reply: Message) -> Message:
        return Message({**reply.fields, "kind": kind}) if name == "south" else reply

    with pytest.raises(WaffleError, match=r"^the sites differ in the kind of their data: north has tables") as caught:
        conduct(folder, tables(), tmp_path / "run", Grid(folder, lie))
    assert str(caught.value).isprintable()


def test_a_crash_at_any_message_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    """F6: a server that dies at any message of a run ends, resumed, in the bits of the unbroken run."""
    twin = bits(simulated(config(), tmp_path / "twin"))
    wanted = config()
    for k in range(3, 15, 2):
        out, received = tmp_path / f"run-{k}", []

        def die(name: str, request: Message, reply: Message, k: int = k, received: list[int] = received) -> Message:
            received.append(1)
            if len(received) == k:
                raise KeyboardInterrupt
            return reply

        with pytest.raises(KeyboardInterrupt):
            conduct(folder, wanted, out, Grid(folder, die))
        conduct(folder, wanted, out)
        assert bits(out)[:2] == twin[:2]


def test_f1_an_absent_agent(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: an agent that does not answer in time has weight 0 in that round, and is back in the next."""
    monkeypatch.setattr(transport, "PAUSE", 0.05)
    change(folder / "server.toml", deadline=0.5)

    def absent(name: str, request: Message, reply: Message) -> Message | None:
        return None if name == "b" and request.fields.get("tasks", [{}])[0].get("round") == 2 else reply

    conduct(folder, config(), tmp_path / "run", Grid(folder, absent))
    rounds = bits(tmp_path / "run")[1]
    assert [line["weights"][1] > 0 for line in rounds[:2]] == [True, False]
    assert rounds[1]["screened"] == {"agent 1": "absent"}
    assert "screened" not in rounds[2]


@pytest.mark.parametrize("fault", ["cut", "replayed", "not finite", "another's", "rubbish"])
def test_w_what_arrives_is_checked(fault: str, folder: Path, tmp_path: Path) -> None:
    """W1-W8: an update that is damaged, old, not finite or another run's costs its agent the weight, and no more."""
    first: dict[str, Message] = {}

    def tamper(name: str, request: Message, reply: Message) -> Message:
        if name != "b" or not reply.payloads:
            return reply
        first.setdefault(name, reply)
        if request.fields["tasks"][0]["round"] != 2:
            return reply
        ((course, payload),) = reply.payloads.items()
        nan = pack({"dy": torch.full((4810,), torch.nan).double(), "stats": torch.zeros(0).double()}, labels(payload))
        changed = {
            "cut": payload[:-1],
            "replayed": first[name].payloads[course],
            "not finite": nan,
            "another's": payload.replace(course.encode(), b"x" * len(course)),
            "rubbish": b"\x80\x04cos\nsystem\n",
        }
        return Message(reply.fields, {course: changed[fault]})

    change(folder / "server.toml", quorum=1)
    conduct(folder, config(), tmp_path / "run", Grid(folder, tamper))
    rounds = bits(tmp_path / "run")[1]
    assert [line["weights"][1] > 0 for line in rounds[:2]] == [True, False]
    assert rounds[1]["screened"] == {"agent 1": "not finite" if fault == "not finite" else "absent"}
    assert ("refused" in rounds[1]) == (fault != "not finite")


def labels(payload: bytes) -> dict[str, str]:
    """What a payload says of itself."""
    return {k: v for k, v in parse_header(payload, len(payload))["__metadata__"].items() if k != "digest"}


def test_f2_alice_absent(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: without Alice the round is held and asked for again, then the run stops, saved, and resumes to its bits."""
    monkeypatch.setattr(transport, "PAUSE", 0.05)
    change(folder / "server.toml", deadline=0.3, retries=2, backoff=0.01)

    def absent(name: str, request: Message, reply: Message) -> Message | None:
        return None if name == "a" and request.fields.get("tasks", [{}])[0].get("round") == 3 else reply

    grid = Grid(folder, absent)
    with pytest.raises(WaffleError, match=r"Alice \(agent 0\) unreachable in round 3.*resume"):
        conduct(folder, config(), tmp_path / "run", grid)
    asked = [name for name, request in grid.requests if request.fields.get("tasks", [{}])[0].get("round") == 3]
    assert asked.count("a") == 3
    assert asked.count("b") == 1
    conduct(folder, config(), tmp_path / "run")
    assert bits(tmp_path / "run")[:2] == bits(simulated(config(), tmp_path / "twin"))[:2]


def test_f10_sites_that_do_not_come(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F10: sites that are not online in time are named."""
    monkeypatch.setattr(transport, "PAUSE", 0.05)
    change(folder / "server.toml", start_timeout=0.2)
    grid = Grid(folder)
    grid.gone = {"a", "c"}
    with pytest.raises(WaffleError, match=r"2 of 3 sites did not connect within 0.2 seconds: a, c"):
        conduct(folder, config(), tmp_path / "run", grid)


def test_f10_a_known_run_goes_on_with_alice_and_the_quorum(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F10: a run whose sites have told of their data does not wait for those that may be missing."""
    grid = Grid(folder)
    survey = JobRunner(folder, Job.create(folder, config(), tmp_path / "run", force=False), grid)._survey()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    grid.gone = {"c"}
    conductor = JobRunner(folder, Job.open(folder, "run"), grid)
    clock = FakeClock()
    monkeypatch.setattr(transport, "time", clock)
    assert conductor._survey() == survey
    assert clock.now < 1
    change(folder / "server.toml", start_timeout=0.2)
    for gone in ({"a"}, {"b", "c"}):
        grid.gone = gone
        with pytest.raises(WaffleError, match=f"did not connect within 0.2 seconds: {', '.join(sorted(gone))}"):
            JobRunner(folder, Job.open(folder, "run"), grid)._survey()


def test_f11_other_software(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: a site that runs another version is told from one of ours, both versions named."""
    assert f"torch {torch.__version__.partition('+')[0]}" in software()
    monkeypatch.setattr("waffle_fl.deploy.server_app.software", lambda: "wire version 99")
    with pytest.raises(WaffleError, match=r"the server runs wire version 99, this site results version \d"):
        conduct(folder, config(), tmp_path / "run")


def test_f12_an_exception_at_a_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F12: what fails at a site is a line at the server without paths or data; the traceback stays at the site."""
    own = hospitals(tmp_path / "hospitals")
    with (own / "south.csv").open("a") as stream:
        stream.write("\n44,f,1.0,A,secret")
    folder = federation(tmp_path / "own", ("north", "south"), str(own))
    with pytest.raises(
        WaffleError, match=r"^south: failed at the site \(WaffleError\); see the site's own log"
    ) as caught:
        conduct(folder, tables(), tmp_path / "run")
    assert "secret" in caplog.text
    assert "secret" not in str(caught.value)


def test_p5_data_that_changed(tmp_path: Path) -> None:
    """P5: a site whose file is another one than at the start takes no further part in the run, and says so."""
    own = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "own", ("north", "south"), str(own), retries=0)

    def change_file(name: str, request: Message, reply: Message) -> Message:
        if request.fields.get("tasks", [{}])[0].get("round") == 1 and name == "south":
            file = own / "south.csv"
            file.write_text(file.read_text() + "\n44,f,1.0,A,3.00")
        return reply

    with pytest.raises(WaffleError, match="has changed since the run began"):
        conduct(folder, tables(), tmp_path / "run", Grid(folder, change_file))


def test_f13_too_large(folder: Path, tmp_path: Path) -> None:
    """F13: a model whose messages would be larger than allowed is refused before the first round."""
    change(folder / "server.toml", message_mb=1)
    with pytest.raises(WaffleError, match=r"needs up to \d+ MB, server.toml allows 1"):
        conduct(folder, config(), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"methods": ["fedavg"]}, "takes part in fedavg, not in waffle"),
        ({"rounds": 2}, "answers at most 2 rounds in total"),
        ({"max_norm": 1e-6}, "too large to leave this site, which allows 1e-06"),
    ],
)
def test_a_site_s_rules_hold(changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path) -> None:
    """What site.toml does not allow does not leave the site, whatever the server asks; the reason is told."""
    change(folder / "server.toml", retries=0)
    change(folder / "sites" / "a" / "site.toml", **changes)
    with pytest.raises(WaffleError, match=reason):
        conduct(folder, config(), tmp_path / "run")


def test_metrics_that_may_not_leave(folder: Path, tmp_path: Path) -> None:
    """A metric that site.toml does not name is in no message; training is the same."""
    change(folder / "sites" / "a" / "site.toml", metrics=["accuracy"])
    conduct(folder, config(), tmp_path / "run")
    model, rounds, result = bits(tmp_path / "run")
    assert all(line["loss"] is None and line["accuracy"] >= 0 for line in rounds)
    assert result["metrics"].keys() == {"accuracy"}
    assert model == bits(simulated(config(), tmp_path / "twin"))[0]


def test_one_process_conducts_a_job(folder: Path, tmp_path: Path) -> None:
    """A ServerApp that finds another at its job stands back and says nothing; when the place is free it goes on."""
    job = Job.create(folder, config(), tmp_path / "run", force=False)
    with job.exclusive() as alone:
        assert alone
        assert job.is_running
        main(folder, Grid(folder), job.name)
        assert job.journal.since(0) == ([], 0)
    assert not job.is_running
    main(folder, Grid(folder), job.name)
    assert job.journal.since(0)[0][-1]["done"] is True
    assert bits(tmp_path / "run")[:2] == bits(simulated(config(), tmp_path / "twin"))[:2]


def test_who_looks_is_not_taken_for_who_conducts(folder: Path, tmp_path: Path) -> None:
    """Many may look at the same moment whether a job is conducted, and none sees another's look."""
    job = Job.create(folder, config(), tmp_path / "run", force=False)
    with job.lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not job.is_running


def test_a_job_keeps_its_name_while_it_is_conducted(folder: Path, tmp_path: Path) -> None:
    """A job that is submitted again before its run has a folder is the same run, if some process is at it."""
    first = Job.create(folder, config(), tmp_path / "run", force=False)
    with first.exclusive():
        assert Job.create(folder, config(), tmp_path / "run", force=False).run == first.run
    assert Job.create(folder, config(), tmp_path / "run", force=False).run != first.run


def test_a_watcher_that_comes_late_hears_the_end(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has said its last word, and still holds its place, ends for who watches it from now on."""
    monkeypatch.setattr(job_watcher, "LOOK", 0.01)
    job = Job.create(folder, config(), tmp_path / "run", force=False)
    job.journal.write(error="that of an earlier attempt")
    main(folder, Grid(folder), job.name)
    with job.exclusive():
        assert job_watcher.watch(folder, job, ProgressFlags(quiet=True)) == 0
    with job.journal.path.open("a") as stream:
        stream.write('{"error": "cut by a cra')
    job.journal.write(note="the same line")
    job.journal.write(error="a cause")
    with job.exclusive(), pytest.raises(WaffleError, match=r"^a cause$"):
        job_watcher.watch(folder, job, ProgressFlags(quiet=True))


@pytest.mark.parametrize("metrics", [[], ["loss"], ["accuracy"]])
@pytest.mark.parametrize("alice", ["0", "all"])
def test_a_run_of_which_little_is_told_is_watched(
    metrics: list[str], alice: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A score that is not told is shown as n/a, an ended run is no surprise, and no text is taken for markup."""
    monkeypatch.setattr(job_watcher, "LOOK", 0.01)
    text = io.StringIO()
    monkeypatch.setattr(job_watcher, "console_for", lambda: Console(file=text, width=200))
    for site in SITES:
        change(folder / "sites" / site / "site.toml", metrics=metrics)

    def evil(name: str, request: Message, reply: Message) -> Message:
        first = request.fields.get("tasks", [{}])[0].get("round") == 1
        return Message({"error": "[/evil] \x1b[31m[bold]\n\u202eno"}) if name == "c" and first else reply

    job = Job.create(folder, config(alice=alice, rounds=2), tmp_path / "run", force=False)
    main(folder, Grid(folder, evil), job.name)
    for result in (tmp_path / "run").rglob("result.json"):
        result.rename(result.with_suffix(".kept"))
    with ProgressDisplay(Console(file=text, width=200)) as received:
        job_watcher._follow(None, "1", job, 0, received)
    for result in (tmp_path / "run").rglob("result.kept"):
        result.rename(result.with_suffix(".json"))
    with ProgressDisplay(Console(file=text, width=200)) as received:
        job_watcher._follow(None, "1", job, 0, received)
    with job.exclusive():
        assert job_watcher.watch(folder, job, ProgressFlags(quiet=True)) == 0
    assert "note: c: [/evil] [31m[bold] no" in text.getvalue()
    assert ("n/a" in text.getvalue()) == (metrics != ["accuracy"] or alice == "0")
    assert "\x1b[31m[bold]" not in text.getvalue()
    _, run = job_watcher.runs_in(tmp_path / "run")[0]
    assert _run(["report", str(run), "--quiet"]) == 0


def test_a_survey_is_of_its_run(tmp_path: Path) -> None:
    """P5: what sites told for another target, or for a run whose folder is gone, is asked again."""
    own = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "own", ("north", "south"), str(own))
    for site in ("north", "south"):
        change(folder / "sites" / site / "site.toml", surveys=2)
    first = conduct(folder, tables(), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "preprocessing.json").read_text())["target"] == "ward"
    assert first.survey is not None
    shutil.rmtree(tmp_path / "run")
    assert first.survey is None
    second = Job.create(folder, tables(target="cost"), tmp_path / "run", force=True)
    assert second.run != first.run
    JobRunner(folder, second, Grid(folder)).run_all()
    assert json.loads((tmp_path / "run" / "preprocessing.json").read_text())["target"] == "cost"
    assert second.survey is not None


def test_force_is_for_once(folder: Path, tmp_path: Path) -> None:
    """P5: a job that was forced through a change is not forced when it is resumed."""

    def stop(name: str, request: Message, reply: Message) -> Message:
        if request.fields.get("tasks", [{}])[0].get("round") == 2:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        conduct(folder, config(), tmp_path / "run", Grid(folder, stop))
    forced = Job.create(folder, config(lr=0.05), tmp_path / "run", force=True)
    with pytest.raises(KeyboardInterrupt):
        JobRunner(folder, forced, Grid(folder, stop)).run_all()
    assert not Job.open(folder, "run").force
    provenance = tmp_path / "run" / "provenance.json"
    content = json.loads(provenance.read_text())
    provenance.write_text(json.dumps({**content, "binding": {**content["binding"], "data": "other"}}))
    with pytest.raises(WaffleError, match="holds another run"):
        JobRunner(folder, Job.open(folder, "run"), Grid(folder)).run_all()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (config(attack="sign-flip"), "attack works in simulations only"),
        (config(leave_out=("1",)), "leave_out works in simulations only"),
        (config(shift="drift(sudden, 0.5)"), "drift works in simulations only"),
        (config(agents=4), "among 4 agents, but server.toml has 3 sites"),
        (tables(shift="rotate(45)"), "shift divides a data set among agents"),
        (tables(sizes=(1.0, 2.0)), "sizes divides a data set among agents"),
        (tables(samples_per_agent=5), "samples_per_agent divides a data set among agents"),
    ],
)
def test_what_a_deployment_does_not_do(wanted: RunConfig, words: str, folder: Path) -> None:
    """A setting that no site would apply is refused before any is asked."""
    with pytest.raises(WaffleError, match=words):
        check_deployable(wanted, read_server(folder))


def test_jobs_are_named_not_pointed_at(folder: Path, tmp_path: Path) -> None:
    """Whoever submits a run can name a job of this deployment and nothing else on the server's disk."""
    for name in ("../../etc/passwd", "nothing", ""):
        with pytest.raises(WaffleError):
            Job.open(folder, name)
