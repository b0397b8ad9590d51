"""Parse the text of a shift, or of shifts joined by +: the same syntax in TOML, on the command line and in Python."""

from __future__ import annotations

import dataclasses
import math
import typing
from functools import cache
from typing import Any, Literal, TypeAlias

from waffle_fl.call_syntax import Call, read_call
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.shifts.concepts import Drift, Swap
from waffle_fl.shifts.covariates import Blur, Colour, Contrast, Noise, Rotate, Scale
from waffle_fl.shifts.groups import groups_of
from waffle_fl.shifts.labels import Dirichlet, Prior, Quantity, Sizes

Shift: TypeAlias = (
    Dirichlet | Quantity | Sizes | Prior | Rotate | Blur | Noise | Contrast | Colour | Scale | Swap | Drift
)
KINDS: dict[str, type[Shift]] = {kind.__name__.lower(): kind for kind in typing.get_args(Shift)}


@cache
def read_shifts(text: str) -> tuple[Shift, ...]:
    """Return the shifts of a text such as `noise(0.3) + swap(4, groups=2)`; none if it is empty."""
    if not text.strip():
        return ()
    shifts = tuple(_read(part) for part in text.split("+"))
    for kinds in ((Quantity, Sizes), *((kind,) for kind in KINDS.values())):
        if sum(isinstance(shift, kinds) for shift in shifts) > 1:  # two of one kind would draw the same numbers
            raise WaffleError(f"expected one {kinds[0].__name__.lower()} in a mixture, got {text!r}")
    return shifts


def shifted_groups(text: str, agents: int, alice: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each shift that has groups, with the group of every agent; 0 is Alice's group."""
    found = zip(text.split("+"), read_shifts(text), strict=False)
    return tuple(
        (part.strip(), groups_of(agents, alice, shift.groups)) for part, shift in found if hasattr(shift, "groups")
    )


def _read(text: str) -> Shift:
    call = read_call(text)
    if not call:
        raise WaffleError(f"expected a shift such as rotate(45) or swap(4, groups=2), got {text.strip()!r}")
    if call.kind not in KINDS:
        raise WaffleError(f"unknown shift {call.kind!r}{suggest(call.kind, KINDS)}")
    kind = KINDS[call.kind]
    if kind is Sizes:
        if call.named:
            raise WaffleError(f"expected numbers in {text.strip()!r}, as in sizes(4, 1, 1)")
        return Sizes(tuple(_number(value, float, text) for value in call.values))
    return kind(**_arguments(kind, call, text.strip()))


def _arguments(kind: type[Shift], call: Call, text: str) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields]
    if len(call.values) > len(names):
        raise WaffleError(f"{text}: expected at most {len(names)} values ({', '.join(names)})")
    given = {**dict(zip(names, call.values, strict=False)), **call.named}
    if len(given) < len(call.values) + len(call.named):
        raise WaffleError(f"{text}: a value is given twice")
    for name in given:
        if name not in names:
            raise WaffleError(f"{text}: unknown name {name!r}{suggest(name, names)}")
    missing = [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in given]
    if missing:
        raise WaffleError(f"{text}: expected {missing[0]}, as in {call.kind}({missing[0]}=...)")
    return {name: _number(value, hints[name], text) for name, value in given.items()}


def _number(value: str, hint: Any, text: str) -> Any:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise WaffleError(f"{text.strip()}: expected {' or '.join(choices)}, got {value!r}")
        return value
    try:
        number = hint(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        what = "an integer" if hint is int else "a number"
        raise WaffleError(f"{text.strip()}: expected {what}, got {value!r}")
    return number
