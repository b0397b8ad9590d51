"""Poisoned training data: malicious agents follow the method, but train on changed labels or samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation

PATCH = 8  # the side of the patch is an eighth of the image's, at least two pixels


def flipped(federation: Federation, attackers: Sequence[int]) -> Federation:
    """Mirror the attackers' labels: k becomes C - 1 - k, also after concept drift."""
    _check_classes(federation)

    def mirrored(names: Tensor) -> Tensor:
        names = names.clone()
        names[list(attackers)] = len(federation.class_names) - 1 - names[list(attackers)]
        return names

    later = None if federation.later is None else mirrored(federation.later)
    return replace(federation, relabel=mirrored(federation.relabel), later=later)


def backdoored(federation: Federation, attackers: Sequence[int], target: int, share: float) -> Federation:
    """Replace a share of the attackers' samples by stamped copies labelled `target`, and add samples that test success.

    The field `backdoor` holds Alice's test samples of other classes, stamped: the attack succeeds on a sample if her
    model classifies it as `target`.
    """
    _check_classes(federation)
    if target >= len(federation.class_names):
        raise WaffleError(f"backdoor: there is no class {target} among {len(federation.class_names)}")
    x, y, train = [federation.x], [federation.y], list(federation.train)
    size = len(federation.x)
    for agent in attackers:
        rows = train[agent]
        chosen = rows[: round(share * len(rows))]  # the rows are already in random order
        train[agent] = torch.cat([torch.arange(size, size + len(chosen)), rows[len(chosen) :]])
        x.append(stamped(federation.x[chosen], federation.x))
        y.append(_class_named(federation, agent, target).expand(len(chosen)))
        size += len(chosen)
    alice = federation.alice
    samples = federation.test[alice]
    samples = samples[federation.labels(alice, samples) != target]
    x.append(stamped(federation.x[samples], federation.x))
    y.append(_class_named(federation, alice, target).expand(len(samples)))
    backdoor = torch.arange(size, size + len(samples))
    turn = federation.turn
    if turn is not None:  # stamped samples keep their label through concept drift
        turn = F.pad(turn, (0, size + len(samples) - len(turn)), value=torch.inf)
    return replace(federation, x=torch.cat(x), y=torch.cat(y), train=tuple(train), backdoor=backdoor, turn=turn)


def stamped(x: Tensor, pool: Tensor) -> Tensor:
    """Return the samples with a bright patch in the last corner; other data than images has its last features set."""
    side = max(2, x.shape[-1] // PATCH)
    corner = (..., slice(-side, None), slice(-side, None)) if x.ndim > 2 else (..., slice(-side, None))
    x = x.clone()
    x[corner] = pool.max()
    return x


def _class_named(federation: Federation, agent: int, target: int) -> Tensor:
    """Return the class that this agent labels `target`."""
    return (federation.relabel[agent] == target).int().argmax()


def _check_classes(federation: Federation) -> None:
    if federation.task != "classification":
        raise WaffleError(
            "expected a classification task for an attack on labels, got a regression: choose another attack"
        )
