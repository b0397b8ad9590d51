"""Flower's own commands, started as they should be: from an empty folder, with nothing that calls out or installs."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from waffle_fl.deploy.folders import ServerSettings, SiteSettings, public_keys, python_bin
from waffle_fl.deploy.launcher import Role, write_commands
from waffle_fl.errors import WaffleError, writable

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # the memory of a message goes back to the system when it has been read
}
RETURNS, RETURN = 5, 20.0  # how often, and after how many seconds, a site that was refused tries again
TURNED_AWAY = 60.0  # seconds within which an end means that it was
PR_SET_PDEATHSIG = 1
CONNECTION = "waffle"
UNKNOWN = "unknown"  # how a run stands of which no SuperLink tells
FINISHED = "finished"  # how Flower's words for a run begin that has ended, well or not
REGISTERED = "registered"  # a file that is there while the running SuperLink knows the sites
PYPROJECT = """\
[project]
name = "waffle-app"
version = "1.0.0"
description = "Stands for the waffle-fl that is installed at each end"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "waffle-fl"

[tool.flwr.app.components]
serverapp = "waffle_app:server"
clientapp = "waffle_app:client"

[tool.flwr.app.config]
job = ""
"""
APP = '''"""Flower wants an app to be sent; both ends run the one that is installed there, and this one never."""

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()
'''


def environment(home: Path) -> dict[str, str]:
    """What Flower's processes see: its own folder in ours, our commands first, every switch off."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    path = os.pathsep.join([str(home / "bin"), str(python_bin()), os.environ.get("PATH", os.defpath)])
    return {**inherited, **SWITCHES, "FLWR_HOME": str(home / "flower"), "PATH": path}


def server_command(folder: Path, s: ServerSettings) -> list[str]:
    keys = folder / "keys"
    missing = [name for name in ("ca.crt", "server.pem", "server.key") if not (keys / name).is_file()]
    if missing and not s.insecure:
        raise WaffleError(f"{keys} lacks {', '.join(missing)}, by which sites know this server: put it back")
    certified = [
        *("--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.pem")),
        *("--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"),
    ]
    return [
        *("flower-superlink", *(["--insecure"] if s.insecure else certified)),
        *("--host", s.listen, "--port", str(s.port), "--database", str(folder / "superlink.db")),
        "--disable-runtime-dependency-installation",
    ]


def address_of(s: SiteSettings) -> tuple[str, int]:
    """The server's name and port."""
    host, _, port = s.server.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise WaffleError(f"server = {s.server!r} in site.toml: expected a name and a port, as in fl.example.org:9443")
    return host, int(port)


def site_command(folder: Path, s: SiteSettings) -> list[str]:
    address_of(s)
    secured = [
        *("--root-certificates", str(folder / "ca.crt")),
        *("--auth-supernode-private-key", str(folder / "node.key")),
    ]
    return [
        *("flower-supernode", *(["--insecure"] if s.insecure else secured), "--superlink", s.server),
        *("--host", "127.0.0.1", "--port", str(s.port)),
    ]


def become(home: Path, role: Role, command: list[str]) -> None:
    """Go on as one of Flower's long-running commands, in an empty folder."""
    os.chdir(_prepared(home, role))
    os.execve(python_bin() / command[0], command, environment(home))


def attend(home: Path, role: Role, command: list[str], say: Callable[[str], None]) -> int:
    """Run one of Flower's commands, and start it anew when it is turned away at the door; its exit code.

    Flower takes a site that was killed for alive until it has missed two heartbeats, and refuses its return till then.
    """
    work = _prepared(home, role)
    for left in range(RETURNS, -1, -1):
        began = time.monotonic()
        child = subprocess.Popen(
            [str(home / "bin" / command[0]), *command[1:]], cwd=work, env=environment(home), preexec_fn=_end_with_parent
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, partial(_pass_on, child))
        code = child.wait()
        if not left or not code or code < 0 or time.monotonic() - began > TURNED_AWAY:
            return code
        say(
            f"not let in (Flower's exit code {code}, its cause above): again in {RETURN:g} seconds; "
            f"waffle deploy check {home} tries the connection"
        )
        time.sleep(RETURN)
    return code


def _pass_on(child: subprocess.Popen[bytes], number: int, frame: Any) -> None:
    """To the child while it runs; in the pause between two, it is for us."""
    if child.poll() is None:
        child.send_signal(number)
    else:
        sys.exit(128 + number)


def _end_with_parent() -> None:
    """Linux ends a child whose parent was killed; elsewhere it stays until it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prepared(home: Path, role: Role) -> Path:
    with writable(home):
        write_commands(home / "bin", role, home)
        for name in ("flower", "work"):
            (home / name).mkdir(exist_ok=True)
    return home / "work"


def aside(command: Sequence[str]) -> None:
    """Start a short-lived command that is nobody's child, so that nobody has to wait for it."""
    subprocess.run(["sh", "-c", '"$@" &', "sh", *command], check=True)


class Link:
    """Flower's command line, towards the SuperLink of this deployment."""

    def __init__(self, folder: Path, s: ServerSettings) -> None:
        self.folder, self.settings = folder, s
        near = "127.0.0.1" if s.listen in ("0.0.0.0", "::") else s.listen
        secured = (
            "insecure = true" if s.insecure else f"root-certificates = {json.dumps(str(folder / 'keys' / 'ca.crt'))}"
        )
        with writable(folder):
            (folder / "flower").mkdir(exist_ok=True)
            (folder / "work").mkdir(exist_ok=True)
            config = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{near}:{s.port}"\n'
            (folder / "flower" / "config.toml").write_text(config + secured + "\n", encoding="utf-8")

    def register(self, seconds: float) -> None:
        """Tell the SuperLink who may connect, as soon as it is up; who is registered already stays so."""
        end = time.monotonic() + seconds
        for site, public in public_keys(self.folder, self.settings).items():
            while (done := self._flwr("supernode", "register", str(public), CONNECTION, "--name", site)).returncode:
                if "already in use" in done.stdout + done.stderr:
                    break
                if time.monotonic() > end:
                    raise WaffleError(f"the SuperLink does not take {site}: {_reason(done)}")
                time.sleep(1)
        (self.folder / REGISTERED).write_text("\n".join(self.settings.sites) + "\n", encoding="utf-8")

    def submit(self, job: str) -> str:
        """Start a job; Flower's number of the run."""
        app = self.folder / "app"
        with writable(app):
            (app / "waffle_app").mkdir(parents=True, exist_ok=True)
            (app / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
            (app / "waffle_app" / "__init__.py").write_text(APP, encoding="utf-8")
        done = self._flwr("run", str(app), CONNECTION, "--run-config", f'job="{job}"', "--format", "json")
        try:
            return str(_json(done.stdout)["run-id"])
        except (ValueError, KeyError):
            if "is unavailable" in done.stdout + done.stderr:
                raise WaffleError(
                    f"no server answers on port {self.settings.port}: start it (waffle deploy server {self.folder}), "
                    "then give this command again"
                ) from None
            raise WaffleError(f"the SuperLink does not take the run: {_reason(done)}") from None

    def status(self, run: str) -> str:
        """How Flower says that a run stands: pending, running, finished:completed ..."""
        done = self._flwr("list", CONNECTION, "--run-id", run, "--format", "json")
        try:
            return str(_json(done.stdout)["runs"][0]["status"])
        except (ValueError, KeyError, IndexError):
            return UNKNOWN

    def _flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python_bin() / "flwr"), *arguments],
            cwd=self.folder / "work",
            env={**environment(self.folder), "NO_COLOR": "1", "COLUMNS": "400"},
            capture_output=True,
            text=True,
            check=False,
        )


def _json(text: str) -> Any:
    """The JSON object in what a command printed."""
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    words = " ".join((done.stderr + " " + done.stdout).split())
    return words[-300:] or f"exit code {done.returncode}"
