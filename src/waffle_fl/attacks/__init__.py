"""Attacks by malicious agents, to measure their effect: manipulated updates and poisoned training data.

updates.py  manipulated updates: map the honest updates of all agents to what the malicious ones send
poison.py   poisoned data: map a federation to one whose malicious agents have changed labels or samples
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from waffle_fl.algorithms.contract import Rows
from waffle_fl.attacks import updates
from waffle_fl.attacks.poison import backdoored, flipped
from waffle_fl.attacks.updates import Lie, Scene
from waffle_fl.call_syntax import build
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation
from waffle_fl.randomness import derive

NONE = "none"


@dataclass(frozen=True)
class Attack:
    """How malicious agents change their data before training, and their updates after it."""

    lie: Lie | None = None
    poison: Callable[[Federation, Sequence[int]], Federation] | None = None


def _label_flip() -> Attack:
    """Train on mirrored labels: class k becomes C - 1 - k."""
    return Attack(poison=flipped)


def _replacement(boost: float = 10.0) -> Attack:
    """Model replacement (Bagdasaryan et al. 2020): train on mirrored labels and send the update times `boost`."""
    return Attack(updates.scaled(boost), flipped)


def _backdoor(target: float = 0.0, share: float = 0.5, boost: float = 1.0) -> Attack:
    """Stamp a patch on a share of the samples and label them `target`; optionally boost the update."""
    if target != int(target) or target < 0 or not 0 < share <= 1:
        raise WaffleError(f"backdoor needs a class and a share in (0, 1], got {target:g} and {share:g}")
    return Attack(
        updates.scaled(boost) if boost != 1 else None,
        lambda federation, attackers: backdoored(federation, attackers, int(target), share),
    )


ATTACKS: dict[str, Callable[..., Attack]] = {
    "label-flip": _label_flip,
    "sign-flip": lambda scale=1.0: Attack(updates.scaled(-scale)),
    "gaussian": lambda length=3.0: Attack(updates.gaussian(length)),
    "replacement": _replacement,
    "alie": lambda z=1.5: Attack(updates.alie(z)),
    "ipm": lambda epsilon=0.5: Attack(updates.ipm(epsilon)),
    "mimic": lambda: Attack(updates.mimic),
    "free-rider": lambda: Attack(updates.scaled(0.0)),
    "far": lambda length=100.0: Attack(updates.gaussian(length)),
    "projected": lambda radius=1.0: Attack(updates.projected(radius)),
    "evading": lambda length=2.0: Attack(updates.evading(length)),
    "backdoor": _backdoor,
}
ADAPTIVE = ("projected", "evading")  # designed against defences that compare distances, and against the guard


@cache
def parse(text: str) -> Attack:
    """Return the attack named by a text such as alie(1.5)."""
    return build(text, {NONE: Attack, **ATTACKS}, "an attack", "sign-flip or alie(1.5)")


def name_of(text: str) -> str:
    """Return the name without arguments: alie for alie(1.5)."""
    return text.split("(")[0].strip()


def attackers_of(federation: Federation, count: int) -> tuple[int, ...]:
    """Return the malicious agents: the last `count`, never Alice."""
    others = [i for i in range(federation.agents) if i != federation.alice]
    if not 1 <= count <= len(others):
        raise WaffleError(f"expected between 1 and {len(others)} attackers (all agents but Alice), got {count}")
    return tuple(others[-count:])


def poisoned(federation: Federation, attack: str, count: int) -> Federation:
    """Return the federation with the training data of its malicious agents poisoned."""
    poison = parse(attack).poison
    return poison(federation, attackers_of(federation, count)) if poison else federation


def tamper_of(federation: Federation, attack: str, count: int, seed: int) -> Callable[[Any, int], Any] | None:
    """Return the function that manipulates a federation's updates in each round; None if the attack changes none."""
    lie = parse(attack).lie
    if lie is None:
        return None
    attackers = attackers_of(federation, count)
    malicious = torch.zeros(federation.agents, dtype=torch.bool)
    malicious[list(attackers)] = True
    honest = ~malicious & (federation.samples.cpu() > 0)

    def tamper(up: Any, r: int) -> Any:
        device = up.dy.device
        keys = torch.tensor([derive(seed, "attack", r, who) for who in federation.ids], device=device)
        seen = honest.to(device) & (up.dy != 0).any(dim=1)  # an agent that takes no part in the round sends zeros
        scene = Scene(up.dy, seen, torch.tensor(federation.alice, device=device), keys)
        sent: Rows = lie(scene).to(up.dy.dtype)
        return up._replace(dy=torch.where(malicious.to(device)[:, None], sent, up.dy))

    return tamper
