"""Wrappers: an option of the optimiser that works for any method is an algorithm around the method.

A wrapper adds fields to the states of the wrapped method and removes them before it calls that method.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor

from waffle_fl.algorithms.contract import Algorithm, Grad, Net, Optimiser, Round, State


@cache
def _with_fields(kind: Any, names: tuple[str, ...]) -> Any:
    """Return a state's type with more fields; `inner` is the type without them."""
    base: Any = namedtuple(kind.__name__, (*kind._fields, *names))  # type: ignore[misc]
    return type(kind.__name__, (base,), {"__slots__": (), "inner": kind})


def extended(state: State, **more: Tensor) -> State:
    """Return the state with more fields."""
    kind: Any = type(state)
    return _with_fields(kind, tuple(more))(*state, *more.values())


def inner_state(state: State) -> State:
    """Return the state without the fields that a wrapper has added last."""
    inner: Any = getattr(type(state), "inner", None)
    return state if inner is None else inner(*state[: len(inner._fields)])


@dataclass(frozen=True)
class Wrapper:
    """An algorithm that behaves as the one inside it; subclasses change some of its functions.

    A subclass changes an optional hook, if the wrapped method has it, by a method with an underscore before its name.
    """

    inner: Algorithm

    @property
    def sgd(self) -> Optimiser:
        return self.inner.sgd

    @property
    def unwrapped(self) -> Algorithm:
        """The method inside all wrappers."""
        return self.inner.unwrapped if isinstance(self.inner, Wrapper) else self.inner

    def __getattr__(self, name: str) -> Any:
        """Return an optional hook of the wrapped method, if it has it."""
        if name == "inner" or name.startswith("_"):
            raise AttributeError(name)
        attribute = getattr(self.inner, name)
        changed = getattr(type(self), f"_{name}", None)
        return partial(changed, self) if changed else attribute

    def _for_validation(self, has_samples: bool) -> Wrapper:
        """Return the same: a wrapped method has its way to predict set."""
        return self

    def init(self, net: Net, agents: int) -> tuple[State, State]:
        return self.inner.init(net, agents)

    def broadcast(self, server: State, agents: int) -> State:
        return self.inner.broadcast(server, agents)

    def begin(self, down: State, agents: State) -> State:
        return self.inner.begin(down, agents)

    def step(self, local: State, grad: Grad) -> State:
        return self.inner.step(local, grad)

    def finish(self, down: State, agents: State, local: State) -> tuple[State, State]:
        return self.inner.finish(down, agents, local)

    def aggregate(self, server: State, up: State, now: Round) -> tuple[State, State]:
        return self.inner.aggregate(server, up, now)

    def personal(self, server: State, agents: State, count: int) -> Net:
        return self.inner.personal(server, agents, count)
