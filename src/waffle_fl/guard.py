"""What the server checks of an update before it touches the model: row W of the threat list in docs/design.md.

Always: an update that is not finite, or longer than any honest one, is not heard this round. With guard "standard" also
the three cheap tests of closeness: too short to be training, pointing away from Alice, and much longer than hers.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import blocks, lengths, row_of

Guard: TypeAlias = Literal["off", "standard"]

MAX_NORM = 1e6
OK, NOT_FINITE, TOO_LONG, TOO_SHORT, OPPOSED, CLIPPED, ABSENT = range(7)
REASONS = ("ok", "not finite", "too long", "too short", "opposed to Alice", "clipped", "absent")


def screen(up: Any, alice: Tensor, present: Tensor, guard: Guard = "off") -> tuple[Any, Tensor, Tensor]:
    """(up with the rejected rows blanked, who was heard, a reason code for each agent)."""
    code = torch.zeros(len(present), dtype=torch.int64, device=present.device)
    for field in up:
        if field.shape[1]:  # the largest number is finite if all are; NaN counts as the largest
            largest = torch.cat([part.abs().amax(dim=1) for part in blocks(field)])
            code = torch.where(torch.isfinite(largest), code, NOT_FINITE)
    if hasattr(up, "dy"):
        norms = lengths(up.dy)
        code = torch.where((norms > MAX_NORM) & (code == OK), TOO_LONG, code)
        if guard == "standard":
            up, code = _closeness(up, alice, norms, code, present)
    code = torch.where(present, code, ABSENT)
    heard = (code == OK) | (code == CLIPPED)
    blanked = [torch.where(heard[:, None], field, 0.0) for field in up]
    return type(up)(*blanked), heard, code


def _closeness(up: Any, alice: Tensor, norms: Tensor, code: Tensor, present: Tensor) -> tuple[Any, Tensor]:
    """Clip at twice Alice's norm; reject a quarter of the median norm and less; reject cos(dy_i, dy_alice) <= 0."""
    dy = torch.where((code == OK)[:, None], up.dy, torch.zeros_like(up.dy)).double()
    median = torch.where(present & (code == OK), norms, torch.nan).nanmedian()
    alice_s, alice_norm = row_of(dy, alice), row_of(norms, alice)
    others = torch.arange(len(norms), device=norms.device) != alice
    suspect = others & present & (code == OK)
    code = torch.where(suspect & (norms < median / 4), TOO_SHORT, code)
    code = torch.where(suspect & (code == OK) & (dy @ alice_s <= 0), OPPOSED, code)
    limit = 2 * alice_norm
    long = others & present & (code == OK) & (norms > limit)
    scale = torch.where(long, limit / norms.clamp(min=1e-300), 1.0).to(up.dy.dtype)
    return up._replace(dy=up.dy * scale[:, None]), torch.where(long, CLIPPED, code)
