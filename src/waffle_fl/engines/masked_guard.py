"""The guard in private rounds: its tests on distances, and on lengths that each agent reports itself.

It finds attackers that follow the protocol. One that reports a false length, or that adds an update to the sum that it
has not sketched, is not found. Updates that are too long are rejected: the server cannot clip what it does not see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from waffle_fl.algorithms import Round
from waffle_fl.algorithms.contract import TINY, Weights, row_of
from waffle_fl.guard import CLIPPED, OK, TOO_LONG, Compared, judged

SAME_ANGLE = 1e-4  # largest difference of the cosines of equal updates: sketches are rounded


def screened(
    norms: Weights, force: Weights | None, distances: Weights, directions: int, now: Round, codes: Tensor
) -> tuple[Round, Tensor]:
    """Return the round without the agents that the guard rejects, and the reasons.

    `norms` and `force` are the lengths of updates and control variates, as the agents report them.
    """
    length = row_of(norms, now.alice)
    agreement = (norms**2 + length**2 - distances**2) / (2 * norms * length).clamp(min=TINY)
    compared = Compared(norms, distances, agreement.clamp(-1, 1), force, directions, SAME_ANGLE)
    present = now.received
    found, _ = judged(compared, now.alice, torch.where(present, OK, codes), present)
    found = torch.where(found == CLIPPED, TOO_LONG, found)
    sound = present & (found == OK)
    suspect = present & ~sound
    return now._replace(received=sound, intact=now.intact & sound, suspect=suspect), torch.where(present, found, codes)
