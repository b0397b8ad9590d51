"""Shifts beyond the paper's splits: hand-computed examples, and properties for any data, seed and agent."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import BATCH, make_federation, make_model, outcomes_of, refusal
from waffle_fl import data
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.batches import Batches, BatchPlan
from waffle_fl.cli.menu import main
from waffle_fl.config import Experiment, RunConfig, Settings, check_run, completed, load_experiments
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment import federation_of, plan
from waffle_fl.federation import Federation, build
from waffle_fl.partition import Partition, split
from waffle_fl.results import read_run
from waffle_fl.shifts import (
    KINDS,
    Blur,
    Colour,
    Contrast,
    Covariate,
    Dirichlet,
    Drift,
    Noise,
    Prior,
    Quantity,
    Rotate,
    Scale,
    Sizes,
    Swap,
    read_shifts,
)
from waffle_fl.shifts.concepts import cycle
from waffle_fl.shifts.covariates import blurred, materialise, rotated
from waffle_fl.shifts.groups import Member, groups_of, members
from waffle_fl.shifts.labels import caps
from waffle_fl.tournament.plan import load_tournament

ROOT = Path(__file__).parent.parent
EXAMPLES = {
    "dirichlet(0.1)": Dirichlet(0.1),
    "quantity(1)": Quantity(1.0),
    "sizes(4, 1, 1)": Sizes((4.0, 1.0, 1.0)),
    "prior(0.4)": Prior(0.4),
    "rotate(45)": Rotate(45.0),
    "blur(1.5, groups=3)": Blur(1.5, 3),
    "noise(std=0.3)": Noise(0.3),
    "contrast( 0.3 )": Contrast(0.3),
    "colour(0.5, 4)": Colour(0.5, 4),
    "scale(0.5)": Scale(0.5),
    "swap(4, groups=5)": Swap(4, 5),
    "drift": Drift(),
    "drift(gradual, 0.2, until=0.8, who=all)": Drift("gradual", 0.2, 0.8, who="all"),
}
COVARIATES: list[Covariate] = [Rotate(30), Blur(1), Noise(0.5), Contrast(0.3), Colour(0.5), Scale(0.5)]

quick = settings(max_examples=60, deadline=20_000)
seeds = st.integers(0, 10_000)
crowds = st.integers(1, 12)


def random_shares(agents: int, classes: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shares = rng.random((agents, classes)) * (rng.random((agents, classes)) < 0.7)
    shares[np.arange(agents), rng.integers(0, classes, agents)] += 0.1
    return shares


def images(n: int = 6, channels: int = 1, side: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((n, channels, side, side)).astype(np.float32))


def digits(shift: str, **changed: Any) -> Federation:
    s = Settings(data="digits", split="A", shift=shift, **changed)
    return federation_of(s)


def other(group: int = 1, degree: float = 1.0, agent: int = 1, seed: int = 0) -> Member:
    return Member(agent, group, degree, seed)


@pytest.mark.parametrize(("text", "shift"), EXAMPLES.items())
def test_shift_texts(text: str, shift: Any) -> None:
    """A text with values by position or by name is parsed to the same shift as in Python."""
    assert read_shifts(text) == (shift,)


def test_every_kind_has_an_example() -> None:
    """The examples of these tests cover every kind of shift."""
    assert {type(shift) for shift in EXAMPLES.values()} == set(KINDS.values())


def test_a_mixture_is_joined_by_plus() -> None:
    """Shifts joined by + keep their order, and an empty text is no shift."""
    assert read_shifts(" noise(0.3)+swap(4, groups=3) ") == (Noise(0.3), Swap(4, 3))
    assert read_shifts("") == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rotat(45)", "did you mean rotate"),
        ("rotate(45", "expected a shift such as"),
        ("rotate", "expected degrees"),
        ("rotate(45, 2, 3)", "at most 2 values"),
        ("rotate(45, degrees=3)", "given twice"),
        ("rotate(45, group=3)", "did you mean groups"),
        ("rotate(fast)", "expected a number, got 'fast'"),
        ("rotate(nan)", "expected a number"),
        ("rotate(45, groups=1.5)", "expected an integer"),
        ("rotate(45, groups=1)", "groups >= 2"),
        ("rotate(groups=3, 45)", "expected a shift such as"),
        ("rotate(400)", "from -360 to 360"),
        ("noise(0)", "above 0"),
        ("dirichlet(0)", "alpha from 0.001"),
        ("quantity(-1)", "sigma from 0 to 5"),
        ("sizes()", "sizes(4, 1, 1)"),
        ("sizes(a=1)", "sizes(4, 1, 1)"),
        ("sizes(1, 0)", "above 0"),
        ("prior(1.5)", "from 0 to 1"),
        ("swap(1)", "at least 2 labels"),
        ("drift(slow)", "sudden or gradual"),
        ("drift(gradual, 0.8, 0.2)", "at < until"),
        ("drift(k=1)", "2 or more labels"),
        ("drift(sudden) + drift(gradual)", "one drift"),
        ("swap(2) + swap(2)", "one swap"),
        ("noise(1) + noise(1)", "one noise"),
        ("sizes(1, 2) + quantity(1)", "one quantity"),
        ("rotate(45) +", "expected a shift such as"),
    ],
)
def test_a_shift_that_cannot_be_read_is_refused_in_one_line(text: str, expected: str) -> None:
    """An invalid shift is rejected before any work, in Python and in a config."""
    assert expected in refusal(read_shifts, text)
    assert expected in refusal(check_run, "fedavg", {"shift": text}, {})


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        ("rotate(45, groups=11)", "as many groups as there are agents"),
        ("swap(11)", "at most 10 labels"),
        ("drift(k=11)", "at most 10 labels"),
    ],
)
def test_a_shift_that_does_not_fit_the_federation_is_refused(shift: str, expected: str) -> None:
    """More groups than agents, or more labels than there are, is rejected with one line."""
    assert expected in refusal(digits, shift)


@pytest.mark.parametrize("shift", ["rotate(45)", "blur(1)", "colour(1)"])
def test_shifts_of_images_are_refused_for_vectors(shift: str) -> None:
    """Image shifts reject samples that are not images."""
    assert "expected images" in refusal(federation_of, Settings(data="synthetic", split="A", shift=shift))


def test_groups_are_counted_from_alice() -> None:
    """With two groups every second agent is in Alice's; the last of three groups has the full shift, hers none."""
    assert groups_of(5, 0, 2) == (0, 1, 0, 1, 0)
    assert groups_of(5, 1, 3) == (2, 0, 1, 2, 0)
    assert [member.degree for member in members(4, 0, 3, 0)] == [0, 0.5, 1, 0]


@quick
@given(agents=crowds, classes=st.integers(1, 12), alpha=st.sampled_from([1e-3, 0.01, 0.1, 1.0, 100.0, 1e6]), seed=seeds)
def test_dirichlet_keeps_sizes_and_labels(agents: int, classes: int, alpha: float, seed: int) -> None:
    """A row stays finite and non-negative, keeps its sum, and gains no label."""
    shares = random_shares(agents, classes, seed)
    drawn = Dirichlet(alpha).skewed(shares, seed)
    assert np.isfinite(drawn).all()
    assert (drawn >= 0).all()
    assert (drawn[shares == 0] == 0).all()
    assert np.allclose(drawn.sum(axis=1), shares.sum(axis=1))
    # an agent's row does not depend on the others
    assert np.array_equal(drawn[:1], Dirichlet(alpha).skewed(shares[:1], seed))


def test_dirichlet_goes_from_one_label_to_the_split() -> None:
    """The mean number of labels that hold 90 % of an agent's samples grows with alpha, up to that of the split."""
    shares = np.full((50, 10), 0.1)

    def spread(alpha: float) -> float:
        drawn = -np.sort(-Dirichlet(alpha).skewed(shares, 0), axis=1)
        return float((np.cumsum(drawn, axis=1) < 0.9).sum(axis=1).mean()) + 1

    found = [spread(alpha) for alpha in (0.01, 0.1, 0.5, 5, 1e5)]
    assert found == sorted(found)
    assert found[0] < 1.3
    assert np.allclose(Dirichlet(1e6).skewed(shares, 0), 0.1, atol=0.01)


@quick
@given(
    n=st.integers(1, 40),
    agents=crowds,
    classes=st.integers(1, 12),
    shift=st.sampled_from(
        ["dirichlet(0.001)", "dirichlet(0.1)", "quantity(5)", "dirichlet(0.05) + quantity(3)", "sizes(1e6, 1)"]
    ),
    seed=seeds,
    per_agent=st.sampled_from([0, 1, 7]),
    validation=st.sampled_from([0.0, 0.2]),
)
def test_tiny_partitions_leave_no_agent_empty(
    n: int, agents: int, classes: int, shift: str, seed: int, per_agent: int, validation: float
) -> None:
    """Every agent gets training samples, all disjoint, within the deadline; fewer samples than agents are rejected."""
    labels = np.random.default_rng(seed).integers(0, classes, n)

    def make() -> Partition:
        more = {"samples_per_agent": per_agent, "validation": validation}
        return split(labels, labels, "A", agents=agents, classes=classes, seed=seed, shift=shift, **more)

    if n < agents:
        assert "at least one training sample per agent" in refusal(make)
        return
    made = make()
    used = np.concatenate([*made.train, *made.validation])
    assert len(np.unique(used)) == len(used)
    assert all(len(part) for part in made.train)


def test_validation_that_would_take_all_is_refused() -> None:
    """An agent with a single sample cannot hold it out for validation."""
    labels = np.arange(4) % 2
    expected = refusal(split, labels, labels, "A", agents=4, classes=2, shift="quantity(1)", validation=0.7)
    assert "nothing to train on" in expected


@quick
@given(agents=crowds, sigma=st.floats(0, 5), seed=seeds)
def test_log_normal_sizes_are_relative_to_their_mean(agents: int, sigma: float, seed: int) -> None:
    """Sizes are positive with mean 1, and all 1 where sigma is 0."""
    sizes = Quantity(sigma).sizes(agents, seed)
    assert (sizes > 0).all()
    assert np.isclose(sizes.mean(), 1)
    assert np.allclose(Quantity(0).sizes(agents, seed), 1)


def test_sizes_by_hand() -> None:
    """sizes(4, 1, 1) gives agents 0 and 3 four times the samples of the others, with a mean of 10 samples per agent."""
    assert Sizes((4.0, 1.0, 1.0)).sizes(6, 0).tolist() == [2, 0.5, 0.5, 2, 0.5, 0.5]
    assert caps(10, [2, 0.5, 0.01]) == [20, 5, 1]
    made = digits("sizes(4, 1, 1)", agents=6, samples_per_agent=60)
    assert made.samples.tolist() == [120, 30, 30, 120, 30, 30]


@quick
@given(agents=crowds, classes=st.integers(2, 12), amount=st.floats(0, 1), seed=seeds)
def test_prior_moves_the_stated_amount(agents: int, classes: int, amount: float, seed: int) -> None:
    """Test labels differ from training labels by `amount` in total variation, or as far as the rarest label allows."""
    shares = random_shares(agents, classes, seed)
    moved = Prior(amount).moved(shares, seed)
    assert (moved >= 0).all()
    assert (moved[shares == 0] == 0).all()
    assert np.allclose(moved.sum(axis=1), shares.sum(axis=1))
    for p, q in zip(shares / shares.sum(axis=1, keepdims=True), moved / moved.sum(axis=1, keepdims=True), strict=True):
        most = 1 - p[p > 0].min() if (p > 0).sum() > 1 else 0.0
        assert np.isclose(np.abs(p - q).sum() / 2, min(amount, most))


def test_prior_changes_test_data_alone() -> None:
    """Training data stay unchanged; the labels of 9,000 test samples differ by 0.4 from the training labels."""
    labels = np.tile(np.arange(10), 900)
    plain, shifted = (split(labels, labels, "A", agents=3, shift=shift) for shift in ("", "prior(0.4)"))
    assert all(np.array_equal(a, b) for a, b in zip(plain.train, shifted.train, strict=True))
    for rows in shifted.test:
        q = np.bincount(labels[rows], minlength=10) / len(rows)
        assert np.isclose(np.abs(q - 0.1).sum() / 2, 0.4, atol=0.01)


@pytest.mark.parametrize("shift", COVARIATES, ids=lambda shift: type(shift).__name__)
def test_alice_s_group_is_not_shifted(shift: Covariate) -> None:
    """A feature shift leaves Alice's group unchanged bit for bit, changes the others, and keeps shape and type."""
    x = images(channels=3)
    black = x.amin(dim=(0, 2, 3))
    assert shift.transform(x, other(0, 0.0, 0), "train", black).equal(x)
    changed = shift.transform(x, other(), "train", black)
    assert changed.shape == x.shape
    assert changed.dtype == x.dtype
    assert changed.isfinite().all()
    assert not changed.equal(x)
    assert changed.equal(shift.transform(x, other(), "train", black))


def test_rotation_turns_anticlockwise_about_the_centre() -> None:
    """A rotation by 90 degrees equals torch's, four of them are the identity, and corners are filled with black."""
    x, black = images(channels=2), torch.tensor([-1.0, -2.0])
    assert torch.allclose(rotated(x, 90, black), torch.rot90(x, 1, (2, 3)), atol=1e-5)
    assert torch.allclose(rotated(x, 360, black), x, atol=1e-5)
    assert torch.allclose(rotated(rotated(x, 90, black), -90, black), x, atol=1e-5)
    assert rotated(x, 45, black)[:, :, 0, 0].equal(black.expand(len(x), 2))


@quick
@given(degrees=st.floats(-360, 360), seed=seeds)
def test_rotation_stays_between_the_darkest_and_the_brightest(degrees: float, seed: int) -> None:
    """A rotated pixel is a mean of pixels and black, so that it stays within their range."""
    x = images(seed=seed)
    turned = rotated(x, degrees, torch.zeros(1))
    assert turned.min() >= -1e-6
    assert turned.max() <= x.max() + 1e-5


@quick
@given(sigma=st.floats(0.05, 5), grey=st.floats(-3, 3), seed=seeds)
def test_blur_narrows_the_range(sigma: float, grey: float, seed: int) -> None:
    """An image of one grey stays unchanged; the range of values of any other image does not grow."""
    plain = torch.full((1, 1, 6, 6), grey)
    assert torch.allclose(blurred(plain, sigma), plain, atol=1e-4)
    x = images(seed=seed)
    assert blurred(x, sigma).amax() <= x.amax() + 1e-5
    assert blurred(x, sigma).amin() >= x.amin() - 1e-5


def test_noise_has_its_deviation_per_agent() -> None:
    """Noise has mean 0 and the requested deviation, scaled by group; every agent and part has its own."""
    x, none = torch.zeros(50, 20, 20), torch.zeros(0)
    full = Noise(0.5).transform(x, other(), "train", none)
    assert abs(full.mean()) < 0.02
    assert abs(full.std() - 0.5) < 0.01
    half = Noise(0.5).transform(x, other(degree=0.5), "train", none)
    assert torch.allclose(2 * half, full, atol=1e-6)
    assert not full.equal(Noise(0.5).transform(x, other(agent=2), "train", none))
    assert not full.equal(Noise(0.5).transform(x, other(), "test", none))


def test_contrast_colour_and_scale_by_hand() -> None:
    """Contrast multiplies, colour keeps black and has one gain per channel, and scale has one factor per feature."""
    x = images(channels=3)
    black = x.amin(dim=(0, 2, 3))
    assert Contrast(0.25).transform(x, other(degree=0.5), "train", black).equal(x * 0.5)
    light = x - black.view(-1, 1, 1)
    gains = (Colour(0.5).transform(x, other(), "train", black) - black.view(-1, 1, 1))[light > 0.1] / light[light > 0.1]
    assert len(torch.unique((gains * 1e3).round())) == 3
    factors = Scale(0.5).transform(x, other(), "train", black) / x
    assert torch.allclose(factors, factors[:1].expand_as(factors), rtol=1e-3)
    assert factors.std() > 0.1
    assert (
        Scale(0.5)
        .transform(x, other(agent=3), "test", black)
        .equal(Scale(0.5).transform(x, other(agent=1), "train", black))
    )  # all agents of a group have the same factors


@quick
@given(agents=st.integers(2, 6), alice=st.integers(0, 5), seed=seeds)
def test_shifted_samples_keep_their_places(agents: int, alice: int, seed: int) -> None:
    """The new pool holds each agent's samples in order; the samples of Alice's group are unchanged."""
    x, rng = images(30, seed=seed), np.random.default_rng(seed)
    parts = {
        name: tuple(torch.from_numpy(rng.integers(0, 30, rng.integers(0, 5))) for _ in range(agents))
        for name in ("train", "validation", "test")
    }
    seen, origin, moved = materialise(x, parts, [Contrast(0.5)], alice % agents, seed)
    assert (
        len(seen) == len(origin) == sum(len(rows) for rows in (*parts["train"], *parts["validation"], *parts["test"]))
    )
    for name, rows in parts.items():
        for agent, (old, new) in enumerate(zip(rows, moved[name], strict=True)):
            factor = 0.5 if (agent - alice % agents) % 2 else 1.0
            assert origin[new].equal(old)
            assert seen[new].equal(factor * x[old])


def test_features_shift_in_all_parts_and_labels_stay() -> None:
    """The shifted federation has the plain one's samples; only features of other groups differ, in all parts."""
    plain, shifted = digits("", validation=0.2), digits("contrast(0.5)", validation=0.2)
    for name in ("train", "validation", "test"):
        for agent, (a, b) in enumerate(zip(getattr(plain, name), getattr(shifted, name), strict=True)):
            assert plain.labels(agent, a).equal(shifted.labels(agent, b))
            assert shifted.x[b].equal(plain.x[a] * (0.5 if agent % 2 else 1.0))
    assert shifted.shifted == (("contrast(0.5)", (0, 1) * 5),)
    assert shifted.without("3").shifted[0][1] == (0, 1, 0, 0, 1, 0, 1, 0, 1)
    assert shifted.only(3).shifted[0][1] == (1,)


@quick
@given(classes=st.integers(2, 20), seed=seeds, group=st.integers(0, 9), share=st.floats(0, 1))
def test_a_swap_moves_exactly_k_labels(classes: int, seed: int, group: int, share: float) -> None:
    """The concept is a permutation that moves exactly k labels."""
    k = 2 + int(share * (classes - 2))
    found = cycle(classes, k, seed, "swap", group)
    assert sorted(found) == list(range(classes))
    assert (found != np.arange(classes)).sum() == k


@quick
@given(agents=crowds, groups=st.integers(2, 6), alice=st.integers(0, 11), seed=seeds)
def test_groups_share_a_concept(agents: int, groups: int, alice: int, seed: int) -> None:
    """Agents of one group have the same labels; Alice's group has the original ones."""
    found = Swap(4, groups).concepts(agents, 10, alice % agents, seed)
    for i in range(agents):
        for j in range(agents):
            if (i - j) % groups == 0:
                assert np.array_equal(found[i], found[j])
    assert np.array_equal(found[alice % agents], np.arange(10))


def test_swap_after_a_star() -> None:
    """Under A* with a swap an agent's labels are first permuted by A*, then swapped."""
    labels = np.tile(np.arange(10), 20)
    star = split(labels, labels, "A*", shift="").relabel
    both = split(labels, labels, "A*", shift="swap(10)").relabel
    swap = Swap(10).concepts(10, 10, 0, 0)
    assert all(np.array_equal(both[i], swap[i][star[i]]) for i in range(10))


@pytest.mark.parametrize("who", ["others", "alice", "all"])
def test_a_sudden_drift_changes_all_labels_at_once(who: str) -> None:
    """Agents that drift have the old labels up to the given share of the rounds, and the new labels afterwards."""
    federation = digits(f"drift(sudden, 0.5, who={who})")
    for agent in range(10):
        drifts = {"others": agent % 2 == 1, "alice": agent % 2 == 0, "all": True}[who]
        for rows in (federation.train[agent], federation.test[agent]):
            old = federation.y[rows]
            assert federation.labels(agent, rows, 0.5).equal(old)
            assert bool((federation.labels(agent, rows, 0.51) != old).all()) == drifts


@quick
@given(at=st.floats(0, 0.9), width=st.floats(0.05, 1), moments=st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_gradual_drift_is_monotonic(at: float, width: float, moments: list[float]) -> None:
    """Labels change once: none before `at`, all after `until`, and linearly more in between."""
    until = min(at + width, 1.0)
    turns = Drift("gradual", at, until).turns(2000, 0)
    early, late = sorted(moments)
    assert ((turns < early) <= (turns < late)).all()
    assert not (turns < at).any()
    assert (turns <= until).all()
    expected = min(max((late - at) / (until - at), 0), 1)
    assert abs((turns < late).mean() - expected) < 0.06


def test_batches_have_the_labels_of_the_round() -> None:
    """Stacked with a federation without drift, each batch has the labels that its agent uses in that round.

    Values that change with the round are copied into the buffers of the first round's plan, as for a captured graph.
    """
    drifting, plain = digits("drift(gradual, 0.2, 0.8, who=all)", agents=4), digits("", agents=4)
    rounds, federations = 5, [drifting, plain]
    batches = Batches(federations, [1, 2], 32, 2, torch.float32, rounds=rounds)
    alone = Batches([plain], [2], 32, 2, torch.float32, rounds=rounds)
    changed, buffers = [], BatchPlan(*(field.clone() for field in batches.plan(1, 0, slice(0, 8))))
    for r in range(1, rounds + 1):
        planned = batches.plan(r, 0, slice(0, 8))
        for buffer, field in zip(buffers, planned, strict=True):
            buffer.copy_(field)
        for t in range(max(batches.steps)):
            found = batches.batch(buffers, torch.tensor([t]), 32)
            for row in range(8):
                federation, agent = federations[row // 4], row % 4
                samples = planned.samples[row, t]
                held = found.weight[row] > 0
                assert found.y[row][held].equal(federation.labels(agent, samples[held], r / rounds))
                changed.append((r, row, bool((found.y[row] != federation.y[samples])[held].any())))
        same = alone.plan(r, 0, slice(0, 4))
        t = torch.tensor([0])
        separate, stacked = alone.batch(same, t, 32), batches.batch(planned, t, 32)
        assert all(a.equal(b[4:]) for a, b in zip(separate, stacked, strict=True))
    assert {r for r, row, is_new in changed if is_new} == {2, 3, 4, 5}
    assert {row for _, row, is_new in changed if is_new} == {0, 1, 2, 3}


def drifted(federation: Federation, at: float) -> Federation:
    """Return the test federation with labels of Alice and agent 1 shifted by one from share `at` of the rounds on."""
    later = federation.relabel.clone()
    later[:2] = later[:2].roll(1, dims=1)
    return dataclasses.replace(federation, later=later, turn=torch.full((len(federation.x),), at, dtype=torch.float64))


def test_drift_starts_with_its_round() -> None:
    """Rounds before the drift equal a run without it bit for bit; afterwards Alice is tested on her new labels."""
    plain, model = make_federation(), make_model()
    still = outcomes_of(RunSpec(FedAvg(), plain, 3), model)
    moved = outcomes_of(RunSpec(FedAvg(), drifted(plain, 0.5), 3), model)
    for before, after in zip(still[:3], moved[:3], strict=True):
        assert before.state.server.x.equal(after.state.server.x)
        assert before.measured["accuracy"] == after.measured["accuracy"]
    assert not still[3].state.server.x.equal(moved[3].state.server.x)
    rows, net = plain.test[0], moved[3].state.server
    predicted = model.predict(net.x, net.stats, plain.x[rows].double()).argmax(dim=1)
    right = (predicted == drifted(plain, 0.5).labels(0, rows, 4 / 6)).double().mean()
    assert moved[3].measured["accuracy"] == right.item()


def test_drifting_run_resumes_identically() -> None:
    """A run resumed in the middle of its drift equals the uninterrupted run."""
    federation, model = drifted(make_federation(), 0.3), make_model()
    whole = outcomes_of(RunSpec(FedAvg(), federation, 3), model)
    continued = simulate([RunSpec(FedAvg(), federation, 3, whole[2].state)], model, rounds=6, start=3, batch_size=BATCH)
    for outcomes, later in zip(continued, whole[3:], strict=True):
        assert outcomes[0].state.server.x.equal(later.state.server.x)
        assert outcomes[0].measured["accuracy"] == later.measured["accuracy"]


def test_stacked_drift_changes_no_bit() -> None:
    """Federations with and without drift in one stack have the same results as alone."""
    model = make_model()
    specs = [RunSpec(FedAvg(), make_federation(), 3), RunSpec(FedAvg(), drifted(make_federation(), 0.5), 4)]
    together = list(simulate(specs, model, rounds=6, batch_size=BATCH))
    for k, spec in enumerate(specs):
        for outcomes, own in zip(together, outcomes_of(spec, model), strict=True):
            assert outcomes[k].state.server.x.equal(own.state.server.x)
            assert outcomes[k].measured["accuracy"] == own.measured["accuracy"]


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("C", "85b31bf183761f100ce3f7b22e9e757eacbdbf01c83e59f8ce843df401f7c493"),
        ("B*", "5ae56ba6281a6b5a56e1308cb79250cd15719d6e1b69ec94029576c519d97c9a"),
    ],
)
def test_without_a_shift_the_data_are_those_of_earlier_versions(kind: str, digest: str) -> None:
    """The digest of a federation without a shift equals the one of versions before shifts."""
    synthetic = data.load("synthetic")
    made = split(synthetic.y_train, synthetic.y_test, kind, samples_per_agent=40, validation=0.2)
    assert build(synthetic, made).digest() == digest


def test_each_shift_has_its_own_digest() -> None:
    """The digest of the data differs between all shifts."""
    shifts = ["", *EXAMPLES, "drift(sudden, 0.4)", "drift(sudden, 0.5, k=4)"]
    assert len({digits(shift).digest() for shift in shifts}) == len(shifts)


def test_config_without_a_shift_is_unchanged() -> None:
    """A config from before shifts is read as one without a shift."""
    known = check_run("fedavg", {}, {}).to_json()
    earlier = {**known, "settings": {k: v for k, v in known["settings"].items() if k != "shift"}}
    assert completed(earlier, "fedavg") == known
    assert completed(earlier, "waffle-paper") == earlier
    assert check_run("fedavg", {}, {}).label == "digits-C-fedavg-1"


@pytest.mark.parametrize(
    ("shift", "label"),
    [
        ("rotate(45)", "rotate-45"),
        ("rotate(-45)", "rotate-minus-45"),
        ("rotate(-1e-3, groups=2)", "rotate-minus-1e-3-groups-2"),
        ("scale(1e-3) + rotate(degrees=-9)", "scale-1e-3-rotate-degrees-minus-9"),
        ("noise(0.3) + swap(4)", "noise-0.3-swap-4"),
    ],
)
def test_a_sign_is_part_of_the_folder_s_name(shift: str, label: str) -> None:
    """Shifts that differ in sign have different folders; without a sign the name has only the numbers."""
    run = RunConfig(method="fedavg", settings=Settings(shift=shift))
    assert run.label == f"digits-C-{label}-fedavg-1"


def test_shift_text_is_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text gives the same data in an experiment file, in `waffle run` and in Python."""
    monkeypatch.chdir(tmp_path)
    text = "dirichlet(0.5) + rotate(30) + swap(2)"
    file = tmp_path / "grid.toml"
    file.write_text(f'methods = ["fedavg"]\nsplits = ["A"]\nshifts = ["", "{text}"]\nagents = 4\nrounds = 1\n')
    (experiment,) = load_experiments(file)
    planned = [config for config, _ in plan(experiment, tmp_path)]
    assert [config.settings.column for config in planned] == ["A", f"A {text}"]
    command = ["run", "fedavg", "--split", "A", "--shift", text, "--agents", "4", "--rounds", "1", "--quiet"]
    assert main([*command, "--out", "run"]) == 0
    run = read_run(tmp_path / "run")
    digits_data = data.load("digits")
    made = split(digits_data.y_train, digits_data.y_test, "A", agents=4, shift=text)
    digests = {federation_of(planned[1].settings).digest(), run.provenance["binding"]["data"]}
    assert digests == {build(digits_data, made).digest()}
    assert run.config.to_json() == planned[1].to_json()
    assert run.row == f"A {text}"
    assert run.provenance["shifted"] == {"rotate(30)": [0, 1, 0, 1], "swap(2)": [0, 1, 0, 1]}


def test_a_grid_of_shifts_is_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """`waffle bench` runs splits x shifts, including drift, with one row of its table each."""
    monkeypatch.chdir(tmp_path)
    lines = [
        'methods = ["fedavg", "waffle-paper"]',
        'splits = ["A"]',
        'shifts = ["", "noise(1)", "drift(sudden, 0.5)"]',
    ]
    Path("grid.toml").write_text("\n".join([*lines, "agents = 3", "rounds = 2", "samples_per_agent = 20"]))
    assert main(["bench", "grid.toml", "--quiet", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 6
    table = (tmp_path / "runs" / "grid" / "report" / "table.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| A")]
    assert rows[:3] == ["A", "A noise(1)", "A drift(sudden, 0.5)"]


def test_shifts_in_a_grid_are_checked(tmp_path: Path) -> None:
    """An invalid shift, a shift named twice, and a single `shift` in a grid are rejected before any run."""
    file = tmp_path / "grid.toml"
    for line, expected in (
        ('shifts = ["rotat(1)"]', "did you mean rotate"),
        ('shifts = ["noise(1)", "noise(1)"]', "expected no duplicates"),
        ('shift = "noise(1)"', "a grid takes shifts"),
    ):
        file.write_text(f'methods = ["fedavg"]\n{line}\n')
        assert expected in refusal(load_experiments, file)


def test_permutation_seed_is_kept_where_labels_are_permuted(tmp_path: Path) -> None:
    """A grid keeps its permutation seed for stars, swaps and drifts; elsewhere it has the default."""
    grid = {"methods": ("local",), "splits": ("A", "A*"), "shifts": ("", "noise(1)", "swap(2)", "drift(sudden)")}
    planned = plan(Experiment(settings=Settings(permutation_seed=3), **grid), tmp_path)
    assert [config.settings.permutation_seed for config, _ in planned] == [0, 0, 3, 3, 3, 3, 3, 3]


def test_user_data_are_not_shifted(tmp_path: Path) -> None:
    """A shift of a folder of the agents' own files is rejected."""
    (tmp_path / "north.csv").write_text("a,ill\n1,0\n2,1\n")
    assert "shift" in refusal(federation_of, Settings(data=str(tmp_path), target="ill", shift="noise(1)"))


def test_alice_s_own_drift_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """When Alice's labels drift, a note says that the last round counts; her model is tested on her last labels."""
    monkeypatch.chdir(tmp_path)
    command = ["run", "local", "--split", "A", "--agents", "2", "--rounds", "2", "--out", "run", "--quiet"]
    assert main([*command, "--shift", "drift(sudden, 0.5, who=all, groups=1)"]) == 0
    run = read_run(tmp_path / "run")
    assert any("drift" in note for note in run.provenance["notes"])
    assert run.result["metrics"]["accuracy"] == pytest.approx(run.result["last"]["accuracy"])


def test_the_tournament_has_shifts_of_every_kind() -> None:
    """experiments/tournament.toml has the paper's splits and shifts of labels, sizes, features, concepts and drift."""
    columns = load_tournament(ROOT / "experiments" / "tournament.toml").data["digits"].columns
    assert {"A", "B", "C", "A*", "B*"} <= {column.split for column in columns if not column.shift}
    kinds = {type(shift).__module__.rpartition(".")[2] for column in columns for shift in read_shifts(column.shift)}
    assert kinds == {type_.__module__.rpartition(".")[2] for type_ in KINDS.values()}


def test_fashion_is_shifted_as_mnist_is(published: Path) -> None:
    """Shifts of the tournament can be built from Fashion-MNIST, with a mean of a thousand samples per agent."""
    settings = Settings(data="fashion-mnist", split="A", samples_per_agent=1000, validation=0.2)
    columns = load_tournament(ROOT / "experiments" / "tournament.toml").data["digits"].columns
    shifts = [column.shift for column in columns if column.shift]
    for shift in shifts[::2]:
        made = federation_of(dataclasses.replace(settings, shift=shift), str(published))
        assert abs(made.samples.double().mean() - 1000) <= 1
        assert len(made.test[0]) >= 100
