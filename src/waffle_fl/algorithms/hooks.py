"""The optional functions of an algorithm. Engines look them up by name; an algorithm implements those that it needs.

Each protocol is one hook. Hooks are row-local like `begin` and `step`, unless they read the server's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from waffle_fl.algorithms.contract import Algorithm, Grad, Net, Round, Rows, Seen, State, Vector, Weights
from waffle_fl.models.layers import Layers


@runtime_checkable
class HasHelper(Protocol):
    """Has a cheaper algorithm for agents whose own model is not requested."""

    def helper(self) -> Algorithm:
        """Return an algorithm of the same `Server`, `Down`, `Up` and `aggregate` that keeps no state at the agents.

        A simulation for one Alice trains the other agents with it. A run of the helper itself with the same settings
        then reuses the server's model instead of training again.
        """
        ...


@runtime_checkable
class HasCandidates(Protocol):
    """Lets each agent evaluate several models before it trains."""

    @property
    def scored_on(self) -> Literal["training", "validation"]:
        """The samples on which an agent evaluates; "validation" uses training samples if there are no others."""
        ...

    def candidates(self, down: State, agents: State) -> Net:
        """Return models (N, M, P). Before `begin` each agent writes their mean losses into `down.losses` (N, M)."""
        ...


@runtime_checkable
class CountsErrors(Protocol):
    """Compares candidates by another measure than the loss."""

    @property
    def scored_by(self) -> Literal["loss", "error"]:
        """What is written into `down.losses`; "error" is the share of wrong predictions, or the loss limited to 1."""
        ...


@runtime_checkable
class HasWarmUp(Protocol):
    """Adapts the model from which an agent starts to train, on mini-batches of the round."""

    @property
    def rehearsed(self) -> float:
        """Share of an epoch's mini-batches that the warm-up uses."""
        ...

    def rehearse(self, local: State, grad: Grad) -> State:
        """Make one warm-up step on a mini-batch, between `begin` and the first `step`."""
        ...


@runtime_checkable
class HasRelations(Protocol):
    """Reports how much each agent's model contributes to every other agent's model."""

    def relations(self, server: State) -> Tensor:
        """Return (N, N): row i holds the weights of all agents' models in the model of agent i.

        Alice's row is recorded as `weights`, instead of the `weights` of an `Info`.
        """
        ...


@runtime_checkable
class HasControlVariates(Protocol):
    """Computes the control variates that the updates lead to, for the guard."""

    def new_control_variates(self, server: State, up: State, steps: Tensor) -> Rows:
        """Return the new control variates, one row per agent."""
        ...


@runtime_checkable
class PredictsWithTrainingData(Protocol):
    """Predicts with the agent's training data: a model file also contains their features and labels."""

    def answer(self, output: Tensor, features: Tensor, known: Tensor, labels: Tensor) -> Tensor:
        """Return the predictions for some samples. Called wherever a model is evaluated.

        `output` is the model's output for these samples and `features` the input of its last layer. `known` and
        `labels` are the features and the labels of the agent's own training samples; numbers are float64. It must
        trace (`torch.export`), without control flow that depends on values or on the number of samples.
        """
        ...


@runtime_checkable
class MixesOutputs(Protocol):
    """Predicts with the mixed outputs of two models."""

    @property
    def mixes_outputs(self) -> bool:
        """Whether a row of `personal` holds two models, their statistics, and the share of the first as last number."""
        ...


@runtime_checkable
class MixesPredictions(Protocol):
    """Predicts with a mixture of its model, the average model, a model trained alone, and nearest training samples."""

    @property
    def mixes_predictions(self) -> bool:
        """Whether the engines wrap the method in `PredictionMixture`, whose rows of `personal` hold several models."""
        ...


@runtime_checkable
class ValidationDependent(Protocol):
    """Predicts in another way if Alice has validation samples."""

    def for_validation(self, has_samples: bool) -> Algorithm:
        """Return the algorithm with its way to predict set, given whether Alice has samples to choose by."""
        ...


@runtime_checkable
class ModelDependent(Protocol):
    """Treats layers of the model differently."""

    def for_model(self, layers: Layers) -> Algorithm:
        """Return the algorithm with its `model_dependent` fields set for a model with these layers."""
        ...


@runtime_checkable
class ChecksAgents(Protocol):
    """Has hyperparameters that do not fit every federation."""

    def check_agents(self, agents: int) -> None:
        """Raise a WaffleError if they do not fit this number of agents. Engines call it before the first round."""
        ...


@runtime_checkable
class AsksAll(Protocol):
    """Has rounds in which all agents take part, also with partial participation."""

    def asks_all(self, r: int, of: int, agents: int) -> bool:
        """Return whether round r of `of` is one of them, with so many agents."""
        ...


@runtime_checkable
class ExpectsCohort(Protocol):
    """Sends something that depends on which agents take part in the round."""

    def expect(self, server: State, asked: Tensor) -> State:
        """Return the server's state before a round of the agents `asked` (N,). Not called if all agents take part."""
        ...


@runtime_checkable
class AveragesCohorts(Protocol):
    """Gives agents weight 0 that take no part in a round, and needs nothing of them."""

    @property
    def averages_cohorts(self) -> bool:
        """Whether `aggregate` may get the rows of a cohort alone, with `Round.cohort`, and gives the same result.

        Its diagnostics are then those of the cohort's agents, and 0 for all others.
        """
        ...


@runtime_checkable
class AggregatesSums(Protocol):
    """Aggregates from distances and weighted sums, so that `privacy = "masked"` can hide single updates.

    `compared_rows` and `summed_rows` are row-local and run at the agents; `agents` is their state before the round.
    The parts of a sum are named: `dy` for updates, `stats` for normalisation statistics. A class that needs the length
    of Alice's update sets `reads_length = True`. Sums are divided by the weight of the agents that did not drop out,
    except the parts that are named in `sums_of_changes`.

    A class that compares several rows of an agent sets `compares_directions = True`, and gets `Seen.angles`. One whose
    parts have different contributors sets `sums_by_layer = True`: a part with one contributor is not summed. Fields of
    `Down` that differ between agents are named in `sent_to_each`.
    """

    def needs_updates(self) -> str:
        """Return the hyperparameter with which the server needs single updates, or an empty string."""
        ...

    def compared_rows(self, down: State, agents: State, up: State, steps: Tensor) -> dict[str, Rows]:
        """Return the rows whose distances from Alice's row the server needs, under their name; empty if none."""
        ...

    def summed_rows(self, down: State, agents: State, up: State, steps: Tensor) -> dict[str, Rows]:
        """Return the rows of which the server needs weighted sums, by name."""
        ...

    def weigh(self, server: State, seen: Seen, now: Round) -> tuple[State, dict[str, Weights], State]:
        """Return the server's state, the weights in each sum, and diagnostics for the record."""
        ...

    def combine(self, server: State, sums: Mapping[str, Vector], now: Round) -> State:
        """Return the server's state after the round, given the weighted sums."""
        ...


@runtime_checkable
class ReadsFirstSum(Protocol):
    """Weighs by the length of a weighted sum of what is compared, besides the hook `AggregatesSums`."""

    def first_weights(self, server: State, seen: Seen, now: Round) -> dict[str, Weights]:
        """Return the weights in the sums whose lengths are needed, by the name of what is compared.

        They sum to 1. A sum that the floors of agents do not allow is left out of `Seen.totals`.
        """
        ...


HOOKS = {
    "helper": HasHelper,
    "scored_on": HasCandidates,
    "candidates": HasCandidates,
    "scored_by": CountsErrors,
    "rehearsed": HasWarmUp,
    "rehearse": HasWarmUp,
    "relations": HasRelations,
    "new_control_variates": HasControlVariates,
    "answer": PredictsWithTrainingData,
    "mixes_outputs": MixesOutputs,
    "mixes_predictions": MixesPredictions,
    "for_model": ModelDependent,
    "for_validation": ValidationDependent,
    "check_agents": ChecksAgents,
    "asks_all": AsksAll,
    "expect": ExpectsCohort,
    "averages_cohorts": AveragesCohorts,
    "needs_updates": AggregatesSums,
    "compared_rows": AggregatesSums,
    "summed_rows": AggregatesSums,
    "weigh": AggregatesSums,
    "combine": AggregatesSums,
    "first_weights": ReadsFirstSum,
}
