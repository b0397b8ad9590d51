"""Schedules of Omega and Psi: the degree of personalisation per round, from 1 (global training) to 0 (local training).

A schedule is written as text, the same in TOML, on the command line and in the record: `sigmoid(3.2)`, `linear(1, 0)`,
`step(0.7)`, `constant(0.5)`, `exponential(3)`, or `package.module:function` for your own function of (r, R). These
depend on the round number only; `adaptive` depends on the gradients of the run (adaptive_degree.py).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from waffle_fl.call_syntax import build
from waffle_fl.constraints import readable
from waffle_fl.errors import WaffleError
from waffle_fl.importing import import_named

Schedule: TypeAlias = Callable[[int, int], float]

ADAPTIVE = "adaptive"


def sigmoid(slope: float = 3.2, shift: float = 0.0) -> Schedule:
    """Eq. 3: 1 / (1 + exp(slope (r / (R/2) - 1))); a positive `shift` makes training local earlier."""
    if slope < 0:
        raise WaffleError(f"a sigmoid needs a slope >= 0, got {slope}: a negative one would end in global training")

    def value(r: int, rounds: int) -> float:
        return 1 / (1 + math.exp(min(slope * ((r + shift) / (rounds / 2) - 1), 700.0)))

    return value


def linear(start: float = 1.0, end: float = 0.0) -> Schedule:
    """Linear from `start` at round 0 to `end` at round R."""
    return lambda r, rounds: start + (end - start) * min(r / rounds, 1.0)


def step(at: float = 0.7, before: float = 1.0, after: float = 0.0) -> Schedule:
    """`before` until the fraction `at` of the rounds, `after` from there on."""
    return lambda r, rounds: before if r < at * rounds else after


def constant(value: float = 0.5) -> Schedule:
    """The same degree of personalisation in every round."""
    return lambda r, rounds: value


def exponential(rate: float = 3.0) -> Schedule:
    """exp(-rate r / R): global at the start, personal early."""
    return lambda r, rounds: math.exp(min(-rate * r / rounds, 700.0))


KINDS: dict[str, Callable[..., Schedule]] = {f.__name__: f for f in (sigmoid, linear, step, constant, exponential)}


@cache
def parse(text: str) -> Schedule:
    """Return the function that the text of a schedule describes."""
    if ":" in text:
        return _imported(text)
    return build(text, KINDS, "a schedule", "sigmoid(3.2) or module:function", also=(ADAPTIVE,))


def read_degree(text: str) -> None:
    """Raise a WaffleError if the text is neither a schedule nor `adaptive`."""
    if text != ADAPTIVE:
        parse(text)


DEGREE = readable(read_degree, "a schedule such as sigmoid(3.2), adaptive or module:function")


def _imported(text: str) -> Schedule:
    function = import_named(text, "schedule")
    if not callable(function):
        raise WaffleError(f"expected a function of (r, R) at {text!r}, got {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def evaluate(schedule: str | Schedule, name: str, r: int, rounds: int) -> float:
    """Return Omega(r) or Psi(r). Raise a WaffleError if the value is outside [0, 1]."""
    value = (parse(schedule) if isinstance(schedule, str) else schedule)(min(r, rounds), rounds)
    if not isinstance(value, numbers.Real) or not 0 <= value <= 1:  # NaN fails this too
        raise WaffleError(f"{name} must lie in [0, 1], but {name}({r}) of {rounds} rounds is {value}: fix the schedule")
    return float(value)
