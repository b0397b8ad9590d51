"""A federation on this machine: sites in this process for quick tests, or Flower's real processes to kill."""

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

from flwr.supercore.task_identity import TaskIdentity

from waffle_fl.config import RunConfig, check_run
from waffle_fl.deploy import settings_files
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.keys import wire_form
from waffle_fl.deploy.local_cluster import PATIENCE, LocalCluster, prepare
from waffle_fl.deploy.server_app import JobRunner
from waffle_fl.deploy.site import Site
from waffle_fl.engines.flower.messages import Message, packed, unpacked
from waffle_fl.experiment import Runtime, execute
from waffle_fl.records import read_json

SITES = ("a", "b", "c")
SMALL = {"data": "digits", "agents": 3, "samples_per_agent": 40, "batch_size": 16, "precision": "float64"}


def small(rounds: int, **settings: Any) -> RunConfig:
    """A run among three sites that hardly computes: what it takes is Flower's."""
    return check_run("waffle", {**SMALL, "rounds": rounds, "guard": "standard", "model": "mlp", **settings}, {})


def asked(rounds: int, out: Path, **settings: Any) -> list[str | Path]:
    """The same as a command line."""
    given = {**SMALL, "rounds": rounds, "model": "mlp", **settings}
    flags = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return ["run", "waffle", *flags, "--out", out]


def federation(folder: Path, names: Sequence[str], data: str = "digits", **settings: Any) -> Path:
    """A deployment folder on loopback that asks again at once, and waits for a site that was killed."""
    prepare(folder, names, data, **{"backoff": 0.1, "grace": PATIENCE, **settings})
    return folder


OWN_MODEL = "own_network:build"
NETWORK = """\
from torch import nn


def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, {hidden}), nn.ReLU(), nn.Linear({hidden}, classes))
"""


def with_model(folder: Path, hidden: int) -> str:
    """A folder with a network of one's own, as a search path."""
    folder.mkdir()
    (folder / "own_network.py").write_text(NETWORK.format(hidden=hidden))
    return os.pathsep.join([str(folder), *sys.path])


class Grid:
    """Flower's grid as far as we use it, the sites in this process; `post` may do anything to a reply."""

    def __init__(self, folder: Path, post: Callable[[str, Message, Message], Message | None] | None = None) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = (
            1  # what a ServerApp's process knows of itself
        )
        names = settings_files.read_server(folder).sites
        self.sites = {name: folder / "sites" / name for name in names}
        self.nodes = [
            SimpleNamespace(node_id=i + 1, public_key=wire_form(folder / "keys" / f"{name}.pub"), last_activated_at="")
            for i, name in enumerate(names)
        ]
        self.post = post or (lambda name, request, reply: reply)
        self.replies: dict[str, Any] = {}
        self.requests: list[tuple[str, Message]] = []
        self.gone: set[str] = set()

    def get_nodes(self) -> list[Any]:
        return [node for node, name in zip(self.nodes, self.sites, strict=True) if name not in self.gone]

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        numbers = []
        for message in messages:
            node = message.metadata.dst_node_id
            name = list(self.sites)[node - 1]
            number = f"{len(self.requests)}"
            request = unpacked(message.content, 1 << 30)
            self.requests.append((name, request))
            reply = self.post(name, request, Site(self.sites[name]).answer(request))
            if reply is not None:
                metadata = SimpleNamespace(reply_to_message_id=number, src_node_id=node)
                self.replies[number] = SimpleNamespace(
                    metadata=metadata, content=packed(reply), has_error=lambda: False, error=None
                )
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers: Sequence[str]) -> list[Any]:
        return [self.replies.pop(number) for number in numbers if number in self.replies]


def conduct(folder: Path, config: RunConfig, out: Path, grid: Any = None) -> Job:
    """Run a job to its end with the sites in this process."""
    job = Job.create(folder, config, out, force=False)
    JobRunner(folder, job, grid or Grid(folder)).run_all()
    return job


def bits(folder: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
    """The final model, every round but for its seconds, and how the run ended."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
    return (folder / "model.safetensors").read_bytes(), rounds, read_json(folder / "result.json") or {}


def simulated(config: RunConfig, out: Path) -> Path:
    """The same config in the simulator."""
    execute([(config, out)], Runtime(device="cpu"))
    return out


class Deployment(LocalCluster):
    """Real processes: a `loopback.Loopback` that also runs jobs, and finds what Flower itself has started."""

    def start_run(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """`waffle deploy run METHOD ...` or `resume RUN` in the background."""
        words = map(str, arguments)
        return self.start("run", "deploy", *words, "--folder", str(self.folder), "--quiet")

    def finish_run(self, *arguments: str | Path, seconds: float = 2 * PATIENCE) -> int:
        """The same to its end; its exit code."""
        code = self.start_run(*arguments).wait(timeout=seconds)
        del self.processes["run"]
        return code

    def refuses(self, *arguments: str | Path) -> str:
        """What a run says that ends in an error of ours."""
        before = self.log.stat().st_size
        assert self.finish_run(*arguments) == 2
        return self.said(before)

    def said(self, since: int) -> str:
        """All output from a position of the log on, as one line."""
        return " ".join(self.log.read_bytes()[since:].decode(errors="replace").split())

    def server_app(self) -> int | None:
        """The process of the ServerApp, if one runs for this deployment."""
        ours = set(processes_in(self.folder))
        named = [number for number, text in _told("comm") if text.strip() == "flwr-serverapp"]
        return next((number for number in named if number in ours), None)

    def wait_for_rounds(self, out: Path, rounds: int) -> None:
        log = out / "rounds.jsonl"
        self.wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= rounds, 2 * PATIENCE)


def processes_with(*words: str) -> list[int]:
    """Processes of this machine whose command line holds all these words."""
    return [number for number, text in _told("cmdline") if all(word in text for word in words)]


def processes_in(folder: Path) -> list[int]:
    """Processes that were started for what lies in this folder: Flower's home is in their environment."""
    return [number for number, text in _told("environ") if f"FLWR_HOME={folder}" in text]


def _told(file: str) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):
            yield int(entry.parent.name), entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
