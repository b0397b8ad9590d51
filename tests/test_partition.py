"""Partitions: the paper's tables, hand-computed examples, and properties of every split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import refusal
from waffle_fl import data
from waffle_fl.config import Settings
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import federation_of
from waffle_fl.federation import build
from waffle_fl.partition import Partition, all_allowed, check_shares, concept_shift, divide, share_matrix, split

# The paper's appendix, "Repartition of labels for the distribution C between our ten agents", row by row.
TABLE_C = """
    0  0  0  .1 .2 .4 .2 .1 0  0
    0  0  .1 .2 .4 .2 .1 0  0  0
    0  .1 .2 .4 .2 .1 0  0  0  0
    .1 .2 .4 .2 .1 0  0  0  0  0
    .2 .4 .2 .1 0  0  0  0  0  .1
    .4 .2 .1 0  0  0  0  0  .1 .2
    .2 .1 0  0  0  0  0  .1 .2 .4
    .1 0  0  0  0  0  .1 .2 .4 .2
    0  0  0  0  0  .1 .2 .4 .2 .1
    0  0  0  0  .1 .2 .4 .2 .1 0
"""
KINDS = ("A", "B", "C", "A*", "B*", "C*")

quick = settings(max_examples=100, deadline=20_000)
kinds = st.sampled_from(KINDS)
numbers = st.integers(0, 10_000)
crowds = st.integers(1, 25)
sizes = st.integers(0, 400)


def labels_of(size: int, seed: int, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, size)


def balanced(per_class: int, classes: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), per_class))


def together(parts: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def same(a: Partition, b: Partition) -> bool:
    pairs = [*zip(a.train, b.train, strict=True), *zip(a.validation, b.validation, strict=True)]
    pairs += [*zip(a.test, b.test, strict=True), (a.relabel, b.relabel), (a.shares, b.shares)]
    return all(np.array_equal(x, y) for x, y in pairs)


# -------------------------------------------------------------------------------------------------- the paper, by hand


def test_c_is_the_papers_table() -> None:
    """The share matrix of C is the paper's printed table, agent by agent."""
    table = np.array([[float(word) for word in line.split()] for line in TABLE_C.split("\n") if line.strip()])
    assert np.array_equal(share_matrix("C", 10, 10), table)


def test_b_gives_each_agent_four_labels_in_turn() -> None:
    """In B Alice holds a quarter of labels 0 to 3, and each next agent starts one label lower, as in the table of C."""
    matrix = share_matrix("B", 10, 10)
    assert matrix[0].tolist() == [0.25] * 4 + [0] * 6
    for agent in range(10):
        held = {(label - agent) % 10 for label in range(4)}
        assert set(np.flatnonzero(matrix[agent]).tolist()) == held
        assert set(matrix[agent][sorted(held)].tolist()) == {0.25}


def test_right_is_the_papers_text() -> None:
    """With direction "right" agent 1 of B holds labels 1 to 4 as in the paper's text, and Alice's row is the same."""
    right = share_matrix("B", 10, 10, "right")
    assert np.flatnonzero(right[0]).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(right[1]).tolist() == [1, 2, 3, 4]
    assert np.flatnonzero(share_matrix("C", 10, 10, "right")[1]).tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("kind", ["A", "B", "C"])
def test_directions_differ_by_the_agents_order(kind: str) -> None:
    """Agent i of one direction has the row of agent -i of the other."""
    left, right = share_matrix(kind, 10, 10), share_matrix(kind, 10, 10, "right")
    assert np.array_equal(left, right[-np.arange(10) % 10])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_sum_to_one(kind: str) -> None:
    """With ten agents every row and every column of the paper's share matrices sums to one."""
    matrix = share_matrix(kind, 10, 10)
    assert np.allclose(matrix.sum(axis=0), 1)
    assert np.allclose(matrix.sum(axis=1), 1)


def test_the_eleventh_agent_holds_what_the_first_holds() -> None:
    """The list has ten entries, so agent 10 has the row of agent 0."""
    matrix = share_matrix("C", 25, 10)
    assert matrix.shape == (25, 10)
    assert np.array_equal(matrix[10:20], matrix[:10])
    assert np.array_equal(matrix[20:], matrix[:5])


def test_star_has_the_shares_of_its_letter() -> None:
    """A star permutes labels and leaves the shares unchanged."""
    for kind in ("A", "B", "C"):
        assert np.array_equal(share_matrix(kind, 7, 10), share_matrix(f"{kind}*", 7, 10))


def test_a_fits_any_number_of_classes() -> None:
    """A distributes any number of classes evenly."""
    assert np.allclose(share_matrix("A", 3, 4), 0.25)


def test_hand_case() -> None:
    """With twenty samples per label, split C gives Alice 2, 4, 8, 4 and 2 of labels 3 to 7, in training and in test."""
    labels = balanced(20)
    made = split(labels, labels, "C")
    assert np.bincount(labels[made.train[0]], minlength=10).tolist() == [0, 0, 0, 2, 4, 8, 4, 2, 0, 0]
    assert np.bincount(labels[made.test[0]], minlength=10).tolist() == [0, 0, 0, 2, 4, 8, 4, 2, 0, 0]
    assert np.bincount(labels[made.train[1]], minlength=10).tolist() == [0, 0, 2, 4, 8, 4, 2, 0, 0, 0]
    assert [len(part) for part in made.train] == [20] * 10


def test_hand_case_of_divide() -> None:
    """Two agents with shares 1:3 and 0:1 of two labels get a quarter and three quarters, and none and all."""
    labels = np.array([0] * 8 + [1] * 4)
    a, b = divide(labels, np.array([[1.0, 0.0], [3.0, 4.0]]), np.random.default_rng(0))
    assert np.bincount(labels[a], minlength=2).tolist() == [2, 0]
    assert np.bincount(labels[b], minlength=2).tolist() == [6, 4]


def test_label_of_a_smaller_column_is_used_in_proportion() -> None:
    """Half of a label is used when its column sums to half of the largest one, so that rows keep their proportions."""
    labels = balanced(40, classes=2)
    (only,) = divide(labels, np.array([[2.0, 1.0]]), np.random.default_rng(0))
    assert np.bincount(labels[only]).tolist() == [40, 20]


# ---------------------------------------------------------------------------------------------------------- properties


@quick
@given(kind=kinds, agents=crowds, n=sizes, seed=numbers, direction=st.sampled_from(["left", "right"]))
def test_agents_are_disjoint_and_hold_their_labels(kind: str, agents: int, n: int, seed: int, direction: Any) -> None:
    """No sample belongs to two agents, and an agent holds only labels of its row."""
    train, test = labels_of(n, seed), labels_of(n // 2, seed + 1)
    made = split(train, test, kind, agents=agents, seed=seed, direction=direction)
    assert made.agents == agents == len(made.test) == len(made.validation) == len(made.relabel)
    for labels, parts in ((train, made.train), (test, made.test)):
        used = together(parts)
        assert used.dtype == np.int64
        assert len(np.unique(used)) == len(used)
        assert set(used.tolist()) <= set(range(len(labels)))
        for agent, part in enumerate(parts):
            assert set(labels[part].tolist()) <= set(np.flatnonzero(made.shares[agent]).tolist())


@quick
@given(kind=kinds, tens=st.integers(1, 2), n=sizes, seed=numbers)
def test_all_samples_are_used_where_columns_sum_equally(kind: str, tens: int, n: int, seed: int) -> None:
    """With ten or twenty agents every column has the same sum, and every sample belongs to an agent."""
    labels = labels_of(n, seed)
    made = split(labels, labels, kind, agents=10 * tens, seed=seed)
    assert sorted(together(made.train).tolist()) == list(range(n))
    assert sorted(together(made.test).tolist()) == list(range(n))


@quick
@given(agents=crowds, n=sizes, seed=numbers, classes=st.integers(1, 12))
def test_a_uses_all_samples_whatever_the_number_of_agents(agents: int, n: int, seed: int, classes: int) -> None:
    """A uses every sample, and the counts of two agents differ by at most one in any label."""
    labels = labels_of(n, seed, classes)
    made = split(labels, labels, "A", agents=agents, classes=classes, seed=seed)
    assert sorted(together(made.train).tolist()) == list(range(n))
    counts = np.stack([np.bincount(labels[part], minlength=classes) for part in made.train])
    assert (counts.max(axis=0) - counts.min(axis=0)).max() <= 1


@quick
@given(data=st.data(), agents=crowds, n=sizes, seed=numbers)
def test_counts_follow_the_shares(data: st.DataObject, agents: int, n: int, seed: int) -> None:
    """Each agent's count of each label is within one sample of its share, for any share matrix."""
    share = st.sampled_from([0.0, 0.0, 0.1, 0.25, 1.0, 3.0])
    rows = data.draw(st.lists(st.lists(share, min_size=4, max_size=4).filter(any), min_size=agents, max_size=agents))
    shares = np.array(rows)
    labels = labels_of(n, seed, 4)
    made = split(labels, labels, "A", agents=agents, classes=4, shares=rows, seed=seed)
    available = np.bincount(labels, minlength=4)
    requested = shares / shares.sum(axis=0).max() * available
    counts = np.stack([np.bincount(labels[part], minlength=4) for part in made.train])
    assert (np.abs(counts - requested) <= 1 + 1e-9).all()
    assert (counts[shares == 0] == 0).all()
    used = together(made.train)
    assert len(np.unique(used)) == len(used)


@quick
@given(kind=kinds, agents=crowds, n=sizes, seed=numbers, requested=st.integers(1, 60))
def test_samples_per_agent_is_exact_where_available(kind: str, agents: int, n: int, seed: int, requested: int) -> None:
    """An agent keeps exactly the requested number, or all it has, in its own proportions to within one sample."""
    labels = labels_of(n, seed)
    complete = split(labels, labels, kind, agents=agents, seed=seed)
    made = split(labels, labels, kind, agents=agents, seed=seed, samples_per_agent=requested)
    for all_of_it, part in zip(complete.train, made.train, strict=True):
        assert len(part) == min(requested, len(all_of_it))
        assert set(part.tolist()) <= set(all_of_it.tolist())
        before, after = (np.bincount(labels[rows], minlength=10) for rows in (all_of_it, part))
        assert (np.abs(after - before * len(part) / max(len(all_of_it), 1)) <= 1 + 1e-9).all()
    assert all(np.array_equal(a, b) for a, b in zip(complete.test, made.test, strict=True))


@quick
@given(
    kind=kinds,
    agents=crowds,
    n=sizes,
    seed=numbers,
    fraction=st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.99]),
    requested=st.sampled_from([0, 7]),
)
def test_validation_is_held_out_of_training(
    kind: str, agents: int, n: int, seed: int, fraction: float, requested: int
) -> None:
    """Validation takes its fraction in addition to the requested samples, or out of them if there are no more."""
    labels = labels_of(n, seed)
    complete = split(labels, labels, kind, agents=agents, seed=seed)
    without_validation = split(labels, labels, kind, agents=agents, seed=seed, samples_per_agent=requested)
    made = split(labels, labels, kind, agents=agents, seed=seed, samples_per_agent=requested, validation=fraction)
    parts = zip(complete.train, without_validation.train, made.train, made.validation, strict=True)
    for all_of_it, before, kept, held_out in parts:
        assert not set(kept.tolist()) & set(held_out.tolist())
        assert {*kept.tolist(), *held_out.tolist()} <= set(all_of_it.tolist())
        assert abs(len(held_out) - fraction * len(before)) <= 0.5
        if len(all_of_it) >= len(before) + len(held_out):
            assert kept.tolist() == before.tolist()
        else:
            assert sorted([*kept.tolist(), *held_out.tolist()]) == sorted(before.tolist())


def test_sizes_scale_the_rows() -> None:
    """Sizes 2:1, repeated over four agents, give two of them twice the samples in the same label proportions."""
    labels = balanced(60)
    made = split(labels, labels, "A", agents=4, sizes=(2, 1))
    assert [np.bincount(labels[part]).tolist() for part in made.train] == [[20] * 10, [10] * 10] * 2


@pytest.mark.parametrize("sizes", [(0.0, 1.0), (-1.0,), (float("nan"),), (float("inf"),)])
def test_bad_sizes_are_refused(sizes: tuple[float, ...]) -> None:
    """A size is a number above 0."""
    assert "above 0" in refusal(split, balanced(10), balanced(10), "A", sizes=sizes)


@quick
@given(kind=kinds, agents=crowds, n=sizes, seed=numbers, test=st.sampled_from(["share", "all"]))
def test_split_is_a_pure_function(kind: str, agents: int, n: int, seed: int, test: Any) -> None:
    """The same labels and seeds give the same partition, without changing the labels or a global generator."""
    labels = labels_of(n, seed)
    before, state = labels.copy(), np.random.get_state()[1].copy()
    options: Any = {"agents": agents, "seed": seed, "test": test, "validation": 0.1, "samples_per_agent": 20}
    first = split(labels, labels, kind, **options)
    np.random.default_rng(seed).random(7)
    assert same(first, split(labels, labels, kind, **options))
    assert np.array_equal(labels, before)
    assert np.array_equal(np.random.get_state()[1], state)


@quick
@given(kind=kinds, agents=crowds, n=st.integers(0, 12), seed=numbers, requested=st.integers(0, 3))
def test_tiny_partitions_are_fast(kind: str, agents: int, n: int, seed: int, requested: int) -> None:
    """A dozen samples or none are divided among up to 25 agents without a hang and without losing a sample."""
    labels = labels_of(n, seed)
    for test in ("share", "all"):
        made = split(labels, labels, kind, agents=agents, seed=seed, samples_per_agent=requested, test=test)
        assert made.agents == agents
        assert len(together(made.train)) <= n
        assert all(part.dtype == np.int64 for part in (*made.train, *made.validation, *made.test))


@quick
@given(kind=kinds, agents=crowds, n=sizes, seed=numbers)
def test_test_all_gives_everything_the_distribution_allows(kind: str, agents: int, n: int, seed: int) -> None:
    """With test="all" an agent gets all of its commonest label, the others in proportion; training is unchanged."""
    labels, test = labels_of(n, seed), labels_of(n, seed + 1)
    made = split(labels, test, kind, agents=agents, seed=seed, test="all")
    available = np.bincount(test, minlength=10)
    for row, part in zip(made.shares, made.test, strict=True):
        assert len(np.unique(part)) == len(part)
        counts = np.bincount(test[part], minlength=10)
        assert np.array_equal(counts, np.round(row / row.max() * available))
    shared = split(labels, test, kind, agents=agents, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(shared.train, made.train, strict=True))
    if kind[0] == "A":
        assert all(len(part) == n for part in made.test)


def test_all_allowed_by_hand() -> None:
    """With ten test samples per label, C allows Alice 2.5, 5, 10, 5 and 2.5 of the labels 3 to 7, rounded."""
    labels = balanced(10)
    alice = all_allowed(labels, share_matrix("C", 10, 10), np.random.default_rng(0))[0]
    assert np.bincount(labels[alice], minlength=10).tolist() == [0, 0, 0, 2, 5, 10, 5, 2, 0, 0]


def test_another_seed_gives_another_split() -> None:
    """The seed determines the samples but not their number."""
    labels = balanced(50)
    a, b = split(labels, labels, "B", seed=1), split(labels, labels, "B", seed=2)
    assert not np.array_equal(np.sort(a.train[0]), np.sort(b.train[0]))
    assert [len(part) for part in a.train] == [len(part) for part in b.train]


def test_scale_of_the_shares_does_not_matter() -> None:
    """Shares in percent give the same split as shares of one."""
    labels = balanced(30)
    shares = share_matrix("C", 10, 10)
    a = split(labels, labels, "A", shares=shares.tolist())
    b = split(labels, labels, "A", shares=(shares * 128).tolist())
    assert all(np.array_equal(x, y) for x, y in zip(a.train, b.train, strict=True))


# ------------------------------------------------------------------------------------------------------- concept shift


@quick
@given(agents=crowds, classes=st.integers(1, 12), seed=numbers, shared=st.booleans(), data=st.data())
def test_concept_shift_is_a_permutation_for_all_but_alice(
    agents: int, classes: int, seed: int, shared: bool, data: st.DataObject
) -> None:
    """Every row is a permutation of the classes, Alice's is the identity, and the rows are fixed by their seed."""
    alice = data.draw(st.integers(0, agents - 1))
    rows = concept_shift(agents, classes, alice, seed, shared)
    assert rows.shape == (agents, classes)
    assert (np.sort(rows, axis=1) == np.arange(classes)).all()
    assert rows[alice].tolist() == list(range(classes))
    assert np.array_equal(rows, concept_shift(agents, classes, alice, seed, shared))
    if shared:
        assert len({tuple(row) for i, row in enumerate(rows.tolist()) if i != alice}) <= 1


def test_permutations_do_not_depend_on_the_other_agents() -> None:
    """Agents have different permutations, which do not depend on the number of agents or on Alice."""
    rows = concept_shift(10, 10, 0, seed=0)
    assert len({tuple(row) for row in rows.tolist()}) == 10
    assert np.array_equal(concept_shift(25, 10, 0, seed=0)[:10], rows)
    assert np.array_equal(concept_shift(10, 10, 3, seed=0)[4:], rows[4:])


def test_shared_permutation_is_one_for_all_others() -> None:
    """With the shared option all agents but Alice have the same permutation, which differs from hers."""
    rows = concept_shift(10, 10, 4, seed=0, shared=True)
    others = {tuple(row) for i, row in enumerate(rows.tolist()) if i != 4}
    assert len(others) == 1
    assert others != {tuple(range(10))}


@pytest.mark.parametrize("kind", ["A*", "B*", "C*"])
def test_star_shifts_all_but_alice(kind: str) -> None:
    """A star relabels the other agents' samples; without it no label changes, and the samples are the same."""
    labels = balanced(20)
    plain, shifted = split(labels, labels, kind[0], alice=2), split(labels, labels, kind, alice=2)
    assert (plain.relabel == np.arange(10)).all()
    assert np.array_equal(shifted.relabel, concept_shift(10, 10, 2, 0))
    assert all(np.array_equal(a, b) for a, b in zip(plain.train, shifted.train, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(plain.test, shifted.test, strict=True))


def test_permutations_have_a_seed_of_their_own() -> None:
    """The split's seed does not change the permutations, and their seed does not change the split."""
    labels = balanced(20)
    a = split(labels, labels, "B*", seed=1, permutation_seed=5)
    b = split(labels, labels, "B*", seed=2, permutation_seed=5)
    c = split(labels, labels, "B*", seed=1, permutation_seed=6)
    assert np.array_equal(a.relabel, b.relabel)
    assert not np.array_equal(a.relabel, c.relabel)
    assert all(np.array_equal(x, y) for x, y in zip(a.train, c.train, strict=True))
    shared = split(labels, labels, "B*", seed=1, permutation_seed=5, shared_permutation=True)
    assert len({tuple(row) for row in shared.relabel[1:].tolist()}) == 1


def test_federation_reads_labels_through_the_permutation() -> None:
    """In a federation Alice's labels, in training and in test, are those of the data; another agent's are permuted."""
    digits = data.load("digits")
    partition = split(digits.y_train, digits.y_test, "A*", alice=1)
    made = build(digits, partition, alice=1)
    assert np.array_equal(made.labels(1, made.train[1]).numpy(), digits.y_train[partition.train[1]])
    assert np.array_equal(made.labels(1, made.test[1]).numpy(), digits.y_test[partition.test[1]])
    others = made.labels(5, made.train[5]).numpy()
    assert np.array_equal(others, partition.relabel[5][digits.y_train[partition.train[5]]])
    assert not np.array_equal(others, digits.y_train[partition.train[5]])


# -------------------------------------------------------------------------------------------- custom shares and errors


def test_given_shares_replace_the_split() -> None:
    """A given share matrix is used unchanged, also with the star of a split."""
    labels = balanced(12, classes=3)
    shares = [[1, 0, 0], [0, 1, 1]]
    made = split(labels, labels, "B*", agents=2, classes=3, shares=shares)
    assert made.shares.tolist() == shares
    assert set(labels[made.train[0]].tolist()) == {0}
    assert set(labels[made.train[1]].tolist()) == {1, 2}
    assert sorted(together(made.train).tolist()) == list(range(36))
    assert made.relabel[0].tolist() == [0, 1, 2]
    assert np.array_equal(made.relabel, concept_shift(2, 3, 0, 0))


def test_label_without_shares_is_left_out() -> None:
    """No agent gets a label whose column is zero."""
    labels = balanced(12, classes=3)
    made = split(labels, labels, "A", agents=2, classes=3, shares=[[1, 0, 1], [1, 0, 1]])
    assert set(labels[together(made.train)].tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([[1, 1, 1]], ("2 agents x 3 labels", "(1, 3)")),
        ([[1, 1], [1, 1]], ("2 agents x 3 labels", "(2, 2)")),
        ([1, 1, 1], ("2 agents x 3 labels", "(3,)")),
        ([[1, 1, -1], [1, 1, 1]], ("not negative",)),
        ([[1, 1, float("nan")], [1, 1, 1]], ("finite",)),
        ([[1, 1, float("inf")], [1, 1, 1]], ("finite",)),
        ([[1, 1, 1], [0, 0, 0]], ("agent 1", "no share")),
    ],
)
def test_wrong_shares_are_refused(shares: Any, words: tuple[str, ...]) -> None:
    """A share matrix with a wrong shape or an invalid share is rejected with the reason."""
    labels = balanced(4, classes=3)
    text = refusal(split, labels, labels, "A", agents=2, classes=3, shares=shares)
    assert all(word in text for word in words)


@pytest.mark.parametrize("shares", [[[1, 2, 3], [1]], [["many", "few", "none"], ["a", "b", "c"]]])
def test_shares_that_are_no_matrix_are_refused(shares: Any) -> None:
    """Rows of different lengths, and words, are refused as shares."""
    labels = balanced(4, classes=3)
    assert "share" in refusal(split, labels, labels, "A", agents=2, classes=3, shares=shares)


def test_ragged_shares_of_an_experiment_are_refused() -> None:
    """Rows of different lengths in the settings are rejected before the run."""
    ragged = Settings(data="digits", agents=2, shares=((1.0, 2.0), (1.0,)))
    assert "share" in refusal(federation_of, ragged)


def test_huge_shares_are_divided_or_refused() -> None:
    """Finite shares whose sum overflows are refused, or divided like small ones."""
    labels = balanced(4, classes=2)
    shares = [[1e308, 1e308], [1e308, 1e308]]
    try:
        made = split(labels, labels, "A", agents=2, classes=2, shares=shares)
        sizes_of = [len(part) for part in made.train]
    except WaffleError:
        sizes_of = [4, 4]
    assert sizes_of == [4, 4]


def test_check_shares_returns_what_it_checked() -> None:
    """A valid share matrix is returned unchanged."""
    shares = np.array([[0.5, 0.5], [1.0, 0.0]])
    assert check_shares(shares, 2, 2) is shares


@pytest.mark.parametrize("kind", ["D", "", "a", "C**", "*", "BC"])
def test_unknown_split_is_refused(kind: str) -> None:
    """An unknown split is refused with its name and the known ones, or the nearest."""
    text = refusal(share_matrix, kind, 10, 10)
    assert f"unknown split {kind!r}" in text
    assert "choose one of A, B, C" in text or "did you mean" in text


@pytest.mark.parametrize("kind", ["B", "C", "B*"])
def test_splits_of_ten_labels_need_ten_classes(kind: str) -> None:
    """B and C are rejected for another number of classes, with both numbers and an alternative."""
    text = refusal(share_matrix, kind, 10, 7)
    assert "10 classes" in text
    assert "has 7" in text
    assert "share matrix" in text


# -------------------------------------------------------------------------------------------------------- real sizes

SIZES = {
    "A": (set(range(10)), 6020, 996),
    "B": ({0, 1, 2, 3}, 6200, 1038),
    "C": ({3, 4, 5, 6, 7}, 5760, 946),
}


@pytest.fixture(scope="module")
def mnist(published: Path) -> data.Dataset:
    if not (published / "mnist").is_dir():
        pytest.skip(f"{published} has no folder mnist")
    return data.load("mnist", str(published))


@pytest.mark.data
@pytest.mark.parametrize("kind", ["A", "B", "C"])
def test_alice_on_mnist_has_the_papers_sizes(mnist: data.Dataset, kind: str) -> None:
    """On MNIST Alice has about 6,000 training and 1,000 test images of her split's labels, as in the authors' code."""
    made = split(mnist.y_train, mnist.y_test, kind)
    labels, train, test = SIZES[kind]
    assert set(mnist.y_train[made.train[0]].tolist()) == labels
    assert set(mnist.y_test[made.test[0]].tolist()) == labels
    assert abs(len(made.train[0]) - train) <= 0.02 * train
    assert abs(len(made.test[0]) - test) <= 10
    assert len(together(made.train)) == 60000
    assert len(together(made.test)) == 10000
    fewer = split(mnist.y_train, mnist.y_test, kind, samples_per_agent=2500)
    assert [len(part) for part in fewer.train] == [2500] * 10


@pytest.mark.data
def test_all_test_images_of_alice_on_mnist(mnist: data.Dataset) -> None:
    """With test="all" Alice is tested on all 10,000 images in A and on every image of labels 0 to 3 in B."""
    everything = split(mnist.y_train, mnist.y_test, "A", test="all")
    assert len(everything.test[0]) == 10000
    four = split(mnist.y_train, mnist.y_test, "B", test="all")
    assert sorted(four.test[0].tolist()) == np.flatnonzero(mnist.y_test < 4).tolist()


@pytest.mark.parametrize(("seed", "agreed"), [(0, (0.35, 0.62)), (1, (0.08, 0.19)), (3, (0.17, 0.44))])
def test_a_vote_of_the_permuted_agents(seed: int, agreed: tuple[float, float]) -> None:
    """The share of Alice's labels on which the plurality of agents agrees with her, on A* and on B*."""
    permutations = concept_shift(10, 10, alice=0, seed=seed)

    def agreement(kind: str) -> float:
        shares = share_matrix(kind, 10, 10, "left")
        votes = np.zeros((10, 10))  # true label x voted label
        for agent, permuted in enumerate(permutations):
            votes[np.arange(10), permuted] += shares[agent]
        winners = np.isclose(votes, votes.max(axis=1, keepdims=True))
        return float((shares[0] * np.diag(winners) / winners.sum(axis=1)).sum() / shares[0].sum())

    assert [round(agreement(kind), 2) for kind in ("A", "B")] == list(agreed)


# ---------------------------------------------------------------------------------------------------- shifts and splits


@quick
@given(kind=kinds, agents=crowds, n=sizes, seed=numbers)
def test_other_shifts_keep_the_split(kind: str, agents: int, n: int, seed: int) -> None:
    """An empty shift, feature shifts and drift leave every agent's samples unchanged."""
    train, test = labels_of(n, seed), labels_of(n // 2, seed + 1)
    plain = split(train, test, kind, agents=agents, seed=seed)
    if agents > 1:
        shift = "noise(1) + drift(sudden, 0.5)"
        assert same(plain, split(train, test, kind, agents=agents, seed=seed, shift=shift))
    assert same(plain, split(train, test, kind, agents=agents, seed=seed, shift=""))


@quick
@given(kind=kinds, agents=st.integers(2, 12), extra=st.integers(0, 300), seed=numbers, alpha=st.floats(0.001, 10))
def test_skewed_split_is_disjoint_and_leaves_no_agent_empty(
    kind: str, agents: int, extra: int, seed: int, alpha: float
) -> None:
    """With at least as many samples as agents, a Dirichlet skew of any split is disjoint and leaves no agent empty."""
    train, test = labels_of(agents + extra, seed), labels_of(50, seed + 1)
    made = split(train, test, kind, agents=agents, seed=seed, shift=f"dirichlet({alpha}) + quantity(2)")
    used = together(made.train)
    assert len(np.unique(used)) == len(used)
    assert all(len(part) for part in made.train)
    again = split(train, test, kind, agents=agents, seed=seed, shift=f"dirichlet({alpha}) + quantity(2)")
    assert same(made, again)
