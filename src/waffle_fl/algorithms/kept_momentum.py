"""Momentum kept between rounds: a wrapper for any method that makes an agent's velocity part of its state.

An optimiser that is created once, before the first round, keeps its velocity from round to round; one that is created
in every round starts at zero. `SGD.momentum_between_rounds` selects the behaviour, and `for_model` wraps the algorithm
if the velocity is kept. The wrapper finds velocities by name: every field of `Local` whose name ends in `velocity`.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import cache
from typing import Any, cast, final

from waffle_fl.algorithms.contract import Algorithm, Grad, Net, Optimiser, Round, State
from waffle_fl.algorithms.hooks import ModelDependent
from waffle_fl.models.layers import Layers

VELOCITY = "velocity"


def for_model(algorithm: Algorithm, layers: Layers) -> Algorithm:
    """Return the algorithm prepared for a model with these layers. Engines call this before they train."""
    inner = algorithm.inner if isinstance(algorithm, KeptMomentum) else algorithm
    fitted = inner.for_model(layers) if isinstance(inner, ModelDependent) else inner
    return KeptMomentum(fitted) if fitted.sgd.keeps_velocity else fitted


@cache
def _with_velocities(agents: Any, velocities: tuple[str, ...]) -> Any:
    """Return a method's `Agents` type with one more field for each velocity."""
    base: Any = namedtuple("Agents", (*agents._fields, *velocities))  # type: ignore[misc]
    return type("Agents", (base,), {"__slots__": (), "inner": agents})


def _velocities(local: State) -> tuple[str, ...]:
    return tuple(name for name in local._fields if name.endswith(VELOCITY))


def _inner_agents(agents: State) -> State:
    """Return the agents' state without the velocities."""
    inner: Any = type(agents).inner
    return inner(*agents[: len(inner._fields)])


def _extended(inner_state: State, local: State) -> State:
    """Return the agents' state with the velocities at the end of local training."""
    names, kind = _velocities(local), cast(Any, type(inner_state))
    return _with_velocities(kind, names)(*inner_state, *(getattr(local, name) for name in names))


@final
@dataclass(frozen=True)
class KeptMomentum:
    """An algorithm whose agents start each round with the velocity from the end of their previous round."""

    inner: Algorithm

    @property
    def sgd(self) -> Optimiser:
        return self.inner.sgd

    def __getattr__(self, name: str) -> Any:
        """Return an optional hook of the wrapped method, if it has it."""
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        attribute = getattr(self.inner, name)
        if name == "helper":
            return lambda: KeptMomentum(attribute())
        if name == "candidates":
            return lambda down, agents: attribute(down, _inner_agents(agents))
        return attribute

    def init(self, net: Net, agents: int) -> tuple[State, State]:
        server, inner_state = self.inner.init(net, agents)
        local = self.inner.begin(self.inner.broadcast(server, agents), inner_state)
        return server, _extended(inner_state, local)

    def broadcast(self, server: State, agents: int) -> State:
        return self.inner.broadcast(server, agents)

    def begin(self, down: State, agents: State) -> State:
        local = self.inner.begin(down, _inner_agents(agents))
        return local._replace(**{name: getattr(agents, name) for name in _velocities(local)})

    def step(self, local: State, grad: Grad) -> State:
        return self.inner.step(local, grad)

    def finish(self, down: State, agents: State, local: State) -> tuple[State, State]:
        inner_state, up = self.inner.finish(down, _inner_agents(agents), local)
        return _extended(inner_state, local), up

    def aggregate(self, server: State, up: State, now: Round) -> tuple[State, State]:
        return self.inner.aggregate(server, up, now)

    def personal(self, server: State, agents: State, count: int) -> Net:
        return self.inner.personal(server, _inner_agents(agents), count)
