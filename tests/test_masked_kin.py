"""WAFFLE in private rounds: angles by layer, a first sum of which only the length is known, own layers."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from conftest import CLASSES, FEATURES, outcomes_of, refusal, shared_model
from private_support import PrivateRound, rows_of
from waffle_fl import SGD, Federation, RunSpec, Waffle
from waffle_fl.algorithms.contract import Angles, Round, Seen
from waffle_fl.engines import masked_agent
from waffle_fl.engines.masked_round import MaskedRound
from waffle_fl.engines.run_spec import Outcome
from waffle_fl.errors import WaffleError
from waffle_fl.privacy import ring, rotation
from waffle_fl.privacy.agent import Numbered
from waffle_fl.privacy.rotation import length_of, moduli_of, moduli_of_sum, rotated
from waffle_fl.randomness import generator

STEP = SGD(0.05)
KIN = Waffle(STEP)
SIZES = (23, 19, 32, 14, 20, 17)


@cache
def opposed(exchanged: int = 1) -> Federation:
    """Return agents of which the first ones, Alice among them, label the classes differently."""
    rng, agents = generator(0, "opposed"), []
    centres = 1.5 * rng.standard_normal((CLASSES, FEATURES))
    for i, n in enumerate(SIZES):
        y = rng.integers(0, CLASSES, n + 12)
        y[:CLASSES] = np.arange(CLASSES)
        x = (centres[y] + rng.standard_normal((n + 12, FEATURES))).astype(np.float64)
        y = (y + (i < exchanged)) % CLASSES
        agents.append((f"agent {i}", (x[:n], y[:n], x[n:], y[n:])))
    return Federation.from_arrays(agents, alice=0, class_names=("a", "b", "c"))


def trained(kin: Waffle = KIN, rounds: int = 6, exchanged: int = 1, **options: Any) -> list[Outcome]:
    return outcomes_of(RunSpec(kin, opposed(exchanged), 1), shared_model(), rounds, **options)


@pytest.mark.parametrize(
    "kin",
    [
        Waffle(STEP),
        Waffle(STEP, head_layers=0, yielding=1.0),
        Waffle(STEP, averaging=0.5, own=0.8),
        Waffle(SGD(0.05, 0.9, momentum_between_rounds="keep", lr_decay=0.9)),
    ],
)
@pytest.mark.parametrize("exchanged", [1, 3])
def test_agents_that_oppose_alice(kin: Waffle, exchanged: int) -> None:
    """Where sketches are exact, strife, shares and models are those of the clear run to the step of the ring."""
    clear, masked = (trained(kin, exchanged=exchanged, privacy=privacy) for privacy in ("off", "masked"))
    assert (clear[-1].state.server.strife.max() > 0.01) == (exchanged == 1)
    for one, other in zip(clear, masked, strict=True):
        assert other.measured["weights"] == pytest.approx(one.measured["weights"], abs=1e-4)
        assert other.measured["loss"] == pytest.approx(one.measured["loss"], abs=1e-4)
        for name in ("strife", "evidence"):
            torch.testing.assert_close(*(getattr(o.state.server, name) for o in (one, other)), rtol=0, atol=1e-3)
        torch.testing.assert_close(one.state.agents.y, other.state.agents.y, rtol=0, atol=1e-4)


def test_the_server_stores_no_agent_s_model() -> None:
    """What the agents keep stays with them, and a layer that Alice shares with no agent is not known to the server."""
    kin = Waffle(STEP, head_layers=2)
    clear, masked = (trained(kin, privacy=privacy)[-1] for privacy in ("off", "masked"))
    first = trained(kin, rounds=1, privacy="masked")[-1]
    assert clear.measured["weights"] == [1, 0, 0, 0, 0, 0]
    assert torch.equal(masked.state.server.y, first.state.server.y)  # never written
    assert not masked.state.server.mean.ne(masked.state.server.mean[0]).any()
    assert torch.equal(masked.state.server.x, shared_model().init(1).params)
    assert not torch.equal(masked.state.agents.y[0], masked.state.server.x)
    assert masked.measured["loss"] == pytest.approx(clear.measured["loss"], abs=1e-6)
    assert masked.measured["contributors"] == 0
    assert "norms" not in masked.measured


def test_the_first_sum_is_asked_for_where_it_matters() -> None:
    """Layers in which the others' sum does not oppose Alice's update, or has one contributor, need no first sum."""
    kin = replace(Waffle(STEP), cut=Waffle(STEP).for_model(shared_model().layers).cut)
    server, _ = kin.init(shared_model().init(0), 4)
    server = server._replace(share=torch.tensor([[1.0, 1], [1, 0], [1, 0], [1, 1]], dtype=torch.float64))
    ones = torch.ones(4, dtype=torch.int64)
    now = Round(1, 9, torch.tensor(0), ones > 0, ones > 0, ones, ones, 1)

    def seen(cosine: float) -> Seen:
        cosines = torch.tensor([[1.0, 1], [cosine, -1], [cosine, -1], [0.1, -0.5]], dtype=torch.float64)
        return Seen(torch.zeros(4, dtype=torch.float64), angles=Angles(cosines, torch.ones_like(cosines)))

    assert kin.first_weights(server, seen(0.2), now).keys() == {"layer 1"}
    found = kin.first_weights(server, seen(-0.2), now)
    assert found["layer 0"].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    assert found["layer 1"].tolist() == [0, 0, 0, 1]  # of one agent: its length is known, so it is not summed
    after, _, _ = kin.weigh(server, seen(0.2), now)
    assert after.strife.tolist() == pytest.approx([0, 0.25])


def test_a_rotation_leaves_a_length_alone() -> None:
    """Rotations are linear and keep lengths, exactly to the steps of a sum."""
    a, b = rows_of(2, 300)
    key = bytes(31) + b"k"
    total = (rotated(a, 1.0, key) + rotated(b, 1.0, key)) % moduli_of(300)
    steps = np.rint(a * 2.0**24) + np.rint(b * 2.0**24)
    assert length_of(total, 1.0) == pytest.approx(np.linalg.norm(steps) * 2.0**-24, rel=1e-12)
    assert length_of(rotated(0 * a, 1.0, key), 1.0) == 0
    long = np.full(50, ring.LONGEST / 50**0.5)
    assert length_of(rotated(long, 1.0, key), 1.0) == pytest.approx(ring.LONGEST, rel=1e-9)
    for p in rotation.PRIMES:
        assert all(p % q for q in range(2, 4097))


def test_a_rotated_vector_is_a_uniform_one_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small prime, where all points of a length can be counted, two vectors of one length look alike."""
    monkeypatch.setattr(rotation, "PRIMES", (7,))
    monkeypatch.setattr(rotation, "PADDING", 0)
    for x in ((3, 0, 0), (1, 1, 0)):
        square = sum(v * v for v in x) % 7
        points = [p for p in itertools.product(range(7), repeat=3) if any(p) and sum(v * v for v in p) % 7 == square]
        found = Counter(
            tuple(rotated(np.array(x) * 2.0**-24, 1.0, n.to_bytes(32, "big")).tolist()) for n in range(6000)
        )
        assert found.keys() <= set(points)
        assert stats.chisquare([found[point] for point in points]).pvalue > 1e-4


@pytest.mark.parametrize("silent", [(), (3,)])
def test_what_the_server_reads_of_a_first_sum_is_its_length(silent: tuple[int, ...]) -> None:
    """The server reads the length of a rotated sum, also of what has arrived; the messages are uniform residues."""
    rows, weights = rows_of(5, 2000), dict.fromkeys(range(1, 5), 0.25)
    one = PrivateRound(5)
    one.open(2000)
    one.server.rotated = True
    announced = one.server.announce({"dy": weights})
    one.masked = [
        one.sides[i].contribute_rotated(announced, {"dy": Numbered(rows[i], 1.0)}, 0)
        for i in weights
        if i not in silent
    ]
    assert len({side.common_secret(0, "rotation") for side in one.sides}) == 1
    moduli = moduli_of_sum([2000])
    for masked in one.masked:
        assert (masked.words < moduli).all()
        assert stats.kstest(masked.words / moduli, "uniform").pvalue > 1e-4
    (length,) = one.unmask(announced)
    true = np.linalg.norm(sum(np.rint(0.25 * rows[i] * 2.0**24) for i in weights if i not in silent)) * 2.0**-24
    assert length == pytest.approx(true, rel=1e-12)
    assert "none" in refusal(PrivateRound(4).sides[1].common_secret, 0, "rotation")


def test_sums_of_a_round_have_secrets_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither masks nor shares of the first sum are those of the round's sum."""
    sides: list[Any] = []
    made = masked_agent.RoundAgent.__init__

    def keep(self: Any, own: Any, side: Any, first: Any, alice: int) -> None:
        sides.append((side, first))
        made(self, own, side, first, alice)

    monkeypatch.setattr(masked_agent.RoundAgent, "__init__", keep)
    trained(rounds=1, privacy="masked")
    for side, first in sides:
        assert side._salt != first._salt
        assert side._self_secret != first._self_secret
        assert all(side._seeds[i] != first._seeds[i] for i in side._seeds)
        assert side._transcript != first._transcript


def test_floors_hold_for_every_layer() -> None:
    """A layer with fewer effective contributors than the floor is not summed: Alice keeps her own."""
    summed: list[dict[str, dict[int, float]]] = []
    original = MaskedRound._reveal

    def keep(self: MaskedRound, replies: Any) -> None:
        summed.extend(dict(of.announced.weights) for of in (self._sum, self._first_sum))
        original(self, replies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MaskedRound, "_reveal", keep)
        outcomes = trained(Waffle(STEP, yielding=2.0), rounds=8, privacy="masked", min_contributors=3.5)
    numbers = [sum(t.values()) ** 2 / sum(w * w for w in t.values()) for tables in summed for t in tables.values()]
    assert numbers
    assert min(numbers) >= 3.5
    assert outcomes[-1].measured["contributors"] == 0  # in the end no layer reaches the floor
    assert outcomes[-1].measured["weights"][0] == pytest.approx(1)


def test_a_first_sum_that_is_not_computed_counts_as_its_upper_bound() -> None:
    """With a floor that it does not reach, strife is the least that angles and lengths allow."""
    free, held = (trained(privacy="masked", min_contributors=floor)[-1].state.server for floor in (1.0, 5.5))
    assert 0 < held.strife.max() < free.strife.max()


def test_layers_are_compared_by_sketches_only() -> None:
    """Exact distances by a dealer are for methods that compare one vector."""
    text = refusal(trained, privacy="masked", masked_distances="dealer")
    assert "expected sketch with Waffle, which compares each layer, got dealer" in text


def test_an_agent_has_no_first_sum_to_send_for_other_methods() -> None:
    """A request for a first sum is refused by an agent of a method that has none."""
    one = PrivateRound(4)
    agent = masked_agent.RoundAgent(masked_agent.UpdateNumbers(0), one.sides[1], None, 0)
    with pytest.raises(WaffleError, match="only sum of the round"):
        agent._side_of(True)


def test_partial_participation() -> None:
    """Agents that take no part in a round keep their model and their shares, as in the clear."""
    kin = replace(KIN, head_layers=0)
    clear, masked = (trained(kin, privacy=privacy, participation=0.7, rounds=8) for privacy in ("off", "masked"))
    assert clear[-1].state.server.strife.max() > 0.01
    for one, other in zip(clear, masked, strict=True):
        assert one.measured["participants"] == other.measured["participants"]
        assert other.measured["weights"] == pytest.approx(one.measured["weights"], abs=1e-4)
        torch.testing.assert_close(one.state.agents.y, other.state.agents.y, rtol=0, atol=1e-4)


def test_the_guard_rejects_in_masked_rounds_what_it_rejects_in_the_clear() -> None:
    """An agent whose update is turned around keeps its own model and has no weight."""

    def tamper(up: Any, r: int) -> Any:
        up.dy[1] *= -1
        return up

    spec = RunSpec(KIN, opposed(0), 1, tamper=tamper)
    for privacy in ("off", "masked"):
        last = outcomes_of(spec, shared_model(), 3, guard="standard", privacy=privacy)[-1]
        assert "agent 1" in last.measured["screened"]
        assert last.measured["weights"][1] == 0
        assert torch.equal(last.state.agents.y[1], shared_model().init(1).params)
