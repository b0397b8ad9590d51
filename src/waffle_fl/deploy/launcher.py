"""Only our own apps run. Flower sends the code of an app with every run; here what it sends is never unpacked.

A folder with these commands stands first on the PATH of Flower's processes, so that they start ours: the ClientApp and
the ServerApp of the installed waffle-fl, whatever a server, or whoever reaches it, has submitted.

Torch is imported only once a process has begun to send its heartbeat: one that is silent for half a minute is taken for
dead, and another is started in its place.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

__all__ = ["clientapp", "refuse", "serverapp", "supernode", "write_commands"]

Role: TypeAlias = Literal["flwr-clientapp", "flwr-serverapp"]
ROLES = {"flwr-clientapp": "clientapp", "flwr-serverapp": "serverapp"}
GRACE = 3.0  # seconds to end by itself
REFUSED = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-simulation")


def write_commands(commands: Path, role: Role, home: Path) -> None:
    """The commands of one end; `home` is the folder of its settings."""
    commands.mkdir(parents=True, exist_ok=True)
    calls = dict.fromkeys((*ROLES, *REFUSED), "refuse()")
    calls[role] = f"{ROLES[role]}({str(home.resolve())!r})"
    if role == "flwr-clientapp":
        calls["flower-supernode"] = f"supernode({str(home.resolve())!r})"
    for name, call in calls.items():
        path = commands / name
        path.write_text(f"#!{sys.executable}\nfrom waffle_fl.deploy.launcher import *\n\n{call}\n", encoding="utf-8")
        path.chmod(0o755)


def refuse() -> None:
    """What this end does not run at all."""
    sys.exit(f"{Path(sys.argv[0]).name} is not run here")


def supernode(home: str) -> None:
    """Flower's flower-supernode. Without TLS it takes no key; the site shows its own all the same, and is believed."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.cli import flower_supernode

    if "--insecure" in sys.argv:
        runtime: Any = import_module("flwr.supernode.start_client_internal")
        connect, key = runtime.http_request_response, load_ssh_private_key((Path(home) / "node.key").read_bytes(), None)
        runtime.http_request_response = lambda address, insecure, root, _, *rest: connect(
            address, insecure, root, (key, key.public_key()), *rest
        )
    flower_supernode()


def clientapp(home: str) -> None:
    """Flower's flwr-clientapp with our ClientApp in place of the one that was sent."""
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    def load(*_: Any) -> Any:
        return import_module("waffle_fl.deploy.clientapp").app_of(Path(home))

    _end_with_parent()
    runtime: Any = import_module("flwr.supernode.runtime.run_clientapp")
    runtime.install_from_fab = _nothing
    runtime.get_load_client_app_fn = lambda **_: load
    flwr_clientapp()


def serverapp(home: str) -> None:
    """Flower's flwr-serverapp with our ServerApp in place of the one that was submitted."""
    from flwr.superlink.cli.flwr_serverapp import flwr_serverapp

    def run(grid: Any, context: Any, **_: Any) -> Any:
        import_module("waffle_fl.deploy.serverapp").main(Path(home), grid, str(context.run_config.get("job")))
        return context

    _end_with_parent()
    runtime: Any = import_module("flwr.superlink.runtime.run_serverapp")
    runtime.install_from_fab = _nothing
    runtime.get_project_config = lambda _: {"tool": {"flwr": {"app": {"components": {"serverapp": ""}}}}}
    runtime.get_fused_config_from_dir = lambda _, given: dict(given)
    runtime.run_ = run
    flwr_serverapp()


def _end_with_parent() -> None:
    """Flower interrupts an app whose parent is gone, which one that waits for an answer never hears: end it then."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _nothing(*_: Any, **__: Any) -> None:
    return None
