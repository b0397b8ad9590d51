"""Scikit-learn estimators: PersonalizedClassifier(alice="clinic").fit(federation).predict(X)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from waffle_fl.config import RunConfig, check_run
from waffle_fl.engines.mixed_outputs import memory_of, tensors_in
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
from waffle_fl.inference.model_files import module_of
from waffle_fl.inference.trained_run import outputs, with_scaled_inputs
from waffle_fl.models import FlatModel, builder, cross_entropy, ready, squared_error
from waffle_fl.models.flat import Precision
from waffle_fl.user_data import ArrayScaling

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.exceptions import NotFittedError
except ImportError:  # scikit-learn is optional; the fallback supports `clone` and grid search
    from waffle_fl.inference.sklearn_base import BaseEstimator, ClassifierMixin, NotFittedError, RegressorMixin

Agents: TypeAlias = Federation | Mapping[str, tuple[Any, Any]]
SCORES = ("accuracy", "rmse", "loss")
FITTED = ("classes_", "n_features_in_", "feature_names_in_")  # absent after some fits


class _Data(NamedTuple):
    """The checked input of `fit`."""

    agents: Federation
    classes: Array | None = None  # for a classifier
    columns: tuple[str, ...] = ()  # if X are tables with named columns


class _Personalized(BaseEstimator):  # type: ignore[misc]
    """It trains a personalised model for one agent together with the other agents.

    `fit` takes a Federation, or a mapping from each agent's name to its (X, y). `alice` is the agent's name or number;
    the default is the federation's Alice or the first agent. `model` is the name of a network, `module:factory`, a
    factory (shape, outputs) -> module, or a module, whose weights are then the starting point. `options` are the
    options of the method.

    Attributes after fit: `model_`, the torch module; `weights_`, each agent's mean weight over the rounds; `history_`,
    one dictionary per round. Its accuracy and loss are measured on Alice's test data. After a fit on (X, y) there are
    no test data, and training_accuracy and training_loss are measured on her training data.
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
        """Train the model of one agent. A fit that fails leaves the estimator unchanged."""
        config = self._config()
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
        tensors, history = _train(config, agents, model)
        module = module_of(config.algorithm(), build, model.dtype, tensors)
        prefix = "" if isinstance(federation, Federation) else "training_"
        for name in FITTED:
            self.__dict__.pop(name, None)
        self.history_ = [{prefix * (k in SCORES) + k: v for k, v in line.items()} for line in history]
        self.weights_ = {name: mean(line["weights"][i] for line in history) for i, name in enumerate(agents.names)}
        self.model_ = with_scaled_inputs(module, agents.scaling, model.dtype)
        self.shape_, self.unit_ = agents.shape, agents.unit
        self.offset_ = agents.target_scale(agents.alice).mean
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
        """Return the federation with the requested Alice."""
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
        """Return a federation that trains on all rows; Alice is scored on her training rows, as there are no others."""
        alice = self._index(0, list(x))
        arrays = {
            name: (rows, y[name], rows, y[name]) if i == alice else (rows, y[name], rows[:0], y[name][:0])
            for i, (name, rows) in enumerate(x.items())
        }
        return Federation.from_arrays(arrays, alice=alice, duplicates="keep", task=task)

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
            name, expected = type(self).__name__, self.shape_[0]
            raise WaffleError(f"X has {x.shape[1]} features, but {name} is expecting {expected} features as input")
        if x.shape[1:] != self.shape_:
            raise WaffleError(f"expected X of shape (rows, {', '.join(map(str, self.shape_))}), got {x.shape}")
        dtype = next(self.model_.parameters()).dtype
        return outputs(self.model_, torch.from_numpy(x).to(dtype)).double()

    def _check_columns(self, X: Any) -> None:
        """Check that a table has the columns passed to fit; arrays have no names to compare."""
        found, fitted = column_names(X), tuple(getattr(self, "feature_names_in_", ()))
        if found and fitted and found != fitted:
            raise WaffleError(
                f"The feature names should match those that were passed during fit: {_differ(found, fitted)}"
            )


class PersonalizedClassifier(ClassifierMixin, _Personalized):  # type: ignore[misc]
    __doc__ = f"Classifier for one agent of a federation. {_Personalized.__doc__}"

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
        """Return the probability of each of `classes_`, of shape (rows, classes)."""
        return self._outputs(X).softmax(dim=1).numpy()

    def predict(self, X: Any) -> Array:
        """Return the most probable class of each row."""
        chosen = self._outputs(X).argmax(dim=1).numpy()
        return np.asarray(self.classes_[chosen])

    def score(self, X: Any, y: Any) -> float:
        """Return the accuracy."""
        found = self.predict(X)
        truth = check_column(y, len(found))
        if not np.isin(truth, self.classes_).any():
            raise WaffleError(f"expected labels from {self.classes_.tolist()}, got none of them")
        return float((found == truth).mean())


class PersonalizedRegressor(RegressorMixin, _Personalized):  # type: ignore[misc]
    __doc__ = f"Regressor for one agent of a federation. {_Personalized.__doc__}"

    def _prepared(self, given: Agents) -> _Data:
        """Return the checked data. Targets in arrays are standardised over all agents, so `lr` suits any unit."""
        if isinstance(given, Federation):
            return _Data(self._of(given, "regression"))
        pairs = check_pairs(given)
        x = _samples_of(pairs)
        targets = {name: check_reals(y, len(x[name]), f"{name}: ") for name, (_, y) in pairs.items()}
        pooled = np.concatenate(list(targets.values()))
        average, deviation = float(pooled.mean()), float(pooled.std()) or 1.0
        scaled = {name: (y - average) / deviation for name, y in targets.items()}
        scaling = ArrayScaling((), (), len(pooled), average, deviation)
        agents = replace(self._from_arrays(x, scaled, "regression"), scalings=(scaling,) * len(pairs))
        return _Data(agents, columns=_columns_of(pairs))

    def predict(self, X: Any) -> Array:
        """Return one number per row, in the unit of the target."""
        return (self._outputs(X).view(-1) * self.unit_ + self.offset_).numpy()

    def score(self, X: Any, y: Any) -> float:
        """Return R²: 1 is perfect, 0 no better than the mean."""
        found = self.predict(X)
        truth = check_reals(y, len(found))
        residual, total = ((truth - found) ** 2).sum(), ((truth - truth.mean()) ** 2).sum()
        return float(1 - residual / total) if total else float(residual == 0)


def _samples_of(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, Array]:
    return {name: check_samples(X, f"{name}: ") for name, (X, _) in pairs.items()}


def _columns_of(pairs: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """Return the column names common to all agents; empty if any agent has no names. Raise if they differ."""
    found = {name: column_names(X) for name, (X, _) in pairs.items()}
    first, columns = next(iter(found.items()))
    if None in found.values() or columns is None:
        return ()
    for name, own in found.items():
        if own is not None and own != columns:
            raise WaffleError(f"{name} and {first} differ in their columns: {_differ(own, columns)}")
    return columns


def _differ(found: Sequence[str], expected: Sequence[str]) -> str:
    """Return how two lists of columns differ: in names, or only in order."""
    more = [name for name in found if name not in expected]
    less = [name for name in expected if name not in found]
    if not more and not less:
        return "the order differs"
    return ", ".join([f"unexpected {name!r}" for name in more] + [f"missing {name!r}" for name in less])


def _described(value: Any) -> str:
    """Return a one-line description of a value."""
    kind = f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
    return value if isinstance(value, str) else kind


def _train(config: RunConfig, agents: Federation, model: FlatModel) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the tensors of Alice's model, as in a model file, and the measurements of each round."""
    s, spec = config.settings, RunSpec(config.algorithm(), agents, config.settings.seed)
    history, state = [], None
    rounds = simulate([spec], model, rounds=s.rounds, batch_size=s.batch_size, epochs=s.epochs, remainder=s.remainder)
    for (outcome,) in rounds:
        if outcome.error:
            raise outcome.error
        history.append(dict(outcome.measured))
        state = outcome.state
    assert state is not None
    net = own_net(spec, state, model)
    return tensors_in(spec.algorithm, model, net, memory_of(spec.algorithm, model, net, agents)), history
