"""The estimators follow scikit-learn's conventions and train what the engine trains."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone, is_classifier, is_regressor
from torch import nn

from conftest import make_federation, refusal
from waffle_fl import FlatModel, PersonalizedClassifier, PersonalizedRegressor, RunSpec, WafflePaper, simulate
from waffle_fl.models import mlp

QUICK: dict[str, Any] = {"rounds": 4, "batch_size": 8, "device": "cpu"}


def agents(names: tuple[str, ...] = ("north", "south", "west"), n: int = 40) -> dict[str, tuple[Any, Any]]:
    """Return agents with two well separated classes, no and yes."""
    rng = np.random.default_rng(0)
    made = {}
    for name in names:
        y = np.arange(n) % 2
        made[name] = (rng.standard_normal((n, 3)) + 3 * y[:, None], np.where(y, "yes", "no"))
    return made


@pytest.mark.parametrize("kind", [PersonalizedClassifier, PersonalizedRegressor])
def test_parameters_can_be_read_set_and_cloned(kind: Any) -> None:
    """get_params returns the arguments of __init__, set_params changes them, and a clone has them, unfitted."""
    estimator = kind("fedavg", alice="south", rounds=7)
    assert estimator.get_params()["alice"] == "south"
    assert estimator.set_params(rounds=9).rounds == 9
    assert clone(estimator).get_params() == estimator.get_params()
    assert not hasattr(clone(estimator), "model_")
    assert (is_classifier(estimator), is_regressor(estimator)) == (
        kind is PersonalizedClassifier,
        kind is not PersonalizedClassifier,
    )


def test_plain_arrays() -> None:
    """(X, y) of each agent trains on every row, predicts the given labels, and has weights per agent."""
    data = agents()
    fitted = PersonalizedClassifier(alice="south", **QUICK).fit(data)
    X, y = data["south"]
    assert fitted.classes_.tolist() == ["no", "yes"]
    assert set(fitted.predict(X)) == {"no", "yes"}
    assert fitted.score(X, y) > 0.9
    np.testing.assert_allclose(fitted.predict_proba(X).sum(axis=1), 1)
    assert list(fitted.weights_) == ["north", "south", "west"]
    assert sum(fitted.weights_.values()) == pytest.approx(1)
    assert [line["round"] for line in fitted.history_] == [1, 2, 3, 4]
    assert fitted.history_[-1]["training_accuracy"] == pytest.approx(fitted.score(X, y))
    assert "accuracy" not in fitted.history_[-1]


def test_a_federation_trains_as_the_engine_does() -> None:
    """The fitted module equals the simulator's model bit for bit, and history is its record."""
    federation = make_federation(alice=1)
    fitted = PersonalizedClassifier(model=lambda shape, classes: mlp(shape, classes, 6), **QUICK).fit(federation)
    model = FlatModel(lambda: mlp((5,), 3, hidden=6))
    *_, (last,) = simulate([RunSpec(WafflePaper(), federation, 1)], model, rounds=4, batch_size=8)
    assert fitted.history_[-1]["accuracy"] == last.measured["accuracy"]
    net = WafflePaper().personal(last.state.server, last.state.agents, 4)
    x = federation.x[federation.test[1]]
    expected = model.predict(net.params[1], net.stats[1], x).argmax(dim=1)
    assert fitted.predict(x).tolist() == [federation.class_names[k] for k in expected]
    assert isinstance(fitted.model_, nn.Module)


def test_alice_can_be_chosen() -> None:
    """The estimator's Alice, by name or number, overrides the federation's."""
    by_name = PersonalizedClassifier(alice="agent 2", **QUICK).fit(make_federation(alice=0))
    by_number = PersonalizedClassifier(alice=2, **QUICK).fit(make_federation(alice=1))
    assert by_name.history_[-1]["loss"] == by_number.history_[-1]["loss"]


def test_training_starts_from_a_given_module() -> None:
    """A module given as model stays unchanged, and training starts from its weights."""
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    fitted = PersonalizedClassifier(model=module, lr=1e-9, **QUICK).fit(agents())
    assert torch.equal(module.weight, before)
    torch.testing.assert_close(fitted.model_.weight, before, atol=1e-6, rtol=0)


def test_local_trains_alice_alone() -> None:
    """Local has one weight, that of Alice."""
    assert PersonalizedClassifier("local", alice="west", **QUICK).fit(agents()).weights_ == {"west": 1.0}


def test_predictions_have_the_unit_of_y() -> None:
    """The regressor's predictions and training error are in the unit of y, whatever its scale."""
    rng = np.random.default_rng(0)
    data = {}
    for name in ("north", "south"):
        X = rng.standard_normal((60, 2))
        data[name] = (X, 5000 + 300 * X[:, 0] - 100 * X[:, 1] + 10 * rng.standard_normal(60))
    fitted = PersonalizedRegressor(model="linear", rounds=20, batch_size=8, device="cpu").fit(data)
    X, y = data["north"]
    assert fitted.score(X, y) > 0.99
    error = np.sqrt(((fitted.predict(X) - y) ** 2).mean())
    assert fitted.history_[-1]["training_rmse"] == pytest.approx(error, rel=1e-3)


def numbers() -> dict[str, tuple[Any, Any]]:
    """Return the same agents with a numeric target."""
    return {name: (X, X.sum(axis=1)) for name, (X, _) in agents().items()}


@pytest.mark.parametrize(("kind", "data"), [(PersonalizedClassifier, agents()), (PersonalizedRegressor, numbers())])
def test_a_table_of_one_column_is_that_column(kind: Any, data: dict[str, tuple[Any, Any]]) -> None:
    """y of shape (rows, 1) trains and scores as y of shape (rows,) does."""
    tables = {name: (X, y[:, None]) for name, (X, y) in data.items()}
    X, y = data["north"]
    flat, tall = kind(**QUICK).fit(data), kind(**QUICK).fit(tables)
    assert flat.predict(X).tolist() == tall.predict(X).tolist()
    assert flat.score(X, y) == tall.score(X, y[:, None])


class NAType:
    """Like pandas' NA: comparisons have no truth value."""

    def __ne__(self, _: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


@pytest.mark.parametrize("missing", [None, float("nan"), np.datetime64("NaT"), NAType()])
@pytest.mark.parametrize(("kind", "data"), [(PersonalizedClassifier, agents()), (PersonalizedRegressor, numbers())])
def test_a_missing_label_is_refused(kind: Any, data: dict[str, tuple[Any, Any]], missing: Any) -> None:
    """A missing label of any kind is rejected with its agent and row, and is no class."""
    X, y = data["south"]
    for labels in (np.array([*y[:-1], missing], dtype=object), [*y[:-1].tolist(), missing]):
        assert "south: y has no value in row 40" in refusal(kind(**QUICK).fit, {**data, "south": (X, labels)})


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: PersonalizedClassifier("wafle").fit(agents()), "did you mean waffle"),
        (lambda: PersonalizedClassifier(rounds=0).fit(agents()), "rounds"),
        (lambda: PersonalizedClassifier(alice="east").fit(agents()), "no agent 'east'"),
        (lambda: PersonalizedClassifier().fit({}), "no agent"),
        (lambda: PersonalizedClassifier().fit({"north": np.zeros((3, 2))}), "(X, y)"),
        (lambda: PersonalizedRegressor().fit(make_federation()), "is for regression"),
        (lambda: PersonalizedClassifier(model=nn.Linear(3, 5)).fit(agents()), "returns 2 outputs"),
        (lambda: PersonalizedClassifier(**QUICK).fit(agents()).predict(np.zeros((2, 4))), "X has 4 features"),
        (lambda: PersonalizedClassifier(**QUICK).fit(agents()).predict([["a", "b", "c"]]), "expected numbers in X"),
        (lambda: PersonalizedClassifier(**QUICK).fit(agents()).score(np.zeros((2, 3)), [0, 1]), "labels from"),
        (lambda: PersonalizedClassifier(**QUICK).fit(agents()).score(np.zeros((2, 3)), [["no", "yes"]]), "shape (2,)"),
        (lambda: PersonalizedClassifier(**QUICK).fit(agents()).score(np.zeros((2, 3)), ["no", None]), "row 2 (None)"),
        (lambda: PersonalizedClassifier(**QUICK).fit({"a": (np.zeros((2, 3)), ["no"])}), "a: expected y of shape (2,)"),
        (lambda: PersonalizedClassifier(**QUICK).fit({"a": (np.eye(2), np.array([0, "no"], object))}), "of one kind"),
        (lambda: PersonalizedRegressor(**QUICK).fit(numbers()).score(np.zeros((2, 3)), np.eye(2)), "shape (2,)"),
        (lambda: PersonalizedRegressor(**QUICK).fit({"a": (np.eye(2), ["no", "yes"])}), "a: expected numbers in y"),
        (lambda: PersonalizedRegressor(**QUICK).fit({"a": (np.eye(2), [0, np.inf])}), "a: expected finite numbers"),
    ],
)  # fmt: skip
def test_mistakes_are_rejected_in_one_line(call: Any, word: str) -> None:
    """A mistake is rejected with one line that names it."""
    assert word in refusal(call)


def test_scikit_learn_is_not_needed() -> None:
    """Without scikit-learn the estimators import, train, and keep get_params and set_params."""
    code = """
import sys
sys.modules["sklearn"] = sys.modules["sklearn.base"] = sys.modules["sklearn.exceptions"] = None
import numpy as np
from waffle_fl import PersonalizedClassifier
X = np.arange(24.0).reshape(8, 3) % 5
e = PersonalizedClassifier(rounds=2, device="cpu").set_params(lr=0.01)
assert e.get_params()["lr"] == 0.01
assert e.fit({"a": (X, [0, 1] * 4), "b": (X + 1, [1, 0] * 4)}).predict(X).shape == (8,)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
