"""A whole federation on this machine, each end a process of its own: for the demonstration, and for tests that kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from waffle_fl.deploy import membership, settings_files
from waffle_fl.deploy.control_client import REGISTERED
from waffle_fl.errors import WaffleError

L = TypeVar("L", bound="LocalCluster")
PATIENCE = 240.0  # seconds for anything on a busy machine


class LocalCluster:
    """The server and the sites of a deployment folder; all that was started here is ended by `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.groups: list[int] = []  # each start is a session of its own, so that nothing of it outlives us
        self.environment = {"OMP_NUM_THREADS": "1"}
        self.prefix: Sequence[str] = ()  # what each command is started by, a tracer for instance

    def start_server(self) -> None:
        (self.folder / REGISTERED).unlink(missing_ok=True)  # what an earlier server knew
        self.start("server", "deploy", "server", str(self.folder))
        self.wait_until((self.folder / REGISTERED).exists)

    def start_site(self, name: str) -> None:
        self.start(name, "deploy", "site", str(self.folder / "sites" / name))

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A `waffle` command in the background, its output in processes.log."""
        command = [*self.prefix, sys.executable, "-m", "waffle_fl", *arguments]
        environment = {**os.environ, **self.environment}
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.processes[name] = process
        self.groups.append(process.pid)
        return process

    @property
    def log(self) -> Path:
        return self.folder / "processes.log"

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """A signal to one process, by its own number; what Flower started for it ends by itself."""
        self.processes[name].send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.processes.pop(name).wait(timeout=PATIENCE)

    def wait_until(self, holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not holds():
            gone = [name for name, process in self.processes.items() if process.poll()]
            if gone or time.monotonic() > end:
                what = f"{gone[0]} has ended" if gone else "this takes too long"
                raise WaffleError(f"{what}: {' '.join(self.log.read_text(errors='replace').split())[-1000:]}")
            time.sleep(0.5)

    def close(self) -> None:
        """End everything, sites before the server."""
        for process in reversed(list(self.processes.values())):
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()


@contextlib.contextmanager
def deployed(cluster: L) -> Iterator[L]:
    """A server and all its sites, up; gone afterwards, whatever happens."""
    try:
        cluster.start_server()
        for name in settings_files.read_server(cluster.folder).sites:
            cluster.start_site(name)
        yield cluster
    finally:
        cluster.close()


def prepare(folder: Path, names: Sequence[str], data: str, **settings: object) -> None:
    """A deployment folder on loopback, whose sites hold shares of a data set by name, or the files of a folder."""
    own = Path(data).is_dir()
    membership.init(folder, names, "127.0.0.1", free_port(), "127.0.0.1", "" if own else data)
    settings_files.change(folder / "server.toml", local_port=free_port(), **settings)
    for name in names:
        home = folder / "sites" / name
        site = home / "site.toml"
        membership.join(home)
        membership.accept_key(folder, name, home / membership.NODE_PUBLIC)
        settings_files.change(site, port=free_port(), model_may_leave=True)
        if own:
            file = next(path for path in sorted(Path(data).resolve().iterdir()) if name in path.name.split("."))
            settings_files.change(site, data=str(file))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
