"""The server's part of one masked sum: from the shares that agents send for it to its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from waffle_fl.algorithms.contract import Weights
from waffle_fl.errors import WaffleError
from waffle_fl.privacy.contributors import effective
from waffle_fl.privacy.messages import Announcement, Delivery, Opening, RoundId
from waffle_fl.privacy.phases import SumRequest, UnmaskRequest
from waffle_fl.privacy.ring import Numbers
from waffle_fl.privacy.server import MaskingServer


class Unreadable(WaffleError):
    """The masks of a round do not cancel, or too few sums or shares have arrived. The round can be tried again."""


class MaskedSum:
    """One sum of a round. `parts` gives the length and the unit of each of its parts."""

    def __init__(self, group: Sequence[int], at: RoundId, parts: Mapping[str, tuple[int, float]], first: bool) -> None:
        self.hub, self.at, self.first = MaskingServer(group, at, parts, rotated=first), at, first
        self.announced = Announcement({})
        self._deliveries: Mapping[int, Delivery] = {}
        self._arrived: tuple[int, ...] = ()

    def open(self, openings: Iterable[Opening]) -> Mapping[int, Delivery]:
        """Return what each agent that has opened the round receives."""
        self._deliveries = self.hub.deliver(openings)
        return self._deliveries

    def requests(self, weights: Mapping[str, Weights], opened: Sequence[int], delivered: bool) -> dict[int, SumRequest]:
        """Announce the weights of the agents that have opened the round; an agent without one needs its shares only."""
        tables = {name: table.tolist() for name, table in weights.items()}
        self.announced = self.hub.announce({name: {i: table[i] for i in opened} for name, table in tables.items()})
        asked = [i for i in opened if i in self.announced.contributors or not delivered]
        return {i: SumRequest(self.announced, () if delivered else (self._deliveries[i],), self.first) for i in asked}

    def close(self, replies: Mapping[int, Any], floors: Sequence[float]) -> UnmaskRequest:
        """Return the request for the shares that unmask the sum of what has arrived."""
        reveal = self.hub.request(one for reply in replies.values() for one in reply.sums)
        self._arrived = reveal.arrived
        for table in self.announced.weights.values():
            floor = largest_floor(table, floors)
            number = effective([table[i] for i in reveal.arrived])
            if sum(table[i] > 0 for i in reveal.arrived) < 2 or number < floor:
                raise Unreadable(
                    f"expected at least {max(floor, 2):g} effective contributors in round {self.at.round}, got "
                    f"{number:.2f}: the sums of {len(reveal.missing)} agents have not arrived"
                )
        return UnmaskRequest(self.announced, reveal, self.first)

    def read(self, replies: Iterable[Any]) -> dict[str, Numbers]:
        """Return the sum of each part over the agents whose sums have arrived."""
        try:
            return self.hub.sums(list(replies))
        except WaffleError as error:
            raise Unreadable(str(error)) from None

    @property
    def scales(self) -> dict[str, float]:
        """The factor of each part by which the weights of what has arrived sum to what was announced."""
        tables = self.announced.weights
        return {name: sum(table.values()) / sum(table[i] for i in self._arrived) for name, table in tables.items()}

    @property
    def missing(self) -> list[int]:
        """The contributors whose sum has not arrived."""
        return [i for i in self.announced.contributors if i not in self._arrived]


def largest_floor(table: Mapping[int, float], floors: Sequence[float]) -> float:
    """Return the largest floor of the contributors to a part."""
    return max(floors[i] for i, weight in table.items() if weight > 0)
