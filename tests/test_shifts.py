"""Shifts beyond the paper's splits: what each does by hand, and what must hold for any data, seed and agent."""

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

from conftest import BATCH, last_state, make_federation, make_model, refusal
from waffle_fl import data
from waffle_fl.algorithms import ALGORITHMS
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
def test_a_shift_is_written_as_it_is_called(text: str, shift: Any) -> None:
    """Text with values in their order or by name is the shift of Python."""
    assert read_shifts(text) == (shift,)


def test_every_kind_has_an_example() -> None:
    """The examples of these tests are all kinds there are."""
    assert {type(shift) for shift in EXAMPLES.values()} == set(KINDS.values())


def test_a_mixture_is_joined_by_plus() -> None:
    """Shifts joined by + come in their order, and an empty text is none."""
    assert read_shifts(" noise(0.3)+swap(4, groups=3) ") == (Noise(0.3), Swap(4, 3))
    assert read_shifts("") == ()


@pytest.mark.parametrize(
    ("text", "told"),
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
def test_a_shift_that_cannot_be_read_is_refused_in_one_line(text: str, told: str) -> None:
    """What is wrong with a shift is told before any work, in Python and in a config alike."""
    assert told in refusal(read_shifts, text)
    assert told in refusal(check_run, "fedavg", {"shift": text}, {})


@pytest.mark.parametrize(
    ("shift", "told"),
    [
        ("rotate(45, groups=11)", "as many groups as there are agents"),
        ("swap(11)", "at most 10 labels"),
        ("drift(k=11)", "at most 10 labels"),
    ],
)
def test_a_shift_that_does_not_fit_the_federation_is_refused(shift: str, told: str) -> None:
    """More groups than agents, or more labels than there are, is told in one line."""
    assert told in refusal(digits, shift)


@pytest.mark.parametrize("shift", ["rotate(45)", "blur(1)", "colour(1)"])
def test_shifts_of_images_are_refused_for_vectors(shift: str) -> None:
    """Samples that are no images cannot be turned, blurred or coloured."""
    assert "expected images" in refusal(federation_of, Settings(data="synthetic", split="A", shift=shift))


def test_groups_are_counted_from_alice() -> None:
    """With two groups every other agent stands with Alice; the last of three groups is shifted in full, hers not."""
    assert groups_of(5, 0, 2) == (0, 1, 0, 1, 0)
    assert groups_of(5, 1, 3) == (2, 0, 1, 2, 0)
    assert [member.degree for member in members(4, 0, 3, 0)] == [0, 0.5, 1, 0]


@quick
@given(agents=crowds, classes=st.integers(1, 12), alpha=st.sampled_from([1e-3, 0.01, 0.1, 1.0, 100.0, 1e6]), seed=seeds)
def test_dirichlet_keeps_sizes_and_labels(agents: int, classes: int, alpha: float, seed: int) -> None:
    """A row stays finite and not negative, keeps its sum, and gains no label that it had not."""
    shares = random_shares(agents, classes, seed)
    drawn = Dirichlet(alpha).skewed(shares, seed)
    assert np.isfinite(drawn).all()
    assert (drawn >= 0).all()
    assert (drawn[shares == 0] == 0).all()
    assert np.allclose(drawn.sum(axis=1), shares.sum(axis=1))
    assert np.array_equal(drawn[:1], Dirichlet(alpha).skewed(shares[:1], seed))  # nobody's depends on the others


def test_dirichlet_goes_from_one_label_to_the_split() -> None:
    """The mean number of labels that hold 90 % of an agent's samples grows with alpha, up to the split's own."""
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
def test_tiny_partitions_end_at_once_and_leave_nobody_empty(
    n: int, agents: int, classes: int, shift: str, seed: int, per_agent: int, validation: float
) -> None:
    """Within the deadline every agent has samples to train on, all disjoint; fewer samples than agents are refused."""
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
    """Who has a single sample cannot also hold it out."""
    labels = np.arange(4) % 2
    told = refusal(split, labels, labels, "A", agents=4, classes=2, shift="quantity(1)", validation=0.7)
    assert "nothing to train on" in told


@quick
@given(agents=crowds, sigma=st.floats(0, 5), seed=seeds)
def test_log_normal_sizes_are_relative_to_their_mean(agents: int, sigma: float, seed: int) -> None:
    """Sizes are positive with mean 1, and all 1 where sigma is 0."""
    sizes = Quantity(sigma).sizes(agents, seed)
    assert (sizes > 0).all()
    assert np.isclose(sizes.mean(), 1)
    assert np.allclose(Quantity(0).sizes(agents, seed), 1)


def test_sizes_by_hand() -> None:
    """sizes(4, 1, 1) gives agents 0 and 3 four times what the others have, and 10 samples an agent on average."""
    assert Sizes((4.0, 1.0, 1.0)).sizes(6, 0).tolist() == [2, 0.5, 0.5, 2, 0.5, 0.5]
    assert caps(10, [2, 0.5, 0.01]) == [20, 5, 1]
    made = digits("sizes(4, 1, 1)", agents=6, samples_per_agent=60)
    assert made.samples.tolist() == [120, 30, 30, 120, 30, 30]


@quick
@given(agents=crowds, classes=st.integers(2, 12), amount=st.floats(0, 1), seed=seeds)
def test_prior_moves_the_stated_amount(agents: int, classes: int, amount: float, seed: int) -> None:
    """Test labels are `amount` from training labels in total variation, or as far as the rarest label allows."""
    shares = random_shares(agents, classes, seed)
    moved = Prior(amount).moved(shares, seed)
    assert (moved >= 0).all()
    assert (moved[shares == 0] == 0).all()
    assert np.allclose(moved.sum(axis=1), shares.sum(axis=1))
    for p, q in zip(shares / shares.sum(axis=1, keepdims=True), moved / moved.sum(axis=1, keepdims=True), strict=True):
        most = 1 - p[p > 0].min() if (p > 0).sum() > 1 else 0.0
        assert np.isclose(np.abs(p - q).sum() / 2, min(amount, most))


def test_prior_changes_test_data_alone() -> None:
    """Training data stay as they are; among 9,000 test samples the labels are 0.4 from the training's."""
    labels = np.tile(np.arange(10), 900)
    plain, shifted = (split(labels, labels, "A", agents=3, shift=shift) for shift in ("", "prior(0.4)"))
    assert all(np.array_equal(a, b) for a, b in zip(plain.train, shifted.train, strict=True))
    for rows in shifted.test:
        q = np.bincount(labels[rows], minlength=10) / len(rows)
        assert np.isclose(np.abs(q - 0.1).sum() / 2, 0.4, atol=0.01)


@pytest.mark.parametrize("shift", COVARIATES, ids=lambda shift: type(shift).__name__)
def test_alice_s_group_sees_what_is_there(shift: Covariate) -> None:
    """A shift of features leaves Alice's group as it is, to the bit, changes the others, and keeps shape and type."""
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
    """Ninety degrees are torch's own quarter turn, four of them nothing, and corners come in black."""
    x, black = images(channels=2), torch.tensor([-1.0, -2.0])
    assert torch.allclose(rotated(x, 90, black), torch.rot90(x, 1, (2, 3)), atol=1e-5)
    assert torch.allclose(rotated(x, 360, black), x, atol=1e-5)
    assert torch.allclose(rotated(rotated(x, 90, black), -90, black), x, atol=1e-5)
    assert rotated(x, 45, black)[:, :, 0, 0].equal(black.expand(len(x), 2))


@quick
@given(degrees=st.floats(-360, 360), seed=seeds)
def test_rotation_stays_between_the_darkest_and_the_brightest(degrees: float, seed: int) -> None:
    """A turned pixel is a mean of pixels and black, so it is no darker and no brighter than any of them."""
    x = images(seed=seed)
    turned = rotated(x, degrees, torch.zeros(1))
    assert turned.min() >= -1e-6
    assert turned.max() <= x.max() + 1e-5


@quick
@given(sigma=st.floats(0.05, 5), grey=st.floats(-3, 3), seed=seeds)
def test_blur_keeps_plain_images_and_calms_others(sigma: float, grey: float, seed: int) -> None:
    """An image of one grey stays as it is; the values of any other come no further apart."""
    plain = torch.full((1, 1, 6, 6), grey)
    assert torch.allclose(blurred(plain, sigma), plain, atol=1e-4)
    x = images(seed=seed)
    assert blurred(x, sigma).amax() <= x.amax() + 1e-5
    assert blurred(x, sigma).amin() >= x.amin() - 1e-5


def test_noise_has_its_deviation_and_is_each_agent_s_own() -> None:
    """Noise has mean 0 and the deviation asked for, graded by group; every agent and part has its own."""
    x, none = torch.zeros(50, 20, 20), torch.zeros(0)
    full = Noise(0.5).transform(x, other(), "train", none)
    assert abs(full.mean()) < 0.02
    assert abs(full.std() - 0.5) < 0.01
    half = Noise(0.5).transform(x, other(degree=0.5), "train", none)
    assert torch.allclose(2 * half, full, atol=1e-6)
    assert not full.equal(Noise(0.5).transform(x, other(agent=2), "train", none))
    assert not full.equal(Noise(0.5).transform(x, other(), "test", none))


def test_contrast_colour_and_scale_by_hand() -> None:
    """Contrast multiplies; colour leaves black and scales each channel by one gain; scale has one factor a feature."""
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
    )  # a group shares its instruments


@quick
@given(agents=st.integers(2, 6), alice=st.integers(0, 5), seed=seeds)
def test_what_agents_see_is_in_its_place(agents: int, alice: int, seed: int) -> None:
    """The new pool holds each agent's samples in order: those of Alice's group unchanged, no other's touched."""
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
    """The shifted federation holds the samples of the plain one: only the others' features differ, in all parts."""
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
    """The concept is a permutation, and just k labels of it are not their own."""
    k = 2 + int(share * (classes - 2))
    found = cycle(classes, k, seed, "swap", group)
    assert sorted(found) == list(range(classes))
    assert (found != np.arange(classes)).sum() == k


@quick
@given(agents=crowds, groups=st.integers(2, 6), alice=st.integers(0, 11), seed=seeds)
def test_groups_share_a_concept(agents: int, groups: int, alice: int, seed: int) -> None:
    """Agents of one group call labels alike; Alice's group calls them by their names."""
    found = Swap(4, groups).concepts(agents, 10, alice % agents, seed)
    for i in range(agents):
        for j in range(agents):
            if (i - j) % groups == 0:
                assert np.array_equal(found[i], found[j])
    assert np.array_equal(found[alice % agents], np.arange(10))


def test_a_swap_comes_on_top_of_a_star() -> None:
    """Under A* with a swap, an agent first permutes its labels as A* says, then swaps."""
    labels = np.tile(np.arange(10), 20)
    star = split(labels, labels, "A*", shift="").relabel
    both = split(labels, labels, "A*", shift="swap(10)").relabel
    swap = Swap(10).concepts(10, 10, 0, 0)
    assert all(np.array_equal(both[i], swap[i][star[i]]) for i in range(10))


@pytest.mark.parametrize("who", ["others", "alice", "all"])
def test_a_sudden_drift_changes_all_labels_at_once(who: str) -> None:
    """Up to the stated share of the rounds labels are the old ones, from then on the new ones, for those who drift."""
    federation = digits(f"drift(sudden, 0.5, who={who})")
    for agent in range(10):
        drifts = {"others": agent % 2 == 1, "alice": agent % 2 == 0, "all": True}[who]
        for rows in (federation.train[agent], federation.test[agent]):
            old = federation.y[rows]
            assert federation.labels(agent, rows, 0.5).equal(old)
            assert bool((federation.labels(agent, rows, 0.51) != old).all()) == drifts


@quick
@given(at=st.floats(0, 0.9), width=st.floats(0.05, 1), moments=st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_a_gradual_drift_only_ever_grows(at: float, width: float, moments: list[float]) -> None:
    """A sample that has turned stays turned: none before `at`, all after `until`, and linearly more in between."""
    until = min(at + width, 1.0)
    turns = Drift("gradual", at, until).turns(2000, 0)
    early, late = sorted(moments)
    assert ((turns < early) <= (turns < late)).all()
    assert not (turns < at).any()
    assert (turns <= until).all()
    expected = min(max((late - at) / (until - at), 0), 1)
    assert abs((turns < late).mean() - expected) < 0.06


def test_every_round_s_batches_bear_the_labels_of_the_round() -> None:
    """Stacked beside a federation without drift, each batch has the labels that its agent uses in that round.

    All that changes with the round is copied into the buffers of the first round's plan, as a captured graph reads it.
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
        lone, beside = alone.batch(same, t, 32), batches.batch(planned, t, 32)
        assert all(a.equal(b[4:]) for a, b in zip(lone, beside, strict=True))
    assert {r for r, row, is_new in changed if is_new} == {2, 3, 4, 5}
    assert {row for _, row, is_new in changed if is_new} == {0, 1, 2, 3}


def drifted(federation: Federation, at: float) -> Federation:
    """The test federation, Alice's labels and agent 1's passed on by one from the share `at` of the rounds on."""
    later = federation.relabel.clone()
    later[:2] = later[:2].roll(1, dims=1)
    return dataclasses.replace(federation, later=later, turn=torch.full((len(federation.x),), at, dtype=torch.float64))


def test_a_drift_begins_with_its_round_and_not_before() -> None:
    """Rounds before the drift are those of a run without it, to the bit; then Alice is tested on her new labels."""
    plain, model = make_federation(), make_model()
    still = last_state(RunSpec(FedAvg(), plain, 3), model)
    moved = last_state(RunSpec(FedAvg(), drifted(plain, 0.5), 3), model)
    for before, after in zip(still[:3], moved[:3], strict=True):
        assert before.state.server.x.equal(after.state.server.x)
        assert before.measured["accuracy"] == after.measured["accuracy"]
    assert not still[3].state.server.x.equal(moved[3].state.server.x)
    rows, net = plain.test[0], moved[3].state.server
    said = model.predict(net.x, net.stats, plain.x[rows].double()).argmax(dim=1)
    right = (said == drifted(plain, 0.5).labels(0, rows, 4 / 6)).double().mean()
    assert moved[3].measured["accuracy"] == right.item()


def test_a_drifting_run_goes_on_in_the_same_bits() -> None:
    """A run that is resumed in the middle of its drift ends as the unbroken one."""
    federation, model = drifted(make_federation(), 0.3), make_model()
    whole = last_state(RunSpec(FedAvg(), federation, 3), model)
    rest = simulate([RunSpec(FedAvg(), federation, 3, whole[2].state)], model, rounds=6, start=3, batch_size=BATCH)
    for outcomes, wanted in zip(rest, whole[3:], strict=True):
        assert outcomes[0].state.server.x.equal(wanted.state.server.x)
        assert outcomes[0].measured["accuracy"] == wanted.measured["accuracy"]


def test_neighbours_that_drift_change_no_bit() -> None:
    """Federations with and without drift in one stack each end as alone, and so do their scores."""
    model = make_model()
    specs = [RunSpec(FedAvg(), make_federation(), 3), RunSpec(FedAvg(), drifted(make_federation(), 0.5), 4)]
    together = list(simulate(specs, model, rounds=6, batch_size=BATCH))
    for k, spec in enumerate(specs):
        for outcomes, own in zip(together, last_state(spec, model), strict=True):
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
    """The digest of a federation without a shift is the one that versions before shifts recorded."""
    synthetic = data.load("synthetic")
    made = split(synthetic.y_train, synthetic.y_test, kind, samples_per_agent=40, validation=0.2)
    assert build(synthetic, made).digest() == digest


def test_each_shift_is_other_data() -> None:
    """The digest of the data tells all shifts apart."""
    shifts = ["", *EXAMPLES, "drift(sudden, 0.4)", "drift(sudden, 0.5, k=4)"]
    assert len({digits(shift).digest() for shift in shifts}) == len(shifts)


def test_a_config_without_a_shift_is_the_run_it_was() -> None:
    """A run folder's config from before there were shifts reads as one without."""
    known = check_run("fedavg", {}, {}).to_json()
    earlier = {**known, "settings": {k: v for k, v in known["settings"].items() if k != "shift"}}
    assert completed(earlier, "fedavg") == known
    assert completed(earlier, "waffle") == earlier
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
    """Shifts that differ in a sign have folders of their own; without one the name is the numbers'."""
    run = RunConfig(method="fedavg", settings=Settings(shift=shift))
    assert run.label == f"digits-C-{label}-fedavg-1"


def test_one_name_in_toml_on_the_command_line_and_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text is the same data in an experiment file, under `waffle run` and in Python."""
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
    """`waffle bench` runs splits x shifts, one row of its table each, drift among them."""
    monkeypatch.chdir(tmp_path)
    lines = ['methods = ["fedavg", "waffle"]', 'splits = ["A"]', 'shifts = ["", "noise(1)", "drift(sudden, 0.5)"]']
    Path("grid.toml").write_text("\n".join([*lines, "agents = 3", "rounds = 2", "samples_per_agent = 20"]))
    assert main(["bench", "grid.toml", "--quiet", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 6
    table = (tmp_path / "runs" / "grid" / "report" / "table.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| A")]
    assert rows[:3] == ["A", "A noise(1)", "A drift(sudden, 0.5)"]


def test_shifts_in_a_grid_are_checked(tmp_path: Path) -> None:
    """A shift that cannot be read, one named twice, and a single `shift` in a grid are told at once."""
    file = tmp_path / "grid.toml"
    for line, told in (
        ('shifts = ["rotat(1)"]', "did you mean rotate"),
        ('shifts = ["noise(1)", "noise(1)"]', "expected no duplicates"),
        ('shift = "noise(1)"', "a grid takes shifts"),
    ):
        file.write_text(f'methods = ["fedavg"]\n{line}\n')
        assert told in refusal(load_experiments, file)


def test_the_seed_of_permutations_counts_where_labels_are_permuted(tmp_path: Path) -> None:
    """A grid keeps its permutation seed for stars, swaps and drifts; elsewhere it says nothing and is the default."""
    grid = {"methods": ("local",), "splits": ("A", "A*"), "shifts": ("", "noise(1)", "swap(2)", "drift(sudden)")}
    planned = plan(Experiment(settings=Settings(permutation_seed=3), **grid), tmp_path)
    assert [config.settings.permutation_seed for config, _ in planned] == [0, 0, 3, 3, 3, 3, 3, 3]


def test_data_of_one_s_own_are_not_shifted(tmp_path: Path) -> None:
    """A folder of agents' own files is as it is: a shift of it is refused."""
    (tmp_path / "north.csv").write_text("a,ill\n1,0\n2,1\n")
    assert "shift" in refusal(federation_of, Settings(data=str(tmp_path), target="ill", shift="noise(1)"))


def test_alice_s_own_drift_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Where Alice's labels drift the run says that its last round counts; its model is measured on her last labels."""
    monkeypatch.chdir(tmp_path)
    command = ["run", "local", "--split", "A", "--agents", "2", "--rounds", "2", "--out", "run", "--quiet"]
    assert main([*command, "--shift", "drift(sudden, 0.5, who=all, groups=1)"]) == 0
    run = read_run(tmp_path / "run")
    assert any("drift" in note for note in run.provenance["notes"])
    assert run.result["metrics"]["accuracy"] == pytest.approx(run.result["last"]["accuracy"])


def test_beyond_has_every_method_and_all_kinds_of_shifts() -> None:
    """experiments/beyond.toml runs all methods on two data sets, the paper's splits and all shifts of grey images."""
    experiments = {e.name.rpartition("/")[2]: e for e in load_experiments(ROOT / "experiments" / "beyond.toml")}
    assert {e.settings.data for e in experiments.values()} == {"mnist", "fashion-mnist"}
    assert all(e.methods == tuple(ALGORITHMS) for e in experiments.values())
    for name in ("mnist", "fashion-mnist"):
        assert experiments[f"{name}-paper"].splits == ("A", "B", "C", "A*", "B*")
        kinds = {type(shift) for text in experiments[name].shifts for shift in read_shifts(text)}
        assert kinds == set(KINDS.values()) - {Colour, Sizes}


def test_fashion_is_shifted_as_mnist_is(published: Path) -> None:
    """Every column of beyond.toml can be made of Fashion-MNIST, with a thousand samples an agent on average."""
    (experiment,) = [
        e for e in load_experiments(ROOT / "experiments" / "beyond.toml") if e.name == "beyond/fashion-mnist"
    ]
    for shift in experiment.shifts:
        made = federation_of(dataclasses.replace(experiment.settings, split="A", shift=shift), str(published))
        assert abs(made.samples.double().mean() - 1000) <= 1
        assert len(made.test[0]) >= 100
