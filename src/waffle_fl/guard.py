"""Checks of the updates before aggregation (docs/design.md, "What the server checks").

An update that is not finite, or longer than MAX_NORM, is always rejected for the round. With guard "standard" the
server also compares updates with Alice's; docs/robustness.md has each test, its reason and the attacks that it stops.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import TINY, Rows, Weights, blocks, lengths, row_of

Guard: TypeAlias = Literal["off", "standard"]

MAX_NORM = 1e6
SHORTEST = 0.25  # of the median length: an agent that trains sends a longer update
LONGEST = 2.0  # times Alice's length: longer updates are clipped; with control variates never below the median length
COPY = 0.1  # of Alice's length and of the median distance from her: training on other data leads farther away
SAME = 1e-9  # relative difference up to which two updates count as equal
AGREEMENT = 0.5  # smallest cosine with Alice's update, relative to the median cosine
CHANCE = 3.0  # the cosine must also exceed so many standard deviations of that of random directions
PULL = 1.5  # times the median length of control variates: a longer one would steer all agents
OK, NOT_FINITE, TOO_LONG, TOO_SHORT, OPPOSED, CLIPPED, ABSENT, COPIED, PULLING, NOT_ASKED = range(10)
REASONS = (
    *("ok", "not finite", "too long", "too short", "opposed to Alice", "clipped", "absent", "a copy"),
    *("too strong a pull", "not asked"),
)


def screen(
    up: Any, alice: Tensor, present: Tensor, guard: Guard = "off", new_control_variates: Rows | None = None
) -> tuple[Any, Tensor, Tensor]:
    """Return (updates with the rejected rows set to 0, mask of admitted agents, a reason code per agent).

    `new_control_variates` are those that would follow from the updates. The correction removes an agent's own drift
    from its update, so a poisoned agent's update looks like the others; its control variate shows the difference.
    """
    code = torch.zeros(len(present), dtype=torch.int64, device=present.device)
    for field in up:
        if field.shape[1]:  # the maximum is finite if all entries are; NaN propagates
            largest = torch.cat([part.abs().amax(dim=1) for part in blocks(field)])
            code = torch.where(torch.isfinite(largest), code, NOT_FINITE)
    if hasattr(up, "dy"):
        norms = lengths(up.dy)
        code = torch.where((norms > MAX_NORM) & (code == OK), TOO_LONG, code)
        if guard == "standard":
            up, code = _closeness(up, alice, norms, code, present, new_control_variates)
    code = torch.where(present, code, ABSENT)
    received = (code == OK) | (code == CLIPPED)
    blanked = [torch.where(received[:, None], field, 0.0) if field.shape[1] else field for field in up]
    return type(up)(*blanked), received, code


def _closeness(
    up: Any, alice: Tensor, norms: Weights, code: Tensor, present: Tensor, new_control_variates: Rows | None
) -> tuple[Any, Tensor]:
    """Reject short, copied or opposed updates and those with a long control variate; clip updates that are too long."""
    hers, length = row_of(up.dy, alice).double(), row_of(norms, alice)
    along = torch.cat([part.double() @ hers for part in blocks(up.dy)])
    distances = (norms**2 + length**2 - 2 * along).clamp(min=0).sqrt()  # exact enough to compare with COPY
    force = None if new_control_variates is None else lengths(new_control_variates)
    compared = Compared(norms, distances, along / (norms * length).clamp(min=TINY), force, up.dy.shape[1])
    code, scale = judged(compared, alice, code, present)
    return up._replace(dy=up.dy * scale.to(up.dy.dtype)[:, None]), code


class Compared(NamedTuple):
    """What the tests of the guard read of each agent's update."""

    norms: Weights
    distances: Weights  # from Alice's update
    agreement: Weights  # cosine with Alice's update
    force: Weights | None  # norms of the control variates, if there are any
    directions: int  # dimensions in which updates are compared
    same: float = SAME  # largest difference of the cosines of equal updates


def judged(compared: Compared, alice: Tensor, code: Tensor, present: Tensor) -> tuple[Tensor, Weights]:
    """Return the reason codes after all tests, and the factor that shortens each update; 1 if it is not too long."""
    norms, distances, agreement, force, directions, _ = compared
    sound = present & (code == OK)
    others = sound & (torch.arange(len(norms), device=norms.device) != alice)
    length = row_of(norms, alice)
    short = norms < SHORTEST * _median(norms, sound)
    copied = distances < COPY * torch.minimum(length, _median(distances, others))
    copied = copied | _repeated(compared, others)
    chance = min(CHANCE / directions**0.5, AGREEMENT)
    opposed = agreement <= (AGREEMENT * _median(agreement, others & ~short & ~copied)).clamp(min=chance)
    tests = [(short, TOO_SHORT), (copied, COPIED), (opposed, OPPOSED)]
    if force is not None:
        tests.append((force > PULL * _median(force, sound), PULLING))
    for wrong, reason in tests:
        code = torch.where(others & wrong & (code == OK), reason, code)
    limit = LONGEST * length
    if force is not None:  # corrected updates have about equal lengths, so a short one of Alice's is chance
        limit = torch.maximum(limit, _median(norms, sound))
    long = others & (code == OK) & (norms > limit)
    return torch.where(long, CLIPPED, code), torch.where(long, limit / norms.clamp(min=TINY), 1.0)


def _repeated(compared: Compared, others: Tensor) -> Tensor:
    """Return the agents that repeat the update of an earlier agent: equal length and equal angle to Alice's update.

    The first of equal updates is admitted; otherwise a copy of an honest update would exclude the agent it copies.
    """
    norms, agreement = compared.norms, compared.agreement
    same = (norms[:, None] - norms).abs() <= SAME * norms
    same = same & ((agreement[:, None] - agreement).abs() <= compared.same) & others
    return same.tril(diagonal=-1).any(dim=1)


def _median(values: Weights, among: Tensor) -> Tensor:
    return torch.where(among, values, torch.nan).nanmedian(dim=0).values
