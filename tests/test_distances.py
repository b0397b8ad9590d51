"""How different the agents' training data are: label, feature and gradient distances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import make_federation, make_model
from waffle_fl.decision.distances import distances, feature_distance, gradient_distance
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel, mlp, squared_error


def test_distances_by_hand() -> None:
    """Label shares 3/4 and 1/4 differ by 1/2; means 1 apart with deviation 1/2 are 2 apart."""
    x = {"a": [[0.0], [0.0], [0.0], [0.0]], "b": [[1.0], [1.0], [1.0], [1.0]]}
    y = {"a": [0, 0, 0, 1], "b": [1, 1, 1, 0]}
    parts = {name: tuple(np.array(v) for v in (x[name], y[name], [[9.0]], [0])) for name in x}
    federation = Federation.from_arrays(parts, duplicates="keep")
    found = distances(federation, FlatModel(lambda: mlp((1,), 2, hidden=3), precision="float64"))
    assert found.label == [[0, 0.5], [0.5, 0]]
    assert found.feature == [[0, 2], [2, 0]]
    assert 0 < found.gradient[0][1] <= 1


def test_distances_are_metrics() -> None:
    """Distances are symmetric with a zero diagonal and satisfy the triangle inequality; shares and angles are <= 1."""
    found = distances(make_federation(), make_model())
    for matrix in (np.array(m) for m in (found.label, found.feature, found.gradient)):
        assert np.allclose(matrix, matrix.T)
        assert np.allclose(np.diag(matrix), 0)
        assert all(matrix[i, j] <= matrix[i, k] + matrix[k, j] + 1e-12 for i, j, k in np.ndindex(4, 4, 4))
    assert np.max(found.label) <= 1
    assert np.max(found.gradient) <= 1


def test_gradient_distance_ignores_the_norm() -> None:
    """Gradients of equal direction have distance 0 whatever their norms; opposite gradients have distance 1."""
    y = {"a": 1.0, "b": 1000.0, "c": -1000.0}
    parts = {
        n: tuple(np.array(v, dtype=np.float32) for v in ([[1.0]] * 4, [t] * 4, [[9.0]], [t])) for n, t in y.items()
    }
    federation = Federation.from_arrays(parts, duplicates="keep", task="regression")
    model = FlatModel(lambda: mlp((1,), 1, hidden=3), loss=squared_error, precision="float64")
    a, b, c = gradient_distance(federation, model, [0, 1, 2], list(federation.train), 1).tolist()
    assert (a[1], a[2], b[2]) == pytest.approx((0, 1, 1), abs=1e-6)
    assert c[2] == 0


def test_constant_features_are_ignored() -> None:
    """Constant features neither count nor cause a division by 0."""
    x = torch.tensor([[0.0, 7.0], [1.0, 7.0]])
    assert feature_distance(x, [torch.tensor([0]), torch.tensor([1])]).tolist() == [[0, 2], [2, 0]]
    assert feature_distance(x[:, 1:], [torch.tensor([0]), torch.tensor([1])]).tolist() == [[0, 0], [0, 0]]
