"""Constraints on parameters, declared with the field and checked when the dataclass is constructed.

    @dataclass(frozen=True)
    class Method:
        mu: float = parameter(0.1, at_least(0))

        def __post_init__(self) -> None:
            check_fields(self)

The command line, experiment files, run folders and Python all use these declarations, so their messages are the same.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from waffle_fl.errors import WaffleError

NUMBER = (int, float)


@dataclass(frozen=True)
class Constraint:
    """A condition on a value in addition to its type, as text and as a predicate.

    `holds` may raise a WaffleError; its text is then the message.
    """

    words: str
    holds: Callable[[Any], bool]

    def problem(self, value: Any) -> str:
        """Return the message for a value that does not fit, or an empty string."""
        try:
            return "" if self.holds(value) else f"expected {self.words}, got {shown(value)}"
        except WaffleError as error:
            return str(error)


def at_least(bound: float) -> Constraint:
    return Constraint(f"at least {bound}", lambda value: value >= bound)


def above(bound: float) -> Constraint:
    return Constraint(f"a number above {bound}", lambda value: value > bound)


def between(low: float, high: float) -> Constraint:
    """Constraint to a closed interval."""
    return Constraint(f"a number from {low} to {high}", lambda value: low <= value <= high)


def below_one() -> Constraint:
    return Constraint("a number from 0 to below 1", lambda value: 0 <= value < 1)


def fraction(positive: bool = False) -> Constraint:
    """Constraint to fractions below 1, and above 0 if `positive`."""
    if positive:
        return Constraint("a fraction above 0 and below 1", lambda value: 0 < value < 1)
    return Constraint("a fraction from 0 to below 1", lambda value: 0 <= value < 1)


def unless(word: str, constraint: Constraint) -> Constraint:
    """Constraint that also accepts one word."""
    return Constraint(f"{constraint.words}, or {word!r}", lambda value: value == word or constraint.holds(value))


def share() -> Constraint:
    """Constraint to a part of a whole, or the whole."""
    return Constraint("a number above 0 and at most 1", lambda value: 0 < value <= 1)


def each_at_least(bound: float) -> Constraint:
    return Constraint(f"numbers of at least {bound:g}", lambda values: all(value >= bound for value in values))


def each_above(bound: float) -> Constraint:
    return Constraint(f"numbers above {bound}", lambda values: all(value > bound for value in values))


def readable(parse: Callable[[str], Any], what: str) -> Constraint:
    """Constraint to strings that `parse` accepts. The message is the error that `parse` raises."""

    def holds(value: Any) -> bool:
        if isinstance(value, str):
            parse(value)
        return True

    return Constraint(what, holds)


class Parameter(NamedTuple):
    """The type of a field and its constraint."""

    hint: Any
    constraint: Constraint | None = None

    def problem(self, value: Any) -> str:
        """Return 'expected X, got Y' for a value that does not fit, or an empty string.

        Plain values that fit are remembered: a record of thousands of runs has the same few. A text with a constraint
        is not: reading it may depend on files.
        """
        plain = type(value) in REMEMBERED or (type(value) is str and self.constraint is None)
        key = (id(self.hint), id(self.constraint), type(value), value) if plain else None
        if key in _fitting:
            return ""
        if not fits(value, self.hint):
            return f"expected {described(self.hint)}, got {shown(value)}{_nearest(value, self.hint)}"
        problem = self.constraint.problem(value) if self.constraint else ""
        if key and not problem and len(_fitting) < MOST_REMEMBERED:
            _fitting[key] = self
        return problem


REMEMBERED = (int, float, bool)
MOST_REMEMBERED = 10_000
_fitting: dict[tuple[Any, ...] | None, Parameter] = {}  # holds the parameters, so that their ids stay theirs


def parameter(
    default: Any, constraint: Constraint | None = None, *, server_side: bool = False, search: Any = None
) -> Any:
    """Return a dataclass field with a constraint.

    `server_side`: only `aggregate` reads it, so runs that differ in it can still train in one stack.
    `search`: the choices or the range that `waffle tune` searches by default (docs/tune.md).
    """
    metadata = {"constraint": constraint, "server_side": server_side, "search": search}
    return dataclasses.field(default=default, metadata=metadata)


def model_dependent(default: Any) -> Any:
    """Return a field that the algorithm's `for_model` sets. It is not a hyperparameter and has no flag."""
    return dataclasses.field(default=default, metadata={"model_dependent": True}, repr=False)


@cache
def parameters_of(kind: Any) -> Mapping[str, Parameter]:
    """Return the fields of a dataclass that a user may set, with their types and constraints."""
    hints = typing.get_type_hints(kind)
    return types.MappingProxyType(
        {
            f.name: Parameter(hints[f.name], f.metadata.get("constraint"))
            for f in dataclasses.fields(kind)
            if not f.metadata.get("model_dependent")
        }
    )


def constraint_of(kind: Any, name: str) -> Constraint | None:
    """Return the constraint of a field, to use it for a field of another dataclass."""
    return parameters_of(kind)[name].constraint


def check_fields(instance: Any) -> None:
    """Raise one WaffleError that lists every field whose value does not fit its type or its constraint."""
    kind: Any = type(instance)
    found = {name: known.problem(getattr(instance, name)) for name, known in parameters_of(kind).items()}
    problems = [f"{name}: {problem}" for name, problem in found.items() if problem]
    if problems:
        raise WaffleError("; ".join(problems))


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has this type. An int counts as a float, a bool as neither; a float must be finite."""
    if hint is float:
        return isinstance(value, NUMBER) and type(value) is not bool and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and type(value) is not bool
    if type(hint) is type:
        return isinstance(value, hint)
    origin, arguments = _parts(hint)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and _fit_each(value, arguments)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, choice) for choice in arguments)
    if origin is collections.abc.Callable:
        return callable(value)
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) and kind is not Any else True


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _fit_each(values: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    """Return whether values match a tuple type, such as tuple[float, ...] or tuple[int, str]."""
    if hints[1:] == (...,):
        return all(fits(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(fits, values, hints))


def described(hint: Any) -> str:
    """Return a type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(described, arguments))
    if origin is collections.abc.Callable:
        return "a function"
    simple = {float: "a finite number", int: "an integer", str: "text", bool: "true or false"}
    lists = {
        tuple[float, ...]: "a list of numbers",
        tuple[str, ...]: "a list of texts",
        tuple[tuple[float, ...], ...]: "a matrix of numbers",
    }
    return simple.get(hint) or lists.get(hint) or str(getattr(hint, "__name__", hint))


def shown(value: Any) -> str:
    """Return the repr of a value on one line, at most 200 characters."""
    try:
        return " ".join(repr(value).split())[:200]
    except (RecursionError, ValueError):
        return "something too deep to print"


def _nearest(value: Any, hint: Any) -> str:
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f", did you mean {near[0]!r}?" if near else ""
