"""Confidence intervals against closed forms, metrics against `measure`, and the coverage and error rate of verdicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from waffle_fl.decision.bootstrap import Hint, Interval, Metric, _areas, estimate, figures, gain, metrics_of
from waffle_fl.metrics import measure

binom = pytest.importorskip("scipy.stats").binom


def scores_of(right: np.ndarray) -> np.ndarray:
    """Scores of two classes that are correct, for targets of class 1, where `right` is true."""
    return np.stack([~right, right], axis=1).astype(np.float64)


def random_case(seed: int, samples: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((samples, classes)), np.append(np.arange(classes), rng.integers(0, classes, samples))[
        :samples
    ]


@settings(max_examples=30)
@given(st.integers(5, 120), st.data())
def test_an_accuracy_has_the_interval_of_a_binomial_share(n: int, data: st.DataObject) -> None:
    """With one success and one failure added, resamples are binomial with n + 2 and (k + 1) / (n + 2)."""
    k = data.draw(st.integers(0, n))
    found = estimate("accuracy", {1: scores_of(np.arange(n) < k)}, np.ones(n, dtype=np.int64))
    law = binom(n + 2, (k + 1) / (n + 2))
    assert found.value == pytest.approx(k / n)
    assert found.low == pytest.approx(min(law.ppf(0.025) / (n + 2), k / n), abs=1.5 / (n + 2))
    assert found.high == pytest.approx(max(law.ppf(0.975) / (n + 2), k / n), abs=1.5 / (n + 2))


@settings(max_examples=30)
@given(st.integers(6, 60), st.integers(2, 4), st.integers(0, 10**6))
def test_a_value_is_the_metric_and_lies_in_its_interval(samples: int, classes: int, seed: int) -> None:
    """The value is that of `measure`, averaged over seeds, and lies in its interval."""
    output, target = random_case(seed, samples, classes)
    other = random_case(seed + 1, samples, classes)[0]
    for metric in metrics_of(target, classes):
        singles = [measure(torch.tensor(o), torch.tensor(target))[metric] for o in (output, other)]
        assert figures(metric, {1: output, 2: other}, target) == pytest.approx({1: singles[0], 2: singles[1]})
        found = estimate(metric, {1: output, 2: other}, target)
        assert found.value == pytest.approx(sum(singles) / 2)
        assert 0 <= found.low <= found.value <= found.high <= 1
        change = gain(metric, {1: output}, {1: other}, target)
        assert change.value == pytest.approx(singles[0] - singles[1])
        assert -1 <= change.low <= change.value <= change.high <= 1


@settings(max_examples=30)
@given(st.integers(4, 20), st.integers(0, 10**6))
def test_auc_with_counts_is_auc_of_repeated_samples(samples: int, seed: int) -> None:
    """Counting a sample twice gives the AUC of repeating it, also with ties."""
    rng = np.random.default_rng(seed)
    score, positive = rng.integers(0, 5, samples).astype(np.float64), np.arange(samples) % 2 == 0
    counts = np.maximum(rng.integers(0, 3, samples), np.arange(samples) < 2)
    s, p = np.repeat(score, counts), np.repeat(positive, counts)
    expected = measure(torch.tensor(np.stack([-s, s], 1)), torch.tensor(p.astype(np.int64)))["auc"]
    assert _areas(score, positive, counts[None].astype(np.float64))[0] == pytest.approx(expected)


@pytest.mark.parametrize(("wins", "clear"), [(0, False), (4, False), (5, False), (7, True)])
def test_few_wins_are_not_significant(wins: int, clear: bool) -> None:
    """Of 46 samples, 4 or 5 wins without a loss are not significant (sign test: 1/8, 1/16); 7 are (1/64)."""
    alone = np.arange(46) >= wins
    found = gain(
        "accuracy", {1: scores_of(np.ones(46, dtype=bool))}, {1: scores_of(alone)}, np.ones(46, dtype=np.int64)
    )
    assert found.value == pytest.approx(wins / 46)
    assert (found.sign == 1) == clear


def test_swapping_methods_flips_the_sign() -> None:
    """Swapping the two methods flips the sign of the gain."""
    right, wrong = scores_of(np.arange(80) < 70), scores_of(np.arange(80) < 40)
    target = np.ones(80, dtype=np.int64)
    ours, theirs = gain("accuracy", {1: right}, {1: wrong}, target), gain("accuracy", {1: wrong}, {1: right}, target)
    assert ours.value == -theirs.value == pytest.approx(30 / 80)
    assert (ours.sign, theirs.sign) == (1, -1)


def test_constant_errors_have_an_interval_of_zero_width() -> None:
    """Constant errors of 3 and 4 give RMSE 3 and 4 in every resample, and a gain of 1."""
    target = np.linspace(0, 1, 30).astype(np.float32)
    small, large = (target.astype(np.float64) + 3)[:, None], (target.astype(np.float64) - 4)[:, None]
    assert metrics_of(target, 1) == ["rmse"]
    assert estimate("rmse", {1: small}, target) == pytest.approx((3, 3, 3), abs=1e-6)
    assert gain("rmse", {1: small}, {1: large}, target) == pytest.approx((1, 1, 1), abs=1e-6)


def test_an_rmse_has_the_interval_of_a_mean() -> None:
    """With many samples the interval of the squared error is its mean ± 1.96 standard errors."""
    target = np.zeros(2000, dtype=np.float32)
    errors = np.random.default_rng(0).standard_normal(2000)
    found, half = estimate("rmse", {1: errors[:, None]}, target), 1.96 * (errors**2).std() / 2000**0.5
    assert found.low**2 == pytest.approx((errors**2).mean() - half, rel=0.01)
    assert found.high**2 == pytest.approx((errors**2).mean() + half, rel=0.01)


def test_coverage_of_intervals() -> None:
    """At least 92 % of 300 small test sets have an interval that contains the true accuracy."""
    rng = np.random.default_rng(1)
    for truth, n in ((0.9, 30), (0.97, 40), (0.7, 25)):
        sets = (scores_of(rng.random(n) < truth) for _ in range(300))
        found = [estimate("accuracy", {1: output}, np.ones(n, dtype=np.int64)) for output in sets]
        assert sum(f.low <= truth <= f.high for f in found) >= 0.92 * 300


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("chance", [0.005, 0.05])
def test_training_noise_is_seldom_a_gain(seeds: int, chance: float) -> None:
    """Two methods that differ by training noise only differ clearly at most 8 times in 100."""
    rng, samples = np.random.default_rng(seeds), 300

    def trained(hard: np.ndarray) -> dict[int, np.ndarray]:
        return {seed: scores_of(hard < rng.normal(0.8, chance)) for seed in range(seeds)}

    target = np.ones(samples, dtype=np.int64)
    sets = (rng.random(samples) for _ in range(100))
    assert sum(gain("accuracy", trained(hard), trained(hard), target).sign != 0 for hard in sets) <= 8


@pytest.mark.parametrize("metric", ["rmse", "auc"])
def test_few_samples_are_seldom_a_gain(metric: Metric) -> None:
    """With 10 samples, or 10 positives, equally good methods differ clearly at most 8 times in 100."""
    rng, target = np.random.default_rng(0), np.arange(10 if metric == "rmse" else 100) < 10

    def trained() -> dict[int, np.ndarray]:
        errors = rng.standard_normal(len(target))
        outputs = (target + errors + 0.1 * rng.standard_normal(len(target)) for _ in range(3))
        return {seed: np.stack([0 * o, o], axis=1) if metric == "auc" else o[:, None] for seed, o in enumerate(outputs)}

    truth = target.astype(np.float32 if metric == "rmse" else np.int64)
    assert sum(gain(metric, trained(), trained(), truth).sign != 0 for _ in range(100)) <= 8


def test_common_seeds_are_paired() -> None:
    """Effects common to both methods' seeds cancel; without common seeds they do not."""
    hard, target = np.linspace(0, 1, 400), np.ones(400, dtype=np.int64)
    ours = {seed: scores_of(hard < 0.7 + 0.05 * seed) for seed in (1, 2, 3)}
    theirs = {seed: scores_of(hard < 0.6 + 0.05 * seed) for seed in (3, 2, 1)}
    assert gain("accuracy", ours, theirs, target).sign == 1
    assert gain("accuracy", ours, {seed + 3: output for seed, output in theirs.items()}, target).sign == 0


@pytest.mark.parametrize(("samples", "few"), [(1, True), (9, True), (10, False)])
def test_an_error_of_few_samples_has_no_verdict(samples: int, few: bool) -> None:
    """With fewer than 10 samples a difference of errors has an interval but no sign."""
    target = np.zeros(samples, dtype=np.float32)
    found = gain("rmse", {1: target[:, None] + 1.0}, {1: target[:, None] + 2.0}, target)
    assert found == Interval(1, 1, 1)
    assert (isinstance(found, Hint), found.sign) == (few, int(not few))


@pytest.mark.parametrize(("positives", "few"), [(1, True), (9, True), (10, False)])
def test_an_auc_of_few_positives_has_no_verdict(positives: int, few: bool) -> None:
    """A difference of AUC has a sign from 10 samples of each class on."""
    target = (np.arange(60) < positives).astype(np.int64)
    found = gain("auc", {1: scores_of(target == 1)}, {1: scores_of(target == 0)}, target)
    assert found == Interval(1, 1, 1)
    assert (isinstance(found, Hint), found.sign) == (few, int(not few))


def test_metrics_depend_on_the_classes() -> None:
    """One class defines accuracy only, several add balanced accuracy, and two add AUC."""
    assert metrics_of(np.zeros(5, dtype=np.int64), 2) == ["accuracy"]
    assert metrics_of(np.arange(3), 3) == ["accuracy", "balanced_accuracy"]
    assert metrics_of(np.arange(2), 2) == ["accuracy", "balanced_accuracy", "auc"]
