"""The processes of a server or a site: Flower's and the executor, started, watched and stopped together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waffle_fl.deploy.gateway import listening
from waffle_fl.deploy.settings_files import SECRET, ServerSettings, SiteSettings, python_bin, secret_of
from waffle_fl.errors import WaffleError, writable
from waffle_fl.process_options import end_with_parent

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # returns the memory of a message to the system once it is freed
    "NO_COLOR": "1",
}
RETRIES, RETRY_SECONDS = 5, 20.0  # number of reconnection attempts of a rejected site, and seconds between them
REJECTED_WITHIN = 60.0  # seconds after the start; an exit later than this is not a rejection
STOPPING = 10.0  # seconds between SIGTERM and SIGKILL


def environment(home: Path) -> dict[str, str]:
    """Environment of the processes: Flower's home inside this folder; telemetry and update checks off."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    path = os.pathsep.join([str(python_bin()), os.environ.get("PATH", os.defpath)])
    return {**inherited, **SWITCHES, "FLWR_HOME": str(home / "flower"), "PATH": path}


def server_command(folder: Path, s: ServerSettings) -> list[str]:
    """Command that starts Flower's SuperLink on the local port; `flower_launcher` opens the public port."""
    keys = folder / "keys"
    missing = [name for name in ("ca.crt", "server.pem", "server.key") if not (keys / name).is_file()]
    if missing and not s.insecure:
        raise WaffleError(f"{keys} lacks {', '.join(missing)}, which sites need to verify this server: restore it")
    secret_of(keys / SECRET)
    certified = [
        *("--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.pem")),
        *("--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"),
    ]
    return [
        *(sys.executable, "-m", "waffle_fl.deploy.flower_launcher", "superlink", str(folder)),
        *(["--insecure"] if s.insecure else certified),
        *("--host", "127.0.0.1", "--port", str(s.local_port), "--database", str(folder / "superlink.db")),
        *("--isolation", "process", "--superexec-auth-secret-file", str(keys / SECRET)),
        "--disable-runtime-dependency-installation",
    ]


def address_of(s: SiteSettings) -> tuple[str, int]:
    """Host name and port of the server."""
    host, _, port = s.server.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise WaffleError(f"server = {s.server!r} in site.toml: expected a name and a port, as in fl.example.org:9443")
    return host, int(port)


def site_command(folder: Path, s: SiteSettings) -> list[str]:
    """Command that starts Flower's SuperNode."""
    address_of(s)
    secret_of(folder / SECRET)
    secured = [
        *("--root-certificates", str(folder / "ca.crt")),
        *("--auth-supernode-private-key", str(folder / "node.key")),
    ]
    return [
        *(sys.executable, "-m", "waffle_fl.deploy.flower_launcher", "supernode", str(folder)),
        *(["--insecure"] if s.insecure else secured),
        *("--superlink", s.server, "--host", "127.0.0.1", "--port", str(s.port)),
        *("--isolation", "process", "--superexec-auth-secret-file", str(folder / SECRET)),
    ]


def executor_command(home: Path) -> list[str]:
    return [sys.executable, "-m", "waffle_fl.deploy.executor", str(home)]


def check_ports(ports: Mapping[str, tuple[str, int]], file: Path) -> None:
    """Raise if another program uses one of these ports; the keys are the names of the settings."""
    for name, (host, port) in ports.items():
        try:
            listening(host, port).close()
        except OSError as error:
            taken = "is in use by another program" if error.errno == 98 else f"cannot be used: {error.strerror}"
            raise WaffleError(f"port {port} on {host} {taken}: stop that program, or change {name} in {file}") from None
        except socket.gaierror:
            raise WaffleError(f"this machine has no address {host!r}: change listen in {file}") from None


@dataclass
class Group:
    """Processes that are started and stopped together; the exit code is that of the first."""

    home: Path
    commands: Mapping[str, Sequence[str]]
    retries: int = 0  # how often the first is restarted after a rejection
    report: Callable[[str], None] = print
    once: Mapping[str, Sequence[str]] = field(default_factory=dict)  # commands that run once and exit
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    stopping: bool = False  # whether a stop signal was received

    def run(self) -> int:
        """Start all processes, wait until the first exits, stop the others; return its exit code."""
        with writable(self.home):
            for name in ("flower", "work"):
                (self.home / name).mkdir(exist_ok=True, mode=0o700)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        first = next(iter(self.commands))
        for name, command in {**self.commands, **self.once}.items():
            self._start(name, command)
        try:
            return self._watch(first)
        finally:
            self._end()

    def _watch(self, first: str) -> int:
        began, left = time.monotonic(), self.retries
        while True:
            for name, process in list(self.running.items()):
                code = process.poll()
                if code is None:
                    continue
                del self.running[name]
                if name in self.once and not code:
                    continue
                if self.stopping:
                    return 0
                early = time.monotonic() - began < REJECTED_WITHIN
                rejected = name == first and code >= 0 and (early or not code)
                if not rejected or not left:
                    return code or 1
                left = left - 1 if early else self.retries - 1
                self.report(
                    f"{'rejected by the server' if code else 'the server closed the connection'} (see the cause above, "
                    f"for example a replaced or revoked key): retrying in {RETRY_SECONDS:g} seconds; test the "
                    f"connection with waffle deploy check {self.home}"
                )
                time.sleep(RETRY_SECONDS)
                began = time.monotonic()
                self._start(first, self.commands[first])
            time.sleep(0.2)

    def _start(self, name: str, command: Sequence[str]) -> None:
        self.running[name] = subprocess.Popen(
            list(command), cwd=self.home / "work", env=environment(self.home), preexec_fn=end_with_parent
        )

    def _pass_on(self, number: int, frame: Any) -> None:
        """Forward the signal to the first process, whose exit stops the others; exit at once if it is not running."""
        self.stopping = True
        first = self.running.get(next(iter(self.commands)))
        if first is None or first.poll() is not None:
            sys.exit(128 + number)
        first.send_signal(number)

    def _end(self) -> None:
        for process in self.running.values():
            process.terminate()
        end = time.monotonic() + STOPPING
        for process in self.running.values():
            try:
                process.wait(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
