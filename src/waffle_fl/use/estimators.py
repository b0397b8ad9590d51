"""The library as scikit-learn estimators: PersonalizedClassifier(alice="clinic").fit(federation).predict(X)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import mean
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from waffle_fl.algorithms import Net
from waffle_fl.config import RunConfig, check_run
from waffle_fl.engines.cells import Cell, own_net
from waffle_fl.engines.simulate import simulate
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import check_output, device_of
from waffle_fl.federation import Federation, check_alice, index_of
from waffle_fl.models import FlatModel, builder, cross_entropy, squared_error
from waffle_fl.models.flat import Precision
from waffle_fl.own import Preprocessing
from waffle_fl.use.trained import check_portable, filled, outputs

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.exceptions import NotFittedError
except ImportError:  # a bare machine: what `clone` and a grid search need is little
    from waffle_fl.use.base import BaseEstimator, ClassifierMixin, NotFittedError, RegressorMixin

Array: TypeAlias = NDArray[Any]
Agents: TypeAlias = Federation | Mapping[str, tuple[Any, Any]]
SCORES = ("accuracy", "rmse", "loss")


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
        """Train the model of one agent."""
        config = self._config()
        check_portable(config)
        given = isinstance(federation, Federation)
        agents = self._checked(federation) if isinstance(federation, Federation) else self._gathered(federation)
        if config.method == "local":  # nobody else's training could matter
            agents = agents.only(agents.alice)
        model = FlatModel(
            self._builder(agents),
            loss=squared_error if agents.task == "regression" else cross_entropy,
            precision=self.precision,
            device=device_of(self.device),
        )
        check_output(str(self.model), model, agents)
        net, history = _train(config, agents, model)
        prefix = "" if given else "training_"
        self.history_ = [{prefix * (k in SCORES) + k: v for k, v in line.items()} for line in history]
        self.weights_ = {name: mean(line["weights"][i] for line in history) for i, name in enumerate(agents.names)}
        self.model_ = filled(self._builder(agents), model.dtype, model.state_dict(net))
        self.shape_, self.unit_ = agents.shape, agents.unit
        self.offset_ = agents.preprocessing.target_mean if agents.preprocessing else 0.0
        return self

    def _config(self) -> RunConfig:
        names = ("rounds", "epochs", "batch_size", "lr", "momentum", "weight_decay", "precision", "seed")
        return check_run(self.method, {name: getattr(self, name) for name in names}, dict(self.options or {}))

    def _checked(self, federation: Federation) -> Federation:
        raise NotImplementedError

    def _gathered(self, agents: Mapping[str, tuple[Any, Any]]) -> Federation:
        raise NotImplementedError

    def _of(self, federation: Federation, task: str) -> Federation:
        """The federation with the Alice that was asked for."""
        if federation.task != task:
            raise WaffleError(f"{type(self).__name__} is for {task}, this federation is for {federation.task}")
        alice = federation.alice if self.alice is None else index_of(self.alice, federation.names)
        return check_alice(replace(federation, alice=alice))

    def _from_arrays(
        self, agents: Mapping[str, tuple[Any, Any]], targets: Mapping[str, Array], task: Any
    ) -> Federation:
        """All rows of all agents are trained on; Alice is scored on her own too, for no others are at hand."""
        names = list(agents)
        alice = index_of(0 if self.alice is None else self.alice, names)
        arrays = {}
        for i, name in enumerate(names):
            x, y = _numbers(agents[name][0]), targets[name]
            arrays[name] = (x, y, x, y) if i == alice else (x, y, x[:0], y[:0])
        return Federation.from_arrays(arrays, alice=alice, allow_duplicates=True, task=task)

    def _builder(self, agents: Federation) -> Callable[[], nn.Module]:
        model: Any = self.model
        if isinstance(model, str):
            return builder(model, "", agents.shape, agents.outputs)
        if isinstance(model, nn.Module):
            return lambda: copy.deepcopy(model)
        return lambda: model(agents.shape, agents.outputs)  # type: ignore[no-any-return]

    def _outputs(self, X: Any) -> Tensor:
        if not hasattr(self, "model_"):
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet: call fit first")
        x = _numbers(X)
        if x.shape[1:] != self.shape_ or not np.issubdtype(x.dtype, np.floating) or not np.isfinite(x).all():
            raise WaffleError(f"expected finite numbers of shape (rows, *{self.shape_}), got {x.dtype} {x.shape}")
        dtype = next(self.model_.parameters()).dtype
        return outputs(self.model_, torch.from_numpy(x).to(dtype)).double()


class PersonalizedClassifier(ClassifierMixin, _Personalized):  # type: ignore[misc]
    __doc__ = f"A classifier for one agent of a federation. {_Personalized.__doc__}"

    def _checked(self, federation: Federation) -> Federation:
        numbered = federation.class_names == tuple(str(k) for k in range(len(federation.class_names)))
        self.classes_ = np.arange(len(federation.class_names)) if numbered else np.array(federation.class_names)
        return self._of(federation, "classification")

    def _gathered(self, agents: Mapping[str, tuple[Any, Any]]) -> Federation:
        labels = {name: _column(y, _numbers(x), f"{name}: ") for name, (x, y) in _pairs(agents).items()}
        try:
            self.classes_ = np.unique(np.concatenate(list(labels.values())))
        except TypeError:
            raise WaffleError("expected labels of one kind, all texts or all numbers, got both") from None
        numbered = {name: np.searchsorted(self.classes_, y) for name, y in labels.items()}
        return self._from_arrays(agents, numbered, "classification")

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
        truth = _column(y, found)
        if not np.isin(truth, self.classes_).any():
            raise WaffleError(f"expected labels from {self.classes_.tolist()}, got none of them")
        return float((found == truth).mean())


class PersonalizedRegressor(RegressorMixin, _Personalized):  # type: ignore[misc]
    __doc__ = f"A regression for one agent of a federation. {_Personalized.__doc__}"

    def _checked(self, federation: Federation) -> Federation:
        return self._of(federation, "regression")

    def _gathered(self, agents: Mapping[str, tuple[Any, Any]]) -> Federation:
        """Targets are standardised over all agents, so that one step size suits every unit."""
        targets = {name: _reals(y, _numbers(x), f"{name}: ") for name, (x, y) in _pairs(agents).items()}
        everyone = np.concatenate(list(targets.values()))
        middle, deviation = float(everyone.mean()), float(everyone.std()) or 1.0
        scaled = {name: (y - middle) / deviation for name, y in targets.items()}
        goal = Preprocessing((), "y", "regression", target_mean=middle, target_deviation=deviation)
        return replace(self._from_arrays(agents, scaled, "regression"), preparations=(goal,) * len(agents))

    def predict(self, X: Any) -> Array:
        """A number for each row, in the target's own unit."""
        return (self._outputs(X).view(-1) * self.unit_ + self.offset_).numpy()

    def score(self, X: Any, y: Any) -> float:
        """R²: 1 is perfect, 0 no better than the mean."""
        found = self.predict(X)
        truth = _reals(y, found)
        rest, spread = ((truth - found) ** 2).sum(), ((truth - truth.mean()) ** 2).sum()
        return float(1 - rest / spread) if spread else float(rest == 0)


def _train(config: RunConfig, agents: Federation, model: FlatModel) -> tuple[Net, list[dict[str, Any]]]:
    s, cell = config.settings, Cell(config.algorithm(), agents, config.settings.seed)
    history, state = [], None
    for (outcome,) in simulate([cell], model, rounds=s.rounds, batch_size=s.batch_size, epochs=s.epochs):
        if outcome.error:
            raise outcome.error
        history.append(outcome.measured)
        state = outcome.state
    assert state is not None
    return own_net(cell, state, model), history


def _pairs(agents: Mapping[str, tuple[Any, Any]]) -> Mapping[str, tuple[Any, Any]]:
    odd = [name for name, pair in agents.items() if not isinstance(pair, tuple | list) or len(pair) != 2]
    if odd or not agents:
        raise WaffleError(f"expected (X, y) for each agent, or a Federation; {odd[0] if odd else 'no agent'} has none")
    return agents


def _numbers(X: Any) -> Array:
    """Numbers of any kind as float32; what else there is, is told by those who check it."""
    x = np.asarray(X)
    with np.errstate(over="ignore"):
        return x.astype(np.float32) if x.dtype.kind in "fiub" else x


def _column(y: Any, beside: Array, whose: str = "") -> Array:
    """One value for each row of what it stands beside, none missing; a table of one column counts as that column."""
    column = np.asarray(y)
    if column.shape == (*beside.shape[:1], 1):
        column = column[:, 0]
    if column.shape != beside.shape[:1]:
        raise WaffleError(f"{whose}expected y of shape {beside.shape[:1]}, a value for each row, got {column.shape}")
    given = np.asarray(y, dtype=object).reshape(-1)  # among texts numpy would make a text of NaN
    missing = next((i for i, value in enumerate(given) if _is_missing(value)), None)
    if missing is not None:
        raise WaffleError(f"{whose}y has no value in row {missing + 1} ({given[missing]}): drop such rows")
    return column


def _is_missing(value: Any) -> bool:
    """Is it None, a NaN or not-a-time, which differ from themselves, or pandas' NA, which cannot be asked that?"""
    return value is None or type(value).__name__ == "NAType" or value != value


def _reals(y: Any, beside: Array, whose: str = "") -> Array:
    """A column of finite numbers."""
    column = _column(y, beside, whose)
    try:
        numbers = column.astype(np.float64)
    except (TypeError, ValueError):
        raise WaffleError(f"{whose}expected numbers in y, got {column.dtype}") from None
    if not np.isfinite(numbers).all():
        raise WaffleError(f"{whose}expected finite numbers in y, got infinity")
    return numbers
