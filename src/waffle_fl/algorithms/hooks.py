"""The optional functions of an algorithm. An engine looks for each by its name; an algorithm has those that it needs.

Each protocol is one hook. They are row-local like `begin` and `step`, unless they read the server's state.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from waffle_fl.algorithms.contract import Algorithm, Grad, Net, Rows, State
from waffle_fl.models.layers import Layers


@runtime_checkable
class HasHelper(Protocol):
    """Has a cheaper algorithm for agents whose own model is not requested."""

    def helper(self) -> Algorithm:
        """Return an algorithm of the same `Server`, `Down`, `Up` and `aggregate` that keeps no state at the agents.

        A simulation for one Alice trains the other agents with it. A run of the helper itself on the same settings is
        then read off the server and not trained again.
        """
        ...


@runtime_checkable
class HasCandidates(Protocol):
    """Lets each agent evaluate several models before it trains."""

    @property
    def scored_on(self) -> Literal["training", "validation"]:
        """The samples on which an agent evaluates; "validation" means training samples where it has no others."""
        ...

    def candidates(self, down: State, agents: State) -> Net:
        """Return (N, M, P) rows. Before `begin` each agent writes the mean loss of each into `down.losses` (N, M)."""
        ...


@runtime_checkable
class HasWarmUp(Protocol):
    """Changes the model from which an agent starts to train, on mini-batches of the round."""

    @property
    def rehearsed(self) -> float:
        """The share of an epoch's mini-batches that are used."""
        ...

    def rehearse(self, local: State, grad: Grad) -> State:
        """One step on a mini-batch, between `begin` and the first `step`."""
        ...


@runtime_checkable
class HasRelations(Protocol):
    """Knows how much of each agent's model is in each other's."""

    def relations(self, server: State) -> Tensor:
        """Return (N, N): row i, the weights of all agents' models in that of agent i.

        Alice's row is recorded as `weights`, in place of those of an `Info`.
        """
        ...


@runtime_checkable
class HasControlVariates(Protocol):
    """Shows the guard the control variates that an update would lead to."""

    def new_control_variates(self, server: State, up: State, steps: Tensor) -> Rows:
        """Return the new control variates, one row per agent."""
        ...


@runtime_checkable
class PredictsWithTrainingData(Protocol):
    """Predicts with the agent's training data at hand, so that its model is of no use without them."""

    def answer(self, output: Tensor, features: Tensor, known: Tensor, labels: Tensor) -> Tensor:
        """Return the predictions for some samples wherever a model is evaluated.

        `output` is what the model predicts for them and `features` the input of its last layer; `known` and `labels`
        are those features of the agent's own training samples, and their labels.
        """
        ...


@runtime_checkable
class ModelDependent(Protocol):
    """Treats layers of the model differently."""

    def for_model(self, layers: Layers) -> Algorithm:
        """Return the algorithm with its `model_dependent` fields set for a model of these layers."""
        ...


@runtime_checkable
class ChecksAgents(Protocol):
    """Has hyperparameters that do not fit every federation."""

    def check_agents(self, agents: int) -> None:
        """Raise a WaffleError where they do not fit this number of agents. Engines call it before the first round."""
        ...


HOOKS = {
    "helper": HasHelper,
    "scored_on": HasCandidates,
    "candidates": HasCandidates,
    "rehearsed": HasWarmUp,
    "rehearse": HasWarmUp,
    "relations": HasRelations,
    "new_control_variates": HasControlVariates,
    "answer": PredictsWithTrainingData,
    "for_model": ModelDependent,
    "check_agents": ChecksAgents,
}
