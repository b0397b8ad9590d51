"""waffle deploy: the methods of waffle run on real machines, through Flower."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro

from waffle_fl.algorithms import ALGORITHMS, algorithm_of
from waffle_fl.cli.deploy_admin import add_site, logs, peers, revoke, rotate, status, stop, watch_page
from waffle_fl.cli.flags import options_class, parse, settings_class
from waffle_fl.cli.job_watcher import watch, watch_until_interrupted
from waffle_fl.cli.progress import ProgressFlags
from waffle_fl.config import check_name, check_run
from waffle_fl.errors import WaffleError, suggest


def init(arguments: Sequence[str]) -> int:
    """Create a federation: waffle deploy init FOLDER --sites north south --address fl.example.org."""

    @dataclass(frozen=True)
    class Init:
        """Make certificates, the operator's key, server.toml, and in `sites` one folder to send to each site."""

        folder: tyro.conf.Positional[Path]
        """The folder to create; it stays on the server."""
        sites: tuple[str, ...]
        """The names of the sites."""
        address: str = "127.0.0.1"
        """Host name or IP address at which sites reach the server; part of the certificate."""
        port: int = 9443
        """The only port that sites connect to; the next port is used on this machine only."""
        listen: str = ""
        """Address to listen on; by default all addresses, or loopback for a federation on 127.0.0.1."""
        data: str = ""
        """For trials: name of a data set; each site gets its share."""
        insecure: bool = False
        """Turn off TLS and authentication; also needs --i-know."""
        i_know: bool = False
        """Confirm that without TLS anyone on the network can read and change everything."""

    from waffle_fl.deploy import membership

    args = parse(Init, arguments, "deploy init")
    if args.insecure and not args.i_know:
        raise WaffleError("--insecure turns off TLS and authentication: add --i-know if this is only a trial")
    listen = args.listen or ("127.0.0.1" if args.address in ("127.0.0.1", "localhost") else "0.0.0.0")
    membership.init(args.folder, args.sites, args.address, args.port, listen, args.data, args.insecure)
    for name in sorted(args.sites):
        print(f"send to {name}: {args.folder / 'sites' / name}; run there: waffle deploy join {name}")
        print(f"then on the server: waffle deploy add-site {name} --key {name}.pub --folder {args.folder}")
    print(f"start the server: waffle deploy server {args.folder}")
    print(f"train: waffle deploy run waffle --folder {args.folder} ...")
    return 0


def join(arguments: Sequence[str]) -> int:
    """Make a site's key, at the site: waffle deploy join FOLDER."""

    @dataclass(frozen=True)
    class Join:
        """Make this site's key pair and print the public key for the operator. The private key stays at the site."""

        folder: tyro.conf.Positional[Path]
        """The folder that the operator sent."""
        rotate: bool = False
        """Replace an existing key; the old one is kept under its date."""

    from waffle_fl.deploy import membership
    from waffle_fl.deploy.keys import fingerprint

    args = parse(Join, arguments, "deploy join")
    public = membership.join(args.folder, args.rotate)
    name = args.folder.resolve().name
    print(f"send to the operator ({args.folder / membership.NODE_PUBLIC}):")
    print(public.decode().strip())
    print(f"fingerprint, to compare by telephone: {fingerprint(public)}")
    command = "rotate" if args.rotate else "add-site"
    print(f"the operator then runs: waffle deploy {command} {name} --key {name}.pub --folder FEDERATION")
    return 0


@dataclass(frozen=True)
class FolderFlags:
    """The folder of the server or site."""

    folder: tyro.conf.Positional[Path]
    """The folder of the server or site."""
    i_know: bool = False
    """Start with insecure = true: anyone on the network can read and change everything."""


def _check_secure(insecure: bool, i_know: bool, where: Path) -> None:
    if insecure and not i_know:
        raise WaffleError(f"{where} has insecure = true, no TLS and no authentication: add --i-know to start anyway")


def server(arguments: Sequence[str]) -> int:
    """Start the server (Flower's SuperLink): waffle deploy server FOLDER."""

    @dataclass(frozen=True)
    class Server(FolderFlags):
        """Run Flower's SuperLink with this folder's certificates; only the sites in server.toml are admitted."""

    from waffle_fl.deploy import control_client, processes, settings_files
    from waffle_fl.deploy.signing import OPERATOR_KEY, load_operator_key

    args = parse(Server, arguments, "deploy server")
    folder, settings = args.folder.resolve(), settings_files.read_server(args.folder)
    _check_secure(settings.insecure, args.i_know, args.folder / "server.toml")
    load_operator_key(folder / "keys" / OPERATOR_KEY)
    command = processes.server_command(folder, settings)
    ports = {"port": (settings.listen, settings.port), "local_port": ("127.0.0.1", settings.local_port)}
    processes.check_ports(ports, args.folder / "server.toml")
    settings_files.make_private(folder, "keys", "jobs", "superlink.db", "server.log")
    (folder / control_client.REGISTERED).unlink(missing_ok=True)
    register_sites = [sys.executable, "-m", "waffle_fl", "deploy", "register", str(folder)]
    commands = {"SuperLink": command, "executor": processes.executor_command(folder)}
    return processes.Group(folder, commands, once={"register": register_sites}).run()


def register(arguments: Sequence[str]) -> int:
    """Register all sites of server.toml with a running server: waffle deploy register FOLDER."""

    @dataclass(frozen=True)
    class Register:
        """Register the public key of every site; needed only after server.toml was edited by hand."""

        folder: tyro.conf.Positional[Path]
        """The server's folder."""

    from waffle_fl.deploy.control_client import ControlClient

    args = parse(Register, arguments, "deploy register")
    client = ControlClient(args.folder.resolve())
    client.wait(seconds=120)
    for line in client.register() or ["all sites are already admitted"]:
        print(line, flush=True)
    return 0


def site(arguments: Sequence[str]) -> int:
    """Start a site (Flower's SuperNode), or print what would leave it: waffle deploy site FOLDER --dry-run."""
    settings_flags = settings_class(exclude=("data",), min_category=5)
    kind = dataclasses.make_dataclass(
        "SiteFlags",
        [
            ("folder", Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="The folder of this site.")]),
            (
                "i_know",
                _flag("Start with insecure = true: anyone on the network can read and change everything."),
                False,
            ),
            ("dry_run", _flag("Train one round here and print everything that would leave; nothing is sent."), False),
            ("accept_ledger", _flag("Start although lines of the ledger are missing; this is recorded."), False),
            ("method", Annotated[str, tyro.conf.arg(help="The method of the dry run.")], "waffle"),
            ("settings", settings_flags, field(default_factory=settings_flags)),
        ],
    )
    kind.__doc__ = "Run Flower's SuperNode with the installed waffle-fl; code sent by a server is never executed."
    from waffle_fl.deploy import processes, settings_files
    from waffle_fl.deploy.dry_run import dry_run

    args: Any = parse(kind, arguments, "deploy site")
    folder, settings = args.folder.resolve(), settings_files.read_site(args.folder)
    if args.dry_run:
        config = check_run(args.method, {**dataclasses.asdict(args.settings), "data": settings.data}, {})
        for line in dry_run(folder, config):
            print(line)
        return 0
    _check_secure(settings.insecure, args.i_know, args.folder / "site.toml")
    command = processes.site_command(folder, settings)
    _check_site(folder, settings, args.accept_ledger)
    processes.check_ports({"port": ("127.0.0.1", settings.port)}, args.folder / "site.toml")
    settings_files.make_private(
        folder, "node.key", settings_files.SECRET, "state", "models", "ledger.jsonl", "site.log"
    )
    commands = {"SuperNode": command, "executor": processes.executor_command(folder)}
    return processes.Group(folder, commands, processes.RETRIES, _to_stderr).run()


def _check_site(folder: Path, settings: Any, accept_ledger: bool) -> None:
    """Raise at the start what would otherwise fail at the first request."""
    from waffle_fl.deploy.settings_files import data_of
    from waffle_fl.deploy.signing import OPERATOR_PUBLIC, load_trusted_keys
    from waffle_fl.deploy.site_store import Ledger
    from waffle_fl.user_data.folder_reader import layout_of

    source = data_of(folder, settings)
    if source != settings.data and not (Path(source).exists() and layout_of(Path(source))):
        raise WaffleError(
            f"data = {settings.data!r} in {folder / 'site.toml'}: expected a table or .npz file, found none"
        )
    if not (folder / "node.key").is_file():
        raise WaffleError(f"{folder} has no key yet: make one with waffle deploy join {folder}")
    load_trusted_keys(folder / OPERATOR_PUBLIC)
    ledger = Ledger(folder / "ledger.jsonl")
    if accept_ledger:
        ledger.accept()
    ledger.check()


def _flag(text: str) -> Any:
    return Annotated[bool, tyro.conf.arg(help=text)]


def _to_stderr(text: str) -> None:
    print(f"waffle: {text}", file=sys.stderr, flush=True)


def run(arguments: Sequence[str]) -> int:
    """Train on the sites: waffle deploy run METHOD --folder FOLDER [flags of waffle run]."""
    method = arguments[0] if arguments else ""
    if method in ("-h", "--help"):
        print("usage: waffle deploy run METHOD --folder FOLDER [flags]\n")
        print(f"Submit a run to the server of a folder and watch it. METHOD is one of {', '.join(ALGORITHMS)},")
        print("or module:Class; waffle deploy run waffle --help lists the flags, which are those of waffle run.")
        return 0
    algorithm_of(method)
    settings = settings_class(method=method, guard="standard", min_category=5)
    kind = dataclasses.make_dataclass(
        "DeployRun",
        [
            ("folder", Annotated[Path, tyro.conf.arg(help="The server's folder.")], field(default=Path())),
            ("settings", settings, field(default_factory=settings)),
            ("options", options_class(method), field(default_factory=options_class(method))),
            ("out", Annotated[str, tyro.conf.arg(help="The run's folder.")], field(default="")),
            ("force", _flag("Continue although settings or code have changed."), field(default=False)),
            ("output", ProgressFlags, field(default_factory=ProgressFlags)),
        ],
    )
    kind.__doc__ = "Submit a run to the server of a folder and watch it; the run folder has the format of `waffle run`."
    args: Any = parse(kind, arguments[1:], f"deploy run {method}")
    config = check_run(method, dataclasses.asdict(args.settings), dataclasses.asdict(args.options))
    out = Path(args.out or Path("runs") / config.label)
    check_name(out.name)
    from waffle_fl.deploy.jobs import Job
    from waffle_fl.deploy.preflight import check_deployable
    from waffle_fl.deploy.settings_files import read_server

    folder = args.folder.resolve()
    check_deployable(config, read_server(folder))
    return watch_until_interrupted(folder, Job.create(folder, config, out, args.force), args.output)


def resume(arguments: Sequence[str]) -> int:
    """Continue an interrupted run: waffle deploy resume RUN --folder FOLDER."""

    @dataclass(frozen=True)
    class ResumeJob:
        """Submit a job again; it continues from its last checkpoint under the same run id."""

        run: tyro.conf.Positional[Path]
        """The run's folder."""
        folder: Path = Path()
        """The server's folder."""
        output: ProgressFlags = field(default_factory=ProgressFlags)

    from waffle_fl.deploy.jobs import Job

    args = parse(ResumeJob, arguments, "deploy resume")
    return watch_until_interrupted(args.folder.resolve(), Job.open(args.folder.resolve(), args.run.name), args.output)


def check(arguments: Sequence[str]) -> int:
    """Check the server's or a site's folder: waffle deploy check FOLDER."""

    @dataclass(frozen=True)
    class Check:
        """Check settings, keys, data and Flower, and connect to the server."""

        folder: tyro.conf.Positional[Path]
        """The server's folder, or a site's."""

    from waffle_fl.deploy.preflight import findings

    args = parse(Check, arguments, "deploy check")
    found = list(findings(args.folder.resolve()))
    for good, text in found:
        print(f"{'ok' if good else 'NOT OK'}: {text}")
    return 0 if all(good for good, _ in found) else 2


def demo(arguments: Sequence[str]) -> int:
    """Run a server and four sites on this machine and compare with the simulation: waffle deploy demo."""

    @dataclass(frozen=True)
    class DeployDemo:
        """Train a few rounds of WAFFLE with TLS, keys and signed requests; compare every bit with the simulation."""

        out: Path = Path("demo-flower")
        """Folder of the federation and of its runs; an earlier demonstration there is deleted."""
        masked: bool = False
        """Train the same run in the clear and with masked updates, and compare both."""
        output: ProgressFlags = field(default_factory=ProgressFlags)

    from waffle_fl.deploy import demo as demonstration
    from waffle_fl.deploy.jobs import Job
    from waffle_fl.deploy.local_cluster import LocalCluster, deployed

    args = parse(DeployDemo, arguments, "deploy demo")
    out = args.out.resolve()
    configs, names = (demonstration.set_up_masked if args.masked else demonstration.set_up)(out)
    folder = out / "federation"
    print(f"a server and {len(names)} sites as processes on loopback; logs in {folder / 'processes.log'}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with deployed(LocalCluster(folder)):
            print(f"the server runs with TLS and admits {', '.join(names)}", flush=True)
            for name, config in configs.items():
                watch(folder, Job.create(folder, config, out / name, force=False), args.output)
    except KeyboardInterrupt:
        print("waffle: stopped the run, the server and its sites", file=sys.stderr)
        return 130
    for name, config in configs.items():
        demonstration.compare(config, out / name, out / f"{name}-simulated")
        seconds = ", ".join(f"{value:.1f}" for value in demonstration.seconds_of(out / name))
        print(f"{name}: seconds per round: {seconds}; bit-equal to the simulation")
    if args.masked:
        print(demonstration.masked_beside_clear(out, names))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "init": init,
    "join": join,
    "add-site": add_site,
    "rotate": rotate,
    "revoke": revoke,
    "peers": peers,
    "server": server,
    "register": register,
    "site": site,
    "check": check,
    "run": run,
    "resume": resume,
    "status": status,
    "stop": stop,
    "logs": logs,
    "watch": watch_page,
    "demo": demo,
}


def deploy(arguments: Sequence[str]) -> int:
    """The same methods on real machines, through Flower: waffle deploy init."""
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:<9} {(f.__doc__ or '').splitlines()[0]}" for name, f in COMMANDS.items())
        print(f"usage: waffle deploy COMMAND ...; see docs/deploy.md for the complete guide\n\n{lines}")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        raise WaffleError(f"unknown command {name!r}{suggest(name, COMMANDS)}")
    if not find_spec("flwr"):
        raise WaffleError('Flower is not installed here: pip install "waffle-fl[flower]"')
    before = os.umask(0o077)  # keys, models, states and records are readable by their owner only
    try:
        return COMMANDS[name](rest)
    finally:
        os.umask(before)
