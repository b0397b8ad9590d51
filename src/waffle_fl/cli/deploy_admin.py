"""waffle deploy: the operator's daily commands: add, rotate and revoke sites, status, stop, logs, live page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from waffle_fl.cli.flags import parse
from waffle_fl.errors import WaffleError


@dataclass(frozen=True)
class OneSite:
    """A site of the federation."""

    name: tyro.conf.Positional[str]
    """The site's name."""
    folder: Path = Path()
    """The server's folder."""
    key: Path | None = None
    """The public key that the site made with `waffle deploy join`."""


def add_site(arguments: Sequence[str]) -> int:
    """Add a site, or set its key: waffle deploy add-site NAME --key NAME.pub --folder FOLDER."""

    @dataclass(frozen=True)
    class AddSite(OneSite):
        """Without --key, make the folder to send to the site; with it, admit the site, at once if the server runs."""

    from waffle_fl.deploy import membership

    args = parse(AddSite, arguments, "deploy add-site")
    folder = args.folder.resolve()
    site_folder = membership.add_site(folder, args.name)
    if args.key is None:
        print(f"send to the site:  {site_folder}; run there: waffle deploy join {args.name}")
        print(f"on the server:     waffle deploy add-site {args.name} --key {args.name}.pub --folder {args.folder}")
        return 0
    print(f"{args.name} has the key {membership.accept_key(folder, args.name, args.key)}")
    return _register(folder)


def rotate(arguments: Sequence[str]) -> int:
    """Replace a site's key: waffle deploy rotate NAME --key NAME.pub --folder FOLDER."""

    @dataclass(frozen=True)
    class Rotate(OneSite):
        """Accept a site's new key and refuse the old one. The site makes it with `waffle deploy join --rotate`."""

    from waffle_fl.deploy import membership

    args = parse(Rotate, arguments, "deploy rotate")
    folder = args.folder.resolve()
    if args.key is None:
        raise WaffleError(f"expected --key: make a new key at {args.name} with waffle deploy join --rotate")
    old = folder / "keys" / f"{args.name}.pub"
    if old.is_file() and args.key.is_file() and old.read_bytes() == args.key.read_bytes():
        raise WaffleError(f"{args.key} is the current key of {args.name}: make a new one at the site (join --rotate)")
    print(f"{args.name} has the key {membership.accept_key(folder, args.name, args.key)}; the old one is refused")
    return _register(folder)


def revoke(arguments: Sequence[str]) -> int:
    """Exclude a site: waffle deploy revoke NAME --folder FOLDER."""

    @dataclass(frozen=True)
    class Revoke:
        """Refuse a site's key and exclude it from new runs. Current runs continue without its updates."""

        name: tyro.conf.Positional[str]
        """The site's name."""
        folder: Path = Path()
        """The server's folder."""

    from waffle_fl.deploy import membership

    args = parse(Revoke, arguments, "deploy revoke")
    folder = args.folder.resolve()
    membership.revoke(folder, args.name)
    print(f"{args.name} is revoked; its key is in {folder / 'keys' / 'retired'}")
    return _register(folder)


def peers(arguments: Sequence[str]) -> int:
    """Print the sites' public keys, for peers.pub of each site: waffle deploy peers FOLDER."""

    @dataclass(frozen=True)
    class Peers:
        """Print one line per site. With these lines in its peers.pub a site verifies the others in masked runs."""

        folder: tyro.conf.Positional[Path]
        """The server's folder."""

    from waffle_fl.deploy import membership

    print(membership.peers_text(parse(Peers, arguments, "deploy peers").folder.resolve()), end="")
    return 0


def _register(folder: Path) -> int:
    from waffle_fl.deploy.control_client import ControlClient

    try:
        changes = ControlClient(folder).register()
    except WaffleError as error:
        if "no server answers" not in str(error):
            raise
        print("the server is not running; this takes effect when it starts")
        return 0
    for line in changes or ["the server is already up to date"]:
        print(line)
    return 0


@dataclass(frozen=True)
class OneServer:
    """The server's folder."""

    folder: tyro.conf.Positional[Path]
    """The server's folder."""


def status(arguments: Sequence[str]) -> int:
    """Show the state of sites and jobs: waffle deploy status FOLDER."""

    @dataclass(frozen=True)
    class Status(OneServer):
        """Show the connected sites and, per job, the round, the awaited sites, the last weights and screened sites."""

        json: bool = False
        """Print JSON."""

    import json

    from waffle_fl.deploy.overview import lines_of, overview

    args = parse(Status, arguments, "deploy status")
    found = overview(args.folder.resolve())
    if args.json:
        print(json.dumps(found))
        return 0
    for line in lines_of(found):
        print(line)
    return 0


def stop(arguments: Sequence[str]) -> int:
    """Stop a job; `resume` continues it: waffle deploy stop JOB --folder FOLDER."""

    @dataclass(frozen=True)
    class Stop:
        """Stop a job after its current step. Recorded rounds are saved, and every site keeps its state."""

        job: tyro.conf.Positional[str]
        """The job's name, as `waffle deploy status` shows it."""
        folder: Path = Path()
        """The server's folder."""

    from waffle_fl.deploy.control_client import ControlClient
    from waffle_fl.deploy.jobs import Job

    args = parse(Stop, arguments, "deploy stop")
    folder = args.folder.resolve()
    job = Job.open(folder, Path(args.job).name)
    if not job.is_running:
        raise WaffleError(f"{job.name} is not running: see waffle deploy status {args.folder}")
    job.request_stop()
    client, end = ControlClient(folder), time.monotonic() + 60
    while job.is_running:
        if time.monotonic() > end:
            if job.flower_run:
                client.stop(job.flower_run)
            break
        time.sleep(0.5)
    print(f"{job.name} stopped after round {job.state.get('round', 0)}; to continue:")
    print(f"waffle deploy resume {job.out} --folder {args.folder}")
    return 0


def logs(arguments: Sequence[str]) -> int:
    """Show the log of the server, a site or a job: waffle deploy logs FOLDER --job JOB --follow."""

    @dataclass(frozen=True)
    class Logs:
        """Print one line per event: time, level, server or site, description."""

        folder: tyro.conf.Positional[Path]
        """The folder of the server or of a site."""
        job: str = ""
        """Only the events of this job; on the server."""
        lines: int = 50
        """Number of last lines to print."""
        follow: bool = False
        """Continue with new lines until Ctrl-C."""

    from waffle_fl.deploy.settings_files import SERVER_FILE

    args = parse(Logs, arguments, "deploy logs")
    folder = args.folder.resolve()
    if args.job:
        from waffle_fl.deploy.jobs import Job

        source = Job.open(folder, args.job).journal.path
    else:
        source = folder / ("server.log" if (folder / SERVER_FILE).exists() else "site.log")
    if not source.exists() and not args.follow:
        raise WaffleError(f"{source} does not exist: nothing has been logged yet")
    try:
        for line in _tail(source, args.lines, args.follow):
            print(_event(line) if args.job else line, flush=True)
    except KeyboardInterrupt:
        return 130
    return 0


def _event(line: str) -> str:
    """Format an event of a job's log like a line of the server's log."""
    import json

    try:
        content: dict[str, Any] = json.loads(line)
    except ValueError:
        return line
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(content.get("time", 0)))
    level = "ERROR" if "error" in content else "INFO"
    text = content.get("error") or content.get("note") or ("finished" if content.get("done") else "started")
    return f"{when} {level} server {text}"


def _tail(path: Path, count: int, follow: bool) -> Iterator[str]:
    """Yield the last lines of a file and, with `follow`, new lines as they are added."""
    position = 0
    if path.exists():
        content = path.read_bytes()
        position = len(content)
        yield from content.decode(errors="replace").splitlines()[-count:]
    while follow:
        time.sleep(0.5)
        if path.exists() and path.stat().st_size != position:
            position = 0 if path.stat().st_size < position else position
            with path.open("rb") as stream:
                stream.seek(position)
                added = stream.read()
            position += len(added)
            yield from added.decode(errors="replace").splitlines()


def watch_page(arguments: Sequence[str]) -> int:
    """Serve a live page and metrics on this machine: waffle deploy watch FOLDER."""

    @dataclass(frozen=True)
    class Watch(OneServer):
        """Serve a page with progress, accuracy, weights per round and site states, and /metrics for Prometheus."""

        port: int = 9464
        """The port on 127.0.0.1."""

    from waffle_fl.deploy.live_page import serve

    args = parse(Watch, arguments, "deploy watch")
    serve(args.folder.resolve(), args.port, lambda text: print(text, flush=True))
    return 0
