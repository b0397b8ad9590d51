"""Loggers for TensorBoard and MLflow, each an optional extra of this package.

A logger receives every round. It first logs the rounds in the run folder, so a resumed run has no gap.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from waffle_fl.config import RunConfig
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Listener
from waffle_fl.records import read_json, read_rounds, write_json
from waffle_fl.results import named_weights

Log: TypeAlias = Literal["tensorboard", "mlflow"]
SCALARS = ("accuracy", "rmse", "loss", "validation_accuracy", "validation_rmse", "validation_loss", "omega", "psi")
ARTIFACTS = (
    *("config.json", "provenance.json", "preprocessing.json", "scaling.json"),
    *("result.json", "rounds.jsonl", "model.safetensors"),
)
STATUS = {"finished": "FINISHED", "diverged": "FAILED"}


class Logger(Listener):
    """Base class of the loggers: starts one log per run and selects the scalars of a round."""

    def __init__(self) -> None:
        self._provenance: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Close open logs. The log of an unfinished run is continued when the run is resumed."""

    def planned(self, runs: Sequence[tuple[RunConfig, Path]], finished: int) -> None:
        for config, folder in runs:
            if (folder / "result.json").exists():
                continue
            self._provenance[config.label] = read_json(folder / "provenance.json") or {}
            self.begin(config, folder, read_rounds(folder / "rounds.jsonl"))

    def begin(self, config: RunConfig, folder: Path, rounds: Sequence[Mapping[str, Any]]) -> None:
        raise NotImplementedError

    def scalars(self, config: RunConfig, measured: Mapping[str, Any]) -> dict[str, float]:
        """Return the scalars of a round by name. The name of an agent's weight is weight/NAME."""
        known = {key: measured[key] for key in SCALARS if measured.get(key) is not None}
        weights = named_weights(self._provenance[config.label], measured.get("weights", []))
        return {**known, **{f"weight/{name}": weight for name, weight in weights.items()}}


class TensorBoard(Logger):
    """Event files in RUN/tensorboard."""

    def __init__(self) -> None:
        super().__init__()
        self._make = _require("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writers: dict[str, Any] = {}

    def begin(self, config: RunConfig, folder: Path, rounds: Sequence[Mapping[str, Any]]) -> None:
        # The rounds in rounds.jsonl replace what an interrupted run wrote before, from step 1 on.
        self._writers[config.label] = self._make(str(folder / "tensorboard"), purge_step=1)
        for measured in rounds:
            self.advanced(config, measured)

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        for name, value in self.scalars(config, measured).items():
            self._writers[config.label].add_scalar(name, value, measured["round"])
        self._writers[config.label].flush()

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        self._writers.pop(config.label).close()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for writer in self._writers.values():
            writer.close()


class _Tracked(NamedTuple):
    """An MLflow run and its last logged round. A run resumed from a checkpoint repeats some rounds."""

    run_id: str
    folder: Path
    last_round: int


class MLflow(Logger):
    """Params, metrics and artifacts in $MLFLOW_TRACKING_URI, or else in ./mlruns. RUN/mlflow.json has the run's id."""

    def __init__(self) -> None:
        super().__init__()
        mlflow = _require("mlflow", "mlflow")
        self._entities, self._errors = mlflow.entities, (mlflow.MlflowException, OSError)
        self.uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not self.uri:
            self.uri = Path("mlruns").resolve().as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow requires it for file stores
        with self._mlflow_errors():
            self._client = mlflow.MlflowClient(tracking_uri=self.uri)
        self._runs: dict[str, _Tracked] = {}

    def begin(self, config: RunConfig, folder: Path, rounds: Sequence[Mapping[str, Any]]) -> None:
        with self._mlflow_errors():
            known = read_json(folder / "mlflow.json")
            if known and known.get("tracking_uri") == self.uri:
                run_id = str(known["run_id"])
                last_round = max((m.step for m in self._client.get_metric_history(run_id, "loss")), default=0)
                self._client.update_run(run_id, status="RUNNING")
            else:
                run_id, last_round = self._create(config, folder), 0
        self._runs[config.label] = _Tracked(run_id, folder, last_round)
        for measured in rounds:
            self.advanced(config, measured)

    def _create(self, config: RunConfig, folder: Path) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "waffle-fl")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run_id = str(self._client.create_run(experiment, run_name=folder.name).info.run_id)
        content = config.to_json()
        options = {f"options.{key}": value for key, value in content["options"].items()}
        params = {"method": config.method, **content["settings"], **options}
        self._client.log_batch(run_id, params=[self._entities.Param(k, str(v)) for k, v in params.items()])
        write_json(folder / "mlflow.json", {"tracking_uri": self.uri, "run_id": run_id})
        return run_id

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        run = self._runs[config.label]
        if measured["round"] <= run.last_round:
            return
        metric, now = self._entities.Metric, int(1000 * time.time())
        numbers = self.scalars(config, measured).items()
        metrics = [metric(_metric_name(name), value, now, measured["round"]) for name, value in numbers]
        with self._mlflow_errors():
            self._client.log_batch(run.run_id, metrics=metrics)

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        run_id, folder, _ = self._runs.pop(config.label)
        final = {f"final_{name}": value for name, value in result.get("metrics", {}).items() if value is not None}
        with self._mlflow_errors():
            for name, value in final.items():
                self._client.log_metric(run_id, name, value, step=result["rounds"])
            for name in ARTIFACTS:
                if (folder / name).exists():
                    self._client.log_artifact(run_id, str(folder / name))
            self._client.set_terminated(run_id, STATUS[result["status"]])

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        with self._mlflow_errors():
            for run in self._runs.values():
                self._client.set_terminated(run.run_id, "KILLED")

    @contextmanager
    def _mlflow_errors(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            reason = " ".join(str(error).split())[:300]
            raise WaffleError(
                f"MLflow at {self.uri}: {reason}; every run is saved: run the same command again to continue"
            ) from None


class ListenerGroup(Listener):
    """Passes events on to several listeners."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners

    def planned(self, runs: Sequence[tuple[RunConfig, Path]], finished: int) -> None:
        for listener in self._listeners:
            listener.planned(runs, finished)

    def resumed(self, config: RunConfig, start: int) -> None:
        for listener in self._listeners:
            listener.resumed(config, start)

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        for listener in self._listeners:
            listener.advanced(config, measured)

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        for listener in self._listeners:
            listener.ended(config, result)

    def warned(self, message: str) -> None:
        for listener in self._listeners:
            listener.warned(message)


def logger(name: Log) -> Logger:
    """Return the named logger, or raise an error that says what to install."""
    return LOGGERS[name]()


def _require(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise WaffleError(
            f'--log {extra} needs a package that is not installed: pip install "waffle-fl[{extra}]"'
        ) from None


def _metric_name(name: str) -> str:
    """Replace characters that MLflow does not allow in metric names."""
    return re.sub(r"[^\w./ -]", "_", name)


LOGGERS: dict[Log, type[Logger]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
