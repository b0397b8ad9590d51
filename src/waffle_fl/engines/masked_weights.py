"""The weights of a masked sum: which agents the floors of all allow in it, and what is known of updates before.

A part of a sum is a row of the model, or one layer of it for a method with `sums_by_layer`. Weights in all parts are
the same, or every layer has contributors of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import Angles, Weights, one_hot, row_of
from waffle_fl.engines.masked_sums import largest_floor
from waffle_fl.errors import WaffleError
from waffle_fl.privacy.contributors import effective, respect_floors


def angles_of(distances: Sequence[Weights], lengths: Tensor, alice: Tensor) -> Angles:
    """Return cosines with Alice from the distances of directions, and the lengths that the agents report."""
    cosines = (1 - torch.stack(list(distances), dim=1) ** 2 / 2).clamp(-1, 1)
    return Angles(torch.where((lengths > 0) & (row_of(lengths, alice) > 0), cosines, 0.0), lengths)


def may_be_summed(weights: Weights, floors: Sequence[float]) -> bool:
    """Return whether a sum with these weights has several contributors and reaches the floors of all of them."""
    table = {i: weight for i, weight in enumerate(weights.tolist()) if weight > 0}
    return len(table) > 1 and effective([*table.values()]) >= largest_floor(table, floors)


def respected(weights: Mapping[str, Weights], floors: Sequence[float], alice: int | None, r: int) -> dict[str, Weights]:
    """Return weights that are the same in all parts without agents whose floor is not reached."""
    table = _allowed(weights["dy"], floors, alice, r)
    return {**weights} if table is weights["dy"] else dict.fromkeys(weights, table)


def respected_by_layer(
    weights: Mapping[str, Weights], floors: Sequence[float], alice: int | None, r: int
) -> dict[str, Weights]:
    """Return the same for every layer; a layer that is left to Alice alone is not summed."""
    allowed = {name: _allowed(table, floors, alice, r) for name, table in weights.items()}
    return {name: table for name, table in allowed.items() if int((table > 0).sum()) > 1}


def overall(weights: Mapping[str, Weights], sizes: Mapping[str, int], alice: Tensor, agents: int) -> Weights:
    """Return the mean of the weights in layers of these sizes; a layer that is not summed is Alice's."""
    alone = one_hot(alice, agents)
    return torch.stack([count * weights.get(name, alone) for name, count in sizes.items()]).sum(dim=0) / sum(
        sizes.values()
    )


def _allowed(weights: Weights, floors: Sequence[float], alice: int | None, r: int) -> Weights:
    given = weights.tolist()
    allowed = respect_floors(given, floors, alice)
    if any(given) and not any(allowed):
        raise WaffleError(
            f"min_contributors: expected at most {effective(given):.2f}, the effective number of agents in round "
            f"{r}, got {max(floors):g}"
        )
    if alice is None and sum(map(bool, allowed)) == 1:
        raise WaffleError(f"round {r}: expected updates of at least 2 agents, got one: the sum would be its update")
    excluded = any(w != 0 and a == 0 for w, a in zip(given, allowed, strict=True))
    return weights.new_tensor(allowed) if excluded else weights
