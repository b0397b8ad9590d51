"""Is one end in order? Its settings, its keys, Flower's version, its data, and the way to the server."""

from __future__ import annotations

import datetime
import importlib.metadata
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

from cryptography import x509

from waffle_fl.deploy.folders import data_of, read_server, read_site
from waffle_fl.deploy.site import software
from waffle_fl.errors import WaffleError
from waffle_fl.own.folder import layout_of

Finding = tuple[bool, str]
TESTED = "1.41.0"
SOON = datetime.timedelta(days=30)


def findings(folder: Path) -> Iterator[Finding]:
    """(is it good, what it is) of everything that can be looked at before a run."""
    yield True, software()
    yield _flower()
    if (folder / "server.toml").exists():
        s = read_server(folder)
        near = "127.0.0.1" if s.listen in ("0.0.0.0", "::") else s.listen
        yield True, f"server of {', '.join(s.sites)}"
        for site in s.sites:
            yield (folder / "keys" / f"{site}.pub").exists(), f"public key of {site}"
        yield from _certificate(folder / "keys" / "server.pem")
        yield _reached(near, s.port, None if s.insecure else folder / "keys" / "ca.crt")
    elif (folder / "site.toml").exists():
        own = read_site(folder)
        yield True, f"site {own.name}: {', '.join(own.methods)}; at most {own.rounds} rounds"
        source = data_of(folder, own)
        readable = own.data == source or (Path(source).exists() and bool(layout_of(Path(source))))
        yield readable, f"data {source}"
        secret = folder / "node.key"
        yield secret.exists() and not secret.stat().st_mode & 0o077, f"{secret} is there, and for its owner alone"
        host, _, port = own.server.rpartition(":")
        yield _reached(host, int(port), None if own.insecure else folder / "ca.crt")
    else:
        raise WaffleError(f"{folder} has neither server.toml nor site.toml: make one with waffle deploy init")


def _flower() -> Finding:
    try:
        found = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        return False, 'Flower is not installed: pip install "waffle-fl[flower]"'
    return found == TESTED, f"Flower {found} (tested with {TESTED})"


def _certificate(path: Path) -> Iterator[Finding]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    yield left > SOON, f"certificate valid for {left.days} more days"


def _reached(host: str, port: int, ca: Path | None) -> Finding:
    """Connect as Flower would: name resolution, port, certificate."""
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=10) as plain:
            if ca is None:
                tls = _speaks_tls(plain)
                return not tls, f"{where} answers; {'with TLS, which this end must use too' if tls else 'WITHOUT TLS'}"
            with ssl.create_default_context(cafile=str(ca)).wrap_socket(plain, server_hostname=host):
                return True, f"{where} answers with the certificate of this federation"
    except ssl.SSLCertVerificationError as error:
        return False, f"{where} has no certificate that {ca} vouches for: {error.verify_message}"
    except ssl.SSLError as error:
        return False, f"{where} does not speak TLS as this end does: {error.reason or error}"
    except OSError as error:
        return False, f"{where} does not answer: {error.strerror or error}"


def _speaks_tls(plain: socket.socket) -> bool:
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    try:
        anyone.wrap_socket(plain).close()
    except OSError:
        return False
    return True
