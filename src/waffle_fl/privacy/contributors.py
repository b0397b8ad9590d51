"""The effective number of contributors to a weighted sum, and the floors that sites set for it.

A weighted sum is a model, and no protocol can hide what it contains. With one contributor it is that agent's update;
with two, each of them can compute the other's. 1 / sum(w_i^2) is N for equal weights and 1 for one contributor.
"""

from __future__ import annotations

from collections.abc import Sequence


def effective(weights: Sequence[float]) -> float:
    """Return 1 / sum(w_i^2) of the weights scaled to sum to 1; 0 if there is no weight."""
    total = sum(weights)
    return total**2 / sum(w * w for w in weights) if total > 0 else 0.0


def respect_floors(weights: Sequence[float], floors: Sequence[float], alice: int | None) -> list[float]:
    """Return the weights without the agents whose floor is above the effective number, scaled to sum to 1.

    An excluded agent lowers the number for the others, so the rule is repeated. If Alice's own floor is not reached, or
    only she is left, all weight is hers and she trains alone. Without Alice the weights can all become 0.
    """
    left = list(weights)
    while any(left):
        number = effective(left)
        if alice is not None and (number < floors[alice] or number == 1.0):
            break
        below = [i for i, w in enumerate(left) if w > 0 and floors[i] > number]
        if not below:
            total = sum(left)
            return [w / total for w in left]
        left = [0.0 if i in below else w for i, w in enumerate(left)]
    return [float(i == alice) for i in range(len(left))]
