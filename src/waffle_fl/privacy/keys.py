"""Key pairs: one per agent and job, its public key signed with the long-term key of the site, and pairwise secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from waffle_fl.errors import WaffleError
from waffle_fl.privacy.masks import PROTOCOL, derive

SIGNING = ec.ECDSA(hashes.SHA384())  # the sites' long-term keys are on the curve P-384


@dataclass(frozen=True)
class Introduction:
    """An agent's public key for one job, signed with the long-term key of its site."""

    agent: int
    public: bytes
    signature: bytes


def introduce(job: str, agent: int, key: X25519PrivateKey, signer: ec.EllipticCurvePrivateKey) -> Introduction:
    """Return the signed public key of an agent."""
    public = public_bytes(key)
    return Introduction(agent, public, signer.sign(_signed(job, agent, public), SIGNING))


def check_introduction(introduction: Introduction, job: str, agent: int, site: ec.EllipticCurvePublicKey) -> bytes:
    """Return the public key if the site of this agent has signed it for this job, or raise a WaffleError."""
    try:
        site.verify(introduction.signature, _signed(job, agent, introduction.public), SIGNING)
    except InvalidSignature:
        raise WaffleError(
            f"the key of agent {agent} for job {job} is not signed by its site: the server or the network has replaced "
            "it, or this site has an old public key of that one; compare fingerprints"
        ) from None
    return introduction.public


def public_bytes(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def pair_secrets(job: str, agent: int, key: X25519PrivateKey, publics: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the secret that an agent shares with each other agent in a job."""
    own, found = public_bytes(key), {}
    for other, public in publics.items():
        if other != agent:
            ordered = own + public if agent < other else public + own
            try:
                agreed = key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:
                raise WaffleError(f"the public key of agent {other} for job {job} is not an X25519 key") from None
            found[other] = derive(agreed, "pair", job.encode() + b"\n" + ordered)
    return found


def _signed(job: str, agent: int, public: bytes) -> bytes:
    return b"\n".join([PROTOCOL, b"introduction", job.encode(), str(agent).encode(), public])
