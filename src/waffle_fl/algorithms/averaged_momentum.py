"""Averaged momentum: a wrapper for FedAvg and FedAvg+FT whose server averages the velocities as it averages the models.

Adam divides each agent's gradient by moments of that agent alone. The mean of such steps differs from Adam's step for
the mean gradient; with averaged moments the agents train nearly as Adam does on the rows of all agents. Every agent
sends its velocity at the end of a round together with its update, and starts the next round with the mean. Where agents
fine-tune alone in the last rounds, they still share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from waffle_fl.algorithms.contract import Algorithm, Net, Round, State, weighted_sum
from waffle_fl.algorithms.wrapper import Wrapper, extended, inner_state
from waffle_fl.errors import WaffleError

OPTION = "momentum_between_rounds"


@final
@dataclass(frozen=True)
class AveragedMomentum(Wrapper):
    """An algorithm whose agents start each round with the mean velocity from the end of the previous round."""

    def init(self, net: Net, agents: int) -> tuple[State, State]:
        server, rows = self.inner.init(net, agents)
        local = self.inner.begin(self.inner.broadcast(server, agents), rows)
        return extended(server, mean_velocity=local.velocity[0]), rows

    def broadcast(self, server: State, agents: int) -> State:
        mean = server.mean_velocity.expand(agents, -1)
        return extended(self.inner.broadcast(inner_state(server), agents), mean_velocity=mean)

    def begin(self, down: State, agents: State) -> State:
        return self.inner.begin(inner_state(down), agents)._replace(velocity=down.mean_velocity)

    def finish(self, down: State, agents: State, local: State) -> tuple[State, State]:
        rows, up = self.inner.finish(inner_state(down), agents, local)
        return rows, extended(up, velocity=local.velocity)

    def aggregate(self, server: State, up: State, now: Round) -> tuple[State, State]:
        after, info = self.inner.aggregate(inner_state(server), inner_state(up), now)
        mean = weighted_sum(info.weights, up.velocity).to(up.velocity.dtype)
        return extended(after, mean_velocity=mean), info

    def personal(self, server: State, agents: State, count: int) -> Net:
        return self.inner.personal(inner_state(server), agents, count)

    def _needs_updates(self) -> str:
        return f"{OPTION} = average"


def with_averaged_momentum(algorithm: Algorithm) -> AveragedMomentum:
    """Return the algorithm with averaged velocities; raise WaffleError unless it averages models by their mean."""
    method = algorithm.unwrapped if isinstance(algorithm, Wrapper) else algorithm
    if not getattr(method, "averages_momentum", False):
        raise WaffleError(
            f"{OPTION}: average works with FedAvg and FedAvg+FT only, got {type(method).__name__}: set reset or keep"
        )
    if getattr(method, "aggregation", "mean") != "mean":
        raise WaffleError(f"{OPTION}: expected reset or keep with a robust aggregation, got average")
    return AveragedMomentum(algorithm)
