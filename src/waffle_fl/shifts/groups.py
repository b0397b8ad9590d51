"""Which agents are shifted: they stand in groups, counted from Alice, and her own group stays as it is."""

from __future__ import annotations

from typing import NamedTuple

from waffle_fl.errors import WaffleError


class Member(NamedTuple):
    """An agent as a shift sees it."""

    agent: int
    group: int  # 0 is Alice's
    degree: float  # how far it is shifted: 0 in Alice's group, 1 in the last
    seed: int


def groups_of(agents: int, alice: int, groups: int) -> tuple[int, ...]:
    """Agent i is in the group (i - alice) mod groups."""
    return tuple((i - alice) % groups for i in range(agents))


def members(agents: int, alice: int, groups: int, seed: int) -> list[Member]:
    """All agents; group g is shifted by the degree g / (groups - 1)."""
    found = groups_of(agents, alice, groups)
    return [Member(i, group, group / max(groups - 1, 1), seed) for i, group in enumerate(found)]


def check_groups(kind: str, groups: int, least: int = 2) -> None:
    if groups < least:
        raise WaffleError(f"{kind}: expected groups >= {least}, got {groups}: Alice's own group is not shifted")
