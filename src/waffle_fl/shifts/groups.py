"""Which agents are shifted: agents form groups, counted from Alice; her own group is not shifted."""

from __future__ import annotations

from typing import NamedTuple

from waffle_fl.errors import WaffleError


class Member(NamedTuple):
    """An agent's position in a shift."""

    agent: int
    group: int  # 0 is Alice's
    degree: float  # degree of the shift: 0 in Alice's group, 1 in the last
    seed: int


def groups_of(agents: int, alice: int, groups: int) -> tuple[int, ...]:
    """Return each agent's group: agent i is in group (i - alice) mod groups."""
    return tuple((i - alice) % groups for i in range(agents))


def members(agents: int, alice: int, groups: int, seed: int) -> list[Member]:
    """Return all agents with their groups; group g is shifted by the degree g / (groups - 1)."""
    found = groups_of(agents, alice, groups)
    return [Member(i, group, group / max(groups - 1, 1), seed) for i, group in enumerate(found)]


def check_groups(kind: str, groups: int, least: int = 2) -> None:
    if groups < least:
        raise WaffleError(f"{kind}: expected groups >= {least}, got {groups}: Alice's own group is not shifted")
