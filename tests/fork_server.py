"""Run commands in real processes that need not import torch again: a server imports it once and forks for each command.

Started as a program, this file is the server. It reads one request per connection: the command, its folder, environment
and limits, and its three standard streams as file descriptors. It answers with the process id, then with the exit code.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

# A development tool installs rfc3987_syntax, which altair would import: two seconds for a format charts do not use.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

CLIENT = """\
#!{python} -IS
import os, sys
sys.path.insert(0, {tests!r})
from fork_server import request
sys.exit(request({address!r}, ["waffle", *sys.argv[1:]], (0, 1, 2)).wait())
"""


def request(
    address: str,
    command: list[str],
    streams: tuple[int, int, int],
    environment: dict[str, str] | None = None,
    limits: dict[str, int] | None = None,
    session: bool = False,
) -> Reply:
    """Start a command at the server: `waffle` with arguments, or the path of a Python program with arguments."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    content = {
        "command": command,
        "folder": str(Path.cwd()),
        "environment": dict(os.environ) if environment is None else environment,
        "limits": limits or {},
        "session": session,
    }
    socket.send_fds(connection, [b"x"], streams)
    connection.sendall(json.dumps(content).encode() + b"\n")
    return Reply(connection)


class Reply:
    """The process id of a command, and its exit code once it has ended."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.lines = connection, connection.makefile("r")
        self.pid = int(self.lines.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal."""
        if self.returncode is None:
            self.connection.settimeout(timeout)
            self.returncode = int(self.lines.readline())
            self.lines.close()
            self.connection.close()
        return self.returncode


class Command:
    """A running command with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, reply: Reply, out: int, err: int) -> None:
        self.reply, self.out, self.err = reply, out, err

    @property
    def pid(self) -> int:
        return self.reply.pid

    @property
    def returncode(self) -> int | None:
        return self.reply.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        if self.returncode is None and _readable(self.reply.connection, 0):
            self.reply.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code."""
        if self.returncode is None and not _readable(self.reply.connection, timeout):
            raise subprocess.TimeoutExpired("waffle", timeout or 0)
        return self.reply.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return what the command wrote to standard output and standard error."""
        self.reply.wait(timeout)
        for number in (self.out, self.err):
            os.lseek(number, 0, os.SEEK_SET)
        with os.fdopen(self.out) as out, os.fdopen(self.err) as err:
            return out.read(), err.read()


def _unnamed_file() -> int:
    number, path = tempfile.mkstemp()
    Path(path).unlink()
    return number


def _readable(connection: socket.socket, timeout: float | None) -> bool:
    import select

    return bool(select.select([connection], [], [], timeout)[0])


class ForkServer:
    """The server process; it ends with the process that started it."""

    def __init__(self, folder: Path) -> None:
        self.address, self.folder = str(folder / "socket"), folder
        command = [sys.executable, __file__, self.address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)
        assert self.process.stdout is not None
        with self.process.stdout as output:
            assert output.readline() == b"ready\n"

    def start(
        self, *command: str | Path, environment: dict[str, str] | None = None, limits: dict[str, int] | None = None
    ) -> Command:
        """Start a command in the current folder; `limits` are resource limits such as RLIMIT_FSIZE."""
        out, err = _unnamed_file(), _unnamed_file()
        with Path(os.devnull).open() as nothing:
            streams = nothing.fileno(), out, err
            reply = request(self.address, [str(word) for word in command], streams, environment, limits)
        return Command(reply, out, err)

    def start_session(self, *command: str, environment: dict[str, str], log: Path) -> Command:
        """Start a command in its own session, with its output at the end of a file."""
        with Path(os.devnull).open() as nothing, log.open("ab") as output:
            streams = nothing.fileno(), output.fileno(), output.fileno()
            reply = request(self.address, list(command), streams, environment, session=True)
        return Command(reply, -1, -1)

    def run(self, *command: str | Path, timeout: float = 100, **options: Any) -> tuple[int, str, str]:
        """Run a command to its end and return (exit code, stdout, stderr)."""
        running = self.start(*command, **options)
        out, err = running.communicate(timeout)
        assert running.returncode is not None
        return running.returncode, out, err

    def write_client(self, folder: Path) -> None:
        """Write a program `waffle` that runs its command at this server."""
        text = CLIENT.format(python=sys.executable, tests=str(Path(__file__).parent), address=self.address)
        (folder / "waffle").write_text(text)
        (folder / "waffle").chmod(0o700)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        shutil.rmtree(self.folder)


@cache
def shared() -> ForkServer:
    """Return the server of this test process; the first call starts it."""
    return ForkServer(Path(tempfile.mkdtemp(prefix="waffle-forks-")))


# ------------------------------------------------------------------------------------------------------ in the server


def serve(address: str) -> None:
    """Fork for each connection until standard input is closed. Nothing is computed here: torch has no threads yet."""
    import gc
    import select

    import altair  # noqa: F401
    import torch._dynamo  # noqa: F401
    import vl_convert  # noqa: F401

    from waffle_fl import experiment
    from waffle_fl.cli import commands, decide, inference  # noqa: F401
    from waffle_fl.report import page

    experiment.factories._dataset("digits", "", False)
    page.bundle = partial(_once, Path(address).with_name("bundle.js"), page.bundle)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            break
        connection, _ = listener.accept()
        children = {pid for pid in children if not os.waitpid(pid, os.WNOHANG)[0]}
        pid = os.fork()
        if not pid:
            listener.close()
            _handle(connection)
        children.add(pid)
        connection.close()
    for pid in children:
        os.waitpid(pid, 0)


def _once(path: Path, compute: Callable[[], str]) -> str:
    """Return a text that takes seconds to compute: the first command writes it to a file, the others read it."""
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(compute(), encoding="utf-8")
        part.rename(path)
    return path.read_text(encoding="utf-8")


def _handle(connection: socket.socket) -> None:
    """Fork the command, report its process id, wait for it and report its exit code."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    content = json.loads(connection.makefile("r").readline())
    pid = os.fork()
    if not pid:
        connection.close()
        _execute(content, streams)
    connection.sendall(f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        connection.sendall(f"{code}\n".encode())
    finally:
        os._exit(0)


def _execute(content: dict[str, Any], streams: list[int]) -> None:
    """Become the command, as a new interpreter would."""
    import atexit
    import resource
    import runpy
    import traceback

    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(content["folder"])
        os.environ.clear()
        os.environ.update(content["environment"])
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if content["session"]:
            os.setsid()
        for name, value in content["limits"].items():
            resource.setrlimit(getattr(resource, name), (value, value))
        program, *arguments = content["command"]
        sys.argv = [program, *arguments]
        if program == "waffle":
            from waffle_fl.cli import main

            main()
        else:
            runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
