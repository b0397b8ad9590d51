"""Membership of a federation: create it, join, replace keys, revoke. Works on files only; no process must run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from waffle_fl.atomic_files import sync_folder, write_atomically
from waffle_fl.config import ALL_ALICES, check_name
from waffle_fl.deploy.keys import fingerprint, make_certificates, make_node_key, make_operator_key, wire_form
from waffle_fl.deploy.settings_files import (
    SERVER_FILE,
    SITE_FILE,
    change,
    make_private,
    public_keys,
    read_server,
    read_site,
    server_text,
    site_text,
)
from waffle_fl.deploy.signing import OPERATOR_KEY, OPERATOR_PUBLIC
from waffle_fl.errors import WaffleError, writable

NODE_KEY, NODE_PUBLIC = "node.key", "node.pub"
FIRST_LOCAL_PORT = 9094
RESERVED = ("operator", "server", "ca", "retired")


def init(
    folder: Path, sites: Sequence[str], address: str, port: int, listen: str, data: str = "", insecure: bool = False
) -> None:
    """Make the folder of a new federation. Agents are ordered by name, as in a folder of data files."""
    names = sorted(sites)
    for name in names:
        _check_site(name)
    if not names or len(set(names)) < len(names):
        raise WaffleError(f"expected the names of the sites, each once, got {', '.join(sites) or 'none'}")
    if (folder / SERVER_FILE).exists():
        raise WaffleError(f"{folder} already holds a federation: choose another folder")
    text = server_text(names, address, port, listen, insecure)
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        keys = folder / "keys"
        make_certificates(keys, folder.resolve().name, list(dict.fromkeys([address, "localhost", "127.0.0.1"])))
        make_operator_key(keys / OPERATOR_KEY, keys / OPERATOR_PUBLIC)
        (folder / SERVER_FILE).write_text(text, encoding="utf-8")
        make_private(folder, "keys")
        for name in names:
            make_site_folder(folder, name, data)


def make_site_folder(folder: Path, name: str, data: str = "") -> Path:
    """Make the folder that the operator sends to a site, without secrets; return it."""
    s = read_server(folder)
    site_folder = folder / "sites" / name
    local = FIRST_LOCAL_PORT + s.sites.index(name)
    with writable(site_folder):
        site_folder.mkdir(parents=True, exist_ok=True)
        for file in ("ca.crt", OPERATOR_PUBLIC):
            (site_folder / file).write_bytes((folder / "keys" / file).read_bytes())
        if not (site_folder / SITE_FILE).exists():
            text = site_text(name, s.address, s.port, local, data, s.insecure)
            (site_folder / SITE_FILE).write_text(text, encoding="utf-8")
    return site_folder


def join(home: Path, rotate: bool = False) -> bytes:
    """Make a site's key pair, at the site; return the public key. With `rotate`, the old key is kept under its date."""
    read_site(home)
    private, public = home / NODE_KEY, home / NODE_PUBLIC
    if private.exists() and not rotate:
        raise WaffleError(
            f"{home} already has a key, {fingerprint(public.read_bytes()) if public.exists() else private}: "
            "send node.pub to the operator, or make a new key with --rotate"
        )
    with writable(home):
        if private.exists():
            private.replace(home / f"{NODE_KEY}.{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
            sync_folder(home)
        make_node_key(private, public)
        make_private(home, NODE_KEY)
    return public.read_bytes()


def add_site(folder: Path, name: str) -> Path:
    """Add a site, or re-admit a revoked one; return the folder to send to it."""
    s = read_server(folder)
    _check_site(name)
    if name not in s.sites:
        change(folder / SERVER_FILE, sites=[*s.sites, name])
    if name in s.revoked:
        change(folder / SERVER_FILE, revoked=[site for site in s.revoked if site != name])
    return make_site_folder(folder, name)


def accept_key(folder: Path, name: str, public: Path) -> str:
    """Set a site's public key; return its fingerprint. An earlier key is moved to `retired`."""
    s = read_server(folder)
    if name not in s.sites:
        raise WaffleError(f"server.toml has no site {name!r}: add it with waffle deploy add-site {name}")
    form = wire_form(public)
    content = b" ".join(public.read_bytes().split()[:2]) + b"\n"
    for other in s.sites:
        path = folder / "keys" / f"{other}.pub"
        if other != name and path.is_file() and wire_form(path) == form:
            raise WaffleError(f"{public} is the key of {other}: each site needs its own key")
    kept = folder / "keys" / f"{name}.pub"
    if kept.is_file() and kept.read_bytes() != content:
        retire_key(folder, name)
    with writable(kept):
        write_atomically(kept, content)
    return fingerprint(content)


def peers_text(folder: Path) -> str:
    """Return the members' public keys, one line each: `peers.pub`, for the sites of masked runs."""
    files = public_keys(folder, read_server(folder).members)
    return "".join(f"{site} {path.read_text(encoding='ascii').strip()}\n" for site, path in files.items())


def admitted_keys(folder: Path) -> dict[bytes, str]:
    """The members by their public keys in Flower's format; sites without a key are left out."""
    files = {site: folder / "keys" / f"{site}.pub" for site in read_server(folder).members}
    return {wire_form(path): site for site, path in files.items() if path.is_file()}


def retire_key(folder: Path, name: str) -> Path | None:
    """Move a site's key to `retired`, with the date in its name; return the new path, or None if there was no key."""
    kept = folder / "keys" / f"{name}.pub"
    if not kept.is_file():
        return None
    aside = folder / "keys" / "retired" / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.pub"
    with writable(aside):
        aside.parent.mkdir(exist_ok=True, mode=0o700)
        kept.replace(aside)
        sync_folder(kept.parent)
    return aside


def revoke(folder: Path, name: str) -> None:
    """Exclude a site from new runs. It keeps its index in earlier runs, but its key is rejected."""
    s = read_server(folder)
    if name not in s.sites:
        raise WaffleError(f"server.toml has no site {name!r}: its sites are {', '.join(s.sites)}")
    if name in s.revoked:
        raise WaffleError(f"{name} is already revoked; waffle deploy add-site {name} --key FILE admits it again")
    if len(s.members) == 1:
        raise WaffleError(f"{name} is the only site left: stop the server to end the federation")
    change(folder / SERVER_FILE, revoked=[*s.revoked, name], quorum=min(s.quorum, len(s.members) - 1))
    retire_key(folder, name)


def _check_site(name: str) -> None:
    check_name(name)
    if name in RESERVED:
        raise WaffleError(f"a site cannot be named {name!r}: the server's own keys use that name")
    if name == ALL_ALICES:
        raise WaffleError(f"a site cannot be named {ALL_ALICES!r}, which means every site")
