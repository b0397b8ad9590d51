"""Three ways to combine control variates and momentum, on the quadratics of the drift figure; ours is SCAFFOLD's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from paper.drift import CURVATURES, OPTIMA, START, common_optimum

MOMENTUM, STEPS, LR, ROUNDS = 0.9, 40, 0.01, 20
FORMS = {
    "outside, divided by K (ours)": (False, float(STEPS)),
    "inside, divided by S": (
        True,
        STEPS / (1 - MOMENTUM) - MOMENTUM * (1 - MOMENTUM**STEPS) / (1 - MOMENTUM) ** 2,
    ),
    "inside, divided by K": (True, float(STEPS)),
    "no control variates (FedAvg)": (False, math.inf),
}


def models(inside: bool, divisor: float) -> list[Tensor]:
    """Return the server's model after each round, with c_i+ = c_i - c + (x - y_i)/(divisor lr).

    `inside` adds c - c_i to the velocity, otherwise it is added to the step.
    """
    x, c, c_i, found = START, torch.zeros_like(START), torch.zeros_like(OPTIMA), []
    for _ in range(ROUNDS):
        y, velocity = x.expand_as(OPTIMA), torch.zeros_like(OPTIMA)
        for _ in range(STEPS):
            gradient = CURVATURES * (y - OPTIMA)
            velocity = MOMENTUM * velocity + (gradient + c - c_i if inside else gradient)
            y = y - LR * (velocity if inside else velocity + c - c_i)
        c_i = c_i - c + (x - y) / (divisor * LR)
        c, x = c_i.mean(dim=0), y.mean(dim=0)
        found.append(x)
    return found


def lines() -> Iterator[str]:
    """Yield the record: per form, the distance of the server's model from the optimum of the mean loss per round."""
    for name, form in FORMS.items():
        distances = [float(f"{(x - common_optimum()).norm():.3g}") for x in models(*form)]
        setting = {"momentum": MOMENTUM, "steps": STEPS, "lr": LR}
        yield json.dumps({"form": name, **setting, "distances": distances}, separators=(",", ":"))
