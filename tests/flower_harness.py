"""A federation on this machine: sites in this process for quick tests, or Flower's real processes to kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.supercore.task_identity import TaskIdentity

from waffle_fl.config import RunConfig
from waffle_fl.deploy import folders
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.keys import wire_form
from waffle_fl.deploy.serverapp import Conductor
from waffle_fl.deploy.site import Site
from waffle_fl.engines.flower.messages import Parcel, packed, unpacked
from waffle_fl.experiment import Place, execute
from waffle_fl.records import read_json
from waffle_fl.tensorfile import write_atomically

PATIENCE = 240.0  # seconds for anything on a busy machine


def change(file: Path, **values: Any) -> None:
    """Change settings in a .toml file of ours."""
    lines = file.read_text().splitlines()
    for key, value in values.items():
        text = json.dumps(value)
        lines = [f"{key} = {text}" if line.startswith(f"{key} =") else line for line in lines]
    write_atomically(file, ("\n".join(lines) + "\n").encode())


def federation(folder: Path, names: Sequence[str], data: str = "digits", **settings: Any) -> Path:
    """A deployment folder on loopback whose sites hold shares of a data set by name, or files of a folder."""
    own = Path(data).is_dir()
    folders.init(folder, names, "127.0.0.1", free_port(), "127.0.0.1", "" if own else data)
    change(folder / "server.toml", **{"backoff": 0.1, **settings})
    for name in names:
        site = folder / "sites" / name
        change(site / "site.toml", port=free_port(), model_may_leave=True)
        if own:
            change(site / "site.toml", data=str(next(p for p in Path(data).resolve().iterdir() if name in p.name)))
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Loopback:
    """Flower's grid as far as we use it, the sites in this process; `post` may do anything to a reply."""

    def __init__(self, folder: Path, post: Callable[[str, Parcel, Parcel], Parcel | None] | None = None) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = (
            1  # what a ServerApp's process knows of itself
        )
        names = folders.read_server(folder).sites
        self.sites = {name: folder / "sites" / name for name in names}
        self.nodes = [
            SimpleNamespace(node_id=i + 1, public_key=wire_form(folder / "keys" / f"{name}.pub"), last_activated_at="")
            for i, name in enumerate(names)
        ]
        self.post = post or (lambda name, request, reply: reply)
        self.replies: dict[str, Any] = {}
        self.requests: list[tuple[str, Parcel]] = []
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
    Conductor(folder, job, grid or Loopback(folder)).conduct()
    return job


def bits(folder: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
    """The final model, every round but for its seconds, and how the run ended."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    rounds = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
    return (folder / "model.safetensors").read_bytes(), rounds, read_json(folder / "result.json") or {}


def simulated(config: RunConfig, out: Path) -> Path:
    """The same config in the simulator."""
    execute([(config, out)], Place(device="cpu"))
    return out


class Deployment:
    """Real processes on loopback: the server, its sites, and `waffle deploy` commands; all are ended on the way out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.log = (folder / "processes.log").open("ab")

    def start_server(self) -> None:
        self._start("server", "deploy", "server", str(self.folder))
        self.wait_until(self._registered)

    def start_site(self, name: str, folder: Path | None = None) -> None:
        self._start(name, "deploy", "site", str(folder or self.folder / "sites" / name))

    def start_run(self, *arguments: str) -> subprocess.Popen[bytes]:
        """`waffle deploy run ...` (or `resume ...`) in the background."""
        return self._start("run", "deploy", *arguments, "--folder", str(self.folder), "--quiet")

    def finish_run(self, *arguments: str, seconds: float = 2 * PATIENCE) -> int:
        """The same to its end; its exit code."""
        return self.start_run(*arguments).wait(timeout=seconds)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """A signal to one of our processes, by its own number; children that Flower started notice by themselves."""
        self.processes[name].send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.processes.pop(name).wait(timeout=PATIENCE)

    def server_app(self) -> int | None:
        """The process of the ServerApp, if one runs for this deployment."""
        return next(iter(children_with("flwr-serverapp", str(self.folder / "bin"))), None)

    def wait_until(self, holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, (self.folder / "processes.log").read_text()[-3000:]
            time.sleep(0.5)

    def wait_for_rounds(self, out: Path, rounds: int) -> None:
        log = out / "rounds.jsonl"
        self.wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= rounds, 2 * PATIENCE)

    def close(self) -> None:
        """End everything that was started here, sites first."""
        for process in reversed(list(self.processes.values())):
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            if process.poll() is None:
                process.kill()
        self.log.close()

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "waffle_fl", *arguments]
        self.processes[name] = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=ENVIRONMENT)
        return self.processes[name]

    def _registered(self) -> bool:
        text = (self.folder / "processes.log").read_text(errors="replace")
        return text.count("Created node_id") >= len(folders.read_server(self.folder).sites) or (
            "already in use" in text and "Uvicorn running" in text
        )


ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith(("COV_", "PYTEST_"))},
    "OMP_NUM_THREADS": "1",
}


def children_with(*words: str) -> list[int]:
    """Processes of this machine whose command line holds all these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(word in text for word in words):
                found.append(int(entry.parent.name))
    return found


@contextlib.contextmanager
def deployed(folder: Path) -> Iterator[Deployment]:
    """A server and all its sites, up and registered; gone afterwards."""
    deployment = Deployment(folder)
    try:
        deployment.start_server()
        for name in folders.read_server(folder).sites:
            deployment.start_site(name)
        yield deployment
    finally:
        deployment.close()
