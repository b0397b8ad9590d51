"""Syntax of a choice with numbers, `kind(3.2, by=4)`: the same in TOML, on the command line and in records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import NamedTuple, TypeVar

from waffle_fl.errors import WaffleError, suggest

T = TypeVar("T")


class Call(NamedTuple):
    """A kind and its arguments, as text."""

    kind: str
    values: tuple[str, ...]
    named: dict[str, str]


def read_call(text: str) -> Call | None:
    """Parse text such as `noise(0.3, groups=2)`; return None if it has another form."""
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\(([^()]*)\))?\s*", text)
    if not match:
        return None
    kind, inside = match.groups()
    parts = [part.strip() for part in (inside or "").split(",") if part.strip()]
    values = tuple(part for part in parts if "=" not in part)
    pairs = [part.partition("=") for part in parts if "=" in part]
    if parts[: len(values)] != list(values) or len({name.strip() for name, _, _ in pairs}) < len(pairs):
        return None
    return Call(kind, values, {name.strip(): value.strip() for name, _, value in pairs})


def build(text: str, kinds: Mapping[str, Callable[..., T]], what: str, example: str, also: Iterable[str] = ()) -> T:
    """Construct the kind that the text names, with its numbers.

    Errors show `example` and suggest names of `kinds` and of `also`, names that are valid elsewhere.
    """
    call = read_call(text)
    if not call:
        raise WaffleError(f"expected {what} such as {example}, got {text!r}")
    if call.kind not in kinds:
        raise WaffleError(f"unknown {what.split()[-1]} {call.kind!r}{suggest(call.kind, (*kinds, *also))}")
    try:
        values, named = [*map(float, call.values)], {name: float(value) for name, value in call.named.items()}
        if not all(map(isfinite, (*values, *named.values()))):
            raise ValueError
        return kinds[call.kind](*values, **named)
    except WaffleError:
        raise
    except (TypeError, ValueError):
        raise WaffleError(f"expected numbers in {text!r}, finite and as many as in {example}") from None
