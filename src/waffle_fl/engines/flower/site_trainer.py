"""Training and evaluation of one agent at its site, with the code that the simulator uses for its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from waffle_fl.algorithms import Algorithm, Net, for_model
from waffle_fl.engines.arithmetic import one_thread, products
from waffle_fl.engines.candidate_losses import CandidateLosses
from waffle_fl.engines.cuda_graphs import Graphs
from waffle_fl.engines.evaluation import Evaluator
from waffle_fl.engines.outcomes import to_numbers
from waffle_fl.engines.private_gradients import batches_of
from waffle_fl.engines.row_training import RowTraining
from waffle_fl.engines.run_spec import RoundSettings, prepared
from waffle_fl.engines.tree import tree_map
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel
from waffle_fl.poisson_batches import PoissonBatches
from waffle_fl.randomness import Draw, noise


class SiteTrainer:
    """One agent of a run. Calls have no side effects: the same state, round and attempt give the same bits."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        model: FlatModel,
        seed: int,
        settings: RoundSettings,
    ) -> None:
        self.model = prepared(model, federation)
        self.algorithm = for_model(algorithm, self.model.layers)
        self.federation = federation.to(model.device, model.dtype)
        batches = self._batches = batches_of(self.algorithm, self.model, [self.federation], [seed], settings)
        self.steps = batches.steps[0]
        losses = CandidateLosses(self.algorithm, model, [self.federation], [seed])
        self._training = RowTraining(self.algorithm, model, batches, Graphs(model), [1], 1, losses)
        self._net = model.init(seed)

    def start(self) -> Any:
        """The agent's state before the first round."""
        return self.algorithm.init(self._net, 1)[1]

    def blank_down(self) -> Any:
        """The initial broadcast: a template with the names, shapes and types of all later ones."""
        return self.algorithm.broadcast(self.algorithm.init(self._net, 1)[0], 1)

    def train(self, down: Any, agents: Any, r: int, attempt: int, draw: Draw = noise) -> tuple[Any, Any]:
        """A2.5-12: return (the agent's new state, its update); `draw` draws noise and samples, which must be secret."""
        if isinstance(self._batches, PoissonBatches):
            self._batches.draw = draw
        with one_thread(), products(self.model.precision):
            ((after, up),) = self._training.round([(down, agents)], r, attempt, rounds_left=1)
        return after, up

    def own_model(self, down: Any, agents: Any) -> Net:
        """The agent's personal model, from the broadcast and its stored state."""
        sent = SimpleNamespace(**tree_map(lambda field: field[0], down)._asdict())
        net = self.algorithm.personal(sent, agents, 1)
        return Net(net.params[0], net.stats[0])

    def evaluate(self, net: Net) -> dict[str, float]:
        """Scores on the agent's own held-out data, bit-equal to the simulator's."""
        with one_thread(), products(self.model.precision):
            metrics = Evaluator(self.model).evaluate([self.algorithm], [self.federation], [net], progress=1.0)
            (scores,) = to_numbers(metrics)
        return scores
