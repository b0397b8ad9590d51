"""A private round: sums are exact with any dropouts, and the server learns distances and a sum, nothing else."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import struct
import typing
from collections.abc import Collection

import numpy as np
import pytest
from scipy import stats

from conftest import refusal
from private_support import PrivateRound, rows_of, secrets_of, words_of
from waffle_fl.errors import WaffleError
from waffle_fl.privacy import messages, ring, server
from waffle_fl.privacy.agent import Numbered
from waffle_fl.privacy.exact_product import dealer_for
from waffle_fl.privacy.masks import derive, pair_mask, self_mask, stream
from waffle_fl.privacy.messages import Announcement, MaskedSums, RevealRequest, RoundId, transcript_of
from waffle_fl.privacy.sketch import compress
from waffle_fl.privacy.sketch import words_of as words_of_sketch

AGENTS, ALICE, LENGTH = 10, 0, 50
WEIGHTS = {0: 0.4, 1: 0.2, 2: 0.1, 4: 0.1, 5: 0.05, 6: 0.05, 8: 0.1}  # agents 3, 7, 9 have no weight


def assert_uniform(data: bytes) -> None:
    """Chi-square of the 256 byte values; a uniform source fails once in a million."""
    counts = np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)
    assert len(data) > 256 * 20
    assert 1e-6 < stats.chisquare(counts).pvalue < 1 - 1e-6


@pytest.mark.parametrize(
    ("absent", "silent", "gone"),
    [((), (), ()), ((3,), (), ()), ((), (1, 8), ()), ((), (), (0, 2, 9)), ((7,), (4,), (5,)), ((), (1,), (1, 3, 4))],
)
def test_sums_are_exact_with_dropouts(absent: Collection[int], silent: Collection[int], gone: Collection[int]) -> None:
    """Agents may drop out before the round, before they send their sum, or after it: the rest is exact."""
    one, rows = PrivateRound(AGENTS), rows_of(AGENTS, LENGTH)
    one.open(LENGTH, absent)
    announced = one.contribute(rows, WEIGHTS, silent)
    found = one.unmask(announced, gone)
    np.testing.assert_array_equal(found, words_of(rows, WEIGHTS, set(WEIGHTS) - set(silent)))
    assert one.server.liars == []


@pytest.mark.parametrize(("absent", "silent", "gone"), [((1,), (), ()), ((), (1,), ()), ((), (), (1,))])
def test_one_of_four_agents_may_drop_out(
    absent: Collection[int], silent: Collection[int], gone: Collection[int]
) -> None:
    """Four agents are the fewest; one of them may be missing in any phase, and two may not."""
    one, rows = PrivateRound(4), rows_of(4, LENGTH)
    one.open(LENGTH, absent)
    weights = dict.fromkeys(set(range(4)) - set(absent), 0.25)
    announced = one.contribute(rows, weights, silent)
    np.testing.assert_array_equal(one.unmask(announced, gone), words_of(rows, weights, weights.keys() - set(silent)))
    assert "expected 3 agents" in refusal(PrivateRound(4).open, LENGTH, (1, 2))


def test_below_the_threshold_nothing_is_read() -> None:
    """With four of ten agents gone a round is rejected, at its start and at its end."""
    one = PrivateRound(AGENTS)
    assert "expected 7 agents" in refusal(one.open, LENGTH, (1, 2, 3, 4))
    one = PrivateRound(AGENTS)
    one.open(LENGTH)
    announced = one.contribute(rows_of(AGENTS, LENGTH), WEIGHTS)
    assert "nothing can be read" in refusal(one.unmask, announced, (1, 2, 3, 4))
    assert "at least 4 agents" in refusal(PrivateRound, 3)


def received_bytes(one: PrivateRound) -> bytes:
    """Everything of a round that depends on secrets, as the server has received it."""
    sealed = [o.salt + o.sealed_seeds + b"".join(o.shares.values()) for o in one.openings]
    digests = [b"".join([*o.self_digests.values(), *o.key_digests.values()]) for o in one.openings]
    return b"".join(sealed + digests + [m.words.tobytes() for m in one.masked])


@pytest.mark.parametrize("row", [np.zeros(2000), np.full(2000, 0.01), rows_of(1, 2000)[0]])
def test_the_server_receives_uniform_bytes(row: np.ndarray) -> None:
    """All messages are uniform bytes, whatever the updates are."""
    one = PrivateRound(AGENTS)
    one.open(2000)
    one.contribute(np.tile(row, (AGENTS, 1)), dict.fromkeys(range(AGENTS), 0.1))
    sketches = [side.sketch(ALICE, row, 1.0, ALICE) for side in one.sides[1:]]
    sketches += [one.sides[ALICE].sketch(j, row, 1.0, ALICE) for j in range(1, AGENTS)]
    assert_uniform(received_bytes(one))
    for content in (*(m.words.tobytes() for m in one.masked), *(s.content for s in sketches)):
        assert_uniform(content)


def test_the_same_update_twice_gives_unrelated_messages() -> None:
    """Neither the messages of two rounds nor their differences show that an update was repeated."""
    row, found = rows_of(1, 4000)[0], []
    for at in (RoundId("test", 1), RoundId("test", 2), RoundId("test", 1, attempt=1)):
        one = PrivateRound(AGENTS, at)
        one.open(4000)
        one.contribute(np.tile(row, (AGENTS, 1)), dict.fromkeys(range(AGENTS), 0.1))
        found.append((one.masked[1].words, ring.unpacked(one.sides[1].sketch(ALICE, row, 1.0, ALICE).content)))
    for other in found[1:]:
        assert_uniform((found[0][0] - other[0]).tobytes())
        assert_uniform(ring.packed(found[0][1] - other[1]))


def test_distances_are_all_that_sketches_tell() -> None:
    """The server reads the distances, exactly for short updates; the difference of two messages is uniform."""
    rows, key = rows_of(AGENTS, 4000), bytes(32)
    for size, error in ((4000, 1e-3), (40, 0.5)):
        one, short = PrivateRound(AGENTS), [compress(row, size, key) for row in rows]
        hub = one.open(4000)
        sketches = [side.sketch(ALICE, short[side.agent], 1.0, ALICE) for side in one.sides[1:]]
        sketches += [one.sides[ALICE].sketch(j, short[ALICE], 1.0, ALICE) for j in range(1, AGENTS)]
        found = hub.distances(sketches, ALICE, 1.0)
        true = np.linalg.norm(rows - rows[ALICE], axis=1)
        assert [found[j] for j in range(1, AGENTS)] == pytest.approx(true[1:].tolist(), rel=error)
        if size == 4000:
            assert_uniform(
                ring.packed(ring.unpacked(sketches[0].content) - ring.unpacked(sketches[AGENTS - 1].content))
            )


def test_exact_distances_need_both_words() -> None:
    """With a third agent as dealer the server reads exact distances, and the vectors that it relays are uniform."""
    rows, one = rows_of(AGENTS, 3000), PrivateRound(AGENTS)
    hub, hers, words = one.open(3000), one.sides[ALICE], []
    for i in range(1, AGENTS):
        dealer = dealer_for(i, ALICE, range(AGENTS))
        assert dealer not in (i, ALICE)
        dealt = one.sides[dealer].deal(i, ALICE, 3000)
        to_alice = one.sides[i].mask_vector(ALICE, rows[i], 1.0, dealer, hers=False)
        to_agent = hers.mask_vector(i, rows[ALICE], 1.0, dealer, hers=True)
        for masked in (to_alice, to_agent):
            assert_uniform(masked.words.tobytes())
        words += [one.sides[i].product_word(to_agent, dealt), hers.product_word(to_alice, None)]
    true = np.linalg.norm(rows - rows[ALICE], axis=1)
    found = hub.exact_distances(words, ALICE, 1.0)
    assert [found[i] for i in range(1, AGENTS)] == pytest.approx(true[1:].tolist(), rel=2e-6)
    assert set(hub.exact_distances(words[1:], ALICE, 1.0)) == set(range(2, AGENTS))
    assert "once" in refusal(one.sides[2].deal, 1, ALICE, 3000)


def test_a_lying_server_gets_no_inner_product_of_its_choice() -> None:
    """Agents refuse a dealer that the server has chosen, a vector that their partner has not sent, and another role."""
    rows, one = rows_of(AGENTS, 30), PrivateRound(AGENTS)
    one.open(30)
    dealer = dealer_for(1, ALICE, range(AGENTS))
    for other in (ALICE, 1, 7):
        step = PrivateRound(AGENTS)
        step.open(30)
        assert "expected another dealer" in refusal(step.sides[1].mask_vector, ALICE, rows[1], 1.0, other, False)
        assert "expected another dealer" in refusal(step.sides[ALICE].mask_vector, 1, rows[0], 1.0, other, True)
    assert "expected another dealer" in refusal(one.sides[5].deal, 1, ALICE, 30)
    dealt = one.sides[dealer].deal(1, ALICE, 30)
    to_alice = one.sides[1].mask_vector(ALICE, rows[1], 1.0, dealer, hers=False)
    to_agent = one.sides[ALICE].mask_vector(1, rows[ALICE], 1.0, dealer, hers=True)
    chosen = dataclasses.replace(to_agent, words=to_agent.words + np.uint64(1))
    assert "has sent" in refusal(one.sides[1].product_word, chosen, dealt)
    assert "has sent" in refusal(one.sides[ALICE].product_word, dataclasses.replace(to_alice, tag=b""), None)
    two = PrivateRound(AGENTS)
    two.open(30)
    two.sides[1].mask_vector(ALICE, rows[1], 1.0, dealer, hers=False)
    to_agent = two.sides[ALICE].mask_vector(1, rows[ALICE], 1.0, dealer, hers=True)
    assert "unless this agent is Alice" in refusal(two.sides[1].product_word, to_agent, None)


def test_two_agents_that_both_act_as_alice_use_other_masks() -> None:
    """A server that names each of two agents Alice towards itself cannot subtract their updates."""
    one, row = PrivateRound(AGENTS), rows_of(1, 4000)[0]
    one.open(4000)
    sent = [ring.unpacked(one.sides[i].sketch(j, row, 1.0, i).content) for i, j in ((1, 2), (2, 1))]
    assert_uniform(ring.packed(sent[0] - sent[1]))
    assert "refuse the round" in refusal(one.sides[1].sketch, 3, row, 1.0, ALICE)


def test_a_missing_sketch_is_a_missing_agent() -> None:
    """An agent whose sketch, or Alice's sketch for it, has not arrived has no distance."""
    one, rows = PrivateRound(AGENTS), rows_of(AGENTS, LENGTH)
    hub = one.open(LENGTH)
    sketches = [one.sides[j].sketch(ALICE, rows[j], 1.0, ALICE) for j in (1, 2)]
    sketches += [one.sides[ALICE].sketch(j, rows[ALICE], 1.0, ALICE) for j in (2, 3)]
    assert set(hub.distances(sketches, ALICE, 1.0)) == {2}


def test_a_server_with_one_site_reads_the_sum_of_the_others_alone() -> None:
    """With the secrets of agent 4 the server removes its masks; each other sum stays uniform, their total is known."""
    one, rows = PrivateRound(AGENTS), rows_of(AGENTS, 4000)
    hub = one.open(4000)
    weights = dict.fromkeys(range(AGENTS), 0.1)
    announced = one.contribute(rows, weights)
    total = one.unmask(announced)
    transcript = transcript_of(one.at, range(AGENTS), {o.agent: o.salt for o in one.openings})
    context, count = announced.binding(transcript), 4000 + messages.CHECK_WORDS
    spy, left = secrets_of("test", AGENTS)[4], {}
    for masked in one.masked:
        if masked.agent != 4:
            digests = one.openings[masked.agent].self_digests
            secret = hub._secret(digests, {r.holder: r.self_shares[masked.agent] for r in one.revealed}, masked.agent)
            seed = derive(spy[masked.agent], "mask seed", one.at.context)
            words = masked.words - self_mask(secret, context, count)
            left[masked.agent] = words - pair_mask(seed, masked.agent, 4, context, count)
            assert_uniform(left[masked.agent].tobytes())
    for pair in ((1, 2), (7, 8)):
        assert_uniform((left[pair[0]] + left[pair[1]]).tobytes())
    others = np.sum([*left.values()], axis=0, dtype=np.uint32)[:4000]
    expected = words_of(rows, weights, set(range(AGENTS)) - {4})
    np.testing.assert_array_equal(ring.decode(others, 1.0, 24), expected)
    np.testing.assert_allclose(total - expected, 0.1 * rows[4], atol=2.0**-24)


@pytest.mark.parametrize("hers", [False, True])
def test_a_server_with_one_of_a_pair_reads_the_other_s_count_sketch_alone(hers: bool) -> None:
    """With a pair's secrets the server reads k sums of the other update: two updates with equal sums give one message.

    So it learns those sums of every update together with Alice, and of Alice's together with any other agent.
    """
    size, count = 64, 500
    key = derive(RoundId("test", 1).context, "count sketch")
    map_of = np.stack([compress(unit, size, key) for unit in np.eye(count)])  # (count, size)
    row = rows_of(1, count)[0]
    hidden = np.linalg.svd(map_of.T)[2][size + 1]  # a direction that the sums do not see
    assert np.abs(hidden @ map_of).max() < 1e-12
    me, other = (ALICE, 1) if hers else (1, ALICE)
    sent = []
    for update in (row, row + hidden):
        one = PrivateRound(AGENTS)
        one.open(count)
        sent.append(ring.unpacked(one.sides[me].sketch(other, compress(update, size, key), 1.0, ALICE).content))
    secret = derive(secrets_of("test", AGENTS)[other][me], f"sketch dy for {ALICE}", one.sides[me]._transcript)
    masks = words_of_sketch(np.zeros(size), 1.0, secret, hers)  # both of a pair can remove them
    read = [((words - masks)[:-1] << np.uint64(16)).view(np.int64) / 2.0**31 for words in sent]
    assert np.abs(read[0] - read[1]).max() <= 2.0**-14
    np.testing.assert_allclose(read[0], row @ map_of, atol=2.0**-15)


def test_a_false_sum_is_recognised() -> None:
    """A sum with another mask leaves nothing to read, and the round is rejected."""
    one = PrivateRound(AGENTS)
    one.open(LENGTH)
    announced = one.contribute(rows_of(AGENTS, LENGTH), WEIGHTS)
    one.masked[2] = MaskedSums(one.masked[2].agent, stream(bytes(32), LENGTH + messages.CHECK_WORDS))
    assert "do not cancel" in refusal(one.unmask, announced)


def test_masks_are_bound_to_the_weights() -> None:
    """A server that sends other weights to one agent gets sums that it cannot read."""
    one, rows = PrivateRound(AGENTS), rows_of(AGENTS, LENGTH)
    one.open(LENGTH)
    announced = one.server.announce({"dy": WEIGHTS})
    other = Announcement({"dy": {**WEIGHTS, 1: 0.15}})
    one.masked = [
        one.sides[i].contribute(other if i == 1 else announced, {"dy": Numbered(rows[i], 1.0)}) for i in WEIGHTS
    ]
    request = one.server.request(one.masked)
    assert "refuse the round" in refusal(one.sides[1].reveal, request, announced)
    one.revealed = [side.reveal(request, announced) for side in one.sides if side.agent != 1]
    assert "do not cancel" in refusal(one.server.sums, one.revealed)


def test_false_shares_are_ignored_and_named() -> None:
    """Shares that differ from their digest are not used, and their holder is known."""
    one, rows = PrivateRound(AGENTS), rows_of(AGENTS, LENGTH)
    one.open(LENGTH)
    announced = one.contribute(rows, WEIGHTS, silent=(8,))
    one.unmask(announced, gone=(0,))
    liar = one.revealed[2]
    one.revealed[2] = dataclasses.replace(liar, self_shares=dict.fromkeys(liar.self_shares, bytes(32)))
    found = one.server.sums(one.revealed)["dy"]
    np.testing.assert_array_equal(found, words_of(rows, WEIGHTS, set(WEIGHTS) - {8}))
    assert one.server.liars == [liar.holder]


def test_a_sum_that_arrives_late_stays_masked() -> None:
    """An agent reported missing loses its pair masks; its late sum is still uniform."""
    one, rows = PrivateRound(AGENTS), rows_of(AGENTS, 4000)
    hub = one.open(4000)
    announced = one.contribute(rows, WEIGHTS)
    late = next(masked for masked in one.masked if masked.agent == 2)
    one.masked.remove(late)
    one.unmask(announced)
    seeds = hub._seeds_of(2, one.revealed)
    context = announced.binding(transcript_of(one.at, range(AGENTS), {o.agent: o.salt for o in one.openings}))
    words = late.words.copy()
    for other in WEIGHTS:
        if other != 2:
            words -= pair_mask(seeds[other], 2, other, context, len(words))
    assert_uniform(words.tobytes())
    for side in one.sides:
        assert "once" in refusal(side.reveal, RevealRequest(tuple(WEIGHTS), ()), announced)


def test_an_agent_refuses_what_would_expose_a_sum() -> None:
    """Both secrets of one agent, agents without a place, one survivor alone, or fewer contributors than its floor."""
    rows = rows_of(AGENTS, LENGTH)

    def opened(floors: dict[int, float] | None = None) -> PrivateRound:
        one = PrivateRound(AGENTS, floors=floors or {})
        one.open(LENGTH)
        return one

    everyone = tuple(WEIGHTS)
    for request in (RevealRequest(everyone, (2,)), RevealRequest(everyone[:-1], ()), RevealRequest((9,), everyone)):
        one = opened()
        announced = one.contribute(rows, WEIGHTS)
        assert "refuse the round" in refusal(one.sides[3].reveal, request, announced)
    one = opened()
    announced = one.contribute(rows, WEIGHTS)
    assert "missing agents" in refusal(one.sides[3].reveal, RevealRequest((1, 2, 8), (0, 4, 5, 6)), announced)
    few = PrivateRound(AGENTS, floors={1: 3.5, 3: 9.0})
    few.open(LENGTH)
    announced = few.contribute(rows, WEIGHTS)
    some = RevealRequest((0, 1, 5, 6), (2, 4, 8))
    assert "effective" in refusal(few.sides[1].reveal, some, announced)
    assert few.sides[3].reveal(some, announced).self_shares.keys() == {0, 1, 5, 6}  # it has no part in the sum
    assert "4.00" not in refusal(opened({5: 5.0}).contribute, rows, WEIGHTS)
    assert "has no weight" in refusal(one.sides[3].contribute, announced, {"dy": Numbered(rows[3], 1.0)})
    large = opened()
    assert "lower lr" in refusal(large.contribute, 200 * np.ones((AGENTS, LENGTH)), WEIGHTS)
    assert "lower lr" in refusal(large.sides[1].sketch, ALICE, 300 * np.ones(LENGTH), 1.0, ALICE)
    assert "lower lr" in refusal(large.sides[1].mask_vector, ALICE, np.full(LENGTH, np.nan), 1.0, 2, False)


@pytest.mark.parametrize(
    "weights", [{0: 1.5, 1: 0.5}, {0: 0.9, 1: 0.9}, {0: float("nan"), 1: 0.5}, {0: -0.5, 1: 0.5}, {0: 0.5, 9: 0.5}]
)
def test_impossible_weights_are_refused(weights: dict[int, float]) -> None:
    """Weights that are no shares, or of an agent that has not opened the round, are refused."""
    one = PrivateRound(AGENTS)
    one.open(LENGTH, absent=(9,))
    for step in (one.sides[1].contribute, one.sides[2].contribute):
        with pytest.raises(WaffleError, match=r"refuse the round|no weight"):
            step(one.server.announce({"dy": weights}), {"dy": Numbered(np.zeros(LENGTH), 1.0)})


def test_steps_have_an_order() -> None:
    """Nothing that depends on an update is sent before the shares have arrived."""
    side = PrivateRound(AGENTS).sides[1]
    assert "first" in refusal(side.sketch, ALICE, np.zeros(LENGTH), 1.0, ALICE)
    assert "first" in refusal(side.mask_vector, ALICE, np.zeros(LENGTH), 1.0, 2, False)
    assert "first" in refusal(side.contribute, Announcement({"dy": WEIGHTS}), {})


def test_no_sum_follows_the_shares() -> None:
    """An agent that has revealed shares, as if its own sum had arrived, sends no sum any more."""
    one, rows = PrivateRound(AGENTS), rows_of(AGENTS, LENGTH)
    one.open(LENGTH)
    announced = one.server.announce({"dy": WEIGHTS})
    one.sides[1].reveal(RevealRequest(tuple(WEIGHTS), ()), announced)
    assert "before that for shares" in refusal(one.sides[1].contribute, announced, {"dy": Numbered(rows[1], 1.0)})


def test_each_step_is_taken_once() -> None:
    """An agent answers no second request of a round, which could compare two sums."""
    one, rows = PrivateRound(AGENTS), rows_of(AGENTS, LENGTH)
    one.open(LENGTH)
    one.contribute(rows, WEIGHTS)
    again = one.server.announce({"dy": {0: 0.5, 1: 0.5}})
    assert "once" in refusal(one.sides[1].contribute, again, {"dy": Numbered(rows[1], 1.0)})
    assert "once" in refusal(one.sides[1].open)
    one.sides[1].sketch(ALICE, rows[1], 1.0, ALICE)
    assert "once" in refusal(one.sides[1].sketch, ALICE, rows[2], 1.0, ALICE)


def test_a_delivery_without_the_own_salt_is_refused() -> None:
    """The server cannot bring an agent into a round that it has not opened."""
    one = PrivateRound(AGENTS)
    openings = [side.open() for side in one.sides]
    hub = server.MaskingServer(range(AGENTS), one.at, {"dy": (LENGTH, 1.0)})
    deliveries = hub.deliver([*openings[:-1], PrivateRound(AGENTS, seed=9).sides[-1].open()])
    assert "own salt" in refusal(one.sides[-1].receive, deliveries[AGENTS - 1])


def test_other_views_of_a_round_have_other_digests() -> None:
    """Neither salts nor weights that are cut in another way give the same digest."""
    one = PrivateRound(AGENTS)
    openings = [side.open() for side in one.sides]
    (delivery, *_) = server.MaskingServer(range(AGENTS), one.at, {"dy": (1, 1.0)}).deliver(openings).values()
    joined = delivery.salts[8] + struct.pack("<q", 9) + delivery.salts[9]
    salts = {i: salt for i, salt in delivery.salts.items() if i < 8} | {8: joined}
    assert transcript_of(one.at, range(AGENTS), salts) == transcript_of(one.at, range(AGENTS), delivery.salts)
    assert "own salt" in refusal(one.sides[0].receive, messages.Delivery(salts, {}))
    entry = struct.pack("<qd", 2, 0.0).decode()
    tables = {"dy": {1: 0.5, 2: 0.0}}, {"dy": {1: 0.5}, entry: {}}
    assert len({Announcement(table).binding(b"") for table in tables}) == 2


def test_the_server_holds_no_keys() -> None:
    """Messages hold bytes, numbers and words; `messages` and `server` import neither agents nor key pairs."""
    for module in (messages, server):
        names = {
            node.module for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)
        }
        assert not names & {"waffle_fl.privacy.agent", "waffle_fl.privacy.keys"}
    kinds = [kind for kind in vars(messages).values() if dataclasses.is_dataclass(kind)]
    plain = {int, float, str, bytes, np.ndarray, np.uint32, np.uint64, typing.Any}
    for kind in kinds:
        for hint in typing.get_type_hints(kind).values():
            assert leaves(hint) <= plain | {tuple}, (kind, hint)


def leaves(hint: typing.Any) -> set[typing.Any]:
    """Return the types at the ends of a type hint."""
    inside = [part for part in typing.get_args(hint) if part is not Ellipsis]
    return set().union(*map(leaves, inside)) if inside else {typing.get_origin(hint) or hint}
