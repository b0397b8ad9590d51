"""Validation of settings. All problems are reported together, each with its line in the file."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from waffle_fl.constraints import Parameter
from waffle_fl.errors import WaffleError, suggest


def problems_of(
    values: Mapping[str, Any], kinds: Mapping[str, Parameter], known: Iterable[str] | None = None, text: str = ""
) -> list[str]:
    """Return one line per key that is unknown or value that does not fit its parameter."""
    problems = []
    for name, value in values.items():
        if name not in kinds:
            problems.append(f"unknown key {name!r}{line_of(text, name)}{suggest(name, known or kinds)}")
        elif problem := kinds[name].problem(value):
            problems.append(f"{name}{line_of(text, name)}: {problem}")
    return problems


def unreadable(read: Callable[[str], Any], text: str) -> list[str]:
    """Return the error raised by reading a text, as a list that is empty if there is none."""
    try:
        read(text)
    except WaffleError as error:
        return [str(error)]
    return []


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


def floats(values: Mapping[str, Any], kinds: Mapping[str, Parameter]) -> dict[str, Any]:
    """Convert the numbers of float settings to float, so that 2 and 2.0 give the same config."""
    return {key: _floated(value, kinds[key].hint) for key, value in values.items()}


def _floated(value: Any, hint: Any) -> Any:
    if isinstance(value, dict):  # an option by split
        return {split: _floated(inner, hint) for split, inner in value.items()}
    if typing.get_origin(hint) is tuple:
        return tuple(_floated(inner, typing.get_args(hint)[0]) for inner in value)
    if type(value) is int and float in typing.get_args(hint):  # a number or a word
        return float(value)
    return float(value) if hint is float else value
