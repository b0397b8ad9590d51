"""Metrics against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from waffle_fl.decision.bootstrap import figures
from waffle_fl.metrics import auc, measure

sklearn = pytest.importorskip("sklearn.metrics")


@given(st.integers(2, 4), st.integers(4, 60), st.integers(0, 10**6), st.booleans())
def test_metrics_match_scikit_learn(classes: int, samples: int, seed: int, ties: bool) -> None:
    """Accuracy, balanced accuracy, AUC and log loss of random predictions, with ties, match scikit-learn's."""
    rng = np.random.default_rng(seed)
    output = rng.integers(0, 3, (samples, classes)) if ties else rng.standard_normal((samples, classes))
    target = np.concatenate([np.arange(classes), rng.integers(0, classes, samples - classes)])[:samples]
    if len(np.unique(target)) < classes:
        return
    found = measure(torch.tensor(output, dtype=torch.float64), torch.tensor(target))
    chances = torch.tensor(output, dtype=torch.float64).softmax(1).numpy()
    chosen = output.argmax(axis=1)
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(target, chosen))
    assert found["balanced_accuracy"] == pytest.approx(sklearn.balanced_accuracy_score(target, chosen))
    expected = sklearn.roc_auc_score(target, chances[:, 1] if classes == 2 else chances, multi_class="ovr")
    assert found["auc"] == pytest.approx(expected)
    assert found["log_loss"] == pytest.approx(sklearn.log_loss(target, chances, labels=range(classes)))


@given(st.integers(2, 60), st.sampled_from([1.0, 30.0, 1000.0]), st.integers(0, 10**6))
def test_auc_matches_that_of_the_decision_page(samples: int, scale: float, seed: int) -> None:
    """The AUC of two classes equals the decision page's, also for outputs so large that softmax would tie."""
    rng = np.random.default_rng(seed)
    output, target = scale * rng.standard_normal((samples, 2)), np.arange(samples) % 2
    found = measure(torch.tensor(output), torch.tensor(target))["auc"]
    assert found == pytest.approx(figures("auc", {1: output}, target)[1], abs=1e-12)
    apart = np.stack([np.zeros(samples), 100.0 + np.argsort(np.argsort(target, kind="stable"))], axis=1)
    assert measure(torch.tensor(apart), torch.tensor(target))["auc"] == 1.0


def test_auc_of_one_class_is_none() -> None:
    """D9: with one class the AUC is None; the other metrics are defined."""
    found = measure(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    assert found["auc"] is None
    assert found["accuracy"] == found["balanced_accuracy"] == 0.5
    assert auc(torch.tensor([[float("nan"), 0.0], [0.0, 1.0]]), torch.tensor([0, 1])) is None


def test_rmse() -> None:
    """The only metric of a regression is the RMSE."""
    found = measure(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]))
    assert found == {"rmse": pytest.approx(5**0.5)}
