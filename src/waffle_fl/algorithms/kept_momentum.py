"""Momentum kept between rounds: a wrapper for any method that makes an agent's velocity part of its state.

An optimiser that is created once, before the first round, keeps its velocity from round to round; one that is created
in every round starts at zero. `SGD.momentum_between_rounds` selects the behaviour. The wrapper finds velocities by
name: every field of `Local` whose name ends in `velocity`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from waffle_fl.algorithms.contract import Net, State
from waffle_fl.algorithms.wrapper import Wrapper, extended, inner_state

VELOCITY = "velocity"


def _velocities(local: State) -> dict[str, Any]:
    return {name: getattr(local, name) for name in local._fields if name.endswith(VELOCITY)}


@final
@dataclass(frozen=True)
class KeptMomentum(Wrapper):
    """An algorithm whose agents start each round with the velocity from the end of their previous round."""

    def init(self, net: Net, agents: int) -> tuple[State, State]:
        server, rows = self.inner.init(net, agents)
        local = self.inner.begin(self.inner.broadcast(server, agents), rows)
        return server, extended(rows, **_velocities(local))

    def begin(self, down: State, agents: State) -> State:
        local = self.inner.begin(down, inner_state(agents))
        return local._replace(**{name: getattr(agents, name) for name in _velocities(local)})

    def finish(self, down: State, agents: State, local: State) -> tuple[State, State]:
        rows, up = self.inner.finish(down, inner_state(agents), local)
        return extended(rows, **_velocities(local)), up

    def personal(self, server: State, agents: State, count: int) -> Net:
        return self.inner.personal(server, inner_state(agents), count)

    def _helper(self) -> KeptMomentum:
        return KeptMomentum(self.inner.helper())  # type: ignore[attr-defined]

    def _candidates(self, down: State, agents: State) -> Net:
        return self.inner.candidates(down, inner_state(agents))  # type: ignore[attr-defined, no-any-return]
