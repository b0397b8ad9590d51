"""Checks before a run: settings, keys, data, Flower, the connection to the server, and whether a run is deployable."""

from __future__ import annotations

import base64
import datetime
import http.client
import importlib.metadata
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509

from waffle_fl.attacks import NONE
from waffle_fl.config import ALL_ALICES, RunConfig
from waffle_fl.deploy.gateway import KEY_HEADER
from waffle_fl.deploy.introductions import PEERS, peer_fingerprints, read_peers
from waffle_fl.deploy.keys import fingerprint, wire_form
from waffle_fl.deploy.processes import address_of
from waffle_fl.deploy.settings_files import ServerSettings, data_of, read_server, read_site
from waffle_fl.deploy.signing import OPERATOR_KEY, OPERATOR_PUBLIC, load_trusted_keys
from waffle_fl.deploy.site import software
from waffle_fl.deploy.site_data import NO_DROP
from waffle_fl.deploy.site_store import Ledger
from waffle_fl.engines.masked_checks import masking_problem, masks_updates
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.experiment import round_settings
from waffle_fl.folder_federation import check_undivided
from waffle_fl.shifts import Drift, read_shifts
from waffle_fl.user_data.folder_reader import layout_of

Finding = tuple[bool, str]
TESTED = "1.41.0"
SOON = datetime.timedelta(days=30)


def findings(folder: Path) -> Iterator[Finding]:
    """Yield (passed, description) for every check of a server's or a site's folder."""
    yield True, software()
    yield _flower()
    if (folder / "server.toml").exists():
        s = read_server(folder)
        near = "127.0.0.1" if s.listen in ("0.0.0.0", "::") else s.listen
        yield True, f"server of {', '.join(s.members)}"
        for site in s.members:
            yield (folder / "keys" / f"{site}.pub").exists(), f"public key of {site}"
        yield _private(folder / "keys" / OPERATOR_KEY)
        yield _certificate(folder / "keys" / "server.pem")
        yield _reached(near, s.port, None if s.insecure else folder / "keys" / "ca.crt")
    elif (folder / "site.toml").exists():
        own = read_site(folder)
        yield True, f"site {own.name}: {', '.join(own.methods)}; at most {own.rounds} rounds"
        source = data_of(folder, own)
        readable = own.data == source or (Path(source).exists() and bool(layout_of(Path(source))))
        yield readable, f"data {source}"
        yield _private(folder / "node.key")
        yield _trusted(folder / OPERATOR_PUBLIC)
        yield _ledger(folder / "ledger.jsonl")
        yield from _peers(folder / PEERS)
        try:
            yield _reached(*address_of(own), None if own.insecure else folder / "ca.crt")
            if not own.insecure:
                yield _admitted(*address_of(own), folder)
        except WaffleError as error:
            yield False, str(error)
    else:
        raise WaffleError(f"{folder} has neither server.toml nor site.toml: make one with waffle deploy init")


def check_deployable(config: RunConfig, settings: ServerSettings) -> None:
    """Raise if a setting is not supported in a deployment, before any site is contacted."""
    s = config.settings
    if s.leave_out:
        raise WaffleError("leave_out works in simulations only: remove sites from server.toml instead")
    if s.newcomers:
        raise WaffleError("newcomers works in simulations only: remove it; a site that joins later starts a new run")
    if s.scored != "alice":
        raise WaffleError(f"scored works in simulations only, got {s.scored!r}: every site scores its own model")
    if problem := masking_problem(config.algorithm(), len(settings.members), round_settings(s)):
        raise WaffleError(problem)
    if s.alice == ALL_ALICES and masks_updates(config.algorithm(), round_settings(s)):
        raise WaffleError(
            "privacy = masked needs one Alice per job: sums of the same updates with other weights, one per Alice, "
            "would give the server every update"
        )
    if s.attack != NONE:
        raise WaffleError(f"attack works in simulations only, got {s.attack!r}: remove it")
    if s.final_model == "selected":
        raise WaffleError(
            "final_model = selected works in simulations only: remove it; the last round's model is saved"
        )
    if s.duplicates == "drop":
        raise WaffleError(NO_DROP)
    if any(isinstance(shift, Drift) for shift in read_shifts(s.shift)):
        raise WaffleError(f"drift works in simulations only, got {s.shift!r}: remove it")
    if s.is_own:
        check_undivided(s)
        members = settings.members
        if s.alice not in (ALL_ALICES, *members) and not (s.alice.isdecimal() and int(s.alice) < len(members)):
            gone = " (it is revoked)" if s.alice in settings.revoked else suggest(s.alice, members)
            raise WaffleError(f"there is no site {s.alice!r} to be Alice{gone}")
    if not s.is_own and s.agents != len(settings.members):
        raise WaffleError(
            f"the run splits {s.data} among {s.agents} agents, but server.toml has {len(settings.members)} sites"
        )


def _private(path: Path) -> Finding:
    return path.exists() and not path.stat().st_mode & 0o077, f"{path} exists and only its owner can read it"


def _trusted(path: Path) -> Finding:
    try:
        keys = load_trusted_keys(path)
    except WaffleError as error:
        return False, str(error)
    return True, f"{len(keys)} trusted operator key(s)"


def _ledger(path: Path) -> Finding:
    ledger = Ledger(path)
    try:
        ledger.check()
    except WaffleError as error:
        return False, str(error)
    return True, f"ledger with {len(list(ledger.lines()))} lines, none missing"


def _peers(path: Path) -> Iterator[Finding]:
    """The keys with which this site verifies the others in masked runs; without the file there is nothing to check."""
    try:
        for name in read_peers(path):
            yield True, f"{name} has the key {peer_fingerprints(path)[name]}, to compare by telephone"
    except WaffleError as error:
        yield False, str(error)


def _flower() -> Finding:
    try:
        found = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        return False, 'Flower is not installed: pip install "waffle-fl[flower]"'
    return found == TESTED, f"Flower {found} (tested with {TESTED})"


def _certificate(path: Path) -> Finding:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        return False, f"cannot read {path}: {error.strerror}"
    except ValueError:
        return False, f"{path} is not a certificate"
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return left > SOON, f"certificate valid for {left.days} more days"


def _reached(host: str, port: int, ca: Path | None) -> Finding:
    """Connect as Flower does: name resolution, port, certificate."""
    where = f"{host}:{port}"
    if ca is not None and not ca.is_file():
        return False, f"{ca} is missing; it is needed to verify the server"
    try:
        with socket.create_connection((host, port), timeout=10) as plain:
            if ca is None:
                tls = _speaks_tls(plain)
                return (
                    not tls,
                    f"{where} answers; {'with TLS, but this folder is set to insecure' if tls else 'WITHOUT TLS'}",
                )
            with ssl.create_default_context(cafile=str(ca)).wrap_socket(plain, server_hostname=host):
                return True, f"{where} answers with the certificate of this federation"
    except ssl.SSLCertVerificationError as error:
        return False, f"{where} has no certificate issued by {ca}: {error.verify_message}"
    except ssl.SSLError as error:
        return False, f"TLS handshake with {where} failed: {error.reason or error}"
    except OSError as error:
        return False, f"{where} does not answer: {error.strerror or error}"


def _admitted(host: str, port: int, folder: Path) -> Finding:
    """Check whether the server admits this site's key."""
    try:
        key = base64.b64encode(wire_form(folder / "node.pub")).decode()
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        connection = http.client.HTTPSConnection(host, port, timeout=10, context=context)
        connection.request("POST", "/v1/fleet/get-run", b"", {KEY_HEADER.decode(): key})
        known = b"does not admit" not in connection.getresponse().read()
        connection.close()
    except (WaffleError, OSError, http.client.HTTPException) as error:
        return False, f"could not ask the server whether it admits this site's key: {error}"
    verb = "admits" if known else "does not admit (not added yet, replaced or revoked)"
    return known, f"the server {verb} the key {fingerprint((folder / 'node.pub').read_bytes())}"


def _speaks_tls(plain: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(plain).close()
    except OSError:
        return False
    return True
