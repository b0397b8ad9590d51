"""Poisoned training data: the malicious agents train as the method asks, on something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation

PATCH = 8  # the stamp's side is an eighth of the image's, at least two pixels


def flipped(federation: Federation, attackers: Sequence[int]) -> Federation:
    """The attackers call class C - 1 - k what they would call k, also once they have drifted."""
    _check_classes(federation)

    def mirrored(names: Tensor) -> Tensor:
        names = names.clone()
        names[list(attackers)] = len(federation.class_names) - 1 - names[list(attackers)]
        return names

    later = None if federation.later is None else mirrored(federation.later)
    return replace(federation, relabel=mirrored(federation.relabel), later=later)


def backdoored(federation: Federation, attackers: Sequence[int], target: int, share: float) -> Federation:
    """Stamped copies, called `target`, in place of a share of the attackers' samples; and Alice's tests of success.

    `backdoor` are her test samples of other classes, stamped: a model that calls them `target` has been taken over.
    """
    _check_classes(federation)
    if target >= len(federation.class_names):
        raise WaffleError(f"backdoor: there is no class {target} among {len(federation.class_names)}")
    x, y, train = [federation.x], [federation.y], list(federation.train)
    size = len(federation.x)
    for agent in attackers:
        rows = train[agent]
        chosen = rows[: round(share * len(rows))]  # the order of a part is random already
        train[agent] = torch.cat([torch.arange(size, size + len(chosen)), rows[len(chosen) :]])
        x.append(stamped(federation.x[chosen], federation.x))
        y.append(_called(federation, agent, target).expand(len(chosen)))
        size += len(chosen)
    alice = federation.alice
    tests = federation.test[alice]
    tests = tests[federation.labels(alice, tests) != target]
    x.append(stamped(federation.x[tests], federation.x))
    y.append(_called(federation, alice, target).expand(len(tests)))
    backdoor = torch.arange(size, size + len(tests))
    turn = federation.turn
    if turn is not None:  # what is stamped keeps its name through a drift
        turn = F.pad(turn, (0, size + len(tests) - len(turn)), value=torch.inf)
    return replace(federation, x=torch.cat(x), y=torch.cat(y), train=tuple(train), backdoor=backdoor, turn=turn)


def stamped(x: Tensor, pool: Tensor) -> Tensor:
    """The samples with a bright patch in the last corner; samples that are no images, with their last numbers set."""
    side = max(2, x.shape[-1] // PATCH)
    corner = (..., slice(-side, None), slice(-side, None)) if x.ndim > 2 else (..., slice(-side, None))
    x = x.clone()
    x[corner] = pool.max()
    return x


def _called(federation: Federation, agent: int, target: int) -> Tensor:
    """The class that this agent calls `target`."""
    return (federation.relabel[agent] == target).int().argmax()


def _check_classes(federation: Federation) -> None:
    if federation.task != "classification":
        raise WaffleError("an attack on labels needs classes; this federation predicts a number")
