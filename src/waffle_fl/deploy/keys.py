"""Keys and certificates: a CA and a server certificate, an operator key that signs requests, a key pair per site."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)

from waffle_fl.atomic_files import check_regular
from waffle_fl.errors import WaffleError

CURVE = ec.SECP384R1()
LARGEST_KEY = 1 << 14  # bytes of a file with a public key
VALID = datetime.timedelta(days=825)


def make_certificates(folder: Path, federation: str, names: Sequence[str], valid: datetime.timedelta = VALID) -> None:
    """Write ca.crt, server.pem and server.key. The CA's own key signs once and is not stored."""
    ca_key, server_key = (ec.generate_private_key(CURVE) for _ in range(2))
    ca_name, server_name = (_named(f"{federation} {part}") for part in ("CA", "server"))
    authority = x509.BasicConstraints(ca=True, path_length=0)
    ca = _builder(ca_name, ca_name, ca_key, valid).add_extension(authority, critical=True)
    signs = _usage(key_cert_sign=True, crl_sign=True)
    ca_certificate = ca.add_extension(signs, critical=True).sign(ca_key, hashes.SHA384())
    server = _builder(server_name, ca_name, server_key, valid)
    server = server.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    server = server.add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    server = server.add_extension(issuer, critical=False)
    certificate = server.sign(ca_key, hashes.SHA384())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ca.crt").write_bytes(ca_certificate.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    write_secret(
        folder / "server.key",
        server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def make_node_key(private: Path, public: Path) -> None:
    """Write a site's key pair in OpenSSH format. It is made at the site; the private key never leaves it."""
    _write_pair(ec.generate_private_key(CURVE), private, public)


def make_operator_key(private: Path, public: Path) -> None:
    """Write the Ed25519 key pair that signs requests; every site has the public key."""
    _write_pair(Ed25519PrivateKey.generate(), private, public)


def _write_pair(key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey, private: Path, public: Path) -> None:
    write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def fingerprint(public: bytes) -> str:
    """Fingerprint of a public key in the format of `ssh-keygen -l`, to compare by telephone."""
    try:
        body = base64.b64decode(public.split()[1], validate=True)
    except (IndexError, ValueError):
        raise WaffleError("this is not a public key: expected a line such as 'ecdsa-sha2-nistp384 AAAA...'") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")


def wire_form(public: Path) -> bytes:
    """A site's public key in the format in which Flower reports the authenticated key of a node."""
    check_regular(public)
    try:
        if public.stat().st_size > LARGEST_KEY:
            raise ValueError
        key = load_ssh_public_key(public.read_bytes())
    except OSError as error:
        raise WaffleError(f"cannot read {public}: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise WaffleError(f"{public} is not the public key of a site") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != CURVE.name:
        raise WaffleError(
            f"{public} is not the public key of a site: expected ecdsa-sha2-nistp384, as made by waffle deploy join"
        )
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def write_secret(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, set before the content is written."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(content)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
        *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})
