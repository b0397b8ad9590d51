"""Signatures of requests. A site accepts requests signed by an operator key, addressed to it, recent, and new.

The server signs every request with the operator's Ed25519 key; each site has the public key in `operator.pub`. A site
therefore need not trust Flower's SuperLink or the network: requests without a valid signature are refused.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from waffle_fl.deploy.policy import Refused
from waffle_fl.engines.flower.messages import Message
from waffle_fl.errors import WaffleError

CONTEXT = b"waffle-fl request, version 1\n"  # prevents reuse of signatures from other protocols
OPERATOR_KEY, OPERATOR_PUBLIC = "operator.key", "operator.pub"


def load_operator_key(path: Path) -> Ed25519PrivateKey:
    """Load the operator's private key, as written by `waffle deploy init`."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise WaffleError(f"cannot read the operator key {path}: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise WaffleError(f"{path} is not an operator key: expected an Ed25519 private key, no passphrase") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise WaffleError(f"{path} is not an operator key: expected Ed25519, got {type(key).__name__}")
    return key


def load_trusted_keys(path: Path) -> list[Ed25519PublicKey]:
    """Load the operator keys that a site trusts, one per line; there are two while a key is being replaced."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip() and not line.startswith(b"#")]
    except OSError as error:
        raise WaffleError(f"cannot read {path}, which is needed to verify requests: {error.strerror}") from None
    keys = []
    for line in lines:
        try:
            key = load_ssh_public_key(line)
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise WaffleError(f"{path}: expected lines of the form 'ssh-ed25519 ...', one per operator key")
        keys.append(key)
    if not keys:
        raise WaffleError(f"{path} holds no operator key, so no request can be verified")
    return keys


def sign(request: Message, key: Ed25519PrivateKey, site: str, now: float | None = None) -> Message:
    """Return the request with the site's name, the time, a nonce, and a signature over all of it."""
    stamp = {"site": site, "issued": time.time() if now is None else now, "nonce": secrets.token_hex(16)}
    fields = {**request.fields, **stamp}
    return replace(request, fields=fields, signature=key.sign(_message(fields, request.payloads)))


def verify(
    request: Message,
    keys: Collection[Ed25519PublicKey],
    site: str,
    used: Collection[str],
    window: float,
    now: float | None = None,
) -> str:
    """Return the request's nonce, or raise `Refused`. Must pass before any other part of the request is used."""
    message = _message(request.fields, request.payloads)
    if not any(_is_signed(key, request.signature, message) for key in keys):
        raise Refused("this request is not signed by an operator key that this site trusts")
    fields = request.fields
    if fields.get("site") != site:
        raise Refused("this request is addressed to another site")
    issued, nonce = fields.get("issued"), fields.get("nonce")
    age = (time.time() if now is None else now) - issued if isinstance(issued, int | float) else float("nan")
    if not abs(age) <= window:
        raise Refused(
            f"this request was signed more than {window:g} seconds before or after this site's time: "
            "synchronise the clocks of server and site, or send it again"
        )
    if not isinstance(nonce, str) or not nonce or nonce in used:
        raise Refused("this request was answered before")
    return nonce


def _is_signed(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _message(fields: Mapping[str, Any], payloads: Mapping[str, bytes]) -> bytes:
    """The bytes that are signed: the fields as canonical JSON, and a digest of every payload by name."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in payloads.items()}
    return CONTEXT + json.dumps({"words": fields, "payloads": digests}, sort_keys=True).encode()
