"""Search spaces: one table per method, in the same form as in a user's TOML file.

    name = [...]                              one of these values
    name = { low = 1, high = 10 }             a number in this range; log = true draws its logarithm;
                                              of = "rounds" multiplies it by the number of rounds
    name = "other"                            the same value as `other`
    name = 2.0                                this value

A string among choices may refer to numbers of the same table: "sigmoid(slope, shift)" draws both if it is chosen.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from waffle_fl.algorithms import algorithm_of, search_space
from waffle_fl.config import RunConfig, check_run, option_types, read_toml
from waffle_fl.errors import WaffleError, suggest

SETTINGS = ("lr", "momentum", "weight_decay", "batch_size", "epochs")  # settings that a search may change


class Draw(Protocol):
    """Draws values: Optuna in a search, fixed values in tests."""

    def choose(self, name: str, choices: list[Any]) -> Any: ...
    def number(self, name: str, low: float, high: float, log: bool) -> float: ...


def space_of(method: str, file: str = "", only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the search space of a method, from the file if given, restricted to the names in `only` if not empty."""
    space = _read(Path(file), method) if file else search_space(method)
    _check(space, method)
    strange = next((name for name in only if name not in space), None)
    if strange:
        raise WaffleError(f"only: {strange!r} is not in the search space of {method}{suggest(strange, space)}")
    known = {**option_types(method), **dict.fromkeys(SETTINGS)}
    kept = {name: rule for name, rule in space.items() if not only or name in only or name not in known}
    if not any(isinstance(rule, list | dict) for name, rule in kept.items() if name in known):
        raise WaffleError(f"nothing is left to search in {', '.join(kept) or 'an empty space'}: add names, or a range")
    return kept


def draw_config(space: Mapping[str, Any], config: RunConfig, draw: Draw) -> RunConfig:
    """Return the config with values drawn from the space."""
    rounds, hyper = config.settings.rounds, option_types(config.method)
    result: dict[str, Any] = {}
    for name, rule in space.items():
        if name in hyper or name in SETTINGS:
            result[name] = (
                result[rule] if isinstance(rule, str) and rule in result else _value(name, space, rounds, draw)
            )
    settings = {k: v for k, v in result.items() if k not in hyper}
    options = {**config.options, **{k: v for k, v in result.items() if k in hyper}}
    given = {f.name: getattr(config.settings, f.name) for f in dataclasses.fields(config.settings)}
    return check_run(config.method, {**given, **settings}, options)


@dataclasses.dataclass(frozen=True)
class _Corner:
    """Draws the k-th choice and the lowest number."""

    k: int

    def choose(self, name: str, choices: list[Any]) -> Any:
        return choices[min(self.k, len(choices) - 1)]

    def number(self, name: str, low: float, high: float, log: bool) -> float:
        return low


def check_space(space: Mapping[str, Any], config: RunConfig) -> None:
    """Raise an error before the first trial if a choice or bound is not a valid value."""
    for k in range(max((len(rule) for rule in space.values() if isinstance(rule, list)), default=1)):
        draw_config(space, config, _Corner(k))


def training_names(space: Mapping[str, Any], method: str) -> set[str]:
    """Return the names that change the local training. Runs that differ in one of them cannot share a stack."""
    fields = dataclasses.fields(algorithm_of(method))  # type: ignore[arg-type]
    free = {f.name for f in fields if f.metadata.get("server_side")}
    inner = {word for name in free & set(space) for word in _named(space[name])}
    return set(space) - free - inner


def _value(name: str, space: Mapping[str, Any], rounds: int, draw: Draw) -> Any:
    rule = space[name]
    if isinstance(rule, list):
        chosen = draw.choose(name, rule)
        if not isinstance(chosen, str):
            return chosen
        numbers = {word: _value(word, space, rounds, draw) for word in _named([chosen]) if word in space}
        return re.sub(r"[a-z_]+", lambda m: f"{numbers[m[0]]:.4g}" if m[0] in numbers else m[0], chosen)
    if isinstance(rule, dict):
        times = rounds if rule.get("of") == "rounds" else 1
        return float(f"{times * draw.number(name, rule['low'], rule['high'], rule.get('log', False)):.4g}")
    return rule


def _named(rule: Any) -> list[str]:
    """Return the words in parentheses in a rule's strings."""
    texts = [text for text in rule if isinstance(text, str)] if isinstance(rule, list) else []
    return [
        word for text in texts for inside in re.findall(r"\((.*?)\)", text) for word in re.findall("[a-z_]+", inside)
    ]


def _read(file: Path, method: str) -> dict[str, Any]:
    _, content = read_toml(file)
    table = content.get(method)
    if not isinstance(table, dict) or not table:
        raise WaffleError(f"{file}: expected a table [{method}] with the search space, got {', '.join(content)}")
    return table


def _check(space: Mapping[str, Any], method: str) -> None:
    """Check that every name is known and every range is valid."""
    inner = {word for rule in space.values() for word in _named(rule)}
    known = [*option_types(method), *SETTINGS]
    for name, rule in space.items():
        if name not in known and name not in inner:
            raise WaffleError(f"search space of {method}: unknown {name!r}{suggest(name, known)}")
        if isinstance(rule, list) and not rule:
            raise WaffleError(f"search space of {method}: {name} has no choices")
        if isinstance(rule, dict):
            _check_range(method, name, rule)
    missing = next((word for word in sorted(inner) if word not in space), None)
    if missing:
        raise WaffleError(f"search space of {method}: {missing} is used in a string but has no range")


def _check_range(method: str, name: str, rule: Mapping[str, Any]) -> None:
    where = f"search space of {method}: {name}"
    low, high = rule.get("low"), rule.get("high")
    odd = next((key for key in rule if key not in ("low", "high", "log", "of")), None)
    if odd:
        raise WaffleError(f"{where} has an unknown key {odd!r}{suggest(odd, ('low', 'high', 'log', 'of'))}")
    if not all(type(v) in (int, float) for v in (low, high)) or not low < high:  # type: ignore[operator]
        raise WaffleError(f"{where} needs numbers low < high, got {low!r} and {high!r}")
    if rule.get("log") and not low > 0:  # type: ignore[operator]
        raise WaffleError(f"{where} draws logarithms, so low must be above 0, got {low!r}")
