"""Hyperparameters of several methods on one command line: `--options waffle.clip=1 ditto.lam=0.5 options.toml`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from waffle_fl.config import option_types, read_toml
from waffle_fl.errors import WaffleError


def read_options(given: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each method, from METHOD.NAME=VALUE and from TOML files with one table per method."""
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        path, equals, value = text.partition("=")
        method, dot, name = path.rpartition(".")
        if not equals and text.endswith(".toml"):
            _, content = read_toml(Path(text))
            for table, options in content.items():
                if not isinstance(options, dict):
                    raise WaffleError(f"{text}: expected one table per method, got {table} = {options!r}")
                found.setdefault(table, {}).update(options)
        elif not (equals and dot and method and name and value):
            raise WaffleError(f"options: expected METHOD.NAME=VALUE or a .toml file, got {text!r}")
        else:
            found.setdefault(method, {})[name.replace("-", "_")] = (method, value)
    unknown = next((method for method in found if method not in methods), None)
    if unknown:
        raise WaffleError(f"options: {unknown} is not among the methods ({', '.join(methods)})")
    return {method: {name: _typed(value, name) for name, value in options.items()} for method, options in found.items()}


def _typed(value: Any, name: str) -> Any:
    """Return a value of the command line as a number, a truth value or text, as its option expects."""
    if not isinstance(value, tuple):
        return value
    method, text = value
    if option_types(method).get(name) is str:
        return text
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
