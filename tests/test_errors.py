"""A WaffleError is a ValueError, and no handler of a ValueError replaces its text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sklearn.exceptions import NotFittedError

from conftest import refusal
from waffle_fl import PersonalizedClassifier, PersonalizedRegressor
from waffle_fl.attacks import parse
from waffle_fl.call_syntax import build
from waffle_fl.engines.flower.messages import unpacked
from waffle_fl.errors import WaffleError
from waffle_fl.inference import sklearn_base
from waffle_fl.manifest import read as read_manifest
from waffle_fl.records import read_json
from waffle_fl.results import read_condensed


def refuse(*_: float) -> None:
    raise WaffleError("the reason")


def test_a_mistake_is_a_value_error() -> None:
    """Code that expects a ValueError of a library catches a WaffleError."""
    assert issubclass(WaffleError, ValueError)


def test_a_refused_value_keeps_its_reason() -> None:
    """What a schedule, an attack or an aggregation reports about its own values is what the user reads."""
    assert refusal(build, "odd(1)", {"odd": refuse}, "an attack", "odd(2)") == "the reason"
    assert "a share in (0, 1]" in refusal(parse, "backdoor(1, 7)")


def test_a_message_that_is_too_long_is_called_that() -> None:
    """A message over the limit is refused for its size, not as one of another program."""
    records = {"words": {"json": "{}", "signature": b""}, "payloads": {"x": type("Array", (), {"data": b"12"})()}}
    assert refusal(unpacked, records, 1) == "more bytes than any message of ours"


def test_a_manifest_of_another_schema_is_called_that(tmp_path: Path) -> None:
    """A manifest of a later version is not called damaged."""
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 9, "key": "", "files": {}, "hmac": ""}))
    assert "expected schema 1, got 9" in refusal(read_manifest, tmp_path)


def test_a_record_that_names_code_says_how_to_trust_it(tmp_path: Path) -> None:
    """A condensed record that names code to import is refused for that, and the line names --trust."""
    settings, options = {"schema": 1, "model": "auto"}, {"omega": "mine:schedule"}
    tables = {"settings": settings, "options": options, "config": {"method": "waffle"}, "provenance": {}}
    path = tmp_path / "record.jsonl"
    path.write_text(json.dumps({"run": "a", "tables": tables, "result": {}, "rounds": {}}) + "\n")
    told = refusal(read_condensed, path)
    assert "names code to import" in told
    assert "is no record" not in told


def key_of(path: Path) -> Any:
    keys = pytest.importorskip("waffle_fl.deploy.keys", exc_type=ImportError)
    return keys.wire_form(path)


@pytest.mark.parametrize("reader", [read_json, key_of])
def test_a_fifo_is_called_a_fifo(tmp_path: Path, reader: Callable[[Path], Any]) -> None:
    """A file that is no regular file is refused in one line that says what it is, once."""
    path = tmp_path / "fifo.json"
    os.mkfifo(path)
    assert refusal(reader, path).startswith("expected a regular file")


@pytest.mark.parametrize("kind", [PersonalizedClassifier, PersonalizedRegressor])
def test_an_estimator_that_is_not_fitted_says_so_as_scikit_learn_does(kind: Any) -> None:
    """predict before fit raises scikit-learn's NotFittedError."""
    with pytest.raises(NotFittedError, match="call fit first"):
        kind().predict([[0.0]])


def test_without_scikit_learn_the_error_is_the_librarys_own() -> None:
    """The fallback is a WaffleError, and of the same built-in types as scikit-learn's."""
    assert issubclass(sklearn_base.NotFittedError, WaffleError)
    assert {ValueError, AttributeError} <= set(sklearn_base.NotFittedError.__mro__) & set(NotFittedError.__mro__)
