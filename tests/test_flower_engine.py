"""The deployment engine with its sites in this process: the same bits as the simulator, also after faults."""

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

from flower_harness import Grid, bits, federation, run_job, run_simulation, without_waiting
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
    """Write two tables with numbers, categories, a mixed column, missing cells, and a class or number to predict."""
    folder.mkdir()
    for name, n, shift in (("north", 37, 0.0), ("south", 23, 1.5)):
        lines = ["age,sex,dose,ward,cost"]
        for i in range(n):
            dose = "" if i % 7 == 3 else f"{(i * 13 % 11) / 3 + shift:.3f}"
            sex = ("m", "f", "?")[i % 3]
            lines.append(f"{20 + i * 7 % 60},{sex},{dose},{'AB'[(i * i + i // 3) % 2]},{i * 1.37 + shift:.2f}")
        (folder / f"{name}.csv").write_text("\n".join(lines))
    return folder


def tables(method: str = "waffle-paper", **settings: Any) -> RunConfig:
    given = {"target": "ward", "alice": "south", "batch_size": 8, "rounds": 3, "precision": "float64"}
    given |= {"min_category": 5}
    return check_run(method, {"data": "hospitals", "guard": "standard", **given, **settings}, {})


@pytest.mark.parametrize("settings", [{}, {"preprocessing": "local"}, {"target": "cost"}, {"validation": 0.2}])
def test_tables_end_in_the_simulator_s_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    """Sites that each hold one table agree on its columns from summaries and train to the simulator's bits."""
    data = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "fed", ("north", "south"), str(data))
    grid = Grid(folder)
    run_job(folder, tables(**settings), tmp_path / "run", grid)
    model, rounds, result = bits(tmp_path / "run")
    reference = bits(run_simulation(tables(data=str(data), **settings), tmp_path / "reference"))
    assert (model, rounds) == reference[:2]
    assert result["metrics"] == reference[2]["metrics"]
    assert "with two sites WAFFLE's weights are fixed" in (folder / "jobs" / "run.log").read_text()


RULES = {"missing": ("-9", "sex=x"), "decimal": ",", "fold_case": True, "drop": ("cost",), "duplicates": "keep"}


@pytest.mark.parametrize("settings", [RULES, {**RULES, "fill_absent": True}])
def test_rules_for_cells_give_the_simulator_s_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    """A site reads its table by the run's rules as the simulator does, also if it lacks a column."""
    data = hospitals(tmp_path / "hospitals")
    for path in data.iterdir():
        header, *lines = (line.split(",") for line in path.read_text().splitlines())
        lines = [[age, sex.upper(), dose.replace(".", ",") or "-9", *more] for age, sex, dose, *more in lines]
        if path.stem == "south" and "fill_absent" in settings:
            header, lines = header[:2] + header[3:], [line[:2] + line[3:] for line in lines]
        path.write_text("\n".join(";".join(line) for line in (header, *lines)))
    folder = federation(tmp_path / "fed", ("north", "south"), str(data))
    run_job(folder, tables(**settings), tmp_path / "run")
    reference = run_simulation(tables(data=str(data), **settings), tmp_path / "reference")
    assert bits(tmp_path / "run")[:2] == bits(reference)[:2]
    fitted = [json.loads((run / "preprocessing.json").read_text()) for run in (tmp_path / "run", reference)]
    for column in (column for content in fitted for column in content["columns"]):
        del column["low"], column["high"]  # the range of the values does not leave a site
    assert fitted[0] == fitted[1]
    assert [column["missing"] for column in fitted[0]["columns"]] == [False, True, True]


def test_a_column_to_drop_that_no_site_has_ends_the_run(tmp_path: Path) -> None:
    """A misspelt column to drop, which would stay in use, ends the run with one line."""
    folder = federation(tmp_path / "fed", ("north", "south"), str(hospitals(tmp_path / "hospitals")))
    with pytest.raises(WaffleError, match="drop: no site has a column 'costs'"):
        run_job(folder, tables(drop=("costs",)), tmp_path / "run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return federation(tmp_path / "federation", SITES)


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_every_method_ends_in_the_simulator_s_bits(method: str, folder: Path, tmp_path: Path) -> None:
    """F16: with every method, the sites produce the simulator's model and record bit for bit."""
    run_job(folder, config(method, rounds=2), tmp_path / "run")
    model, rounds, result = bits(tmp_path / "run")
    reference = bits(run_simulation(config(method, rounds=2), tmp_path / "reference"))
    assert (model, rounds) == reference[:2]
    assert {k: v for k, v in result.items() if k != "metrics"} == {
        k: v for k, v in reference[2].items() if k != "metrics"
    }
    assert result["metrics"] == reference[2]["metrics"]


@pytest.mark.parametrize(
    "method", ["knn-per", "fedfomo", "ifca", "fedala", "fedrep", "cobo", "pfedgraph", "fedcollab", "feddbe"]
)
@pytest.mark.parametrize("settings", [{"validation": 0.2}, {"target": "cost"}])
def test_optional_hooks(method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Methods that score candidates, run trial steps, use neighbours or split the model give the same bits."""
    data = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "fed", ("north", "south"), str(data))
    run_job(folder, tables(method, rounds=2, **settings), tmp_path / "run")
    reference = bits(run_simulation(tables(method, rounds=2, data=str(data), **settings), tmp_path / "reference"))
    assert bits(tmp_path / "run")[:2] == reference[:2]


@pytest.mark.parametrize("method", ["waffle-paper", "ditto", "fedfomo", "ifca", "cfl", "knn-per", "fedala", "fedper"])
def test_alice_all(method: str, folder: Path, tmp_path: Path) -> None:
    """With alice = "all" one message carries the requests for every Alice, and each run equals its simulation."""
    job_config = config(method, alice="all", rounds=2)
    grid = Grid(folder)
    run_job(folder, job_config, tmp_path / "runs", grid)
    assert len([request for _, request in grid.requests if "tasks" in request.fields]) == 3 * 2 + 3
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 3
    for run in runs:
        alice = read_runs([run])[0].config
        assert bits(run)[:2] == bits(run_simulation(alice, tmp_path / f"reference-{run.name}"))[:2]


def test_a_deployed_run_folder_can_be_reported_and_opened(folder: Path, tmp_path: Path) -> None:
    """The server's run folder and the model at Alice's site can both be opened and give the same outputs."""
    job = run_job(folder, config(), tmp_path / "run")
    (finished,) = read_runs([tmp_path / "run"])
    assert finished.result["status"] == "finished"
    x = torch.zeros(2, 1, 8, 8)
    (site_model,) = (folder / "sites" / "a" / "models").iterdir()
    assert site_model.name.startswith(job.run)
    assert torch.equal(open_run(tmp_path / "run").outputs(x), open_run(site_model).outputs(x))


@pytest.mark.parametrize("method", ["waffle-paper", "waffle"])
def test_a_model_computed_by_the_server_needs_no_permission(method: str, folder: Path, tmp_path: Path) -> None:
    """If the server can compute Alice's model, its run folder holds it even if model_may_leave is false."""
    for site in (folder / "sites").iterdir():
        change(site / "site.toml", model_may_leave=False)
    run_job(folder, config(method), tmp_path / "run")
    assert bits(tmp_path / "run")[0] == bits(run_simulation(config(method), tmp_path / "reference"))[0]


@pytest.mark.parametrize("losers", [("a", "b"), ("b",)])
@pytest.mark.parametrize("method", ["scaffold", "waffle-paper", "waffle", "ifca"])
def test_f4_a_lost_state_is_restored(method: str, losers: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """F4: sites that lost their state get the server's copy, and no bit changes."""
    seen: list[int] = []

    def lose(name: str, request: Message, reply: Message) -> Message:
        (task,) = request.fields.get("tasks", [{}])
        if task.get("round") == 2 and name in losers and len(seen) < len(losers):
            seen.append(1)
            shutil.rmtree(folder / "sites" / name / "state")
        return reply

    run_job(folder, config(method), tmp_path / "run", Grid(folder, lose))
    restored = [line.get("refused") for line in bits(tmp_path / "run")[1]]
    assert [len(notes or ()) for notes in restored] == [0, 0, len(losers)]
    model, rounds, _ = bits(tmp_path / "run")
    reference = bits(run_simulation(config(method), tmp_path / "reference"))
    assert model == reference[0]
    assert [{k: v for k, v in line.items() if k != "refused"} for line in rounds] == reference[1]


def test_f4_a_lost_personal_model_stops_the_run(folder: Path, tmp_path: Path) -> None:
    """F4: the server cannot restore Alice's lost personal model, so the run stops with an error."""

    def lose(name: str, request: Message, reply: Message) -> Message:
        if request.fields.get("tasks", [{}])[0].get("round") == 2 and name == "a":
            shutil.rmtree(folder / "sites" / name / "state")
        return reply

    with pytest.raises(WaffleError, match="lost her personal model of round 2"):
        run_job(folder, config("ditto"), tmp_path / "run", Grid(folder, lose))


@pytest.mark.parametrize("resumed", [False, True])
def test_f4_a_lost_personal_model_stops_only_its_run(resumed: bool, folder: Path, tmp_path: Path) -> None:
    """F4: if one of several Alices lost her personal model, only her run stops; the others finish."""
    job_config = config("ditto", alice="all", rounds=2)

    def lost(name: str, request: Message, reply: Message) -> Message:
        label = next((task["course"] for task in request.fields.get("tasks", []) if task["examine"]), "")
        if name != "b" or not label:
            return reply
        return Message({**reply.fields, "courses": {**reply.fields["courses"], label: {"lost": True}}}, reply.payloads)

    for _ in range(1 + resumed):
        with pytest.raises(
            WaffleError,
            match=r"^Alice \(agent 1\) lost her personal model of round 1.*continue with waffle deploy resume$",
        ):
            run_job(folder, job_config, tmp_path / "runs", Grid(folder, lost))
    ended = sorted(path.parent.name for path in (tmp_path / "runs").glob("*/result.json"))
    assert ended == ["digits-C-ditto-1", "digits-C-ditto-1-2"]


INVALID_SCORES = {"accuracy": 10**400, "loss": None, "validation_loss": "low", "rmse": 0.5, "more": 1}


@pytest.mark.parametrize("r", [1, 2, 3])
def test_invalid_scores_are_recorded_as_none(r: int, folder: Path, tmp_path: Path) -> None:
    """A score that is not a finite number of this task is recorded as None, and the run finishes."""

    def send_invalid_scores(name: str, request: Message, reply: Message) -> Message:
        (task,) = request.fields.get("tasks", [{}])
        if not task.get("examine") or task["base"][0] != r:
            return reply
        changed = {**reply.fields["courses"][task["course"]], "score": {"finite": True, **INVALID_SCORES}}
        if task["final"]:
            changed["metrics"] = {"auc": float("inf"), "log_loss": 10**400, "loss": True, **INVALID_SCORES}
        return Message({**reply.fields, "courses": {task["course"]: changed}}, reply.payloads)

    run_job(folder, config(), tmp_path / "run", Grid(folder, send_invalid_scores))
    _, rounds, result = bits(tmp_path / "run")
    assert [line["accuracy"] is None for line in rounds] == [line["round"] == r for line in rounds]
    assert all("rmse" not in line and "more" not in line for line in rounds)
    assert result["best"]["round"] != r
    assert r != 3 or result["metrics"] == dict.fromkeys(("accuracy", "loss", "validation_loss", "auc", "log_loss"))


@pytest.mark.parametrize(
    "summary",
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
def test_invalid_summaries_are_rejected(summary: dict[str, Any], tmp_path: Path) -> None:
    """A site that sends an impossible summary of its data is named before the first round."""
    data = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "fed", ("north", "south"), str(data))

    def lie(name: str, request: Message, reply: Message) -> Message:
        replaced = {key: value for key, value in summary.items() if key in reply.fields}
        return Message({**reply.fields, **replaced}) if name == "south" else reply

    with pytest.raises(WaffleError, match=r"^south sent a survey reply that cannot be read: [^\n]+$"):
        run_job(folder, tables(), tmp_path / "run", Grid(folder, lie))


def test_too_many_classes_are_rejected_before_a_model_is_built(folder: Path, tmp_path: Path) -> None:
    """W6: a site that reports a million classes is rejected before a model is built."""

    def lie(name: str, request: Message, reply: Message) -> Message:
        return Message({**reply.fields, "classes": ["x"] * 1_000_000}) if name == "b" else reply

    with pytest.raises(WaffleError, match=r"^b sent a survey reply .*: 1000000 classes, more than 10000$"):
        run_job(folder, config(), tmp_path / "run", Grid(folder, lie))


@pytest.mark.parametrize("kind", [["tables"], None, "\x1b[31mred"])
def test_different_kinds_of_data_are_rejected(kind: Any, tmp_path: Path) -> None:
    """Sites with different kinds of data cause a one-line error without control characters."""
    folder = federation(tmp_path / "fed", ("north", "south"), str(hospitals(tmp_path / "hospitals")))

    def lie(name: str, request: Message, reply: Message) -> Message:
        return Message({**reply.fields, "kind": kind}) if name == "south" else reply

    with pytest.raises(WaffleError, match=r"^the sites differ in the kind of their data: north has tables") as caught:
        run_job(folder, tables(), tmp_path / "run", Grid(folder, lie))
    assert str(caught.value).isprintable()


def test_a_crash_at_any_message_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    """F6: a run whose server died at any message resumes to the bits of the uninterrupted run."""
    reference = bits(run_simulation(config(), tmp_path / "reference"))
    job_config = config()
    for k in range(3, 15, 2):
        out, received = tmp_path / f"run-{k}", []

        def die(name: str, request: Message, reply: Message, k: int = k, received: list[int] = received) -> Message:
            received.append(1)
            if len(received) == k:
                raise KeyboardInterrupt
            return reply

        with pytest.raises(KeyboardInterrupt):
            run_job(folder, job_config, out, Grid(folder, die))
        run_job(folder, job_config, out)
        assert bits(out)[:2] == reference[:2]


def test_f1_an_absent_agent(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: an agent that misses the deadline has weight 0 in that round and takes part in the next."""
    without_waiting(monkeypatch)
    change(folder / "server.toml", deadline=60.0)

    def absent(name: str, request: Message, reply: Message) -> Message | None:
        return None if name == "b" and request.fields.get("tasks", [{}])[0].get("round") == 2 else reply

    run_job(folder, config(), tmp_path / "run", Grid(folder, absent))
    rounds = bits(tmp_path / "run")[1]
    assert [line["weights"][1] > 0 for line in rounds[:2]] == [True, False]
    assert rounds[1]["screened"] == {"agent 1": "absent"}
    assert "screened" not in rounds[2]


@pytest.mark.parametrize("fault", ["cut", "replayed", "not finite", "another's", "rubbish"])
def test_w1_to_w8_invalid_updates_get_weight_0(fault: str, folder: Path, tmp_path: Path) -> None:
    """W1-W8: an update that is damaged, old, not finite or of another run gets weight 0, and the run continues."""
    first: dict[str, Message] = {}

    def tamper(name: str, request: Message, reply: Message) -> Message:
        if name != "b" or not reply.payloads:
            return reply
        first.setdefault(name, reply)
        if request.fields["tasks"][0]["round"] != 2:
            return reply
        ((label, payload),) = reply.payloads.items()
        nan = pack({"dy": torch.full((4810,), torch.nan).double(), "stats": torch.zeros(0).double()}, labels(payload))
        changed = {
            "cut": payload[:-1],
            "replayed": first[name].payloads[label],
            "not finite": nan,
            "another's": payload.replace(label.encode(), b"x" * len(label)),
            "rubbish": b"\x80\x04cos\nsystem\n",
        }
        return Message(reply.fields, {label: changed[fault]})

    change(folder / "server.toml", quorum=1)
    run_job(folder, config(), tmp_path / "run", Grid(folder, tamper))
    rounds = bits(tmp_path / "run")[1]
    assert [line["weights"][1] > 0 for line in rounds[:2]] == [True, False]
    assert rounds[1]["screened"] == {"agent 1": "not finite" if fault == "not finite" else "absent"}
    assert ("refused" in rounds[1]) == (fault != "not finite")


def labels(payload: bytes) -> dict[str, str]:
    """Return the metadata of a payload without its digest."""
    return {k: v for k, v in parse_header(payload, len(payload))["__metadata__"].items() if k != "digest"}


def test_f2_absent_alice(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: without Alice the round is retried, then the run stops, is saved, and resumes to the same bits."""
    without_waiting(monkeypatch)
    change(folder / "server.toml", deadline=60.0, retries=2, backoff=5.0)

    def absent(name: str, request: Message, reply: Message) -> Message | None:
        return None if name == "a" and request.fields.get("tasks", [{}])[0].get("round") == 3 else reply

    grid = Grid(folder, absent)
    with pytest.raises(WaffleError, match=r"Alice \(agent 0\) unreachable in round 3.*resume"):
        run_job(folder, config(), tmp_path / "run", grid)
    requested = [name for name, request in grid.requests if request.fields.get("tasks", [{}])[0].get("round") == 3]
    assert requested.count("a") == 3
    assert requested.count("b") == 1
    run_job(folder, config(), tmp_path / "run")
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(config(), tmp_path / "reference"))[:2]


def test_f10_missing_sites_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F10: sites that are not online in time are named."""
    without_waiting(monkeypatch)
    change(folder / "server.toml", start_timeout=60.0)
    grid = Grid(folder)
    grid.offline = {"a", "c"}
    with pytest.raises(WaffleError, match=r"2 of 3 sites did not connect within 60 seconds: a, c"):
        run_job(folder, config(), tmp_path / "run", grid)


def test_f10_a_surveyed_run_needs_only_alice_and_the_quorum(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F10: a run whose sites were surveyed waits only for Alice and the quorum."""
    grid = Grid(folder)
    survey = JobRunner(folder, Job.create(folder, config(), tmp_path / "run", force=False), grid)._survey()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    grid.offline = {"c"}
    runner = JobRunner(folder, Job.open(folder, "run"), grid)
    clock = without_waiting(monkeypatch)
    assert runner._survey() == survey
    assert clock.now < 1
    change(folder / "server.toml", start_timeout=0.2)
    for offline in ({"a"}, {"b", "c"}):
        grid.offline = offline
        with pytest.raises(WaffleError, match=f"did not connect within 0.2 seconds: {', '.join(sorted(offline))}"):
            JobRunner(folder, Job.open(folder, "run"), grid)._survey()


def test_f11_other_software(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: a site that runs another version is rejected, and the error names both versions."""
    assert f"torch {torch.__version__.partition('+')[0]}" in software()
    monkeypatch.setattr("waffle_fl.deploy.server_app.software", lambda: "wire version 99")
    with pytest.raises(WaffleError, match=r"the server runs wire version 99, this site results version \d"):
        run_job(folder, config(), tmp_path / "run")


def test_f12_an_exception_at_a_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F12: an exception at a site is one line at the server without paths or data; the traceback stays at the site."""
    data = hospitals(tmp_path / "hospitals")
    with (data / "south.csv").open("a") as stream:
        stream.write("\n44,f,1.0,A,secret")
    folder = federation(tmp_path / "fed", ("north", "south"), str(data))
    with pytest.raises(
        WaffleError, match=r"^south: failed at the site \(WaffleError\); see the site's own log"
    ) as caught:
        run_job(folder, tables(), tmp_path / "run")
    assert "secret" in caplog.text
    assert "secret" not in str(caught.value)


def test_p5_changed_data_stops_the_site(tmp_path: Path) -> None:
    """P5: a site whose file changed since the start of the run takes no further part in it and reports the reason."""
    data = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "fed", ("north", "south"), str(data), retries=0)

    def change_file(name: str, request: Message, reply: Message) -> Message:
        if request.fields.get("tasks", [{}])[0].get("round") == 1 and name == "south":
            file = data / "south.csv"
            file.write_text(file.read_text() + "\n44,f,1.0,A,3.00")
        return reply

    with pytest.raises(WaffleError, match="has changed since the run began"):
        run_job(folder, tables(), tmp_path / "run", Grid(folder, change_file))


def test_f13_too_large_messages(folder: Path, tmp_path: Path) -> None:
    """F13: a model whose messages exceed the limit is rejected before the first round."""
    change(folder / "server.toml", message_mb=1)
    with pytest.raises(WaffleError, match=r"needs up to \d+ MB, server.toml allows 1"):
        run_job(folder, config(), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"methods": ["fedavg"]}, "takes part in fedavg, not in waffle"),
        ({"rounds": 2}, "answers at most 2 rounds in total"),
        ({"max_norm": 1e-6}, "too large to leave this site, which allows 1e-06"),
    ],
)
def test_site_rules_are_enforced(changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path) -> None:
    """A site refuses what its site.toml does not allow and reports the reason."""
    change(folder / "server.toml", retries=0)
    change(folder / "sites" / "a" / "site.toml", **changes)
    with pytest.raises(WaffleError, match=reason):
        run_job(folder, config(), tmp_path / "run")


def test_metrics_that_may_not_leave(folder: Path, tmp_path: Path) -> None:
    """A metric that site.toml does not list is in no message, and training is unchanged."""
    change(folder / "sites" / "a" / "site.toml", metrics=["accuracy"])
    run_job(folder, config(), tmp_path / "run")
    model, rounds, result = bits(tmp_path / "run")
    assert all(line["loss"] is None and line["accuracy"] >= 0 for line in rounds)
    assert result["metrics"].keys() == {"accuracy"}
    assert model == bits(run_simulation(config(), tmp_path / "reference"))[0]


def test_only_one_process_runs_a_job(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ServerApp does nothing while another holds its job, and runs the job once the lock is free."""
    job = Job.create(folder, config(), tmp_path / "run", force=False)
    with job.exclusive() as alone:
        assert alone
        assert job.is_running
        with monkeypatch.context() as patch:
            patch.setattr("time.sleep", lambda seconds: None)  # it tries for two seconds
            main(folder, Grid(folder), job.name)
        assert job.journal.since(0) == ([], 0)
    assert not job.is_running
    main(folder, Grid(folder), job.name)
    assert job.journal.since(0)[0][-1]["done"] is True
    assert bits(tmp_path / "run")[:2] == bits(run_simulation(config(), tmp_path / "reference"))[:2]


def test_checking_a_job_does_not_mark_it_as_running(folder: Path, tmp_path: Path) -> None:
    """Several processes can check at once whether a job is running without affecting each other."""
    job = Job.create(folder, config(), tmp_path / "run", force=False)
    with job.lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not job.is_running


def test_a_job_keeps_its_run_name_while_it_runs(folder: Path, tmp_path: Path) -> None:
    """A job that is submitted again before its run folder exists is the same run if a process holds its lock."""
    first = Job.create(folder, config(), tmp_path / "run", force=False)
    with first.exclusive():
        assert Job.create(folder, config(), tmp_path / "run", force=False).run == first.run
    assert Job.create(folder, config(), tmp_path / "run", force=False).run != first.run


def test_a_late_watcher_gets_the_end_of_the_job(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that starts after a job's last journal entry returns although the job's lock is still held."""
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
def test_a_run_with_few_reported_metrics_is_watched(
    metrics: list[str], alice: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing scores are shown as n/a, a finished run is accepted, and no text is interpreted as markup."""
    monkeypatch.setattr(job_watcher, "LOOK", 0.01)
    text = io.StringIO()
    monkeypatch.setattr(job_watcher, "console_for", lambda: Console(file=text, width=200))
    for site in SITES:
        change(folder / "sites" / site / "site.toml", metrics=metrics)

    def send_markup(name: str, request: Message, reply: Message) -> Message:
        first = request.fields.get("tasks", [{}])[0].get("round") == 1
        return Message({"error": "[/evil] \x1b[31m[bold]\n\u202eno"}) if name == "c" and first else reply

    job = Job.create(folder, config(alice=alice, rounds=2), tmp_path / "run", force=False)
    main(folder, Grid(folder, send_markup), job.name)
    for result in (tmp_path / "run").rglob("result.json"):
        result.rename(result.with_suffix(".moved"))
    with ProgressDisplay(Console(file=text, width=200)) as received:
        job_watcher._follow(None, "1", job, 0, received)
    for result in (tmp_path / "run").rglob("result.moved"):
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


def test_a_survey_belongs_to_one_run(tmp_path: Path) -> None:
    """P5: the survey is repeated for another target and for a run whose folder was deleted."""
    data = hospitals(tmp_path / "hospitals")
    folder = federation(tmp_path / "fed", ("north", "south"), str(data))
    for site in ("north", "south"):
        change(folder / "sites" / site / "site.toml", surveys=2)
    first = run_job(folder, tables(), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "preprocessing.json").read_text())["target"] == "ward"
    assert first.survey is not None
    shutil.rmtree(tmp_path / "run")
    assert first.survey is None
    second = Job.create(folder, tables(target="cost"), tmp_path / "run", force=True)
    assert second.run != first.run
    JobRunner(folder, second, Grid(folder)).run_all()
    assert json.loads((tmp_path / "run" / "preprocessing.json").read_text())["target"] == "cost"
    assert second.survey is not None


def test_force_applies_once(folder: Path, tmp_path: Path) -> None:
    """P5: a job that was started with --force is not forced when it is resumed."""

    def stop(name: str, request: Message, reply: Message) -> Message:
        if request.fields.get("tasks", [{}])[0].get("round") == 2:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        run_job(folder, config(), tmp_path / "run", Grid(folder, stop))
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
    ("job_config", "words"),
    [
        (config(attack="sign-flip"), "attack works in simulations only"),
        (config(states="disk"), "states works in simulations only"),
        (config(privacy="masked"), "expected at least 4 agents with samples in a round, got 3"),
        (config(leave_out=("1",)), "leave_out works in simulations only"),
        (config(final_model="selected"), "final_model = selected works in simulations only"),
        (config(shift="drift(sudden, 0.5)"), "drift works in simulations only"),
        (config(agents=4), "among 4 agents, but server.toml has 3 sites"),
        (tables(shift="rotate(45)"), "shift divides a data set among agents"),
        (tables(sizes=(1.0, 2.0)), "sizes divides a data set among agents"),
        (tables(samples_per_agent=5), "samples_per_agent divides a data set among agents"),
        (tables(duplicates="drop"), "duplicates = drop compares the rows of different agents"),
    ],
)
def test_settings_that_work_only_in_simulations_are_rejected(job_config: RunConfig, words: str, folder: Path) -> None:
    """A setting that no site can apply is rejected before any request is sent."""
    with pytest.raises(WaffleError, match=words):
        check_deployable(job_config, read_server(folder))


def test_a_job_name_is_not_a_path(folder: Path, tmp_path: Path) -> None:
    """A client can name a job of this deployment but no other file on the server's disk."""
    for name in ("../../etc/passwd", "nothing", ""):
        with pytest.raises(WaffleError):
            Job.open(folder, name)
