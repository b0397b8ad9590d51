"""Experiment files: a grid and settings at the top, one table per method, and variants that change them."""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from waffle_fl.algorithms import ALGORITHMS, algorithm_of
from waffle_fl.atomic_files import check_regular
from waffle_fl.config.checking import floats, line_of, problems_of, tuples, unreadable
from waffle_fl.config.settings import (
    ALL_ALICES,
    SCHEMA,
    Experiment,
    Settings,
    check_name,
    check_schema,
    options_of,
    plain,
    weighting_problems,
)
from waffle_fl.constraints import parameters_of, shown
from waffle_fl.errors import WaffleError, suggest
from waffle_fl.shifts import read_shifts

MAX_COMBINATIONS = 100_000  # of the values in [vary]: each is an experiment that is held in memory
GRID = ("methods", "splits", "shifts", "seeds")


def load_experiment(path: Path) -> Experiment:
    """Read an experiment file: settings at the top, one table per method. An option may be a table keyed by split.

    methods = ["all"] means all methods of the installed version.
    """
    first, *more = load_experiments(path)
    if more:
        raise WaffleError(f"{path}: expected one experiment, got a file with variants")
    return first


def load_experiments(path: Path) -> list[Experiment]:
    """Read the experiment of a file, or one experiment per [variants.NAME], whose values replace those at the top.

    A table [vary] of lists, at the top or in a variant, gives one experiment per combination of their values.
    """
    text, content = read_toml(path)
    content.pop("claims", None)
    if "variants" not in content:
        return [_experiment(path, name, varied, text) for name, varied in _varied(path, path.stem, content)]
    variants = content.pop("variants")
    if not isinstance(variants, dict) or not variants or not all(isinstance(v, dict) for v in variants.values()):
        raise WaffleError(f"{path}: expected tables [variants.NAME], got {shown(variants)}")
    return [
        _experiment(path, name, varied, text)
        for variant, changes in variants.items()
        for name, varied in _varied(path, f"{path.stem}/{check_name(variant)}", _changed(content, changes))
    ]


def _varied(path: Path, name: str, content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the content, or one copy per combination of the values in [vary]; the key `method.option` is an option."""
    lists = content.pop("vary", {})
    if not isinstance(lists, dict) or not all(isinstance(values, list) and values for values in lists.values()):
        raise WaffleError(f"{path}: expected lists of values in [vary], got {shown(lists)}")
    count = math.prod(map(len, lists.values()))
    if count > MAX_COMBINATIONS:
        raise WaffleError(
            f"{path}: the lists in [vary] make {count:,} combinations, expected at most {MAX_COMBINATIONS:,}: "
            "shorten them"
        )
    for chosen in itertools.product(*lists.values()):
        changes: dict[str, Any] = {}
        for key, value in zip(lists, chosen, strict=True):
            method, _, option = key.rpartition(".")
            changes |= {method: {**changes.get(method, {}), option: value}} if method else {key: value}
        yield "/".join([name, *(plain(str(value)).strip("-") for value in chosen)]), _changed(content, changes)


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Return a file's text and its parsed content."""
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError as error:
        raise WaffleError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise WaffleError(f"{path} is not valid TOML: {error}") from None


def _changed(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with a variant's values in place of the file's, and with tables merged."""
    merged = {
        k: {**content[k], **v} for k, v in changes.items() if isinstance(v, dict) and isinstance(content.get(k), dict)
    }
    return {**content, **changes, **merged}


def _experiment(path: Path, name: str, content: dict[str, Any], text: str) -> Experiment:
    check_schema(content.pop("schema", SCHEMA))
    tables = {key: content.pop(key) for key in list(content) if isinstance(content[key], dict)}
    grid: dict[str, Any] = {key: content.pop(key) for key in GRID if key in content}
    if grid.get("methods") == [ALL_ALICES]:
        grid["methods"] = list(ALGORITHMS)
    problems = _grid_problems(grid)
    hints = parameters_of(Settings)
    known = [*hints, *GRID, "schema", "variants", "vary", "claims", *ALGORITHMS]
    problems += [
        f"{key}{line_of(text, key)}: a grid takes {key}s = [...]"
        for key in ("split", "shift", "seed")
        if key in content
    ]
    values = tuples(content)
    problems += problems_of(values, hints, known, text)
    methods, splits = _texts(grid.get("methods")), _texts(grid.get("splits", ["C"]))
    problems += weighting_problems(values.get("weighting", Settings.weighting), methods)
    for method, table in tables.items():
        if method not in ALGORITHMS and ":" not in method:
            problems.append(f"unknown key {method!r}{line_of(text, method)}{suggest(method, known)}")
        elif method not in methods:
            problems.append(f"[{method}]{line_of(text, method)}: this method is not among the experiment's methods")
        if method in ALGORITHMS or (method in methods and not unreadable(algorithm_of, method)):
            problems += _option_problems(method, table, splits, _from_table(text, method))
    if problems:
        raise WaffleError(f"{path}: " + "; ".join(problems))
    return Experiment(
        name=name,
        settings=Settings(**floats(values, hints)),
        options={method: floats(table, options_of(method)) for method, table in tables.items()},
        **{key: tuple(value) for key, value in grid.items()},
    )


def _texts(value: Any) -> list[str]:
    """Return the strings of a list. Other values have already been reported."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _grid_problems(grid: Mapping[str, Any]) -> list[str]:
    problems = []
    if not grid.get("methods"):
        problems.append(f"expected methods = [...], from {', '.join(ALGORITHMS)}")
    for key, kind in (("methods", str), ("splits", str), ("shifts", str), ("seeds", int)):
        value = grid.get(key, [])
        if not isinstance(value, list) or not all(type(v) is kind for v in value) or (key in grid and not value):
            problems.append(f"{key}: expected a list of {kind.__name__}, got {shown(value)}")
        elif len(set(value)) < len(value):
            problems.append(f"{key}: expected no duplicates, got {value!r}")
        elif key == "methods":
            problems += [problem for method in value for problem in unreadable(algorithm_of, method)]
        elif key == "shifts":
            problems += [problem for text in value for problem in unreadable(read_shifts, text)]
        elif key == "seeds":
            problems += [f"seeds: expected integers >= 0, got {v}" for v in value if v < 0]
    return problems


def _option_problems(method: str, table: Mapping[str, Any], splits: Iterable[str], text: str) -> list[str]:
    """Return the problems of a method's options. An option is a value, or a table with one value per split."""
    kinds, problems = options_of(method), []
    for name, value in table.items():
        if isinstance(value, dict):
            unknown = [key for key in value if key not in splits]
            problems += [f"{method}.{name}: no split {key!r} in this experiment" for key in unknown]
            problems += [f"{method}.{name}: no value for split {split}" for split in splits if split not in value]
            for inner in value.values():
                problems += problems_of({name: inner}, kinds, kinds, text)
        else:
            problems += problems_of({name: value}, kinds, kinds, text)
    return problems


def _from_table(text: str, method: str) -> str:
    """Return the text from a method's table on, with empty lines before it to keep the line numbers."""
    start = re.search(rf"^\s*\[\s*[\"']?{re.escape(method)}[\"']?\s*\]", text, re.MULTILINE)
    at = start.start() if start else 0
    return "\n" * text[:at].count("\n") + text[at:]
