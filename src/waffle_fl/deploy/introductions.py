"""Keys of private rounds at a site: one key pair per job, and the long-term public keys of the other sites.

A site signs the public key of its job with `node.key`, and verifies those of the others with `peers.pub`, which its
administrator has compared with them. The server relays signed keys; it cannot replace one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from waffle_fl.config import check_name
from waffle_fl.deploy.keys import fingerprint
from waffle_fl.deploy.policy import Refused
from waffle_fl.deploy.settings_files import secret_of
from waffle_fl.engines.flower.masked_messages import SessionTerms
from waffle_fl.errors import WaffleError
from waffle_fl.privacy.keys import Introduction, check_introduction, introduce, pair_secrets, public_bytes

PEERS = "peers.pub"


def introduction_of(home: Path, run: str, agent: int) -> Introduction:
    """Return this site's public key for a job, signed; the key pair is made on first use."""
    path = home / "node.key"
    try:
        signer = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        raise Refused("this site has no readable node.key, with which it signs its key for private rounds") from None
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise Refused("node.key of this site is not a key made by waffle deploy join")
    job_key = _job_key(home, run)
    job_key.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return introduce(run, agent, X25519PrivateKey.from_private_bytes(secret_of(job_key)), signer)


def secrets_with_others(home: Path, name: str, run: str, agent: int, terms: SessionTerms) -> dict[int, bytes]:
    """Return the secret that this site shares with each other agent, or refuse terms that do not name true sites."""
    sites = terms.sites
    if agent >= len(sites) or sites[agent] != name or len(set(sites)) < len(sites):
        raise Refused("expected each site once, and this one as its own agent: refuse the round")
    if len(terms.introductions) != len(sites) or not {agent, terms.alice} | set(terms.group) <= set(range(len(sites))):
        raise Refused("expected a signed key of each agent: refuse the round")
    try:
        own = X25519PrivateKey.from_private_bytes(_job_key(home, run).read_bytes())
    except OSError:
        raise Refused("this site has lost its key of this job: start a new run") from None
    if terms.introductions[agent].public != public_bytes(own):
        raise Refused("this site has another key for this job than the server says: start a new run")
    peers, publics = read_peers(home / PEERS), {agent: public_bytes(own)}
    for other, site in enumerate(sites):
        if other != agent:
            if site not in peers:
                raise Refused(
                    f"{PEERS} of this site lacks {site}: ask the operator for the line (waffle deploy peers), and "
                    "compare the fingerprint with that site"
                )
            try:
                publics[other] = check_introduction(terms.introductions[other], run, other, peers[site])
            except WaffleError as error:
                raise Refused(str(error)) from None
    if len(set(publics.values())) < len(publics):
        raise Refused("expected another key of each agent: refuse the round")
    return pair_secrets(run, agent, own, publics)


def read_peers(path: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """Return the sites' long-term public keys by name: lines of `waffle deploy peers`; empty if there is no file."""
    found: dict[str, ec.EllipticCurvePublicKey] = {}
    for name, line in _lines(path):
        try:
            key = load_ssh_public_key(line)
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey) or name in found:
            raise Refused(f"{PEERS} of this site: expected lines of the form 'NAME ecdsa-sha2-nistp384 ...', each once")
        found[name] = key
    return found


def peer_fingerprints(path: Path) -> dict[str, str]:
    """Return the fingerprint of each key in `peers.pub`, to compare with its site."""
    return {name: fingerprint(line) for name, line in _lines(path)}


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    for line in path.read_bytes().splitlines() if path.exists() else ():
        name, _, key = line.strip().partition(b" ")
        if name and not name.startswith(b"#"):
            yield name.decode(errors="replace"), key


def _job_key(home: Path, run: str) -> Path:
    return home / "state" / check_name(run) / "masks.key"
