"""The processes of one end: Flower's own, and our executor beside it; started together, watched, and ended together."""

from __future__ import annotations

import ctypes
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

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # the memory of a message goes back to the system when it has been read
    "NO_COLOR": "1",
}
RETURNS, RETURN = 5, 20.0  # how often, and after how many seconds, a site that was refused tries again
REJECTED_WITHIN = 60.0  # seconds after its start; a process that ends later was not rejected
STOPPING = 10.0  # seconds for a process to end by itself
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def environment(home: Path) -> dict[str, str]:
    """The variables of an end's processes: Flower's folder inside ours, every switch off."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    path = os.pathsep.join([str(python_bin()), os.environ.get("PATH", os.defpath)])
    return {**inherited, **SWITCHES, "FLWR_HOME": str(home / "flower"), "PATH": path}


def server_command(folder: Path, s: ServerSettings) -> list[str]:
    """Flower's SuperLink, on the local port; its public one is opened by the launcher."""
    keys = folder / "keys"
    missing = [name for name in ("ca.crt", "server.pem", "server.key") if not (keys / name).is_file()]
    if missing and not s.insecure:
        raise WaffleError(f"{keys} lacks {', '.join(missing)}, by which sites know this server: put it back")
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
    """The server's name and port."""
    host, _, port = s.server.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise WaffleError(f"server = {s.server!r} in site.toml: expected a name and a port, as in fl.example.org:9443")
    return host, int(port)


def site_command(folder: Path, s: SiteSettings) -> list[str]:
    """Flower's SuperNode."""
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
    """Raise one line that names a port which another program holds; keys are the names of the settings."""
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
    """Processes that live and die together; the first one decides how they end."""

    home: Path
    commands: Mapping[str, Sequence[str]]
    returns: int = 0  # how often the first is started again after it was rejected
    say: Callable[[str], None] = print
    once: Mapping[str, Sequence[str]] = field(default_factory=dict)  # commands that end by themselves
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    stopping: bool = False  # has somebody asked for the end?

    def run(self) -> int:
        """Start all, wait for the first to end, end the others; return its exit code."""
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
        began, left = time.monotonic(), self.returns
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
                left = left - 1 if early else self.returns - 1
                self.say(
                    f"{'not let in' if code else 'the server has ended the connection'} (its cause above; a key that "
                    f"was replaced or revoked is one): again in {RETURN:g} seconds; waffle deploy check {self.home} "
                    "tries the connection"
                )
                time.sleep(RETURN)
                began = time.monotonic()
                self._start(first, self.commands[first])
            time.sleep(0.2)

    def _start(self, name: str, command: Sequence[str]) -> None:
        self.running[name] = subprocess.Popen(
            list(command), cwd=self.home / "work", env=environment(self.home), preexec_fn=end_with_parent
        )

    def _pass_on(self, number: int, frame: Any) -> None:
        """Stop the first process, which ends the others; between two starts of it there is only us to stop."""
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


def end_with_parent() -> None:
    """Have Linux kill this process when its parent dies; on other systems it stays until it is stopped."""
    _process_option(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_name(name: str) -> None:
    """Name this process in process listings, on Linux; at most 15 characters."""
    _process_option(PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _process_option(option: int, value: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
