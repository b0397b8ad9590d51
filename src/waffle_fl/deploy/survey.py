"""The survey before the first round: the sites' sample counts, and summaries for the preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from waffle_fl.config import Settings
from waffle_fl.engines.flower.messages import read_count
from waffle_fl.engines.flower.server_run import finite_or_none, one_line
from waffle_fl.errors import WaffleError
from waffle_fl.user_data import Column, Preprocessing
from waffle_fl.user_data.agent_data import check_classes
from waffle_fl.user_data.array_scaling import FeatureMoments, common_scaling
from waffle_fl.user_data.cleaning import CellRules
from waffle_fl.user_data.preprocessing import (
    Cellcount,
    Moments,
    Task,
    aim_from,
    categorical_column,
    fit_jointly,
    joined_moments,
    kind_of,
    numeric_column,
    table_scope,
)

LARGEST = 1e100  # largest accepted mean; its square is still finite
MOST_CLASSES = 10_000  # limit for arrays, since each class is an output of the model
MOST_FEATURES = 100_000  # limit for arrays that are standardised, since every message holds their means
Stage: TypeAlias = Literal["hello", "counts", "columns", "moments"]
Answers: TypeAlias = dict[str, dict[str, Any]]  # by site, in the order of the agents
Ask: TypeAlias = Callable[[Stage, dict[str, Any]], Answers]


@dataclass(frozen=True)
class Survey:
    """What the server knows about the data of all sites."""

    samples: dict[str, int]
    test: dict[str, int]
    validation: dict[str, int]
    digests: dict[str, str]
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    task: Task
    prepared: dict[str, Any] | None = None  # a Preprocessing, as JSON, for tables
    scaling: dict[str, Any] | None = None  # an ArrayScaling, as JSON, for arrays that are standardised

    @property
    def outputs(self) -> int:
        return len(self.classes) if self.task == "classification" else 1

    @property
    def known(self) -> dict[str, Any]:
        """What a site needs to preprocess its data in the same way as the others."""
        return {"prepared": self.prepared, "scaling": self.scaling, "classes": list(self.classes)}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Survey:
        return cls(**{**content, "shape": tuple(content["shape"]), "classes": tuple(content["classes"])})


def survey(ask: Ask, settings: Settings) -> Survey:
    """Query the sites: three times for tables, twice for arrays, or once if nothing of the arrays is summarised."""
    hello = ask("hello", {})
    kind = _agreed({name: one_line(reply.get("kind")) for name, reply in hello.items()}, "the kind of their data")
    digests = {name: _text(name, reply, "digest")[:64] for name, reply in hello.items()}
    if kind == "tables":
        return _tables(ask, settings, hello, digests)
    facts = {name: _facts(name, reply) for name, reply in hello.items()}
    shape, task = (_agreed({n: f[key] for n, f in facts.items()}, key) for key in ("shape", "task"))
    classes = max((f["classes"] for f in facts.values()), key=len)
    counts = _counts(hello)
    scaling = _scaling(ask, settings, counts["samples"], shape, task) if kind == "arrays" else None
    return Survey(**counts, digests=digests, shape=shape, classes=classes, task=task, scaling=scaling)


def _scaling(
    ask: Ask, s: Settings, samples: Mapping[str, int], shape: tuple[int, ...], task: Task
) -> dict[str, Any] | None:
    """Return the common scaling of arrays, from the moments of the sites' training samples; None if there is none."""
    if s.preprocessing == "none":
        return None
    federated, regression = s.preprocessing == "federated", task == "regression"
    if federated and shape[0] > MOST_FEATURES:
        raise WaffleError(
            f"expected arrays with at most {MOST_FEATURES} features or channels, got {shape[0]}: standardise them in "
            "the files and set --preprocessing none, or use --preprocessing local"
        )
    answers = ask("moments", {}) if federated or regression else {}
    features = [_feature_moments(n, r, samples[n], shape[0]) for n, r in answers.items()] if federated else []
    targets = [_target_moments(n, r, samples[n]) for n, r in answers.items()] if regression else []
    return common_scaling(features, targets, s.preprocessing, len(shape)).to_json()


def _tables(ask: Ask, s: Settings, hello: Answers, digests: dict[str, str]) -> Survey:
    scope = table_scope(s.preprocessing)
    orders = {name: _texts(name, reply, "columns") for name, reply in hello.items()}
    _check_dropped(s, hello)
    if not s.fill_absent:
        _agreed_columns(orders)
    target = _agreed({name: _text(name, reply, "target") for name, reply in hello.items()}, "target")
    categorical = _agreed({name: _texts(name, reply, "categorical") for name, reply in hello.items()}, "categorical")
    order = list(dict.fromkeys(name for own in orders.values() for name in own))
    if target not in order:
        raise WaffleError(f"no site has the target column {one_line(target)!r}")
    aim = replace(_aim(s, target, hello, target in categorical), rules=_rules(s))
    counted = ask("counts", {"aim": aim.to_json()})
    counts = {
        name: [_cells(site, reply, name, name in orders[site]) for site, reply in counted.items()] for name in order
    }
    features = [name for name in order if name != target]
    kinds = {name: kind_of(counts[name], name in categorical) for name in features}
    if aim.task == "regression":
        kinds[target] = "numeric"
    answers = ask("columns", {"aim": aim.to_json(), "kinds": kinds})
    local = scope == "local"

    def column(name: str) -> Column:
        if kinds[name] == "categorical":
            found = [_texts(site, w, "categories", name) for site, w in answers.items()]
            return categorical_column(name, counts[name], found, name in categorical)
        own = [] if local else [_moments(site, w, name) for site, w in answers.items()]
        return numeric_column(name, counts[name], own)

    regression = aim.task == "regression"
    goal = joined_moments(_moments(site, w, target) for site, w in answers.items()) if regression else Moments()
    prepared = fit_jointly(aim, tuple(column(name) for name in features), goal, scope)
    return Survey(
        **_counts(counted),
        digests=digests,
        shape=(len(prepared.features),),
        classes=prepared.classes,
        task=prepared.task,
        prepared=prepared.to_json(),
    )


def _rules(s: Settings) -> CellRules:
    return CellRules(**{f.name: getattr(s, f.name) for f in fields(CellRules)})


def _check_dropped(s: Settings, hello: Answers) -> None:
    """Raise WaffleError if no site has a column to drop: a misspelt name would leave the column in use."""
    found = {name for site, reply in hello.items() for name in _texts(site, reply, "dropped")} if s.drop else set()
    for name in s.drop:
        if name not in found:
            raise WaffleError(f"drop: no site has a column {name!r}: correct the name, or leave it out")


def _agreed_columns(orders: Mapping[str, tuple[str, ...]]) -> None:
    """Raise WaffleError if the sites have different columns."""
    try:
        _agreed({name: tuple(sorted(order)) for name, order in orders.items()}, "columns")
    except WaffleError as error:
        raise WaffleError(f"{error}; rename them, set --drop, or set --fill-absent") from None


def _aim(s: Settings, target: str, hello: Answers, named: bool) -> Preprocessing:
    """Classification if all sites' values can be classes; else regression, if all values are numbers."""
    if all(reply.get("values") is not None for reply in hello.values()):
        values = {value for name, reply in hello.items() for value in _texts(name, reply, "values")}
        aim = aim_from(target, values, s.task, named)
        check_classes(aim.task, aim.classes)
        return aim
    texts = [name for name, reply in hello.items() if reply.get("numeric") is not True]
    if texts:
        raise WaffleError(f"the target {target!r} holds numbers at some sites, but text at {', '.join(texts)}")
    return Preprocessing((), target, "regression")


def _counts(answers: Answers) -> dict[str, dict[str, int]]:
    def counted(key: str) -> dict[str, int]:
        return {name: _count(name, reply, key) for name, reply in answers.items()}

    return {key: counted(key) for key in ("samples", "test", "validation")}


def _count(name: str, reply: Mapping[str, Any], key: str) -> int:
    with _readable(name):
        return read_count(reply, key)


def _facts(name: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    with _readable(name):
        task = reply["task"]
        if task not in ("classification", "regression"):
            raise ValueError(task)
        shape = tuple(read_count({"shape": side}, "shape") for side in reply["shape"])
        if not shape:
            raise ValueError("the shape of a sample has no axis")
        if len(reply["classes"]) > MOST_CLASSES:
            raise ValueError(f"{len(reply['classes'])} classes, more than {MOST_CLASSES}")
    return {"shape": shape, "classes": _texts(name, reply, "classes"), "task": task}


def _cells(name: str, reply: Mapping[str, Any], column: str, present: bool) -> Cellcount:
    """Return a site's number of cells of a column; all are missing if its table lacks the column."""
    with _readable(name):
        if not present:
            return Cellcount(0, 0, read_count(reply, "samples"))
        return Cellcount(*(read_count({column: n}, column) for n in reply["counts"][column]))


def _moments(name: str, reply: Mapping[str, Any], column: str) -> Moments:
    with _readable(name):
        n, *rest = reply["moments"][column]
        mean, squares = _mean_and_squares(column, *rest)
        return Moments(read_count({column: n}, column), mean, squares)


def _mean_and_squares(what: str, *given: Any) -> tuple[float, float]:
    mean, squares = map(finite_or_none, given)
    if mean is None or squares is None or abs(mean) > LARGEST or not 0 <= squares <= LARGEST**2:
        raise ValueError(f"{what!r} has mean and squared deviations {list(given)}")
    return mean, squares


def _feature_moments(name: str, reply: Mapping[str, Any], samples: int, features: int) -> FeatureMoments:
    """Return a site's moments of each feature or channel of its training samples."""
    with _readable(name):
        means, squares = reply["features"]
        if not len(means) == len(squares) == features:
            raise ValueError(f"moments of {len(means)} and {len(squares)} features, expected {features}")
        pairs = [_mean_and_squares(f"feature {i}", *pair) for i, pair in enumerate(zip(means, squares, strict=True))]
        found = np.array(pairs, np.float64).reshape(features, 2)
        return FeatureMoments(samples, found[:, 0], found[:, 1])


def _target_moments(name: str, reply: Mapping[str, Any], samples: int) -> Moments:
    """Return a site's moments of the targets of its training samples."""
    with _readable(name):
        return Moments(samples, *_mean_and_squares("target", *reply["target"]))


def _text(name: str, reply: Mapping[str, Any], key: str) -> str:
    with _readable(name):
        if not isinstance(reply[key], str):
            raise ValueError(f"{key!r} is not a text")
        return str(reply[key])


def _texts(name: str, reply: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    with _readable(name):
        found: Any = reply
        for key in keys:
            found = found[key]
        if not isinstance(found, list):
            raise ValueError(f"{keys[-1]!r} is not a list")
        return tuple(map(str, found))


def _agreed(answers: Mapping[str, Any], what: str) -> Any:
    if len(set(answers.values())) > 1:
        raise WaffleError(f"the sites differ in {what}: {_list(answers)}")
    return next(iter(answers.values()))


def _list(answers: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} has {one_line(value)}" for name, value in answers.items())[:500]


@contextmanager
def _readable(name: str) -> Any:
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise WaffleError(f"{name} sent a survey reply that cannot be read: {one_line(error)}") from None
