"""Whether values are what a setting takes; every mistake is told at once, with its line in the file."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from waffle_fl import attacks
from waffle_fl.algorithms import defences
from waffle_fl.algorithms.schedules import ADAPTIVE, parse
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.shifts import read_shifts


def problems_of(
    values: Mapping[str, Any], kinds: Mapping[str, Any], known: Iterable[str] | None = None, text: str = ""
) -> list[str]:
    problems = []
    for name, value in values.items():
        if name not in kinds:
            problems.append(f"unknown key {name!r}{line_of(text, name)}{suggest(name, known or kinds)}")
        elif not _fits(value, kinds[name]):
            problems.append(f"{name}{line_of(text, name)}: expected {_described(kinds[name])}, got {shown(value)}")
        else:
            rule = RULES.get(name)
            if rule and not rule[1](value):
                problems.append(f"{name}{line_of(text, name)}: expected {rule[0]}, got {shown(value)}")
            elif name in TEXTS:
                problems += unreadable(TEXTS[name], value)
    return problems


def unreadable(read: Callable[[str], Any], text: str) -> list[str]:
    try:
        read(text)
    except WaffleError as error:
        return [str(error)]
    return []


def _read_degree(text: str) -> None:
    if text != ADAPTIVE:
        parse(text)


SCHEDULES = ("omega", "psi")
TEXTS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(SCHEDULES, _read_degree),
    "shift": read_shifts,
    "attack": attacks.parse,
    "aggregation": defences.parse,
}


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, arguments[0]) for v in value)
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is hint


def _described(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    simple = {float: "a finite number", int: "an integer", str: "text", bool: "true or false"}
    lists = {tuple[float, ...]: "a list of numbers", tuple[str, ...]: "a list of texts"}
    return simple.get(hint) or lists.get(hint, "a matrix of numbers")


def shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except (RecursionError, ValueError):
        return "something too deep to print"


def line_of(text: str, key: str) -> str:
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(rf"\s*\[?\s*[\"']?{re.escape(key)}\b", line):
            return f" (line {number})"
    return ""


def tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    def frozen(value: Any) -> Any:
        return tuple(frozen(v) for v in value) if isinstance(value, list | tuple) else value

    given = {key: frozen(value) for key, value in content.items()}
    return {**given, "alice": str(given["alice"])} if type(given.get("alice")) is int else given


def floats(values: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values, every number of a float setting a float: 2 and 2.0 are one config, and are written alike."""
    return {key: _floated(value, hints[key]) for key, value in values.items()}


def _floated(value: Any, hint: Any) -> Any:
    if isinstance(value, dict):  # an option by split
        return {split: _floated(inner, hint) for split, inner in value.items()}
    if typing.get_origin(hint) is tuple:
        return tuple(_floated(inner, typing.get_args(hint)[0]) for inner in value)
    return float(value) if hint is float else value


def at_least(bound: int) -> tuple[str, Any]:
    return f"at least {bound}", lambda value: value >= bound


POSITIVE = "a number above 0", lambda value: value > 0
NOT_NEGATIVE = at_least(0)
RULES: dict[str, tuple[str, Any]] = {
    "agents": at_least(1),
    "attackers": at_least(1),
    "sizes": ("numbers above 0", lambda value: all(size > 0 for size in value)),
    "samples_per_agent": NOT_NEGATIVE,
    "validation": ("a fraction from 0 to below 1", lambda value: 0 <= value < 1),
    "min_category": at_least(1),
    "test_share": ("a fraction above 0 and below 1", lambda value: 0 < value < 1),
    "rounds": at_least(1),
    "epochs": at_least(1),
    "batch_size": at_least(1),
    "lr": POSITIVE,
    "momentum": ("a number from 0 to below 1", lambda value: 0 <= value < 1),
    "weight_decay": NOT_NEGATIVE,
    "seed": NOT_NEGATIVE,
    "split_seed": NOT_NEGATIVE,
    "permutation_seed": NOT_NEGATIVE,
    "clip": NOT_NEGATIVE,
    "correction": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "eta_g": POSITIVE,
    "p_d": NOT_NEGATIVE,
    "p_s": NOT_NEGATIVE,
    "mix": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "lam": NOT_NEGATIVE,
    "mu": NOT_NEGATIVE,
    "tuning": at_least(1),
    "inner_lr": NOT_NEGATIVE,
    "inner_steps": at_least(1),
    "delta": POSITIVE,
    "eta": POSITIVE,
    "beta": POSITIVE,
    "head_layers": NOT_NEGATIVE,
    "yielding": NOT_NEGATIVE,
    "averaging": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "own": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "head_share": ("a fraction from 0 to below 1", lambda value: 0 <= value < 1),
    "alpha": POSITIVE,
    "sigma": POSITIVE,
    "clusters": at_least(1),
    "eps_mean": NOT_NEGATIVE,
    "eps_max": NOT_NEGATIVE,
    "models": at_least(1),
    "eta_p": NOT_NEGATIVE,
    "eta_w": NOT_NEGATIVE,
    "rehearsed": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "global_share": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "k": at_least(1),
    "scale": POSITIVE,
    "explore": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
}
