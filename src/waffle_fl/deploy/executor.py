"""Runs our apps for Flower's tasks: python -m waffle_fl.deploy.executor FOLDER

Replaces Flower's SuperExec, which starts a new process per message, with a secret token on its command line and the
submitted code. This process authenticates with the folder's secret, takes only tasks of its role (server or site), and
forks itself for each task: torch is already loaded, no token appears in a process listing, and the app is always the
installed waffle-fl. Code that Flower transports is never unpacked.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import Any

from waffle_fl.deploy.flower_launcher import plain_logs
from waffle_fl.deploy.settings_files import Endpoint, endpoint_of
from waffle_fl.errors import WaffleError
from waffle_fl.process_options import end_with_parent, set_name

log = logging.getLogger("waffle_fl")
POLL, LONGEST_POLL = 0.1, 0.5  # seconds between two polls for a task; the pause grows while none arrives
ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
SLOW_IMPORT = "torch._dynamo"  # needed by the traces of gradients; takes seconds
LONG = 3.0  # seconds of a task after which SLOW_IMPORT is loaded once for all later tasks
APPS = {"server": "flwr-serverapp", "site": "flwr-clientapp"}  # process name while an app runs


def serve(home: Path) -> None:
    """Poll for tasks and run them until stopped."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from httpx import HTTPError, HTTPStatusError

    end = endpoint_of(home)
    kind = TaskType.SERVER_APP if end.role == "server" else TaskType.CLIENT_APP
    _preload(end.role)
    children: dict[int, float] = {}  # process ids, and when they began
    signal.signal(signal.SIGTERM, lambda *_: _stop(children))
    signal.signal(signal.SIGINT, lambda *_: _stop(children))
    while True:
        _forget_ended(children)
        client = _client(end)
        pause = POLL
        try:
            while True:
                found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
                pause = min(1.05 * pause, LONGEST_POLL)
                if found.HasField("task") and found.token:
                    children[_fork(home, end, str(found.token))] = time.monotonic()
                    pause = POLL
                if _forget_ended(children) > LONG and end.role == "site":
                    import_module(SLOW_IMPORT)
                time.sleep(pause)
        except HTTPStatusError as error:
            log.error("Flower's process rejected the request for tasks (%d)", error.response.status_code)
            time.sleep(10.0)
        except HTTPError:  # Flower's process is not up yet, or is being restarted
            time.sleep(1.0)
        finally:
            client.close()


def _client(end: Endpoint) -> Any:
    """Return a client of the Runtime API that authenticates with the folder's secret."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    chain: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperExec"),
        SuperExecAuthHttpInterceptor(master_secret=end.secret, protected_methods=ACQUIRE),
    ]
    return RuntimeHttpClient.from_server_address(end.address, end.certificates is None, end.certificates, chain)


def _preload(role: str) -> None:
    """Import what every app needs, once. Nothing is computed here, because a fork does not copy torch's threads."""
    import_module("waffle_fl.deploy.client_app" if role == "site" else "waffle_fl.deploy.server_app")
    runtime: Any = import_module(
        "flwr.supernode.runtime.run_clientapp" if role == "site" else "flwr.superlink.runtime.run_serverapp"
    )
    runtime.install_from_fab = _nothing


def _fork(home: Path, end: Endpoint, token: str) -> int:
    """Fork a process that runs the app of one task and exits; return its id."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        end_with_parent()
        set_name(APPS[end.role])
        RUN[end.role](home, end, token)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_client_app(home: Path, end: Endpoint, token: str) -> None:
    """Run Flower's ClientApp process with the installed ClientApp instead of the submitted one."""
    runtime: Any = import_module("flwr.supernode.runtime.run_clientapp")
    app_of = import_module("waffle_fl.deploy.client_app").app_of
    runtime.get_load_client_app_fn = lambda **_: lambda *_: app_of(home)
    runtime.run_clientapp(end.address, token, end.certificates is None, end.certificates)


def run_server_app(home: Path, end: Endpoint, token: str) -> None:
    """Run Flower's ServerApp process with the installed ServerApp instead of the submitted one."""
    runtime: Any = import_module("flwr.superlink.runtime.run_serverapp")
    serve_job = import_module("waffle_fl.deploy.server_app").main

    def run(grid: Any, context: Any, **_: Any) -> Any:
        job = str(context.run_config.get("job"))
        try:
            serve_job(home, grid, job)
        except WaffleError as error:  # also written to the job's log
            log.error("job %s: %s", job, error)
        return context

    runtime.get_project_config = lambda _: {"tool": {"flwr": {"app": {"components": {"serverapp": ""}}}}}
    runtime.get_fused_config_from_dir = lambda _, given: dict(given)
    runtime.run_ = run
    nothing_to_upload: Queue[str | None] = Queue()
    runtime.run_serverapp(end.address, nothing_to_upload, token, end.certificates is None, end.certificates)


RUN: dict[str, Callable[[Path, Endpoint, str], None]] = {"server": run_server_app, "site": run_client_app}


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _forget_ended(children: dict[int, float]) -> float:
    """Remove the processes that have ended; return how long the longest of them ran."""
    ended = [number for number in children if os.waitpid(number, os.WNOHANG)[0]]
    return max((time.monotonic() - children.pop(number) for number in ended), default=0.0)


def _stop(children: dict[int, float]) -> None:
    """Stop the running apps, then exit."""
    for number in children:
        os.kill(number, signal.SIGTERM)
    end = time.monotonic() + 3
    while children and time.monotonic() < end:
        _forget_ended(children)
        time.sleep(0.05)
    for number in children:
        os.kill(number, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    home = Path(sys.argv[1])
    import_module("flwr.supercore.logger")
    plain_logs(home, endpoint_of(home).name)
    serve(home)


if __name__ == "__main__":
    main()
