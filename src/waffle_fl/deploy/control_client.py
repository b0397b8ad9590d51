"""Client for the operator's commands to a running server: Flower's Control API on loopback, with a secret."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from waffle_fl.deploy.gateway import CONTROL_HEADER
from waffle_fl.deploy.membership import admitted_keys
from waffle_fl.deploy.settings_files import ServerSettings, control_secret, read_server
from waffle_fl.errors import WaffleError, writable

UNKNOWN = "unknown"  # status of a run if no SuperLink answers
FINISHED = "finished"  # prefix of Flower's status of an ended run, successful or not
REGISTERED = "registered"  # file that exists once the running SuperLink has registered the sites
PYPROJECT = """\
[project]
name = "waffle-app"
version = "1.0.0"
description = "Placeholder for the waffle-fl that is installed on the server and at each site"
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
APP = '''"""Placeholder: Flower requires a submitted app. Server and sites run the installed waffle-fl instead."""

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()
'''


@dataclass(frozen=True)
class Node:
    """A site as the SuperLink knows it."""

    node_id: int
    name: str
    public_key: bytes
    status: str  # registered, online, offline or unregistered


class _Secret:
    """Adds the operator's secret to every request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers[CONTROL_HEADER] = self.secret
        return call_next(context)


class ControlClient:
    """The operator's client for the SuperLink of a folder."""

    def __init__(self, folder: Path, settings: ServerSettings | None = None) -> None:
        self.folder, self.settings = folder, settings or read_server(folder)

    def wait(self, seconds: float) -> None:
        """Wait until the SuperLink answers."""
        end = time.monotonic() + seconds
        while True:
            try:
                self.nodes()
                return
            except WaffleError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.5)

    def register(self) -> list[str]:
        """Register the keys that may connect with the SuperLink; return one line per change."""
        known, admitted = {node.public_key: node for node in self.nodes()}, admitted_keys(self.folder)
        changes = [
            f"{site} has no key yet: waffle deploy add-site {site} --key FILE --folder {self.folder}"
            for site in self.settings.members
            if site not in admitted.values()
        ]
        for form, node in known.items():
            if form not in admitted and node.status != "unregistered":
                self.unregister(node.node_id)
                changes.append(f"{node.name or node.node_id} is no longer admitted")
        for form, site in admitted.items():
            if form in known and known[form].status != "unregistered":
                continue
            self._forget(form)
            self._register(form, site)
            changes.append(f"{site} is admitted")
        with writable(self.folder):
            (self.folder / REGISTERED).write_text("\n".join(self.settings.members) + "\n", encoding="utf-8")
        return changes

    def nodes(self) -> list[Node]:
        """All sites known to the SuperLink, including removed ones."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._client() as client:
            found = client.ListNodes(ListNodesRequest()).nodes_info
        return [Node(node.node_id, node.name, bytes(node.public_key), node.status) for node in found]

    def unregister(self, node_id: int) -> None:
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        with self._client() as client:
            client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))

    def submit(self, job: str) -> str:
        """Submit a job; return Flower's run id."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        app = self.folder / "app"
        with writable(app):
            (app / "waffle_app").mkdir(parents=True, exist_ok=True)
            (app / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
            (app / "waffle_app" / "__init__.py").write_text(APP, encoding="utf-8")
        content = build_fab_from_disk(app)
        fab = Fab(sha256(content).hexdigest(), content, {})
        with self._client() as client:
            started = client.StartRun(
                StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto({"job": job}))
            )
        if not started.HasField("run_id"):
            raise WaffleError("the SuperLink did not accept the run")
        return str(started.run_id)

    def status(self, run: str) -> str:
        """Flower's status of a run: pending, running, finished:completed ..."""
        from flwr.proto.control_pb2 import ListRunsRequest

        try:
            with self._client() as client:
                found = client.ListRuns(ListRunsRequest(run_id=int(run))).run_dict
        except WaffleError:
            return UNKNOWN
        for entry in found.values():
            status = entry.status
            return f"{status.status}:{status.sub_status}" if status.sub_status else str(status.status)
        return UNKNOWN

    def stop(self, run: str) -> bool:
        """Stop a run; return False if it was not running."""
        from flwr.proto.control_pb2 import StopRunRequest

        with self._client() as client:
            return bool(client.StopRun(StopRunRequest(run_id=int(run))).success)

    def _register(self, form: bytes, site: str) -> None:
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with self._client() as client:
            client.RegisterNode(RegisterNodeRequest(public_key=form, name=site))

    def _forget(self, form: bytes) -> None:
        """Delete a removed key from Flower's database; otherwise Flower never admits it again."""
        with closing(sqlite3.connect(self.folder / "superlink.db", timeout=30)) as database, database:
            database.execute("DELETE FROM node WHERE public_key = ? AND status = 'unregistered'", (form,))

    @contextmanager
    def _client(self) -> Iterator[Any]:
        """Yield a client of the Control API; turn its errors into one-line messages."""
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from httpx import HTTPError, HTTPStatusError

        s = self.settings
        ca = None if s.insecure else (self.folder / "keys" / "ca.crt").read_bytes()
        secret = _Secret(control_secret(self.folder))
        chain: list[Any] = [RuntimeVersionHttpInterceptor(component_name="flwr CLI"), secret]
        client = ControlHttpClient.from_server_address(f"127.0.0.1:{s.local_port}", s.insecure, ca, chain)
        try:
            yield client
        except HTTPStatusError as error:
            raise WaffleError(
                f"the server rejected this request ({error.response.status_code}): {_reason_of(error)}"
            ) from None
        except HTTPError as error:
            if "CERTIFICATE" in str(error) or "SSL" in str(error):
                raise WaffleError(
                    f"another program answers on 127.0.0.1:{s.local_port}, not the server of {self.folder}: stop it, "
                    "or change local_port in server.toml"
                ) from None
            raise WaffleError(
                f"no server answers on 127.0.0.1:{s.local_port}: start it (waffle deploy server {self.folder}), "
                "then run this command again"
            ) from None
        finally:
            client.close()


def _reason_of(error: Any) -> str:
    return " ".join(error.response.text.split())[:300] or "no reason given"
