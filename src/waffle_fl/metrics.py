"""Metrics: accuracy, balanced accuracy, AUC and log loss for classification, RMSE for regression.

A metric that is undefined for the samples (for example with a single class) is None, never NaN.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def measure(output: Tensor, target: Tensor) -> dict[str, float | None]:
    """Return all metrics of these outputs: class scores (n, classes) for integer targets, otherwise numbers."""
    output = output.double()
    if target.is_floating_point():
        return {"rmse": _number((output.view(-1) - target.double()).square().mean().sqrt())}
    return {
        "accuracy": _number((output.argmax(dim=1) == target).double().mean()),
        "balanced_accuracy": balanced_accuracy(output, target),
        "auc": auc(output, target),
        "log_loss": _number(F.cross_entropy(output, target)),
    }


def balanced_accuracy(output: Tensor, target: Tensor) -> float | None:
    """Return the mean recall over the classes that occur."""
    right = output.argmax(dim=1) == target
    return _number(torch.stack([right[target == k].double().mean() for k in torch.unique(target)]).mean())


def auc(output: Tensor, target: Tensor) -> float | None:
    """Return the area under the ROC curve; with more than two classes the mean of one-versus-rest.

    Two classes are ranked by the difference of their outputs, because softmax rounds large ones to 1.
    """
    two = output.shape[1] == 2
    scores = {1: output[:, 1] - output[:, 0]} if two else dict(enumerate(output.softmax(dim=1).unbind(dim=1)))
    areas = [_area(score, target == k) for k, score in scores.items()]
    known = [area for area in areas if area is not None]
    return sum(known) / len(known) if known else None


def _area(score: Tensor, positive: Tensor) -> float | None:
    """Return the probability that a positive sample scores higher than a negative one; ties count half."""
    if positive.all() or not positive.any() or score.isnan().any():
        return None
    _, group, size = torch.unique(score, return_inverse=True, return_counts=True)
    rank = (size.cumsum(0) - (size - 1) / 2)[group].double()  # ties share the mean of their ranks
    p, n = int(positive.sum()), int((~positive).sum())
    return float((rank[positive].sum() - p * (p + 1) / 2) / (p * n))


def _number(value: Tensor) -> float | None:
    return float(value) if math.isfinite(value) else None
