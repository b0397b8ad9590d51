"""The loggers, read back with the real packages: every round is logged once, also after an interruption."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_support import refusal, waffle
from waffle_fl import experiment
from waffle_fl.experiment import Listener
from waffle_fl.loggers import ListenerGroup
from waffle_fl.records import read_rounds

SMALL = ("--data", "synthetic", "--model", "linear", "--samples-per-agent", "20", "--agents", "3", "--rounds", "4")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary working folder, without a tracking server from the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return tmp_path


def events(folder: Path) -> Any:
    """The scalars of a folder of event files."""
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="reading events needs tensorboard"
    )
    found = module.EventAccumulator(str(folder))
    found.Reload()
    return found


@pytest.fixture
def mlflow() -> Any:
    return pytest.importorskip("mlflow", reason="logging to MLflow needs mlflow-skinny")


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Interrupt once after the given round, as Ctrl-C does, without a checkpoint."""
    log = experiment.execution.log

    def stopping(job: Any, outcome: Any, *more: Any) -> None:
        log(job, outcome, *more)
        if outcome.round == after:
            job.latest = None  # as if the process had died before it saved a checkpoint
            monkeypatch.setattr(experiment.execution, "log", log)
            raise experiment.Interrupted(2)

    monkeypatch.setattr(experiment.execution, "log", stopping)


def test_tensorboard_has_every_round(here: Path) -> None:
    """Accuracy, losses and one weight per agent, by name, are logged at the steps 1 to 4."""
    pytest.importorskip("tensorboard", reason="logging to TensorBoard needs tensorboard")
    shown = waffle(
        "run", "waffle-paper", *SMALL, "--validation", "0.2", "--quiet", "--out", "run", "--log", "tensorboard"
    )
    assert shown.code == 0, shown.err
    found = events(here / "run" / "tensorboard")
    rounds = read_rounds(here / "run" / "rounds.jsonl")
    assert {"accuracy", "loss", "validation_accuracy", "weight/agent 0", "weight/agent 2"} <= set(
        found.Tags()["scalars"]
    )
    for name in ("accuracy", "loss", "validation_accuracy"):
        assert [(e.step, e.value) for e in found.Scalars(name)] == [
            (line["round"], pytest.approx(line[name])) for line in rounds
        ]
    assert [e.value for e in found.Scalars("weight/agent 1")] == [pytest.approx(line["weights"][1]) for line in rounds]


def test_tensorboard_after_an_interruption(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run shows each round once, including those before the interruption."""
    pytest.importorskip("tensorboard", reason="logging to TensorBoard needs tensorboard")
    command = ("run", "waffle-paper", *SMALL, "--quiet", "--out", "run", "--log", "tensorboard")
    interrupt(monkeypatch, after=3)
    assert waffle(*command).code == 130
    assert waffle(*command).code == 0
    assert [e.step for e in events(here / "run" / "tensorboard").Scalars("loss")] == [1, 2, 3, 4]


def test_mlflow_has_params_metrics_and_artifacts(here: Path, mlflow: Any) -> None:
    """A run in ./mlruns has every setting, every round, the model and the result."""
    shown = waffle("run", "waffle-paper", *SMALL, "--quiet", "--out", "run", "--log", "mlflow")
    assert shown.code == 0, shown.err
    client = mlflow.MlflowClient(tracking_uri=(here / "mlruns").as_uri())
    known = json.loads((here / "run" / "mlflow.json").read_text())
    run = client.get_run(known["run_id"])
    rounds = read_rounds(here / "run" / "rounds.jsonl")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    params = {"method": "waffle-paper", "rounds": "4", "options.denominator": "max"}
    assert params.items() <= run.data.params.items()
    for name, expected in (
        ("accuracy", [line["accuracy"] for line in rounds]),
        ("weight/agent 1", [line["weights"][1] for line in rounds]),
    ):
        history = sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))
        assert history == list(enumerate(expected, start=1))
    result = json.loads((here / "run" / "result.json").read_text())
    assert run.data.metrics["final_accuracy"] == result["metrics"]["accuracy"]
    assert {"model.safetensors", "result.json"} <= {a.path for a in client.list_artifacts(run.info.run_id)}


def test_mlflow_after_an_interruption(here: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run continues the same MLflow run and logs no round twice."""
    command = ("run", "waffle-paper", *SMALL, "--quiet", "--out", "run", "--log", "mlflow")
    interrupt(monkeypatch, after=3)
    assert waffle(*command).code == 130
    client = mlflow.MlflowClient(tracking_uri=(here / "mlruns").as_uri())
    run_id = json.loads((here / "run" / "mlflow.json").read_text())["run_id"]
    assert client.get_run(run_id).info.status == "KILLED"
    assert waffle(*command).code == 0
    assert client.get_run(run_id).info.status == "FINISHED"
    assert sorted(m.step for m in client.get_metric_history(run_id, "loss")) == [1, 2, 3, 4]


def test_mlflow_environment_variables(here: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are respected."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (here / "elsewhere").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "wards")
    assert waffle("run", "local", *SMALL, "--quiet", "--out", "run", "--log", "mlflow").code == 0
    client = mlflow.MlflowClient(tracking_uri=(here / "elsewhere").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("wards").experiment_id])
    assert run.data.metrics["weight/agent 0"] == 1
    assert not (here / "mlruns").exists()


def test_a_tracking_error_is_one_line(here: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of MLflow is refused in one line, before training."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    shown = waffle("run", "local", *SMALL, "--quiet", "--out", "run", "--log", "mlflow")
    assert "MLflow at nonsense://nowhere" in refusal(shown)
    assert not (here / "run").exists()


def test_bench_logs_every_run_to_both(here: Path, mlflow: Any) -> None:
    """--log may be given twice, and each run of a grid has its own log."""
    pytest.importorskip("tensorboard", reason="logging to TensorBoard needs tensorboard")
    (here / "grid.toml").write_text(
        'methods = ["local", "fedavg"]\nseeds = [1, 2]\ndata = "synthetic"\nmodel = "linear"\n'
        "samples_per_agent = 20\nagents = 3\nrounds = 2\n"
    )
    shown = waffle("bench", "grid.toml", "--quiet", "--log", "tensorboard", "--log", "mlflow")
    assert shown.code == 0, shown.err
    runs = sorted(path.parent for path in here.glob("runs/grid/*/config.json"))
    assert len(runs) == 4
    assert all([e.step for e in events(run / "tensorboard").Scalars("loss")] == [1, 2] for run in runs)
    assert len({json.loads((run / "mlflow.json").read_text())["run_id"] for run in runs}) == 4


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")])
def test_an_absent_package_is_named(here: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    """Without the package one line names the extra to install, and no run folder is created."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError):
        importlib.import_module(module)
    shown = waffle("run", "local", *SMALL, "--out", "run", "--log", name)
    assert f'pip install "waffle-fl[{name}]"' in refusal(shown)
    assert not (here / "run").exists()


def test_every_listener_receives_every_event() -> None:
    """A ListenerGroup forwards each event to each listener."""
    received: list[str] = []

    class RecordingListener(Listener):
        def planned(self, *_: Any) -> None:
            received.append("planned")

        def advanced(self, *_: Any) -> None:
            received.append("advanced")

        def ended(self, *_: Any) -> None:
            received.append("ended")

        def warned(self, message: str) -> None:
            received.append(message)

    several: Any = ListenerGroup([RecordingListener(), RecordingListener()])
    several.planned([], 0)
    several.advanced(None, {})
    several.ended(None, {})
    several.warned("note")
    assert received == [word for word in ("planned", "advanced", "ended", "note") for _ in range(2)]
