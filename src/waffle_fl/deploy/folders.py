"""The folder of a federation: server.toml and the keys here, and in `sites` a folder to hand over to each site."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.config import EVERYONE, check_name
from waffle_fl.data import NAMES
from waffle_fl.deploy.keys import make_certificates, make_node_key
from waffle_fl.deploy.policy import Policy
from waffle_fl.engines.flower.messages import METRICS, SCORES
from waffle_fl.errors import WaffleError, suggest, writable
from waffle_fl.tensorfile import write_atomically

T = TypeVar("T")

SERVER = """\
# The server of a federation. Change what you like, then start it anew: waffle deploy server
schema = 1
address = "{address}"   # the name or IP address under which sites reach this machine; it stands in the certificate
port = {port}
listen = "{listen}"   # which of this machine's addresses to listen on; 0.0.0.0 is all of them
sites = [{sites}]   # the agents, in this order; each is known by keys/NAME.pub
insecure = {insecure}   # true: neither TLS nor authentication

quorum = {quorum}   # a round needs this many answers, Alice's among them
deadline = 600.0   # seconds that a round waits for a site that is online before it is closed without it
grace = 45.0   # seconds that a round waits for a site that is offline; Flower notices a minute after it was killed
start_timeout = 600.0   # seconds to wait for the sites before the first round
retries = 3   # how often a round is asked for again when Alice, or the quorum, does not answer in time
backoff = 30.0   # seconds before the first of these, twice as many before each further one
message_mb = 1024   # a model whose messages would be larger is refused before the first round
"""

SITE = """\
# This site's own rules. The server cannot change them; waffle deploy site --dry-run shows what they let out.
schema = 1
name = "{name}"
server = "{address}:{port}"
insecure = {insecure}   # true: neither TLS nor authentication
port = {local}   # used on this machine alone, between Flower's own processes

data = "{data}"   # a .csv, .tsv, .parquet or .npz file, or a folder with train.csv and test.csv; relative to this file
methods = [{methods}]   # runs of other methods are refused
models = []   # networks of your own (module:factory) that may be imported; the built-in ones always may
surveys = 1   # ways to read and split the data that are summarised; the difference of two can tell a single row
rounds = 1000   # updates that leave this site, in all runs together, and models that are scored; the same again is free
max_norm = 1000.0   # a longer update does not leave this site
max_steps = 1000000   # steps of a round: epochs x batches, times the method's own inner steps
max_mb = 1024   # a message, or a model as the method multiplies it, that is larger is refused
metrics = [{metrics}]   # what may be told of a model on this site's held-out data
model_may_leave = false   # may a model that is this site's alone (local, apfl, ditto) be sent to the server?
"""


@dataclass(frozen=True)
class ServerSettings:
    """server.toml"""

    address: str
    port: int
    sites: tuple[str, ...]
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
    models: tuple[str, ...] = ()
    surveys: int = 1
    rounds: int = 1000
    max_norm: float = 1000.0
    max_steps: int = 1_000_000
    max_mb: int = 1024
    model_may_leave: bool = False
    schema: int = 1

    @property
    def policy(self) -> Policy:
        return Policy(**{f.name: getattr(self, f.name) for f in fields(Policy)})


def init(
    folder: Path, sites: Sequence[str], address: str, port: int, listen: str, data: str = "", insecure: bool = False
) -> None:
    """Make the folder of a new federation; its agents are in the order of their names, as in a folder of files."""
    names = sorted(sites)
    for name in names:
        check_name(name)
    if EVERYONE in names:
        raise WaffleError(f"a site cannot be called {EVERYONE!r}, which means every site")
    if not names or len(set(names)) < len(names):
        raise WaffleError(f"expected the names of the sites, none of them twice, got {', '.join(sites) or 'none'}")
    if not re.fullmatch(r"[A-Za-z0-9.:-]+", address):
        raise WaffleError(f"expected the server's name or IP address, got {address!r}")
    if (folder / "server.toml").exists():
        raise WaffleError(f"{folder} holds a federation already: choose another folder")
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        make_certificates(
            folder / "keys", folder.resolve().name, list(dict.fromkeys([address, "localhost", "127.0.0.1"]))
        )
        for i, name in enumerate(names):
            _make_site(folder, name, address, port, 9094 + i, data, insecure)
        text = SERVER.format(
            address=address,
            port=port,
            listen=listen,
            sites=_listed(names),
            insecure=str(insecure).lower(),
            quorum=-(-len(names) // 2),
        )
        (folder / "server.toml").write_text(text, encoding="utf-8")


def _make_site(folder: Path, name: str, address: str, port: int, local: int, data: str, insecure: bool) -> None:
    site = folder / "sites" / name
    site.mkdir(parents=True)
    make_node_key(site / "node.key", folder / "keys" / f"{name}.pub")
    (site / "ca.crt").write_bytes((folder / "keys" / "ca.crt").read_bytes())
    text = SITE.format(
        name=name,
        address=address,
        port=port,
        local=local,
        insecure=str(insecure).lower(),
        data=data or f"data/{name}.csv",
        methods=_listed(ALGORITHMS),
        metrics=_listed((*SCORES, *METRICS)),
    )
    (site / "site.toml").write_text(text, encoding="utf-8")


def _listed(names: typing.Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def read_server(folder: Path) -> ServerSettings:
    """server.toml, every mistake in it told."""
    found = _read(folder / "server.toml", ServerSettings)
    for name in found.sites:
        check_name(name)
    problems = [] if found.sites and len(set(found.sites)) == len(found.sites) else ["sites: expected each name once"]
    problems += [] if 0 < found.port < 1 << 16 else ["port: expected 1 to 65535"]
    problems += [] if 1 <= found.quorum <= len(found.sites) else [f"quorum: expected 1 to {len(found.sites)}"]
    positive = ("deadline", "grace", "start_timeout", "message_mb")
    problems += [f"{k}: expected above 0" for k in positive if not getattr(found, k) > 0]
    problems += [f"{k}: expected at least 0" for k in ("retries", "backoff") if not getattr(found, k) >= 0]
    _refuse(folder / "server.toml", problems)
    return found


def public_keys(folder: Path, s: ServerSettings) -> dict[str, Path]:
    """By site, the file of the key that it is known by."""
    found = {site: folder / "keys" / f"{site}.pub" for site in s.sites}
    missing = [path.name for path in found.values() if not path.is_file()]
    if missing:
        raise WaffleError(
            f"{folder / 'keys'} lacks {', '.join(missing)}: put it there, or take the site off server.toml"
        )
    return found


def read_site(folder: Path) -> SiteSettings:
    """site.toml, every mistake in it told."""
    found = _read(folder / "site.toml", SiteSettings)
    strange = [f"methods: unknown {m!r}{suggest(m, ALGORITHMS)}" for m in found.methods if m not in ALGORITHMS]
    strange += [
        f"metrics: unknown {m!r}{suggest(m, (*SCORES, *METRICS))}"
        for m in found.metrics
        if m not in (*SCORES, *METRICS)
    ]
    above = ("surveys", "rounds", "max_norm", "max_steps", "max_mb")
    strange += [f"{k}: expected above 0" for k in above if not getattr(found, k) > 0]
    _refuse(folder / "site.toml", strange)
    return found


def change(file: Path, **values: Any) -> None:
    """Change settings in one of these files; what stands around them stays."""
    lines = file.read_text(encoding="utf-8").splitlines()
    for key, value in values.items():
        lines = [f"{key} = {json.dumps(value)}" if line.startswith(f"{key} =") else line for line in lines]
    write_atomically(file, ("\n".join(lines) + "\n").encode())


def data_of(folder: Path, settings: SiteSettings) -> str:
    """Where a site's data lies: a data set's name, or a path, relative to the site's folder."""
    return settings.data if settings.data in NAMES else str((folder / settings.data).resolve())


def _read(path: Path, kind: type[T]) -> T:
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise WaffleError(f"{path} is not valid TOML: {error}") from None
    hints = typing.get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    problems = [f"unknown key {key!r}{suggest(key, known)}" for key in content if key not in known]
    values = {key: _converted(value, hints[key]) for key, value in content.items() if key in known}
    problems += [f"{key}: cannot be {content[key]!r}" for key, value in values.items() if value is None]
    _refuse(path, problems)
    try:
        return kind(**values)
    except TypeError as error:
        raise WaffleError(f"{path}: {str(error).split(': ')[-1].replace('positional ', '')}") from None


def _converted(value: Any, hint: Any) -> Any:
    """The value as its field wants it, or None."""
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    return value if type(value) is hint else None


def _refuse(path: Path, problems: Sequence[str]) -> None:
    if problems:
        raise WaffleError(f"{path}: {'; '.join(problems)}")


def python_bin() -> Path:
    """Where this installation keeps its commands, Flower's among them."""
    return Path(sys.executable).parent
