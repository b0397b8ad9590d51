"""The live page of a deployment, and the same numbers for Prometheus. Read-only, served on 127.0.0.1."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import math
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from waffle_fl.algorithms import TITLES
from waffle_fl.deploy.overview import histories, overview
from waffle_fl.deploy.settings_files import read_server
from waffle_fl.errors import WaffleError

HOST = "127.0.0.1"
FRESH = 1.0  # seconds for which a snapshot is served again
PATIENCE = 2.0  # seconds that a request waits for a newer snapshot; then it gets the last one
IDLE = 10.0  # seconds after which a silent connection is closed
JOBS = 50  # the newest jobs; older ones are counted
POINTS = 200  # rounds per run on the page; longer histories are subsampled
TEXT = 1000  # characters of a name, a reason or an error
NO_PROMETHEUS = "metrics need prometheus-client: pip install 'waffle-fl[flower]', or pip install prometheus-client"
NOTHING: Mapping[str, Any] = {
    "time": 0.0,
    "federation": "",
    "server": "unknown",
    "problem": "",
    "sites": [],
    "jobs": [],
    "older": 0,
}
GAUGES = {
    "waffle_server_running": ("1 if the server answers on this machine, else 0", ()),
    "waffle_snapshot_age_seconds": ("Seconds since these numbers were read", ()),
    "waffle_job_running": ("1 while the job runs, else 0", ("job",)),
    "waffle_job_round": ("Last recorded round of the job", ("job",)),
    "waffle_job_rounds": ("Number of rounds requested", ("job",)),
    "waffle_job_accuracy": (
        "Accuracy of Alice's model on her held-out data in her last round, 0 to 1",
        ("job", "alice"),
    ),
    "waffle_job_rmse": ("Root mean squared error of Alice's model in her last round", ("job", "alice")),
    "waffle_job_loss": ("Loss of Alice's model on her held-out data in her last round", ("job", "alice")),
    "waffle_site_weight": ("Weight of a site in Alice's last round", ("job", "alice", "site")),
    "waffle_site_screened": (
        "1 if the site was screened in the last round of any Alice, else 0",
        ("job", "site"),
    ),
    "waffle_site_connected": ("1 if the site is connected; 0 if not, or if the server does not answer", ("site",)),
}


class Page(NamedTuple):
    """The page and its Content-Security-Policy, which allows its own script and style and nothing else."""

    content: bytes
    policy: str


class Reader:
    """Reads the state of a deployment's folder; reads a job's history again only when its files have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, tuple[object, list[dict[str, Any]]]] = {}

    def __call__(self) -> dict[str, Any]:
        """Return what the page and the metrics show: numbers and single lines of text, no paths and no secrets."""
        try:
            return self._state()
        except WaffleError as error:
            raise WaffleError(self._without_paths(str(error), self.folder)) from None
        except Exception as error:  # the page shows it and tries again
            text = f"the folder cannot be read: {type(error).__name__}: {error}"
            raise WaffleError(self._without_paths(text, self.folder)) from error

    def _state(self) -> dict[str, Any]:
        found = overview(self.folder)
        jobs = sorted(found["jobs"], key=lambda job: bool(job["status"] != "running"))  # newest first, as before
        return {
            "time": time.time(),
            "federation": _text(self.folder.name),
            "server": found["server"],
            "problem": "",
            "sites": [{key: _text(site[key]) for key in ("name", "state", "key")} for site in found["sites"]],
            "jobs": [self._job(job) for job in jobs[:JOBS]],
            "older": max(0, len(jobs) - JOBS),
        }

    def _job(self, job: Mapping[str, Any]) -> dict[str, Any]:
        out = Path(job["out"])
        logs = [out / "rounds.jsonl", *sorted(out.glob("*/rounds.jsonl"))]
        found = [path.stat() for path in logs if path.is_file()]
        return {
            "name": _text(job["name"]),
            "method": TITLES.get(job["method"], _text(job["method"])),
            "alice": _text(job["alice"]),
            "status": _text(job["status"]),
            "round": _number(job["round"]) or 0,
            "rounds": _number(job["rounds"]) or 0,
            "waiting": [_text(name) for name in job["waiting"]],
            "error": self._without_paths(str(job["error"]), out),
            "updated": max((file.st_mtime for file in found), default=None),
            "runs": self._runs(job, [(file.st_ino, file.st_mtime_ns, file.st_size) for file in found]),
        }

    def _runs(self, job: Mapping[str, Any], version: object) -> list[dict[str, Any]]:
        """One entry per Alice."""
        known = self._known.get(job["name"])
        if known is None or known[0] != version:
            try:
                runs = [_run(alice, lines) for alice, lines in histories([dict(job)])[job["name"]].items()]
            except (OSError, LookupError, TypeError, ValueError, AttributeError):
                runs = []  # a run folder that cannot be read hides its own charts only
            known = self._known[job["name"]] = version, runs
        return known[1]

    def _without_paths(self, text: str, out: Path) -> str:
        for path in (out, self.folder, out.parent):
            text = text.replace(str(path), path.name) if path.name else text
        return _text(text)


def _run(alice: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The history of one Alice, by column, subsampled; the last round is always included."""
    kept = lines[::-1][:: max(1, -(-len(lines) // POINTS))][::-1]
    score = "rmse" if any("rmse" in line for line in lines) else "accuracy"
    sites = list(dict.fromkeys(name for line in lines for name in line["weights"]))
    screened: dict[str, dict[str, Any]] = {}
    for line in lines:
        for name, reason in line["screened"].items():
            before = screened.get(name, {"times": 0})["times"]
            screened[name] = {"site": _text(name), "reason": _text(reason), "round": line["round"], "times": before + 1}
    return {
        "alice": _text(alice),
        "score": score,
        "rounds": [line["round"] for line in kept],
        "scores": [_number(line.get(score)) for line in kept],
        "losses": [_number(line.get("loss")) for line in kept],
        "sites": [_text(name) for name in sites],
        "weights": [[_number(line["weights"].get(name)) for line in kept] for name in sites],
        "screened": list(screened.values()),
    }


def _text(value: object) -> str:
    """One printable line of bounded length. Names, reasons and errors may come from a hostile site."""
    line = " ".join(str(value).split())[:TEXT]
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def _number(value: object) -> float | None:
    """A finite number, or None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None  # type: ignore[arg-type,return-value]


class Snapshots:
    """Caches the last state. Reads run in their own thread, so a slow one delays a request by `PATIENCE` at most."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._done = threading.Condition()
        self._state: Mapping[str, Any] = {**NOTHING, "problem": "the folder is still being read"}
        self._time = -math.inf
        self._reading = False

    def latest(self) -> dict[str, Any]:
        """The newest state, with its age in seconds."""
        with self._done:
            if not self._reading and time.monotonic() - self._time > FRESH:
                self._reading = True
                threading.Thread(target=self._refresh, name="waffle-watch", daemon=True).start()
            self._done.wait_for(lambda: not self._reading, PATIENCE)
            state = self._state
        return {**state, "age": round(max(0.0, time.time() - state["time"]), 3) if state["time"] else None}

    def _refresh(self) -> None:
        try:
            state: Mapping[str, Any] = self._read()
        except WaffleError as error:
            known = self._state if self._state["time"] else NOTHING
            state = {**known, "problem": str(error)}
        with self._done:
            self._state, self._time, self._reading = state, time.monotonic(), False
            self._done.notify_all()


def samples(state: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], float | None]]:
    """(metric, label values, value) of a state; None where nothing was measured."""
    yield "waffle_server_running", (), float(state["server"] == "running")
    yield "waffle_snapshot_age_seconds", (), state["age"]
    for site in state["sites"]:
        yield "waffle_site_connected", (site["name"],), float(site["state"] == "connected")
    for job in state["jobs"]:
        name = job["name"]
        yield "waffle_job_running", (name,), float(job["status"] == "running")
        yield "waffle_job_round", (name,), job["round"]
        yield "waffle_job_rounds", (name,), job["rounds"]
        screened = {site: 0.0 for run in job["runs"] for site in run["sites"]}
        for run in (run for run in job["runs"] if run["rounds"]):
            labels = name, run["alice"]
            yield f"waffle_job_{run['score']}", labels, run["scores"][-1]
            yield "waffle_job_loss", labels, run["losses"][-1]
            for site, weights in zip(run["sites"], run["weights"], strict=True):
                yield "waffle_site_weight", (*labels, site), weights[-1]
            screened |= {entry["site"]: 1.0 for entry in run["screened"] if entry["round"] == run["rounds"][-1]}
        for site, value in screened.items():
            yield "waffle_site_screened", (name, site), value


def exposition(state: Mapping[str, Any], accept: str = "") -> tuple[bytes, str]:
    """(the metrics of a state in a format that the scraper accepts, its content type)."""
    from prometheus_client.core import CollectorRegistry, GaugeMetricFamily
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector

    values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in GAUGES}
    for name, labels, value in samples(state):
        if value is not None:
            values[name][labels] = value  # a series appears once, or Prometheus rejects the scrape

    class State(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            for name, (text, labels) in GAUGES.items():
                family = GaugeMetricFamily(name, text, labels=labels)
                for found, value in values[name].items():
                    family.add_metric(found, value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(State())
    encoder, kind = choose_encoder(accept)
    return encoder(registry), kind


@cache
def page() -> Page:
    """The page with embedded style and script."""
    files = resources.files("waffle_fl.deploy")
    text, style, script = (
        files.joinpath(f"live_page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(text.replace("@style@", style).replace("@script@", script).encode(), policy)


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


class Handler(BaseHTTPRequestHandler):
    """Answers GET for the page, its state and the metrics; every answer carries the same security headers."""

    server: Server
    timeout = IDLE

    def do_GET(self) -> None:
        # DNS rebinding: another name that resolves to this machine
        if self.headers.get_all("Host") not in self.server.names:
            address = f"{HOST}:{self.server.server_port}"
            self.send_error(403, f"open http://{address}; a tunnel must use the same port at both ends")
            return
        route = self.path.partition("?")[0]
        if route == "/":
            self._answer(200, page().content, "text/html; charset=utf-8")
        elif route == "/state.json":
            state = json.dumps(self.server.snapshots.latest(), allow_nan=False, separators=(",", ":"))
            self._answer(200, state.encode(), "application/json")
        elif route == "/metrics":
            self._metrics()
        else:
            self.send_error(404, "the page is at /, metrics are at /metrics")

    def _metrics(self) -> None:
        state = self.server.snapshots.latest()
        if state["problem"]:
            self.send_error(503, state["problem"])
            return
        try:
            content, kind = exposition(state, self.headers.get("Accept", ""))
        except ImportError:
            self.send_error(501, NO_PROMETHEUS)
            return
        self._answer(200, content, kind)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with one line of plain text."""
        if code == 501 and message != NO_PROMETHEUS:  # raised by http.server for other methods
            code, message = 405, "only GET is answered here"
        self.close_connection = True
        self._answer(
            code, f"{message or HTTPStatus(code).phrase}\n".encode(errors="replace"), "text/plain; charset=utf-8"
        )

    def _answer(self, code: int, content: bytes, kind: str) -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": page().policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            **({"Allow": "GET"} if code == 405 else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def version_string(self) -> str:
        return "waffle-fl"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class Server(ThreadingHTTPServer):
    """The page of one folder, on loopback."""

    def __init__(self, folder: Path, port: int) -> None:
        self.snapshots = Snapshots(Reader(folder))
        super().__init__((HOST, port), Handler)
        self.names = [[f"{name}:{self.server_port}"] for name in (HOST, "localhost")]
        self.names += [[HOST], ["localhost"]] if self.server_port == 80 else []

    def server_bind(self) -> None:
        """Bind without resolving the host name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect; print any other error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def listening(folder: Path, port: int) -> Server:
    """Return a server bound to its port; port 0 selects a free one."""
    read_server(folder)
    try:
        return Server(folder, port)
    except OverflowError:
        raise WaffleError(f"--port: expected 0 to 65535, got {port}") from None
    except OSError as error:
        what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise WaffleError(f"port {port} on {HOST} {what}: choose another one with --port") from None


def serve(folder: Path, port: int, report: Callable[[str], None]) -> None:
    """Serve the page and the metrics of a deployment's folder until Ctrl-C."""
    with listening(folder, port) as server, contextlib.suppress(KeyboardInterrupt):
        address = f"http://{HOST}:{server.server_port}"
        report(f"the page is at {address}, metrics at {address}/metrics; Ctrl-C ends it")
        server.serve_forever()
