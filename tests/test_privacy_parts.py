"""The parts of a private round: ring, shares, sketches, exact products, keys, floors."""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np
import pytest
from benchmarks.private_rounds import weight_error
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from conftest import refusal
from private_support import entropy_of, secrets_of
from waffle_fl.privacy import contributors, exact_product, ring, shamir
from waffle_fl.privacy.keys import check_introduction, introduce, pair_secrets, public_bytes
from waffle_fl.privacy.masks import derive, open_seeds, pair_mask, seal_seeds, stream
from waffle_fl.privacy.sketch import compress, distance, words_of


def test_words_keep_numbers_to_a_step() -> None:
    """A number returns from the ring with an error of at most half a step, and stochastic rounding is unbiased."""
    numbers = np.random.default_rng(0).normal(size=1000)
    for unit in (1.0, 0.125):
        back = ring.decode(ring.encode(numbers, unit, 24), unit, 24)
        assert np.abs(back - numbers).max() <= unit * 2.0**-25
    draws = np.random.default_rng(1).random((4000, 1))
    rounded = ring.decode(ring.encode(np.full((4000, 3), 0.3 * 2.0**-24), 1.0, 24, draws), 1.0, 24)
    assert rounded.mean() * 2.0**24 == pytest.approx(0.3, abs=0.03)


def test_the_stated_error_of_a_sum() -> None:
    """The error of a sum of ten LeNet-5 updates is near 2.3e-5, as the documentation of the ring says."""
    rng = np.random.default_rng(2)
    rows, draws = rng.normal(size=(10, 61706)) / 250, rng.random((10, 61706))
    words = [ring.encode(0.1 * row, 1.0, 24, draw) for row, draw in zip(rows, draws, strict=True)]
    total = ring.decode(np.sum(words, axis=0, dtype=np.uint32), 1.0, 24)
    error = np.linalg.norm(total - 0.1 * rows.sum(axis=0))
    assert 0.5e-5 < error < 2.4e-5


def test_numbers_that_do_not_fit_are_recognised() -> None:
    """Numbers that are not finite, or that a sum could not hold, are recognised."""
    assert ring.holds(np.array([125.0, -125.0]), 1.0, 24)
    for wrong in (np.nan, np.inf, 127.0, -1e20):
        assert not ring.holds(np.array([0.0, wrong]), 1.0, 24)
    assert [ring.unit_for(size) for size in (1.0, 0.1, 0.3, 3.0)] == [1.0, 0.125, 0.5, 4.0]


@given(st.binary(min_size=31, max_size=31), st.integers(4, 9))
def test_shares_give_the_secret(secret: bytes, agents: int) -> None:
    """Any threshold of the shares gives the secret; one share fewer gives another one."""
    threshold = shamir.threshold_for(agents)
    shares = shamir.split(secret, range(agents), threshold, entropy_of(secret))
    for some in list(combinations(range(agents), threshold))[:5]:
        assert shamir.combine({i: shares[i] for i in some}) == secret
    assert shamir.combine({i: shares[i] for i in range(threshold - 1)}) != secret


def test_thresholds() -> None:
    """Two thirds of the agents, rounded up."""
    assert [shamir.threshold_for(n) for n in (4, 5, 9, 10, 100)] == [3, 4, 6, 7, 67]


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_the_server_reads_distances_from_two_masked_sketches(length: int) -> None:
    """The distance is exact to a step, whatever the masks; words of another pair give another one."""
    a, b = np.random.default_rng(0).normal(size=(2, length))
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
    found = {distance(words_of(a, 1.0, key, False), words_of(b, 1.0, key, True), 1.0) for key in keys}
    assert len(found) == 1
    assert found.pop() == pytest.approx(np.linalg.norm(a - b), abs=length**0.5 * 2.0**-15)
    other = distance(words_of(a, 1.0, keys[0], False), words_of(b, 1.0, keys[1], True), 1.0)
    assert other != pytest.approx(np.linalg.norm(a - b), abs=0.1)
    assert distance(words_of(a, 1.0, keys[0], False), words_of(a, 1.0, keys[0], True), 1.0) == 0


def test_masked_sketches_follow_from_the_distance_alone() -> None:
    """For given masks, two pairs of vectors with one distance are each the other's pair under other masks.

    The masks x + a - x', y + b - y' and a p that keeps the third message are as probable as a, b and p, so the four
    messages of both pairs have one distribution.
    """
    rng = np.random.default_rng(0)
    x, y = rng.integers(-1000, 1000, (2, 5)).astype(np.int64)
    other_x = x[::-1].copy()
    other_y = other_x - (x - y)[::-1]  # of the same distance
    a, b, p = rng.integers(0, 1 << 48, 5), rng.integers(0, 1 << 48, 5), rng.integers(0, 1 << 48)

    def sent(x: np.ndarray, y: np.ndarray, a: np.ndarray, b: np.ndarray, p: int) -> list[int]:
        own = [*(x + a).tolist(), int(x @ x) + 2 * dot(x + a, b) + p]
        hers = [*(y + b).tolist(), int(y @ y) + 2 * dot(a, y) - p]
        return [word % (1 << 48) for word in own + hers]

    def dot(a: np.ndarray, b: np.ndarray) -> int:
        return sum(i * j for i, j in zip(a.tolist(), b.tolist(), strict=True))

    messages, masks = sent(x, y, a, b, int(p)), (x + a - other_x, y + b - other_y)
    without = sent(other_x, other_y, *masks, 0)
    assert sent(other_x, other_y, *masks, messages[5] - without[5]) == messages
    key = bytes(32)
    stored = ring.wrap(stream(key, 2 * 11).view(np.uint64)).astype(np.int64)
    expected = sent(x, y, stored[:5], stored[5:10], int(stored[10]))
    words = [words_of(v * 2.0**-15, 1.0, key, hers).tolist() for v, hers in ((x, False), (y, True))]
    assert words[0] + words[1] == expected


def test_words_of_six_bytes() -> None:
    """Words modulo 2^48 travel as six bytes."""
    words = np.array([0, 1, (1 << 48) - 1, 123456789012], dtype=np.uint64)
    assert len(ring.packed(words)) == 24
    assert ring.unpacked(ring.packed(words)).tolist() == words.tolist()


@pytest.mark.parametrize("size", [256, 1024])
def test_the_error_of_a_sketch(size: int) -> None:
    """A sketch keeps squared lengths on average, with the relative variance 2 / k."""
    rng = np.random.default_rng(0)
    ratios = []
    for i in range(300):
        vector = rng.normal(size=5000)
        ratios.append((compress(vector, size, derive(bytes([i % 256]), str(i))) ** 2).sum() / (vector**2).sum())
    assert np.mean(ratios) == pytest.approx(1, abs=4 * (2 / size / 300) ** 0.5)
    assert np.var(ratios) == pytest.approx(2 / size, rel=0.3)
    assert compress(vector, 5000, bytes(32)) is vector


@pytest.mark.parametrize(("spread", "size", "error"), [(0.3, 256, 0.026), (0.8, 4096, 0.016), (0.95, 1024, 0.156)])
def test_the_error_of_the_weights(spread: float, size: int, error: float) -> None:
    """The L1 error of WAFFLE's weights is that of the table in docs/privacy.md; it falls as 1 / sqrt(k)."""
    assert weight_error(size, spread, tries=1)["error"] == pytest.approx(error, rel=0.2)


def test_seeds_stay_sealed_without_the_secret() -> None:
    """Sealed seeds open with their secret and in their round alone."""
    seeds = {i: bytes([i]) * 32 for i in (0, 2, 3)}
    sealed = seal_seeds(b"s" * 31, seeds, b"round 1")
    assert open_seeds(b"s" * 31, sealed, [3, 0, 2], b"round 1") == seeds
    for secret, context in ((b"t" * 31, b"round 1"), (b"s" * 31, b"round 2")):
        with pytest.raises(InvalidTag):
            open_seeds(secret, sealed, [0, 2, 3], context)


def test_pair_masks_cancel() -> None:
    """What one agent of a pair adds, the other subtracts, exactly."""
    one, other = (pair_mask(b"s" * 32, *pair, b"context", 100) for pair in ((1, 4), (4, 1)))
    assert not (one + other).any()
    assert len(set(one.tolist())) > 90


def test_pairs_agree_on_their_secret() -> None:
    """Two agents derive the same secret; other pairs and other jobs have other secrets."""
    secrets = secrets_of("job", 4)
    found = {secrets[i][j] for i in range(4) for j in range(4) if i != j}
    assert secrets[1][3] == secrets[3][1]
    assert len(found) == 6
    assert not found & {secrets_of("another job", 4)[0][j] for j in (1, 2, 3)}


@pytest.mark.parametrize("public", [bytes(32), b"short"])
def test_keys_without_a_secret_are_rejected(public: bytes) -> None:
    """A public key with which every secret would be the same, or that is no key, is rejected."""
    assert "not an X25519 key" in refusal(pair_secrets, "job", 0, X25519PrivateKey.generate(), {1: public})


def test_a_replaced_key_is_rejected() -> None:
    """A job's key is valid with the signature of its site, for its job and its agent."""
    site, key = ec.generate_private_key(ec.SECP384R1()), X25519PrivateKey.generate()
    introduction = introduce("job", 2, key, site)
    assert check_introduction(introduction, "job", 2, site.public_key()) == public_bytes(key)
    other = introduce("job", 2, X25519PrivateKey.generate(), ec.generate_private_key(ec.SECP384R1()))
    for wrong in ((introduction, "job 2", 2), (introduction, "job", 3), (other, "job", 2)):
        assert "not signed by its site" in refusal(check_introduction, *wrong, site.public_key())


def test_an_exact_distance_with_a_dealer() -> None:
    """The two words of an exact product give the distance to 1e-6; each alone, and each masked vector, is uniform."""
    x, y = np.random.default_rng(3).normal(size=(2, 2000)) / 40
    agent_key, alice_key, pair = (hashlib.sha256(name).digest() for name in (b"agent", b"alice", b"pair"))
    agent = exact_product.agent_of(agent_key, 2000, exact_product.dealer_word(agent_key, alice_key, 2000))
    alice = exact_product.alice_of(alice_key, 2000)
    xs, ys = (exact_product.encode(v, 1.0) for v in (x, y))
    to_alice, to_agent = xs + agent.mask, ys + alice.mask
    words = (
        exact_product.agent_word(xs, to_agent, agent, pair),
        exact_product.alice_word(ys, to_alice, alice, pair),
    )
    assert exact_product.distance(*words, 1.0) == pytest.approx(np.linalg.norm(x - y), rel=1e-6)
    for masked in (to_alice, to_agent):
        assert abs(np.unpackbits(masked.view(np.uint8)).mean() - 0.5) < 0.005


def test_effective_contributors() -> None:
    """N for equal weights, 1 for one, 0 for none; scale does not matter."""
    assert contributors.effective([0.25] * 4) == pytest.approx(4)
    assert contributors.effective([0, 3, 0]) == 1
    assert contributors.effective([0, 0]) == 0
    assert contributors.effective([0.5, 0.25, 0.25]) == pytest.approx(1 / (0.25 + 0.125))


def test_floors_remove_partners_until_they_hold() -> None:
    """An agent whose floor is not reached loses its weight; the others' floors are then checked again."""
    weights = [0.4, 0.3, 0.2, 0.1]
    assert contributors.respect_floors(weights, [1] * 4, 0) == pytest.approx(weights)
    assert contributors.respect_floors(weights, [1, 1, 1, 9], 0) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert contributors.respect_floors(weights, [1, 1, 2.9, 9], 0) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert contributors.respect_floors(weights, [1, 3, 3, 9], 0) == [1, 0, 0, 0]
    assert contributors.respect_floors(weights, [9, 1, 1, 1], 0) == [1, 0, 0, 0]
    assert contributors.respect_floors([0.5, 0.5, 0, 0], [3, 3, 3, 3], None) == [0, 0, 0, 0]
