"""How good predictions are: accuracy, balanced accuracy, AUC and log loss of classes, RMSE of numbers.

A metric that the samples at hand do not define (one class only, say) is None, never NaN.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def measure(output: Tensor, target: Tensor) -> dict[str, float | None]:
    """All metrics of these outputs: class scores (n, classes) for integer targets, numbers for others."""
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
    """The mean, over the classes that occur, of the share of their samples that are recognised."""
    right = output.argmax(dim=1) == target
    return _number(torch.stack([right[target == k].double().mean() for k in torch.unique(target)]).mean())


def auc(output: Tensor, target: Tensor) -> float | None:
    """Area under the ROC curve; of more than two classes the mean of each against the rest.

    Two classes are ranked by the difference of their outputs: where it is large, softmax rounds unequal ones to 1.
    """
    two = output.shape[1] == 2
    scores = {1: output[:, 1] - output[:, 0]} if two else dict(enumerate(output.softmax(dim=1).unbind(dim=1)))
    areas = [_area(score, target == k) for k, score in scores.items()]
    known = [area for area in areas if area is not None]
    return sum(known) / len(known) if known else None


def _area(score: Tensor, positive: Tensor) -> float | None:
    """The chance that a positive sample scores higher than a negative one, ties counting half."""
    if positive.all() or not positive.any() or score.isnan().any():
        return None
    _, group, size = torch.unique(score, return_inverse=True, return_counts=True)
    rank = (size.cumsum(0) - (size - 1) / 2)[group].double()  # ties share the mean of their ranks
    p, n = int(positive.sum()), int((~positive).sum())
    return float((rank[positive].sum() - p * (p + 1) / 2) / (p * n))


def _number(value: Tensor) -> float | None:
    return float(value) if math.isfinite(value) else None
