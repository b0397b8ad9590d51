"""Settings files and secrets: server.toml in the server's folder, site.toml in each site's folder."""

from __future__ import annotations

import json
import re
import secrets
import sys
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.atomic_files import write_atomically
from waffle_fl.config import check_name
from waffle_fl.data import NAMES
from waffle_fl.deploy.keys import write_secret
from waffle_fl.deploy.policy import Policy
from waffle_fl.engines.flower.messages import METRICS, SCORES
from waffle_fl.errors import WaffleError, suggest

T = TypeVar("T")

SERVER_FILE, SITE_FILE = "server.toml", "site.toml"
SECRET = "runtime.secret"  # shared by Flower's process and the executor
CONTROL_SECRET = "control.secret"  # shared by the server and the operator's commands
RENAMED = {"models": "imports"}  # keys of earlier versions
SERVER = """\
# Settings of the server. Restart it after a change: waffle deploy server
schema = 1
address = "{address}"   # host name or IP address at which sites reach this machine; part of the certificate
port = {port}   # the only port that sites connect to
local_port = {local_port}   # on 127.0.0.1 only: the operator's commands and Flower's own processes
listen = "{listen}"   # address of this machine to listen on; 0.0.0.0 means all addresses
sites = [{sites}]   # the agents, in this order; the key of each is keys/NAME.pub
revoked = []   # sites that no longer take part; they keep their index in earlier runs
insecure = {insecure}   # true: no TLS and no authentication

quorum = {quorum}   # replies that a round needs, including Alice's
deadline = 600.0   # seconds that a round waits for a site that is online
grace = 45.0   # seconds that a round waits for a site that is offline; Flower detects a killed site after a minute
start_timeout = 600.0   # seconds to wait for the sites before the first round
retries = 3   # how often a round is repeated if Alice or the quorum does not reply in time
backoff = 30.0   # seconds before the first retry, doubled before each further one
message_mb = 1024   # largest message; a model that needs more is refused before the first round
"""

SITE = """\
# This site's own rules. The server cannot change them; waffle deploy site --dry-run prints what may leave.
schema = 1
name = "{name}"
server = "{address}:{port}"
insecure = {insecure}   # true: no TLS and no authentication
port = {local}   # on 127.0.0.1 only, between Flower's own processes
max_age = 900.0   # seconds; a request whose signature is older, or that far in the future, is refused

data = "{data}"   # a .csv, .tsv, .parquet or .npz file, or a folder with train.csv and test.csv; relative to this file
targets = []   # columns that runs may predict, with all their classes; empty: any whose classes are safe to share
categorical = []   # numeric columns whose values may be shared as categories
min_count = 5   # categories, and classes of unlisted targets, with fewer rows do not leave
max_rows = 100000   # maximum training rows of all sites together; means over more are rejected
methods = [{methods}]   # runs of other methods are refused
imports = []   # your own code (module:name) that a run may import: a network, method or schedule
surveys = 1   # ways of reading and splitting the data that are summarised; comparing two can reveal a single row
rounds = 1000   # maximum number of updates, and of scored models, over all runs; repeated requests are not counted
min_batch = 4   # minimum rows per mini-batch
min_steps = 2   # minimum steps per round; an update from a single step reveals most about its rows
max_exposed = 0.2   # share of training rows that a model may single out, plus twice a random model's share; 1: any
max_norm = 1000.0   # maximum norm of an update
max_steps = 1000000   # maximum steps per round: epochs x batches x the method's own inner steps
max_mb = 1024   # maximum size of a message, and of the models that the method trains
metrics = [{metrics}]   # metrics on held-out data that may leave
model_may_leave = false   # whether a personal model of this site (local, apfl, ditto, mixtures) may go to the server
epsilon = 0.0   # privacy budget of a training row over all runs; when it is spent no update leaves; 0: as each run says
delta = 1e-5   # probability with which epsilon may be exceeded; below 1 / training rows
min_contributors = 1.0   # smallest effective number of agents in a sum with this site's update; above 1: masked only
"""


@dataclass(frozen=True)
class ServerSettings:
    """server.toml"""

    address: str
    port: int
    sites: tuple[str, ...]
    local_port: int = 9444
    revoked: tuple[str, ...] = ()
    listen: str = "0.0.0.0"
    insecure: bool = False
    quorum: int = 1
    deadline: float = 600.0
    grace: float = 45.0
    start_timeout: float = 600.0
    retries: int = 3
    backoff: float = 30.0
    message_mb: int = 1024
    schema: int = 1

    @property
    def members(self) -> tuple[str, ...]:
        """The sites that take part in new runs."""
        return tuple(site for site in self.sites if site not in self.revoked)


@dataclass(frozen=True)
class SiteSettings:
    """site.toml"""

    name: str
    server: str
    data: str
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    insecure: bool = False
    port: int = 9094
    max_age: float = 900.0
    targets: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    min_count: int = 5
    max_rows: int = 100_000
    imports: tuple[str, ...] = ()
    surveys: int = 1
    rounds: int = 1000
    min_batch: int = 4
    min_steps: int = 2
    max_exposed: float = 0.2
    max_norm: float = 1000.0
    max_steps: int = 1_000_000
    max_mb: int = 1024
    model_may_leave: bool = False
    epsilon: float = 0.0
    delta: float = 1e-5
    min_contributors: float = 1.0
    schema: int = 1

    @property
    def policy(self) -> Policy:
        return Policy(**{f.name: getattr(self, f.name) for f in fields(Policy)})


@dataclass(frozen=True)
class Endpoint:
    """Local address and secret with which the executor reaches Flower's process."""

    role: Literal["server", "site"]
    name: str
    address: str
    certificates: bytes | None  # CA certificate; None: no TLS
    secret: bytes


def endpoint_of(home: Path) -> Endpoint:
    """Return the local endpoint of a folder with server.toml or site.toml."""
    if (home / SERVER_FILE).exists():
        server = read_server(home)
        ca = None if server.insecure else (home / "keys" / "ca.crt").read_bytes()
        return Endpoint("server", "server", f"127.0.0.1:{server.local_port}", ca, secret_of(home / "keys" / SECRET))
    site = read_site(home)
    return Endpoint("site", site.name, f"127.0.0.1:{site.port}", None, secret_of(home / SECRET))


def name_of(home: Path) -> str:
    """Name in the log lines: "server" or the site's name."""
    return "server" if (home / SERVER_FILE).exists() else read_site(home).name


def secret_of(path: Path) -> bytes:
    """Return the secret in this file; it is created on first use."""
    if not path.exists():
        write_secret(path, secrets.token_bytes(32))
    return path.read_bytes()


def control_secret(folder: Path) -> str:
    """The secret with which the operator's commands authenticate."""
    return secret_of(folder / "keys" / CONTROL_SECRET).hex()


def server_text(sites: Sequence[str], address: str, port: int, listen: str, insecure: bool) -> str:
    """Content of server.toml for a new federation."""
    if not re.fullmatch(r"[A-Za-z0-9.:-]+", address):
        raise WaffleError(f"expected the server's name or IP address, got {address!r}")
    return SERVER.format(
        address=address,
        port=port,
        local_port=port + 1,
        listen=listen,
        sites=_listed(sites),
        insecure=str(insecure).lower(),
        quorum=-(-len(sites) // 2),
    )


def site_text(name: str, address: str, port: int, local: int, data: str, insecure: bool) -> str:
    """Content of site.toml for a new site."""
    return SITE.format(
        name=name,
        address=address,
        port=port,
        local=local,
        insecure=str(insecure).lower(),
        data=data or f"data/{name}.csv",
        methods=_listed(ALGORITHMS),
        metrics=_listed((*SCORES, *METRICS)),
    )


def _listed(names: typing.Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def read_server(folder: Path) -> ServerSettings:
    """Read server.toml; raise one error that lists all mistakes."""
    found = _read(folder / SERVER_FILE, ServerSettings)
    for name in found.sites:
        check_name(name)
    problems = [] if found.sites and len(set(found.sites)) == len(found.sites) else ["sites: expected each name once"]
    ports = (found.port, found.local_port)
    problems += [f"{k}: expected 1 to 65535" for k in ("port", "local_port") if not 0 < getattr(found, k) < 1 << 16]
    problems += ["local_port: expected a port other than `port`"] if ports[0] == ports[1] else []
    problems += [f"revoked: {name!r} is not among the sites" for name in found.revoked if name not in found.sites]
    problems += [] if 1 <= found.quorum <= len(found.sites) else [f"quorum: expected 1 to {len(found.sites)}"]
    positive = ("deadline", "grace", "start_timeout", "message_mb")
    problems += [f"{k}: expected above 0" for k in positive if not getattr(found, k) > 0]
    problems += [f"{k}: expected at least 0" for k in ("retries", "backoff") if not getattr(found, k) >= 0]
    _refuse(folder / SERVER_FILE, problems)
    return found


def public_keys(folder: Path, sites: Sequence[str]) -> dict[str, Path]:
    """Path of each site's public key; raise if one is missing."""
    found = {site: folder / "keys" / f"{site}.pub" for site in sites}
    missing = [site for site, path in found.items() if not path.is_file()]
    if missing:
        raise WaffleError(
            f"{folder / 'keys'} lacks {', '.join(f'{site}.pub' for site in missing)}: make a key at the site (waffle "
            f"deploy join), then run waffle deploy add-site {missing[0]} --key FILE --folder {folder}"
        )
    return found


def read_site(folder: Path) -> SiteSettings:
    """Read site.toml; raise one error that lists all mistakes."""
    found = _read(folder / SITE_FILE, SiteSettings)
    others = [m for m in found.methods if m not in ALGORITHMS]
    problems = [f"methods: unknown {m!r}{suggest(m, ALGORITHMS)}" for m in others if ":" not in m]
    problems += [f"methods: {m!r} must be listed in imports too" for m in others if ":" in m and m not in found.imports]
    problems += [
        f"metrics: unknown {m!r}{suggest(m, (*SCORES, *METRICS))}"
        for m in found.metrics
        if m not in (*SCORES, *METRICS)
    ]
    above = (
        *("surveys", "rounds", "max_norm", "max_steps", "max_mb", "max_age", "max_rows"),
        *("min_count", "min_batch", "min_steps"),
    )
    problems += [f"{k}: expected above 0" for k in above if not getattr(found, k) > 0]
    problems += [] if 0 <= found.max_exposed <= 1 else ["max_exposed: expected a share from 0 to 1"]
    problems += [] if found.min_contributors >= 1 else ["min_contributors: expected at least 1"]
    problems += [] if found.epsilon >= 0 else ["epsilon: expected at least 0"]
    problems += [] if 0 < found.delta < 1 else ["delta: expected a number between 0 and 1"]
    _refuse(folder / SITE_FILE, problems)
    return found


def change(file: Path, **values: Any) -> None:
    """Change settings in one of these files and keep all other lines. Missing keys are appended."""
    lines = file.read_text(encoding="utf-8").splitlines()
    for key, value in values.items():
        new = f"{key} = {json.dumps(value)}"
        known = any(line.startswith(f"{key} =") for line in lines)
        lines = [new if line.startswith(f"{key} =") else line for line in lines] if known else [*lines, new]
    write_atomically(file, ("\n".join(lines) + "\n").encode())


def data_of(folder: Path, settings: SiteSettings) -> str:
    """A site's data source: the name of a data set, or an absolute path (relative ones start at the site's folder)."""
    return settings.data if settings.data in NAMES else str((folder / settings.data).resolve())


def make_private(home: Path, *names: str) -> None:
    """Restrict these files and folders to their owner: folders 0700, files 0600."""
    home.chmod(0o700)
    for root in (home / name for name in names):
        for path in (root, *root.rglob("*")) if root.is_dir() else [root] * root.exists():
            if not path.is_symlink():
                path.chmod(0o700 if path.is_dir() else 0o600)


def _read(path: Path, kind: type[T]) -> T:
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise WaffleError(f"{path} is not valid TOML: {error}") from None
    hints = typing.get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    problems = [_unknown(key, known) for key in content if key not in known]
    values = {key: _converted(value, hints[key]) for key, value in content.items() if key in known}
    problems += [f"{key}: cannot be {content[key]!r}" for key, value in values.items() if value is None]
    _refuse(path, problems)
    try:
        return kind(**values)
    except TypeError as error:
        raise WaffleError(f"{path}: {str(error).split(': ')[-1].replace('positional ', '')}") from None


def _unknown(key: str, known: Sequence[str]) -> str:
    return f"{key} is now called {RENAMED[key]}" if key in RENAMED else f"unknown key {key!r}{suggest(key, known)}"


def _converted(value: Any, hint: Any) -> Any:
    """Return the value converted to the field's type, or None."""
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    return value if type(value) is hint else None


def _refuse(path: Path, problems: Sequence[str]) -> None:
    if problems:
        raise WaffleError(f"{path}: {'; '.join(problems)}")


def python_bin() -> Path:
    """Folder with the commands of this installation, including Flower's."""
    return Path(sys.executable).parent
