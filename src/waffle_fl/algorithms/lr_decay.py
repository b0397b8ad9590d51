"""Decay of the learning rate: a wrapper for any method that multiplies lr by `lr_decay` after every round.

The server sends the learning rate of the round with the model, one number per agent, so that an agent that missed
rounds, and a site of a deployment, use the right one. It is a tensor, so that a captured CUDA graph can update it.
The wrapped method sees it as `sgd.lr`: (N, 1) in functions of the agents, a scalar at the server.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import Algorithm, Grad, Net, Round, Rows, Seen, State, Vector, Weights
from waffle_fl.algorithms.wrapper import Wrapper, extended, inner_state

T = TypeVar("T")


def _replaced(instance: T, name: str, value: Any) -> T:
    """Return a frozen dataclass with another value in one field, without checks: they would wait for the device."""
    changed = copy.copy(instance)
    object.__setattr__(changed, name, value)
    return changed


@final
@dataclass(frozen=True)
class LrDecay(Wrapper):
    """An algorithm whose learning rate in round r is lr * lr_decay^(r - 1)."""

    def _at(self, lr: Tensor) -> Algorithm:
        """Return the wrapped method with this learning rate."""
        return _replaced(self.inner, "sgd", _replaced(self.inner.sgd, "lr", lr))

    def init(self, net: Net, agents: int) -> tuple[State, State]:
        server, rows = self.inner.init(net, agents)
        return extended(server, round_lr=net.params.new_full((), self.sgd.lr)), rows

    def broadcast(self, server: State, agents: int) -> State:
        return extended(self.inner.broadcast(inner_state(server), agents), round_lr=server.round_lr.expand(agents))

    def begin(self, down: State, agents: State) -> State:
        local = self._at(down.round_lr[:, None]).begin(inner_state(down), agents)
        return extended(local, round_lr=down.round_lr)

    def step(self, local: State, grad: Grad) -> State:
        stepped = self._at(local.round_lr[:, None]).step(inner_state(local), grad)
        return extended(stepped, round_lr=local.round_lr)

    def finish(self, down: State, agents: State, local: State) -> tuple[State, State]:
        return self._at(down.round_lr[:, None]).finish(inner_state(down), agents, inner_state(local))

    def aggregate(self, server: State, up: State, now: Round) -> tuple[State, State]:
        after, info = self._at(server.round_lr).aggregate(inner_state(server), up, now)
        return self._next_round(server, after, now), info

    def _next_round(self, server: State, after: State, now: Round) -> State:
        """Return the wrapped method's state after the round with the learning rate of the next one."""
        return extended(after, round_lr=torch.full_like(server.round_lr, self.sgd.lr * self.sgd.lr_decay**now.r))

    def personal(self, server: State, agents: State, count: int) -> Net:
        return self.inner.personal(inner_state(server), agents, count)

    def _compared_rows(self, down: State, agents: State, up: State, steps: Tensor) -> dict[str, Rows]:
        method: Any = self._at(down.round_lr[:, None])
        return method.compared_rows(inner_state(down), agents, up, steps)  # type: ignore[no-any-return]

    def _summed_rows(self, down: State, agents: State, up: State, steps: Tensor) -> dict[str, Rows]:
        method: Any = self._at(down.round_lr[:, None])
        return method.summed_rows(inner_state(down), agents, up, steps)  # type: ignore[no-any-return]

    def _first_weights(self, server: State, seen: Seen, now: Round) -> dict[str, Weights]:
        method: Any = self._at(server.round_lr)
        return method.first_weights(inner_state(server), seen, now)  # type: ignore[no-any-return]

    def _weigh(self, server: State, seen: Seen, now: Round) -> tuple[State, dict[str, Weights], State]:
        method: Any = self._at(server.round_lr)
        after, weights, info = method.weigh(inner_state(server), seen, now)
        return extended(after, round_lr=server.round_lr), weights, info

    def _combine(self, server: State, sums: Mapping[str, Vector], now: Round) -> State:
        method: Any = self._at(server.round_lr)
        return self._next_round(server, method.combine(inner_state(server), sums, now), now)

    def _helper(self) -> LrDecay:
        return LrDecay(self.inner.helper())  # type: ignore[attr-defined]

    def _candidates(self, down: State, agents: State) -> Net:
        return self.inner.candidates(inner_state(down), agents)  # type: ignore[attr-defined, no-any-return]

    def _rehearse(self, local: State, grad: Grad) -> State:
        rehearsed = self._at(local.round_lr[:, None]).rehearse(inner_state(local), grad)  # type: ignore[attr-defined]
        return extended(rehearsed, round_lr=local.round_lr)

    def _relations(self, server: State) -> Tensor:
        return self.inner.relations(inner_state(server))  # type: ignore[attr-defined, no-any-return]

    def _new_control_variates(self, server: State, up: State, steps: Tensor) -> Rows:
        method: Any = self._at(server.round_lr)
        return method.new_control_variates(inner_state(server), up, steps)  # type: ignore[no-any-return]
