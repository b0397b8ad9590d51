"""Start Flower's SuperLink or SuperNode: python -m waffle_fl.deploy.flower_launcher superlink|supernode FOLDER ...

Both are Flower's own commands, run in this process with three changes: the SuperLink listens on two sockets behind a
`Gateway`, the SuperNode polls for messages more often, and both log one plain line per event.
"""

from __future__ import annotations

import base64
import logging
import logging.handlers
import sys
import time
import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONNECTIONS = 1000  # concurrent, on both ports together
FRESH = 2.0  # seconds for which the sites' keys are cached
LONGEST_LINE = 4000  # characters of a log line
POLLING = 1 / 6  # factor on Flower's pauses: a SuperNode polls every 0.5 seconds instead of every 3


def superlink(home: Path) -> None:
    """Run flower-superlink behind the gateway."""
    from waffle_fl.deploy.settings_files import read_server

    command: Any = import_module("flwr.superlink.cli.flower_superlink")
    settings = read_server(home)

    def run(app: Any, **options: Any) -> None:
        _serve(home, settings, app, options)

    command.uvicorn = SimpleNamespace(run=run)
    command.flower_superlink()


def _serve(home: Path, s: Any, app: Any, options: dict[str, Any]) -> None:
    """Replacement for `uvicorn.run` that listens on the public and on the local socket."""
    import uvicorn
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as PIECE

    from waffle_fl.deploy.gateway import SPARE, Gateway, listening
    from waffle_fl.deploy.settings_files import control_secret

    admitted = Admitted(home)
    known = (lambda key: True) if s.insecure else admitted.has
    gateway = Gateway(app, s.port, control_secret(home), PIECE + SPARE, known)
    limits = {"limit_concurrency": CONNECTIONS, "timeout_keep_alive": 60}
    quiet = {"access_log": False, "log_config": None, "server_header": False}
    config = uvicorn.Config(gateway, **{**options, **quiet, **limits})
    sockets = [listening(s.listen, s.port), listening("127.0.0.1", s.local_port)]
    uvicorn.Server(config).run(sockets=sockets)


class Admitted:
    """The public keys of the admitted sites, encoded as in request headers; re-read every `FRESH` seconds."""

    def __init__(self, home: Path) -> None:
        self.home, self.keys, self.read = home, frozenset[bytes](), 0.0

    def has(self, shown: bytes) -> bool:
        """Return whether this is the key of an admitted site."""
        if time.monotonic() - self.read > FRESH:
            self.keys, self.read = self._now(), time.monotonic()
        return shown in self.keys

    def _now(self) -> frozenset[bytes]:
        from waffle_fl.deploy.membership import admitted_keys
        from waffle_fl.errors import WaffleError

        try:
            return frozenset(map(base64.b64encode, admitted_keys(self.home)))
        except WaffleError as error:  # a file that is being edited
            logging.getLogger("waffle_fl").error("%s", error)
            return self.keys


def supernode(home: Path) -> None:
    """Run flower-supernode. Without TLS Flower sends no key; this adds the site's key, which is then not verified."""
    import uvicorn
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    command: Any = import_module("flwr.supernode.cli.flower_supernode")
    runtime: Any = import_module("flwr.supernode.start_client_internal")
    runtime.time = SimpleNamespace(sleep=lambda seconds: time.sleep(POLLING * seconds))
    command.uvicorn = SimpleNamespace(Server=uvicorn.Server, Config=partial(uvicorn.Config, log_config=None))
    if "--insecure" in sys.argv:
        connect, key = runtime.http_request_response, load_ssh_private_key((home / "node.key").read_bytes(), None)
        runtime.http_request_response = lambda address, insecure, root, _, *rest: connect(
            address, insecure, root, (key, key.public_key()), *rest
        )
    command.flower_supernode()


def plain_logs(home: Path, name: str) -> None:
    """Log one line per event to standard error and to the folder's log: time, level, server or site name, event."""
    file = logging.handlers.WatchedFileHandler(home / ("server.log" if name == "server" else "site.log"))
    Path(file.baseFilename).chmod(0o600)
    handlers: list[logging.Handler] = [logging.StreamHandler(), file]
    for handler in handlers:
        handler.setFormatter(OneLine(name))
        handler.addFilter(lambda record: bool(record.getMessage().strip()))
    for logger in (logging.getLogger("flwr"), logging.getLogger("uvicorn"), logging.getLogger("waffle_fl")):
        logger.handlers, logger.propagate = handlers, False
        logger.setLevel(logging.INFO)
    for noisy in ("httpx", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class OneLine(logging.Formatter):
    """2026-11-16T14:02:03Z INFO north Received successfully"""

    converter = staticmethod(time.gmtime)

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {name} %(message)s", "%Y-%m-%dT%H:%M:%SZ")

    def format(self, record: logging.LogRecord) -> str:
        text = " | ".join(line.strip() for line in super().format(record).splitlines() if line.strip())
        return "".join(char if char.isprintable() else "?" for char in text[:LONGEST_LINE])


def _name_of(role: str, home: Path) -> str:
    """Return the name in the log. `waffle deploy site` has checked site.toml; checking it again would import torch."""
    return "server" if role == "superlink" else str(tomllib.loads((home / "site.toml").read_text())["name"])


def main() -> None:
    role, home = sys.argv[1], Path(sys.argv[2])
    sys.argv = [f"flower-{role}", *sys.argv[3:]]
    import_module("flwr.supercore.logger")  # installs its own handler, replaced below
    plain_logs(home, _name_of(role, home))
    {"superlink": superlink, "supernode": supernode}[role](home)


if __name__ == "__main__":
    main()
