"""The library as scikit-learn estimators: PersonalizedClassifier(alice="clinic").fit(federation).predict(X)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from waffle_fl.algorithms import Net
from waffle_fl.config import RunConfig, check_run
from waffle_fl.engines.run_spec import RunSpec, own_net
from waffle_fl.engines.simulate import simulate
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import check_output, device_of
from waffle_fl.federation import Federation, check_alice, index_of
from waffle_fl.inference.estimator_inputs import (
    Array,
    check_column,
    check_labels,
    check_pairs,
    check_reals,
    check_samples,
    column_names,
)
from waffle_fl.inference.trained_run import check_portable, filled, outputs
from waffle_fl.models import FlatModel, builder, cross_entropy, ready, squared_error
from waffle_fl.models.flat import Precision
from waffle_fl.user_data import Preprocessing

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.exceptions import NotFittedError
except ImportError:  # a bare machine: what `clone` and a grid search need is little
    from waffle_fl.inference.sklearn_base import BaseEstimator, ClassifierMixin, NotFittedError, RegressorMixin

Agents: TypeAlias = Federation | Mapping[str, tuple[Any, Any]]
SCORES = ("accuracy", "rmse", "loss")
FITTED = ("classes_", "n_features_in_", "feature_names_in_")  # absent after some fits


class _Data(NamedTuple):
    """What fit was given, checked."""

    agents: Federation
    classes: Array | None = None  # of a classifier
    columns: tuple[str, ...] = ()  # where X are tables with named columns


class _Personalized(BaseEstimator):  # type: ignore[misc]
    """One agent's model, trained with the others' help.

    `fit` takes a Federation, or (X, y) of each agent by name. `alice` is the agent's name or number, by default the
    federation's own Alice or the first. `model` is a network's name, `module:factory`, a factory (shape, outputs) ->
    module, or a module, from whose weights training then starts. `options` are the method's own.

    After fit: `model_` the torch module, `weights_` each agent's mean weight over the rounds, `history_` a dictionary
    a round. Its accuracy and loss are those on Alice's test data; where she has none, training_accuracy and
    training_loss are those on her training data.
    """

    def __init__(
        self,
        method: str = "waffle",
        *,
        alice: str | int | None = None,
        rounds: int = 100,
        epochs: int = 1,
        batch_size: int = 32,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        model: str | nn.Module | Callable[..., nn.Module] = "auto",
        options: Mapping[str, Any] | None = None,
        precision: Precision = "float32",
        device: str = "auto",
        seed: int = 1,
    ) -> None:
        self.method, self.alice, self.model, self.options, self.device = method, alice, model, options, device
        self.rounds, self.epochs, self.batch_size, self.seed = rounds, epochs, batch_size, seed
        self.lr, self.momentum, self.weight_decay, self.precision = lr, momentum, weight_decay, precision

    def fit(self, federation: Agents) -> Self:
        """Train the model of one agent. A fit that fails leaves the estimator as it was."""
        config = self._config()
        check_portable(config)
        data = self._prepared(federation)
        agents = data.agents.only(data.agents.alice) if config.method == "local" else data.agents
        build = self._builder(agents)
        model = FlatModel(
            build,
            loss=squared_error if agents.task == "regression" else cross_entropy,
            precision=self.precision,
            device=device_of(self.device),
        )
        check_output(_described(self.model), model, agents)
        net, history = _train(config, agents, model)
        module = filled(build, model.dtype, model.state_dict(net))
        prefix = "" if isinstance(federation, Federation) else "training_"
        for name in FITTED:
            self.__dict__.pop(name, None)
        self.history_ = [{prefix * (k in SCORES) + k: v for k, v in line.items()} for line in history]
        self.weights_ = {name: mean(line["weights"][i] for line in history) for i, name in enumerate(agents.names)}
        self.model_, self.shape_, self.unit_ = module, agents.shape, agents.unit
        self.offset_ = agents.preprocessing.target_mean if agents.preprocessing else 0.0
        if len(agents.shape) == 1:
            self.n_features_in_ = agents.shape[0]
        if data.columns:
            self.feature_names_in_ = np.array(data.columns, dtype=object)
        if data.classes is not None:
            self.classes_ = data.classes
        return self

    def _config(self) -> RunConfig:
        if self.options is not None and not isinstance(self.options, Mapping):
            raise WaffleError(f"options: expected a mapping from name to value, got {_described(self.options)}")
        names = ("rounds", "epochs", "batch_size", "lr", "momentum", "weight_decay", "precision", "seed")
        return check_run(self.method, {name: getattr(self, name) for name in names}, dict(self.options or {}))

    def _prepared(self, given: Agents) -> _Data:
        raise NotImplementedError

    def _of(self, federation: Federation, task: str) -> Federation:
        """The federation with the Alice that was asked for."""
        if federation.task != task:
            raise WaffleError(f"{type(self).__name__} is for {task}, this federation is for {federation.task}")
        return check_alice(replace(federation, alice=self._index(federation.alice, federation.names)))

    def _index(self, default: int, names: Sequence[str]) -> int:
        if self.alice is None:
            return default
        if not isinstance(self.alice, str | int):
            raise WaffleError(f"alice: expected the name or the number of an agent, got {_described(self.alice)}")
        return index_of(self.alice, names)

    def _from_arrays(self, x: Mapping[str, Array], y: Mapping[str, Array], task: Any) -> Federation:
        """All rows of all agents are trained on; Alice is scored on her own too, for no others are at hand."""
        alice = self._index(0, list(x))
        arrays = {
            name: (rows, y[name], rows, y[name]) if i == alice else (rows, y[name], rows[:0], y[name][:0])
            for i, (name, rows) in enumerate(x.items())
        }
        return Federation.from_arrays(arrays, alice=alice, allow_duplicates=True, task=task)

    def _builder(self, agents: Federation) -> Callable[[], nn.Module]:
        model: Any = self.model
        if isinstance(model, str):
            return builder(model, "", agents.shape, agents.outputs)
        if isinstance(model, nn.Module):
            return ready(lambda: copy.deepcopy(model), agents.shape)
        if not callable(model):
            raise WaffleError(f"model: expected a name, a torch module or a factory, got {_described(model)}")
        return ready(lambda: model(agents.shape, agents.outputs), agents.shape)

    def _outputs(self, X: Any) -> Tensor:
        if not hasattr(self, "model_"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet: call fit first")
        x = check_samples(X)
        self._check_columns(X)
        if x.ndim == 2 and len(self.shape_) == 1 and x.shape[1:] != self.shape_:
            who, expected = type(self).__name__, self.shape_[0]
            raise WaffleError(f"X has {x.shape[1]} features, but {who} is expecting {expected} features as input")
        if x.shape[1:] != self.shape_:
            raise WaffleError(f"expected X of shape (rows, {', '.join(map(str, self.shape_))}), got {x.shape}")
        dtype = next(self.model_.parameters()).dtype
        return outputs(self.model_, torch.from_numpy(x).to(dtype)).double()

    def _check_columns(self, X: Any) -> None:
        """Tables to predict must have the columns of those that were fitted; arrays have no names to compare."""
        found, fitted = column_names(X), tuple(getattr(self, "feature_names_in_", ()))
        if found and fitted and found != fitted:
            raise WaffleError(
                f"The feature names should match those that were passed during fit: {_differ(found, fitted)}"
            )


class PersonalizedClassifier(ClassifierMixin, _Personalized):  # type: ignore[misc]
    __doc__ = f"A classifier for one agent of a federation. {_Personalized.__doc__}"

    def _prepared(self, given: Agents) -> _Data:
        if isinstance(given, Federation):
            names = given.class_names
            numbered = names == tuple(str(k) for k in range(len(names)))
            classes = np.arange(len(names)) if numbered else np.array(names)
            return _Data(self._of(given, "classification"), classes)
        pairs = check_pairs(given)
        x = _samples_of(pairs)
        labels = {name: check_labels(y, len(x[name]), f"{name}: ") for name, (_, y) in pairs.items()}
        try:
            classes = np.unique(np.concatenate(list(labels.values())))
        except TypeError:
            raise WaffleError("expected labels of one kind, all texts or all numbers, got both") from None
        numbers = {name: np.searchsorted(classes, y) for name, y in labels.items()}
        return _Data(self._from_arrays(x, numbers, "classification"), classes, _columns_of(pairs))

    def predict_proba(self, X: Any) -> Array:
        """(rows, classes): the probability of each of `classes_`."""
        return self._outputs(X).softmax(dim=1).numpy()

    def predict(self, X: Any) -> Array:
        """The most probable class of each row."""
        chosen = self._outputs(X).argmax(dim=1).numpy()
        return np.asarray(self.classes_[chosen])

    def score(self, X: Any, y: Any) -> float:
        """The share of rows whose class is predicted."""
        found = self.predict(X)
        truth = check_column(y, len(found))
        if not np.isin(truth, self.classes_).any():
            raise WaffleError(f"expected labels from {self.classes_.tolist()}, got none of them")
        return float((found == truth).mean())


class PersonalizedRegressor(RegressorMixin, _Personalized):  # type: ignore[misc]
    __doc__ = f"A regression for one agent of a federation. {_Personalized.__doc__}"

    def _prepared(self, given: Agents) -> _Data:
        """Targets in arrays are standardised over all agents, so that one step size suits every unit."""
        if isinstance(given, Federation):
            return _Data(self._of(given, "regression"))
        pairs = check_pairs(given)
        x = _samples_of(pairs)
        targets = {name: check_reals(y, len(x[name]), f"{name}: ") for name, (_, y) in pairs.items()}
        everyone = np.concatenate(list(targets.values()))
        middle, deviation = float(everyone.mean()), float(everyone.std()) or 1.0
        scaled = {name: (y - middle) / deviation for name, y in targets.items()}
        goal = Preprocessing((), "y", "regression", target_mean=middle, target_deviation=deviation)
        agents = replace(self._from_arrays(x, scaled, "regression"), preparations=(goal,) * len(pairs))
        return _Data(agents, columns=_columns_of(pairs))

    def predict(self, X: Any) -> Array:
        """A number for each row, in the target's own unit."""
        return (self._outputs(X).view(-1) * self.unit_ + self.offset_).numpy()

    def score(self, X: Any, y: Any) -> float:
        """R²: 1 is perfect, 0 no better than the mean."""
        found = self.predict(X)
        truth = check_reals(y, len(found))
        rest, spread = ((truth - found) ** 2).sum(), ((truth - truth.mean()) ** 2).sum()
        return float(1 - rest / spread) if spread else float(rest == 0)


def _samples_of(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, Array]:
    return {name: check_samples(X, f"{name}: ") for name, (X, _) in pairs.items()}


def _columns_of(pairs: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """The columns that all agents' tables share; none where one of them has no names."""
    found = {name: column_names(X) for name, (X, _) in pairs.items()}
    first, columns = next(iter(found.items()))
    if None in found.values() or columns is None:
        return ()
    for name, own in found.items():
        if own is not None and own != columns:
            raise WaffleError(f"{name} and {first} differ in their columns: {_differ(own, columns)}")
    return columns


def _differ(found: Sequence[str], expected: Sequence[str]) -> str:
    """In what lists of columns differ: names, or their order alone."""
    more = [name for name in found if name not in expected]
    less = [name for name in expected if name not in found]
    if not more and not less:
        return "the order is another"
    return ", ".join([f"unexpected {name!r}" for name in more] + [f"missing {name!r}" for name in less])


def _described(value: Any) -> str:
    """What a value is, in one line."""
    kind = f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
    return value if isinstance(value, str) else kind


def _train(config: RunConfig, agents: Federation, model: FlatModel) -> tuple[Net, list[dict[str, Any]]]:
    s, spec = config.settings, RunSpec(config.algorithm(), agents, config.settings.seed)
    history, state = [], None
    rounds = simulate([spec], model, rounds=s.rounds, batch_size=s.batch_size, epochs=s.epochs, remainder=s.remainder)
    for (outcome,) in rounds:
        if outcome.error:
            raise outcome.error
        history.append(dict(outcome.measured))
        state = outcome.state
    assert state is not None
    return own_net(spec, state, model), history
