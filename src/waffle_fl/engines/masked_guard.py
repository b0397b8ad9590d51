"""The guard in private rounds: its tests on distances, and on lengths that each agent reports itself.

It finds attackers that follow the protocol. One that reports a false length, or that adds an update to the sum that it
has not sketched, is not found. Updates that are too long are rejected: the server cannot clip what it does not see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from waffle_fl.algorithms import Round
from waffle_fl.algorithms.contract import TINY, Weights, lengths, row_of
from waffle_fl.guard import CLIPPED, OK, TOO_LONG, Compared, judged

SAME_ANGLE = 1e-4  # largest difference of the cosines of equal updates: they have one sketch, rounded twice


def screened(
    algorithm: Any, server: Any, before: Any, up: Any, distances: Weights, directions: int, now: Round, codes: Tensor
) -> tuple[Round, Tensor]:
    """Return the round without the agents that the guard rejects, and the reasons."""
    norms = lengths(up.dy)
    length = row_of(norms, now.alice)
    agreement = (norms**2 + length**2 - distances**2) / (2 * norms * length).clamp(min=TINY)
    force = None
    if hasattr(algorithm, "new_control_variates"):  # computed at the agents, which report its length
        own = server._replace(c_i=before.c_i)
        force = lengths(algorithm.new_control_variates(own, up, now.steps))
    compared = Compared(norms, distances, agreement.clamp(-1, 1), force, directions, SAME_ANGLE)
    present = now.received
    found, _ = judged(compared, now.alice, torch.where(present, OK, codes), present)
    found = torch.where(found == CLIPPED, TOO_LONG, found)
    sound = present & (found == OK)
    suspect = present & ~sound
    return now._replace(received=sound, intact=now.intact & sound, suspect=suspect), torch.where(present, found, codes)
