"""A reference for training alone: scikit-learn on an agent's own data, to tell whether its own model is any good.

Several estimators are fitted on the training rows; the one with the best score on the validation rows is fitted again
on both and predicts the test rows. Tables: logistic or ridge regression and histogram gradient boosting. Images and
series: logistic or ridge regression and a support vector machine on the standardised values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from waffle_fl.federation import Federation

ABSENT = -30.0  # log-probability of a class that the training rows do not contain
MOST_ROWS = 5_000  # larger training sets are not fitted: the references would take longer than training


class Reference(NamedTuple):
    """The estimator that was chosen, and its outputs for the test rows in the form of a model's."""

    name: str
    output: NDArray[np.float64]  # (rows, classes) log-probabilities, or (rows, 1) numbers in the target's unit
    target: NDArray[Any]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "output": self.output.round(5).tolist(), "target": self.target.tolist()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Reference:
        return cls(content["name"], np.asarray(content["output"], np.float64), np.asarray(content["target"]))


def fit_references(federation: Federation, agents: Sequence[int]) -> dict[str, Reference]:
    """Return the reference of each agent that has one, by name."""
    found = {federation.names[agent]: fit_reference(federation, agent) for agent in agents}
    return {name: reference for name, reference in found.items() if reference is not None}


def fit_reference(federation: Federation, agent: int) -> Reference | None:
    """Return the reference of an agent; None without validation rows, with too many rows, or with a single class."""
    train, validation, test = (getattr(federation, part)[agent] for part in ("train", "validation", "test"))
    if not len(validation) or not len(test) or len(train) > MOST_ROWS:
        return None
    x, y = _data(federation, agent, train)
    if federation.task == "classification" and len(np.unique(y)) < 2:
        return None
    known, truth = _data(federation, agent, validation)
    table = len(federation.shape) == 1
    kinds = _classifiers(table) if federation.task == "classification" else _regressors(table)
    with warnings.catch_warnings(), threadpool_limits(1, "blas"):  # two threads take four times as long
        warnings.simplefilter("ignore")  # convergence warnings of single fits
        scores = {name: build().fit(x, y).score(known, truth) for name, build in kinds.items()}
        best = max(scores, key=lambda name: float(scores[name]))
        both = torch.cat([train, validation])
        fitted = kinds[best]().fit(*_data(federation, agent, both))
        output = _outputs(fitted, federation, _data(federation, agent, test)[0])
    target = federation.labels(agent, test).numpy()
    if federation.task == "regression":
        mean, unit = federation.target_scale(agent)
        output, target = mean + unit * output, mean + unit * target.astype(np.float64)
    return Reference(best, output, target)


def _data(federation: Federation, agent: int, rows: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    return federation.x[rows].flatten(1).numpy(), federation.labels(agent, rows).numpy()


def _classifiers(table: bool) -> dict[str, Callable[[], Any]]:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    linear = {"logistic regression": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))}
    if table:
        return {**linear, "gradient boosting": lambda: HistGradientBoostingClassifier(random_state=0)}
    return {**linear, "support vector machine": lambda: make_pipeline(StandardScaler(), SVC(C=10.0))}


def _regressors(table: bool) -> dict[str, Callable[[], Any]]:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVR

    linear = {"ridge regression": lambda: make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 3, 11)))}
    if table:
        return {**linear, "gradient boosting": lambda: HistGradientBoostingRegressor(random_state=0)}
    return {**linear, "support vector machine": lambda: make_pipeline(StandardScaler(), SVR(C=10.0))}


def _outputs(fitted: Any, federation: Federation, x: NDArray[Any]) -> NDArray[np.float64]:
    """Return the outputs in the form of a model's: one column per class of the federation, or one number."""
    if federation.task == "regression":
        return np.asarray(fitted.predict(x), np.float64)[:, None]
    known = fitted.predict_proba(x) if hasattr(fitted, "predict_proba") else None
    output = np.full((len(x), federation.outputs), ABSENT)
    if known is None:  # a support vector machine: its votes order the classes
        votes = fitted.decision_function(x)
        known_scores = np.stack([-votes, votes], axis=1) if votes.ndim == 1 else votes
        output[:, fitted.classes_] = known_scores
    else:
        output[:, fitted.classes_] = np.log(np.maximum(known, 1e-12))
    return output
