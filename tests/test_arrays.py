"""Federations from arrays: accepted forms, and errors of one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import refusal
from data_support import result_or_message
from waffle_fl import data
from waffle_fl.algorithms import ALGORITHMS, SGD
from waffle_fl.config import RunConfig, Settings
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment import advice
from waffle_fl.federation import Federation, build, index_of
from waffle_fl.models import FlatModel, mlp
from waffle_fl.partition import split

# ------------------------------------------------------------------------------------------------------ from_arrays

Arrays = tuple[Any, Any, Any, Any]


def agent(seed: int, train: int = 12, test: int = 6, classes: int = 3, features: int = 4) -> Arrays:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((train + test, features)).astype(np.float32)
    y = np.arange(train + test) % classes
    return x[:train], y[:train], x[train:], y[train:]


def federation(**agents: Arrays) -> Federation:
    return Federation.from_arrays(agents)


def trained(made: Federation, rounds: int = 3, batch_size: int = 64) -> list[dict[str, Any]]:
    """Return the measurements of a few rounds of WAFFLE on the federation."""
    shape, classes = made.shape, len(made.class_names)
    model = FlatModel(lambda: mlp(shape, classes, hidden=4))
    spec = RunSpec(ALGORITHMS["waffle-paper"](sgd=SGD(0.1)), made, 1)
    stream = simulate([spec], model, rounds=rounds, batch_size=batch_size, workers=1)
    return [outcomes[0].measured for outcomes in stream]


def test_from_arrays_keeps_all_samples() -> None:
    """Each agent's rows index exactly its samples and labels."""
    a, b = agent(1), agent(2, train=5)
    made = federation(alice=a, bob=b)
    assert made.names == ("alice", "bob")
    assert made.samples.tolist() == [12, 5]
    assert made.shape == (4,)
    assert made.class_names == ("0", "1", "2")
    for i, (x, y, x_test, y_test) in enumerate((a, b)):
        assert np.array_equal(made.x[made.train[i]].numpy(), x)
        assert np.array_equal(made.labels(i, made.train[i]).numpy(), y)
        assert np.array_equal(made.x[made.test[i]].numpy(), x_test)
        assert np.array_equal(made.labels(i, made.test[i]).numpy(), y_test)
    assert made.label_counts().tolist() == [[4, 4, 4], [2, 2, 1]]


def test_from_arrays_takes_lists_tensors_and_pairs() -> None:
    """Lists, tensors and a sequence of pairs make the same federation as arrays in a mapping."""
    x, y, x_test, y_test = agent(1)
    plain = federation(a=(x, y, x_test, y_test))
    tensors = Federation.from_arrays([("a", tuple(map(torch.from_numpy, (x, y, x_test, y_test))))])
    lists = federation(a=(x.astype(float).tolist(), y.tolist(), x_test.astype(float).tolist(), y_test.tolist()))
    assert plain.digest() == tensors.digest() == lists.digest()


def test_digest_sees_every_change() -> None:
    """Another sample, another label or another name gives another digest."""
    x, y, x_test, y_test = agent(1)
    base = federation(a=(x, y, x_test, y_test)).digest()
    assert federation(a=(x, y, x_test, y_test)).digest() == base
    other = x.copy()
    other[3, 2] += 1
    assert federation(a=(other, y, x_test, y_test)).digest() != base
    assert federation(a=(x, np.roll(y, 1), x_test, y_test)).digest() != base
    assert federation(b=(x, y, x_test, y_test)).digest() != base


def test_only_keeps_one_agent() -> None:
    """`only` keeps one agent's samples and id, and makes it Alice."""
    made = federation(alice=agent(1), bob=agent(2)).only(1)
    assert made.names == ("bob",)
    assert made.ids == (1,)
    assert made.alice == 0
    assert np.array_equal(made.x[made.train[0]].numpy(), agent(2)[0])


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint8, np.uint16, np.uint64])
def test_labels_of_every_integer_type_are_taken(kind: type) -> None:
    """Labels may be of any integer type, MNIST's unsigned bytes among them."""
    x, y, x_test, y_test = agent(1)
    made = federation(a=(x, y.astype(kind), x_test, y_test.astype(kind)))
    assert made.y.dtype == torch.int64
    assert made.y.tolist() == [*y.tolist(), *y_test.tolist()]


@pytest.mark.parametrize(("part", "word"), [(1, "training"), (3, "test")])
def test_negative_label_is_refused(part: int, word: str) -> None:
    """D5: a negative label is refused with the agent, the label and its first index."""
    arrays = [a.copy() for a in agent(2)]
    arrays[part][3] = arrays[part][5] = -7
    text = refusal(federation, alice=agent(1), bob=tuple(arrays))
    assert text == f"bob: expected labels >= 0, got -7 at {word} index 3"


def test_label_beyond_the_classes_is_refused() -> None:
    """D5: a label beyond the class names is refused with both numbers."""
    x, y, x_test, y_test = agent(2)
    y = y.copy()
    y[4] = 9
    agents = {"alice": agent(1), "bob": (x, y, x_test, y_test)}
    text = refusal(Federation.from_arrays, agents, class_names=("a", "b", "c"))
    assert "below 3" in text
    assert "got 9" in text


def test_label_beyond_the_classes_is_refused_with_agent_and_index() -> None:
    """D5: a label beyond the class names is refused with the agent and the index that hold it."""
    x, y, x_test, y_test = agent(2)
    y = y.copy()
    y[4] = 9
    agents = {"alice": agent(1), "bob": (x, y, x_test, y_test)}
    text = refusal(Federation.from_arrays, agents, class_names=("a", "b", "c"))
    assert "bob" in text
    assert "index 4" in text


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.bool_, np.complex64, np.str_, object])
def test_labels_that_are_no_integers_are_refused(kind: type) -> None:
    """D5: labels of any type but integers are refused with the agent and the type."""
    x, y, x_test, y_test = agent(2)
    text = refusal(federation, alice=agent(1), bob=(x, y.astype(kind), x_test, y_test))
    assert text == f"bob: expected integer labels, the training labels are {y.astype(kind).dtype}"


def test_labels_with_two_axes_are_refused() -> None:
    """D5: one-hot labels, which have an axis too many, are refused with the agent."""
    x, y, x_test, y_test = agent(2)
    one_hot = np.eye(3, dtype=np.int64)
    assert "bob" in refusal(federation, alice=agent(1), bob=(x, one_hot[y], x_test, one_hot[y_test]))


def test_more_samples_than_labels_are_refused() -> None:
    """D2: an agent with more samples than labels is refused with both counts."""
    x, y, x_test, y_test = agent(2)
    assert refusal(federation, bob=(x, y[:-1], x_test, y_test)) == "bob: 12 training samples but 11 labels"
    assert refusal(federation, bob=(x, y, x_test[:2], y_test)) == "bob: 2 test samples but 6 labels"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("part", "word"), [(0, "training"), (2, "test")])
def test_features_that_are_not_finite_are_refused(value: float, part: int, word: str) -> None:
    """D6: NaN and infinity are refused with the agent, their count in samples and the first index."""
    arrays = [a.copy() for a in agent(2)]
    arrays[part][4, 1] = arrays[part][4, 2] = arrays[part][5, 0] = value
    text = refusal(federation, alice=agent(1), bob=tuple(arrays))
    assert text.startswith(f"bob: 2 {word} samples hold NaN or infinity, the first at index 4")


def test_features_that_overflow_single_precision_are_refused() -> None:
    """D6: a finite double that becomes infinite in single precision is rejected or kept finite."""
    x, y, x_test, y_test = agent(2)
    x = x.astype(np.float64)
    x[4, 1] = 1e39
    made = result_or_message(federation, bob=(x, y, x_test.astype(np.float64), y_test))
    assert "index 4" in made if isinstance(made, str) else bool(made.x.isfinite().all())


@pytest.mark.parametrize("kind", [np.complex64, np.str_, object, np.bool_])
def test_features_that_are_no_numbers_are_refused(kind: type) -> None:
    """D12: features that are not real numbers are rejected with the agent and the type."""
    x, y, x_test, y_test = agent(2)
    text = refusal(federation, bob=(x.astype(kind), y, x_test, y_test))
    assert text == f"bob: expected numeric features, the training features are {x.astype(kind).dtype}"


@pytest.mark.parametrize(
    "arrays",
    [
        pytest.param(([[1.0, 2.0], [3.0]], [0, 1], [[4.0, 5.0]], [0]), id="ragged"),
        pytest.param(([[1.0, 2.0], [3.0, 4.0]], [0, 1], [[4.0, 5.0]]), id="three arrays"),
        pytest.param((1.0, 0, 2.0, 1), id="scalars"),
        pytest.param((None, None, None, None), id="nothing"),
    ],
)
def test_unusable_arrays_are_refused(arrays: Any) -> None:
    """Arguments that are not four arrays of matching lengths are rejected with the agent."""
    assert "bob" in refusal(federation, bob=arrays)


def test_alice_without_training_samples_is_refused() -> None:
    """D7: an Alice without training samples is refused by name."""
    text = refusal(federation, alice=agent(1, train=0), bob=agent(2))
    assert "Alice (alice) has no training samples" in text


def test_another_agent_without_samples_is_kept_at_weight_zero() -> None:
    """D7: another agent without samples is kept with a warning, and has weight 0 in every round."""
    made = federation(alice=agent(1), bob=agent(2, train=0), carol=agent(3))
    assert made.samples.tolist() == [12, 0, 12]
    notes = advice(RunConfig(method="waffle-paper", settings=Settings()), made)
    assert [note for note in notes if "bob" in note] == ["bob without training samples: weight 0 throughout"]
    for measured in trained(made):
        assert measured["weights"][1] == 0
        assert sum(measured["weights"]) == pytest.approx(1)
        assert measured["loss"] is not None


def test_agent_of_a_single_class_is_kept() -> None:
    """D9: an agent with a single class is kept, and its measurements are finite."""
    x, _, x_test, _ = agent(2)
    made = federation(alice=(x, np.full(12, 2), x_test, np.full(6, 2)), bob=agent(1))
    assert made.label_counts().tolist() == [[0, 0, 12], [4, 4, 4]]
    for measured in trained(made):
        assert np.isfinite(measured["loss"])
        assert 0 <= measured["accuracy"] <= 1


def test_alice_without_test_samples_is_refused() -> None:
    """D10: an Alice without test samples is refused by name; another agent needs none."""
    text = refusal(federation, alice=agent(1, test=0), bob=agent(2))
    assert "Alice (alice) has no test samples" in text
    assert federation(alice=agent(1), bob=agent(2, test=0)).agents == 2


def test_overlap_of_training_and_test_is_refused() -> None:
    """D11: training samples among an agent's test samples are refused with their count and first index."""
    x, y, x_test, y_test = agent(2)
    x_test, y_test = x_test.copy(), y_test.copy()
    x_test[3], y_test[3] = x[7], y[7]
    x_test[5], y_test[5] = x[0], y[0]
    agents = {"alice": agent(1), "bob": (x, y, x_test, y_test)}
    text = refusal(Federation.from_arrays, agents)
    assert text.startswith("bob: 2 test samples are also training data of bob, the first at index 3")
    assert Federation.from_arrays(agents, duplicates="keep").agents == 2


def test_overlap_is_found_whatever_the_type_of_the_labels() -> None:
    """D11: the overlap is found when training and test labels have different integer types."""
    x, y, _, _ = agent(2)
    assert "also training data of bob" in refusal(federation, bob=(x, y.astype(np.int64), x, y.astype(np.int32)))


def test_test_sample_that_another_agent_trains_on_is_refused() -> None:
    """D11: Alice's test samples among the training samples of another agent are refused with both names."""
    a, b = agent(1), agent(2)
    leaked = (np.concatenate([b[0], a[2]]), np.concatenate([b[1], a[3]]), b[2], b[3])
    text = refusal(federation, alice=a, bob=leaked)
    assert "alice" in text
    assert "bob" in text


def test_data_counted_twice_is_refused() -> None:
    """D11: two agents with the same training data, in any order, are rejected with both names."""
    x, y, x_test, y_test = agent(1)
    turned = (x[::-1], y[::-1], x_test, y_test)
    text = refusal(federation, alice=agent(3), bob=(x, y, x_test, y_test), carol=turned)
    assert text == "carol and bob hold the same training data: remove one of them, or set --duplicates keep"


@pytest.mark.parametrize(
    ("features", "kind", "named"), [(5, np.float32, "(5,)"), (4, np.float64, "float64"), (4, np.uint8, "uint8")]
)
def test_agents_of_another_kind_are_refused(features: int, kind: type, named: str) -> None:
    """D12: an agent with other features or another type is refused with both kinds and both names."""
    x, y, x_test, y_test = agent(2, features=features)
    text = refusal(federation, alice=agent(1), bob=(x.astype(kind), y, x_test.astype(kind), y_test))
    assert "alice has float32 (4,)" in text
    assert "bob has" in text
    assert named in text


def test_other_channels_are_refused() -> None:
    """D12: images with another number of channels are refused with both shapes, in test data too."""
    rng = np.random.default_rng(0)
    grey, colour = rng.random((6, 1, 8, 8)), rng.random((6, 3, 8, 8))
    y = np.arange(6) % 2
    text = refusal(federation, alice=(grey[:4], y[:4], grey[4:], y[4:]), bob=(colour[:4], y[:4], colour[4:], y[4:]))
    assert "(1, 8, 8)" in text
    assert "(3, 8, 8)" in text
    assert "(3, 8, 8)" in refusal(federation, alice=(grey[:4], y[:4], colour[4:], y[4:]))


def test_identical_agents_have_defined_weights() -> None:
    """D14: agents with identical data, at distance 0, get finite weights that sum to 1."""
    same = agent(1)
    made = Federation.from_arrays({"alice": same, "bob": same, "carol": same}, duplicates="keep")
    for measured in trained(made, rounds=4):
        assert np.isfinite(measured["weights"]).all()
        assert sum(measured["weights"]) == pytest.approx(1)
        assert np.isfinite(measured["loss"])


def test_no_agents_and_doubled_names_are_refused() -> None:
    """C12: an empty federation and two agents of one name are rejected."""
    assert "at least one agent" in refusal(Federation.from_arrays, {})
    assert "'bob'" in refusal(Federation.from_arrays, [("bob", agent(1)), ("bob", agent(2))])


@pytest.mark.parametrize("alice", [2, -1, "2", "-1", "zoe", "", "²", "9" * 5000])
def test_unknown_alice_is_refused(alice: int | str) -> None:
    """C3: an Alice out of range or unknown is refused with the names or the range."""
    text = refusal(index_of, alice, ("ann", "bob"))
    assert "ann, bob" in text or "between 0 and 1" in text


def test_alice_is_found_by_name_or_number() -> None:
    """Alice is given by name, by number, or by number as text; a name takes precedence."""
    assert index_of("bob", ("ann", "bob")) == 1
    assert index_of(1, ("ann", "bob")) == 1
    assert index_of("1", ("ann", "bob")) == 1
    assert index_of("1", ("1", "0")) == 0
    made = Federation.from_arrays({"ann": agent(1), "bob": agent(2)}, alice="bob")
    assert made.alice == 1


def test_build_offsets_the_test_rows_and_refuses_shared_samples() -> None:
    """Test rows index behind the training rows of the pool, and a training sample of two agents is rejected."""
    digits = data.load("digits")
    partition = split(digits.y_train, digits.y_test, "B*", seed=1)
    made = build(digits, partition)
    assert made.names[3] == "agent 3"
    assert np.array_equal(made.x[made.test[2]].numpy(), digits.x_test[partition.test[2]])
    assert np.array_equal(made.y[made.test[2]].numpy(), digits.y_test[partition.test[2]])
    expected = partition.relabel[2][digits.y_train[partition.train[2]]]
    assert np.array_equal(made.labels(2, made.train[2]).numpy(), expected)
    doubled = replace(partition, train=(partition.train[0],) * 10)
    assert "two agents" in refusal(build, digits, doubled)
    empty = np.empty(0, np.int64)
    assert "no test samples" in refusal(build, digits, replace(partition, test=(empty,) * 10))
