"""The estimators pass scikit-learn's checks, and refuse wrong data in one line."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks
from torch import nn

from conftest import make_federation, refusal
from waffle_fl import PersonalizedClassifier, PersonalizedRegressor, Waffle
from waffle_fl.errors import Diverged

QUICK: dict[str, Any] = {"rounds": 2, "batch_size": 8, "device": "cpu"}
BOTH = [PersonalizedClassifier, PersonalizedRegressor]


class OneAgentClassifier(PersonalizedClassifier):
    """The classifier with scikit-learn's signature: X and y are those of one agent."""

    def fit(self, X: Any, y: Any) -> Any:
        return super().fit({"alice": (X, y)})


class OneAgentRegressor(PersonalizedRegressor):
    """The regressor with scikit-learn's signature: X and y are those of one agent."""

    def fit(self, X: Any, y: Any) -> Any:
        return super().fit({"alice": (X, y)})


# float64, because one check compares predictions of single rows to 1e-7.
ESTIMATORS = [
    kind(method, options=options, rounds=10, lr=0.3, device="cpu", precision="float64")
    for kind in (OneAgentClassifier, OneAgentRegressor)
    for method, options in (("waffle", None), ("waffle", {"prediction": "mixture"}), ("knn-per", {"clip": 5.0}))
]
CANNOT_PASS = {
    "check_dtype_object": "a value that is no number is a WaffleError, a ValueError; the check wants a TypeError",
    "check_supervised_y_2d": "y of shape (rows, 1) is taken as that column without a warning",
}
# All other checks call fit(X, y) and do not apply: the estimators take a federation.
WITHOUT_FIT = {
    "check_estimator_cloneable",
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
    "check_estimator_repr",
    "check_no_attributes_set_in_init",
    "check_mixin_order",
    "check_estimators_unfitted",
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_set_params",
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(ESTIMATORS, expected_failed_checks=lambda _: CANNOT_PASS)
def test_data_of_one_agent_pass_the_checks(estimator: Any, check: Any) -> None:
    """With (X, y) of one agent every check passes except those listed with a reason."""
    check(estimator)


@pytest.mark.parametrize("kind", BOTH)
def test_the_checks_without_data_pass(kind: Any) -> None:
    """With their own signature the estimators pass every check that does not call fit(X, y)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = check_estimator(kind(**QUICK), on_fail=None, on_skip=None)
    assert {result["check_name"] for result in done if result["status"] == "passed"} >= WITHOUT_FIT


def data(shift: float = 0.0) -> dict[str, tuple[Any, Any]]:
    """Two agents with three features and the labels 0 and 1."""
    rng = np.random.default_rng(0)
    y = np.arange(20) % 2
    return {name: (rng.standard_normal((20, 3)) + 2 * y[:, None] + shift, y) for name in ("north", "south")}


class Table:
    """A minimal data frame: named columns and an array of values."""

    def __init__(self, values: Any, columns: list[Any]) -> None:
        self.values, self.columns = np.asarray(values), columns

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values.astype(dtype or self.values.dtype)


def tables(**columns: list[Any]) -> dict[str, tuple[Any, Any]]:
    """The same agents, each with a table of the given columns."""
    return {name: (Table(X, columns[name]), y) for name, (X, y) in data().items()}


@pytest.mark.parametrize("kind", BOTH)
def test_column_names_are_kept_and_compared(kind: Any) -> None:
    """Tables set feature_names_in_; other names are refused at fit and at predict, arrays are not."""
    abc = ["a", "b", "c"]
    fitted = kind(**QUICK).fit(tables(north=abc, south=abc))
    assert fitted.feature_names_in_.tolist() == abc
    assert fitted.n_features_in_ == 3
    rows = np.zeros((2, 3))
    assert fitted.predict(Table(rows, abc)).tolist() == fitted.predict(rows).tolist()
    assert "unexpected 'd', missing 'c'" in refusal(fitted.predict, Table(rows, ["a", "b", "d"]))
    assert "the order differs" in refusal(fitted.predict, Table(rows, ["b", "a", "c"]))
    assert "south and north differ in their columns" in refusal(fitted.fit, tables(north=abc, south=["a", "b", "d"]))
    assert not hasattr(fitted.fit(tables(north=[0, 1, 2], south=[0, 1, 2])), "feature_names_in_")


@pytest.mark.parametrize("kind", BOTH)
def test_a_fitted_estimator_survives_pickling(kind: Any) -> None:
    """A pickled estimator predicts the same, and a clone of it is not fitted."""
    fitted = kind(**QUICK).fit(data())
    again = pickle.loads(pickle.dumps(fitted))
    X, _ = data()["north"]
    assert again.predict(X).tolist() == fitted.predict(X).tolist()
    assert not hasattr(clone(again), "n_features_in_")
    assert "rounds=2" in repr(again)


X, y = data()["north"]
HOLE = np.where(np.arange(60).reshape(20, 3) == 7, np.nan, X)
WRONG: list[tuple[Any, str]] = [
    ([1, 2], "got list"),
    (np.zeros((3, 2)), "got ndarray"),
    (None, "got NoneType"),
    ("folder", "got str"),
    ({}, "got no agent"),
    ({1: (X, y)}, "got the name 1"),
    ({"north": X}, "'north' has no such pair"),
    ({"north": (X, y, X)}, "'north' has no such pair"),
    ({"north": (X, y), "south": (X, y[:-1])}, "south: expected y of shape (20,)"),
    ({"north": (HOLE, y)}, "north: X has NaN, infinity or a number beyond float32 in row 3"),
    ({"north": (X * 1e300, y)}, "beyond float32"),
    ({"north": ([[1.0], [1.0, 2.0]], [0, 1])}, "rows of equal length"),
    ({"north": (X, [[0], [1, 2]] * 10)}, "rows of unequal length"),
    ({"north": ([["a"], ["b"]], [0, 1])}, "expected numbers in X"),
    ({"north": (X[:, 0], y)}, "Reshape your data"),
    ({"north": (X[:0], y[:0])}, "X is empty"),
    ({"north": (X, None)}, "y is None"),
    ({"north": (X, y), "south": (X[:, :2], y)}, "south"),
]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("given", "word"), WRONG)
def test_wrong_data_is_refused_in_one_line(kind: Any, given: Any, word: str) -> None:
    """Data that are not a federation are refused with what was expected and what came."""
    assert word in refusal(kind(**QUICK).fit, given)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"method": Waffle()}, "expected a name or module:Class such as 'waffle', got Waffle("),
        ({"method": Waffle}, "such as 'waffle', got <class"),
        ({"method": None}, "such as 'waffle', got None"),
        ({"options": [1]}, "options: expected a mapping"),
        ({"model": 3}, "model: expected a name, a torch module or a factory"),
        ({"alice": 0.5}, "alice: expected the name or the number"),
        ({"alice": ["north"]}, "alice: expected the name or the number"),
        ({"rounds": "many"}, "rounds"),
        ({"lr": float("nan")}, "lr"),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(kind: Any, parameters: dict[str, Any], word: str) -> None:
    """A parameter of the wrong kind is named."""
    assert word in refusal(kind(**{**QUICK, **parameters}).fit, data())


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("change", "given"),
    [
        ({}, [1, 2]),
        ({}, {"north": (X, np.full(20, np.nan))}),
        ({"alice": "east"}, {"north": (X[:, :2], y)}),
        ({"model": nn.Linear(3, 9)}, data()),
        ({"device": "nowhere"}, data()),
    ],
)
def test_a_fit_that_fails_changes_nothing(kind: Any, change: dict[str, Any], given: Any) -> None:
    """A refused refit leaves every attribute unchanged."""
    fitted = kind(**QUICK).fit(data())
    before = dict(vars(fitted.set_params(**change)))
    refusal(fitted.fit, given)
    assert vars(fitted).keys() == before.keys()
    assert all(vars(fitted)[name] is value for name, value in before.items())


@pytest.mark.parametrize("kind", BOTH)
def test_a_fit_that_diverges_changes_nothing(kind: Any) -> None:
    """A refit that diverges leaves the fitted state unchanged."""
    fitted = kind(model="linear", **QUICK).fit(data())
    before = dict(vars(fitted.set_params(lr=1e30)))
    with pytest.raises(Diverged):
        fitted.fit(data())
    assert dict(vars(fitted)) == before


def test_a_federation_gives_the_number_of_features() -> None:
    """n_features_in_ and classes_ are set when fitting a Federation."""
    fitted = PersonalizedClassifier(**QUICK).fit(make_federation())
    assert fitted.n_features_in_ == 5
    assert fitted.classes_.tolist() == ["a", "b", "c"]
    assert sklearn.utils.get_tags(fitted).estimator_type == "classifier"
