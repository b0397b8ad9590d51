"""Run a federation on this machine, with the sites in this process or with Flower's real processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.supercore.task_identity import TaskIdentity

from fork_server import Command, shared
from waffle_fl.config import RunConfig, check_run
from waffle_fl.deploy import server_app, settings_files, site
from waffle_fl.deploy.demo import models_in
from waffle_fl.deploy.exposure import usual_shares
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.keys import wire_form
from waffle_fl.deploy.local_cluster import PATIENCE, LocalCluster, prepare
from waffle_fl.deploy.server_app import JobRunner
from waffle_fl.deploy.site import Site
from waffle_fl.engines.flower import transport
from waffle_fl.engines.flower.messages import Message, packed, unpacked
from waffle_fl.experiment import Runtime, execute
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel
from waffle_fl.records import read_json

SITES = ("a", "b", "c")
SMALL = {"data": "digits", "agents": 3, "samples_per_agent": 40, "batch_size": 16, "precision": "float64"}


def small_config(rounds: int, **settings: Any) -> RunConfig:
    """Return the config of a short run among three sites with a small model."""
    return check_run("waffle-paper", {**SMALL, "rounds": rounds, "guard": "standard", "model": "mlp", **settings}, {})


def run_arguments(rounds: int, out: Path, **settings: Any) -> list[str | Path]:
    """Return the arguments of the same run for the command line."""
    given = {**SMALL, "rounds": rounds, "model": "mlp", **settings}
    flags = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return ["run", "waffle-paper", *flags, "--out", out]


def federation(folder: Path, names: Sequence[str], data: str = "digits", **settings: Any) -> Path:
    """Create a deployment folder on loopback with a short retry delay and a long grace period for killed sites."""
    prepare(folder, names, data, **{"backoff": 0.1, "grace": PATIENCE, **settings})
    return folder


OWN_MODEL = "own_network:build"
NETWORK = """\
from torch import nn


def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, {hidden}), nn.ReLU(), nn.Linear({hidden}, classes))
"""


def write_model(folder: Path, hidden: int) -> str:
    """Write a folder with a user-defined network and return it as a search path."""
    folder.mkdir()
    (folder / "own_network.py").write_text(NETWORK.format(hidden=hidden))
    return os.pathsep.join([str(folder), *sys.path])


SHARES: dict[tuple[Any, ...], tuple[float, float]] = {}


def remembered_shares(model: FlatModel, federation: Federation) -> tuple[float, float]:
    """Return `usual_shares`; models of the same text on the same rows have the same shares."""
    rows = federation.train[0]
    content = federation.x[rows].numpy().tobytes(), federation.labels(0, rows).numpy().tobytes()
    key = repr(model.module()), model.dtype, federation.task, *content
    if key not in SHARES:
        SHARES[key] = usual_shares(model, federation)
    return SHARES[key]


site.usual_shares = remembered_shares  # a site computes them for each message, three models each


class FakeClock:
    """Replacement of the module `time` whose `sleep` advances the clock without waiting."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def without_waiting(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace the server's clock by one that only its own pauses advance, and return it."""
    clock = FakeClock()
    monkeypatch.setattr(transport, "time", clock)
    monkeypatch.setattr(server_app, "time", clock)
    return clock


class Grid:
    """The part of Flower's grid that is used, with the sites in this process.

    `intercept` may change or drop a reply.
    """

    def __init__(
        self, folder: Path, intercept: Callable[[str, Message, Message], Message | None] | None = None
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = (
            1  # Flower sets these in a ServerApp's process
        )
        names = settings_files.read_server(folder).sites
        self.sites = {name: folder / "sites" / name for name in names}
        self.nodes = [
            SimpleNamespace(node_id=i + 1, public_key=wire_form(folder / "keys" / f"{name}.pub"), last_activated_at="")
            for i, name in enumerate(names)
        ]
        self.intercept = intercept or (lambda name, request, reply: reply)
        self.replies: dict[str, Any] = {}
        self.requests: list[tuple[str, Message]] = []
        self.offline: set[str] = set()

    def get_nodes(self) -> list[Any]:
        return [node for node, name in zip(self.nodes, self.sites, strict=True) if name not in self.offline]

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        numbers = []
        for message in messages:
            node = message.metadata.dst_node_id
            name = list(self.sites)[node - 1]
            number = f"{len(self.requests)}"
            request = unpacked(message.content, 1 << 30)
            self.requests.append((name, request))
            reply = self.intercept(name, request, Site(self.sites[name]).answer(request))
            if reply is not None:
                metadata = SimpleNamespace(reply_to_message_id=number, src_node_id=node)
                self.replies[number] = SimpleNamespace(
                    metadata=metadata, content=packed(reply), has_error=lambda: False, error=None
                )
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers: Sequence[str]) -> list[Any]:
        return [self.replies.pop(number) for number in numbers if number in self.replies]


def run_job(folder: Path, config: RunConfig, out: Path, grid: Any = None) -> Job:
    """Run a job to its end with the sites in this process."""
    job = Job.create(folder, config, out, force=False)
    JobRunner(folder, job, grid or Grid(folder)).run_all()
    return job


def bits(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Return what must be bit-identical: the final models, the rounds without their seconds, and the result."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
    return models_in(folder), rounds, read_json(folder / "result.json") or {}


def run_simulation(config: RunConfig, out: Path) -> Path:
    """Run the same config in the simulator and return its run folder."""
    execute([(config, out)], Runtime(device="cpu"))
    return out


class Deployment(LocalCluster):
    """A `LocalCluster` of real processes that also runs jobs and finds the processes that Flower started."""

    def start_run(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Start `waffle deploy run METHOD ...` or `resume RUN` in the background."""
        words = map(str, arguments)
        return self.start("run", "deploy", *words, "--folder", str(self.folder), "--quiet")

    def finish_run(self, *arguments: str | Path, seconds: float = 2 * PATIENCE) -> int:
        """Run the same command to its end and return its exit code."""
        code = self.start_run(*arguments).wait(timeout=seconds)
        del self.processes["run"]
        return code

    def run_error(self, *arguments: str | Path) -> str:
        """Return the output of a run that exits with code 2."""
        before = self.log.stat().st_size
        assert self.finish_run(*arguments) == 2
        return self.output_since(before)

    def output_since(self, since: int) -> str:
        """Return all output after a position of the log as one line."""
        return " ".join(self.log.read_bytes()[since:].decode(errors="replace").split())

    def server_app(self) -> int | None:
        """Return the process id of this deployment's ServerApp, or None."""
        ours = set(processes_in(self.folder))
        named = [number for number, text in _proc_files("comm") if text.strip() == "flwr-serverapp"]
        return next((number for number in named if number in ours), None)

    def wait_for_rounds(self, out: Path, rounds: int) -> None:
        log = out / "rounds.jsonl"
        self.wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= rounds, 2 * PATIENCE)


class ForkedDeployment(Deployment):
    """A deployment whose `waffle` commands are forked with torch imported. Flower and the executors start afresh."""

    def start(self, name: str, *arguments: str) -> Command:  # type: ignore[override]
        process = shared().start_session(
            "waffle", *arguments, environment={**os.environ, **self.environment}, log=self.log
        )
        self.processes[name] = process  # type: ignore[assignment]
        self.groups.append(process.pid)
        return process


def processes_with(*words: str) -> list[int]:
    """Return the processes of this machine whose command line contains all these words."""
    return [number for number, text in _proc_files("cmdline") if all(word in text for word in words)]


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose Flower home, set in their environment, is this folder."""
    return [number for number, text in _proc_files("environ") if f"FLWR_HOME={folder}" in text]


def _proc_files(file: str) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):
            yield int(entry.parent.name), entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
