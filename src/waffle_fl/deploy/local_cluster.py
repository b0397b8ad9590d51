"""A federation on this machine: server and sites as separate processes, for the demonstration and for tests."""

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
from waffle_fl.deploy.introductions import PEERS
from waffle_fl.errors import WaffleError

L = TypeVar("L", bound="LocalCluster")
PATIENCE = 240.0  # seconds; generous, for busy machines


class LocalCluster:
    """The server and the sites of a deployment folder; `close` stops every process started here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.groups: list[int] = []  # process groups: each command has its own session, to be killed together
        self.environment = {"OMP_NUM_THREADS": "1"}
        self.prefix: Sequence[str] = ()  # prepended to each command, for example a tracer

    def start_server(self) -> None:
        (self.folder / REGISTERED).unlink(missing_ok=True)  # left by an earlier server
        self.start("server", "deploy", "server", str(self.folder))
        self.wait_until((self.folder / REGISTERED).exists)

    def start_site(self, name: str) -> None:
        self.start(name, "deploy", "site", str(self.folder / "sites" / name))

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a `waffle` command in the background, with its output in processes.log."""
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
        """Send a signal to one process; the processes that Flower started for it end by themselves."""
        self.processes[name].send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.processes.pop(name).wait(timeout=PATIENCE)

    def wait_until(self, holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not holds():
            gone = [name for name, process in self.processes.items() if process.poll()]
            if gone or time.monotonic() > end:
                what = f"{gone[0]} has ended" if gone else f"timeout after {seconds:g} seconds"
                raise WaffleError(f"{what}: {' '.join(self.log.read_text(errors='replace').split())[-1000:]}")
            time.sleep(0.5)

    def close(self) -> None:
        """Stop all processes, sites before the server."""
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
    """Start a server and all its sites; stop them on exit."""
    try:
        cluster.start_server()
        for name in settings_files.read_server(cluster.folder).sites:
            cluster.start_site(name)
        yield cluster
    finally:
        cluster.close()


def prepare(folder: Path, names: Sequence[str], data: str, **settings: object) -> None:
    """Make a deployment folder on loopback; `data` names a data set to split, or a folder with one file per site."""
    is_folder = Path(data).is_dir()
    port, local_port, *of_sites = free_ports(2 + len(names))
    membership.init(folder, names, "127.0.0.1", port, "127.0.0.1", "" if is_folder else data)
    settings_files.change(folder / "server.toml", local_port=local_port, **settings)
    for name, own_port in zip(names, of_sites, strict=True):
        home = folder / "sites" / name
        site = home / "site.toml"
        membership.join(home)
        membership.accept_key(folder, name, home / membership.NODE_PUBLIC)
        settings_files.change(site, port=own_port, model_may_leave=True)
        if is_folder:
            file = next(path for path in sorted(Path(data).resolve().iterdir()) if name in path.name.split("."))
            settings_files.change(site, data=str(file))
    for name in names:
        (folder / "sites" / name / PEERS).write_text(membership.peers_text(folder), encoding="ascii")


def free_ports(count: int) -> list[int]:
    """Return different ports of this machine that are free now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port() -> int:
    """Return a port of this machine that is free now."""
    return free_ports(1)[0]
