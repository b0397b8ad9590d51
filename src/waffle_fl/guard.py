"""What the server checks of an update before it touches the model: row W of the threat list in docs/design.md.

Always: an update that is not finite, or longer than any honest one, is not heard this round. With guard "standard" also
the cheap tests of closeness: too short to be training, a copy of Alice's, pointing away from her, and much longer.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import Rows, Vector, Weights, blocks, lengths, row_of

Guard: TypeAlias = Literal["off", "standard"]

MAX_NORM = 1e6
SHORTEST = 0.25  # of the median length; who trains at all moves farther
LONGEST = 2.0  # times Alice's length
CHANCE = 3.0  # deviations of the angle between random directions; who agrees no more with Alice than that does not
COPY = 0.1  # of Alice's length and of the median distance from her; different data part two agents farther
OK, NOT_FINITE, TOO_LONG, TOO_SHORT, OPPOSED, CLIPPED, ABSENT, COPIED = range(8)
REASONS = ("ok", "not finite", "too long", "too short", "opposed to Alice", "clipped", "absent", "a copy of Alice's")


def screen(
    up: Any, alice: Tensor, present: Tensor, guard: Guard = "off", own: Rows | None = None
) -> tuple[Any, Tensor, Tensor]:
    """(up with the rejected rows blanked, who was heard, a reason code for each agent).

    `own` is dy without what the method itself added to all agents' steps, where it does: a control variate takes what
    is an agent's own out of its update, so a poisoned agent moves as everybody does while it bends where that leads.
    """
    code = torch.zeros(len(present), dtype=torch.int64, device=present.device)
    for field in up:
        if field.shape[1]:  # the largest number is finite if all are; NaN counts as the largest
            largest = torch.cat([part.abs().amax(dim=1) for part in blocks(field)])
            code = torch.where(torch.isfinite(largest), code, NOT_FINITE)
    if hasattr(up, "dy"):
        code = torch.where((lengths(up.dy) > MAX_NORM) & (code == OK), TOO_LONG, code)
        if guard == "standard":
            code, factor = _closeness(up.dy, alice, present & (code == OK), code)
            if own is not None:
                code, other = _closeness(own, alice, present & (code == OK), code)
                factor = factor.minimum(other)
            code = torch.where((code == OK) & present & (factor < 1), CLIPPED, code)
            up = up._replace(dy=up.dy * factor[:, None].to(up.dy.dtype))
    code = torch.where(present, code, ABSENT)
    heard = (code == OK) | (code == CLIPPED)
    blanked = [torch.where(heard[:, None], field, 0.0) for field in up]
    return type(up)(*blanked), heard, code


def _closeness(dy: Rows, alice: Tensor, sound: Tensor, code: Tensor) -> tuple[Tensor, Weights]:
    """The tests of the sound rows against Alice's: what is wrong with each, and the factor that shortens it."""
    dy = torch.where(sound[:, None], dy, torch.zeros_like(dy))
    hers, norms = row_of(dy, alice), lengths(dy)
    length, distances = row_of(norms, alice), lengths(dy, hers)
    others = (torch.arange(len(dy), device=dy.device) != alice) & sound
    copied = distances < COPY * torch.minimum(length, _middle(distances, others))
    opposed = _along(dy, hers) <= CHANCE / dy.shape[1] ** 0.5 * norms * length
    for wrong, reason in ((norms < SHORTEST * _middle(norms, sound), TOO_SHORT), (copied, COPIED), (opposed, OPPOSED)):
        code = torch.where(others & wrong & (code == OK), reason, code)
    limit = LONGEST * length
    return code, torch.where(others & (norms > limit), limit / norms.clamp(min=1e-300), 1.0)


def _along(dy: Rows, hers: Vector) -> Weights:
    """<dy_i, dy_alice> in float64."""
    return torch.cat([part.double() @ hers.double() for part in blocks(dy)])


def _middle(values: Weights, among: Tensor) -> Tensor:
    return torch.where(among, values, torch.nan).nanmedian()
