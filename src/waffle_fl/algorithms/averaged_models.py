"""Averaging of iterates: a wrapper for any method whose agents use the mean of their models over the latest rounds.

After r rounds the latest model has the weight min(1, 1 / (averaging r)) in the mean, so that the mean covers about the
last `averaging` r rounds. Training does not see the mean. An agent adds the model of a round when it trains the next
one, from what it then receives; `personal` adds the latest model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import final

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import Net, State
from waffle_fl.algorithms.wrapper import Wrapper, extended, inner_state
from waffle_fl.errors import WaffleError

AVERAGED = "averaged"  # the names of the fields that the wrapper adds start with it


@final
@dataclass(frozen=True)
class AveragedModels(Wrapper):
    """An algorithm whose personal models are means over the latest rounds."""

    def init(self, net: Net, agents: int) -> tuple[State, State]:
        server, rows = self.inner.init(net, agents)
        try:
            start = self._received(self.inner.broadcast(server, agents), rows)
        except AttributeError as error:
            raise WaffleError(
                "averaging: expected a method whose personal() reads only fields that broadcast() sends, got "
                f"{type(self.unwrapped).__name__}: {error}"
            ) from None
        return server, extended(
            rows,
            averaged_params=start.params,
            averaged_stats=start.stats,
            averaged_rounds=net.params.new_zeros(agents),
        )

    def begin(self, down: State, agents: State) -> State:
        return self.inner.begin(down, inner_state(agents))

    def finish(self, down: State, agents: State, local: State) -> tuple[State, State]:
        before = inner_state(agents)
        mean = self._mean(agents, self._received(down, before))
        after, up = self.inner.finish(down, before, local)
        return extended(
            after,
            averaged_params=mean.params,
            averaged_stats=mean.stats,
            averaged_rounds=agents.averaged_rounds + 1,
        ), up

    def personal(self, server: State, agents: State, count: int) -> Net:
        return self._mean(agents, self.inner.personal(server, inner_state(agents), count))

    def _candidates(self, down: State, agents: State) -> Net:
        return self.inner.candidates(down, inner_state(agents))  # type: ignore[attr-defined, no-any-return]

    def _mean(self, agents: State, latest: Net) -> Net:
        """Return the mean of each agent with one more model."""
        weight = (1 / (self.sgd.averaging * agents.averaged_rounds)).clamp(max=1)[:, None]
        return Net(*map(torch.lerp, (agents.averaged_params, agents.averaged_stats), latest, (weight, weight)))

    def _received(self, down: State, agents: State) -> Net:
        """Return the model of each agent after the previous round, from what it receives and keeps."""
        nets = [self._model_of(down, agents, row) for row in range(len(down[0]) if down else len(agents[0]))]
        return Net(*(torch.cat(parts) for parts in zip(*nets, strict=True)))

    def _model_of(self, down: State, agents: State, row: int) -> Net:
        sent: dict[str, Tensor] = {name: field[row] for name, field in down._asdict().items()}
        own = type(agents)(*(field[row : row + 1] for field in agents))
        return self.inner.personal(SimpleNamespace(**sent), own, 1)
