"""Minimal base classes of estimators for use without scikit-learn."""

from __future__ import annotations

import inspect
from typing import Any, Self

from waffle_fl.errors import WaffleError


class NotFittedError(WaffleError, AttributeError):
    """An estimator was used before fit; like scikit-learn's, a ValueError and an AttributeError."""


class BaseEstimator:
    """Estimator whose parameters are the arguments of __init__, stored under the same names."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        for name, value in params.items():
            if name not in self.get_params():
                raise WaffleError(f"{type(self).__name__} has no parameter {name!r}")
            setattr(self, name, value)
        return self


class ClassifierMixin:
    """Mixin of classifiers."""


class RegressorMixin:
    """Mixin of regressors."""
