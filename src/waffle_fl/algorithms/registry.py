"""All methods by name: those of this package, which are discovered, and user classes named `module:Class`."""

from __future__ import annotations

import dataclasses
import difflib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from waffle_fl.algorithms.contract import LR, SGD, About, Algorithm, Optimiser
from waffle_fl.algorithms.hooks import HOOKS
from waffle_fl.constraints import parameters_of, shown
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.importing import import_named

CONTRACT = ("init", "broadcast", "begin", "step", "finish", "aggregate", "personal")
ATTRIBUTES = ("about", "for_alice", "trains_as")
RENAMED = {"waffle-kin": "waffle"}
MIN_SIMILARITY = 0.8  # difflib ratio from which a name counts as a misspelt hook


def check_method(kind: Any, name: str) -> None:
    """Raise a WaffleError if a class does not implement the contract, or probably misspells the name of a hook."""
    if not isinstance(kind, type):
        raise WaffleError(f"{name}: expected a class, got {type(kind).__name__}")
    missing = [function for function in CONTRACT if not callable(getattr(kind, function, None))]
    named = [*vars(kind), *getattr(kind, "__annotations__", {})]
    fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for found in dict.fromkeys(named):
        known = (*CONTRACT, *HOOKS, *ATTRIBUTES)
        close_matches = difflib.get_close_matches(found, known, n=1, cutoff=MIN_SIMILARITY)
        if close_matches and found not in (*known, *fields) and not found.startswith("_"):
            raise WaffleError(
                f"{name}: {found!r} is not part of the contract, did you mean {close_matches[0]!r}? "
                "If not, begin its name with _"
            )
    if missing:
        raise WaffleError(f"{name} lacks {', '.join(f'{function}()' for function in missing)} of the contract")
    if not fields or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise WaffleError(f"{name}: expected a frozen dataclass, add @dataclass(frozen=True)")
    try:
        known_fields = parameters_of(kind)
    except Exception as error:  # evaluating an annotation can raise any exception
        raise WaffleError(f"{name}: its annotations cannot be read: {' '.join(str(error).split())}") from None
    if "sgd" not in known_fields or known_fields["sgd"].hint not in (SGD, Optimiser):
        raise WaffleError(f"{name} lacks the field sgd: SGD = field(default_factory=SGD)")
    required = [f.name for f in dataclasses.fields(kind) if _has_no_default(f)]
    if required:
        raise WaffleError(f"{name}: expected a default for each hyperparameter, {', '.join(required)} has none")
    about = getattr(kind, "about", None)
    if about is not None and not isinstance(about, About):
        raise WaffleError(f"{name}: expected about to be an About, got {type(about).__name__}")


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def methods_in(package: ModuleType) -> dict[str, type[Algorithm]]:
    """Return the methods that the modules of a package define, by name and in the order of tables."""
    kinds = sorted(_method_classes(package), key=lambda kind: (kind.about.order, kind.about.name))
    for kind in kinds:
        check_method(kind, kind.about.name)
    return {kind.about.name: kind for kind in kinds}


def _method_classes(package: ModuleType) -> Iterator[Any]:
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = import_module(found.name)
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and "about" in vars(kind):
                yield kind


ALGORITHMS = methods_in(import_module("waffle_fl.algorithms"))
TITLES = {name: kind.about.title for name, kind in ALGORITHMS.items()}  # type: ignore[attr-defined]


def algorithm_of(name: Any) -> type[Algorithm]:
    """Return the class of a method: one of this package by its name, any other as `module:Class`."""
    if not isinstance(name, str):
        kind: Any = name if isinstance(name, type) else type(name)
        own = f"{kind.__module__}:{kind.__qualname__}" if hasattr(kind, "aggregate") else "waffle"
        text = kind.about.name if kind in ALGORITHMS.values() else own
        raise WaffleError(f"method: expected a name or module:Class such as {text!r}, got {shown(name):.80}")
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if name in RENAMED:
        raise WaffleError(f"unknown method {name!r}: it is now {RENAMED[name]!r}")
    if ":" in name:
        return _imported(name)
    raise WaffleError(f"unknown method {name!r}{suggest(name, ALGORITHMS)}")


@cache
def _imported(name: str) -> type[Algorithm]:
    kind = import_named(name, "method")
    check_method(kind, name)
    return kind  # type: ignore[no-any-return]


def about_of(name: str) -> About:
    """Return the description of a method. A class outside this package without one is described by its docstring."""
    kind: Any = algorithm_of(name)
    if name in ALGORITHMS:
        return kind.about  # type: ignore[no-any-return]
    summary = summary_of(kind)
    given = getattr(kind, "about", None) or About(name, kind.__name__, "each agent", summary)
    title = f"{given.title} ({name})" if given.title in TITLES.values() else given.title
    return replace(given, name=name, title=title)


def title_of(name: str) -> str:
    """Return the method's name in tables and charts."""
    return about_of(name).title


def summary_of(kind: type) -> str:
    """Return the first line of a class's docstring."""
    return (kind.__doc__ or kind.__name__).strip().splitlines()[0]


def search_space(name: str) -> dict[str, Any]:
    """Return the default search space of `waffle tune`: the step size and the parameters that define a `search`."""
    kind: Any = algorithm_of(name)
    fields = {f.name: f.metadata.get("search") for f in dataclasses.fields(kind)}
    searched = {field: space for field, space in fields.items() if space is not None}
    return dict(about_of(name).search) or {"lr": LR, **searched}
