"""WaffleError is a ValueError, and handlers of ValueError keep its message."""

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


def raise_error(*_: float) -> None:
    raise WaffleError("the reason")


def test_waffle_error_is_a_value_error() -> None:
    """`except ValueError` catches a WaffleError."""
    assert issubclass(WaffleError, ValueError)


def test_a_refused_value_keeps_its_reason() -> None:
    """The user sees the reason that a schedule, an attack or an aggregation rule gives for a refused value."""
    assert refusal(build, "odd(1)", {"odd": raise_error}, "an attack", "odd(2)") == "the reason"
    assert "a share in (0, 1]" in refusal(parse, "backdoor(1, 7)")


def test_a_message_that_is_too_long_is_refused_for_its_size() -> None:
    """A message over the size limit is refused for its size, not as a foreign message."""
    records = {"words": {"json": "{}", "signature": b""}, "payloads": {"x": type("Array", (), {"data": b"12"})()}}
    assert refusal(unpacked, records, 1) == "more bytes than any message of ours"


def test_a_manifest_of_another_schema_is_refused_for_its_schema(tmp_path: Path) -> None:
    """A manifest of a later schema is refused for its schema, not as damaged."""
    (tmp_path / "manifest.json").write_text(json.dumps({"schema": 9, "key": "", "files": {}, "hmac": ""}))
    assert "expected schema 1, got 9" in refusal(read_manifest, tmp_path)


def test_a_record_that_names_code_is_refused(tmp_path: Path) -> None:
    """A condensed record that names code to import is refused for that reason."""
    settings, options = {"schema": 1, "model": "auto"}, {"omega": "mine:schedule"}
    tables = {"settings": settings, "options": options, "config": {"method": "waffle-paper"}, "provenance": {}}
    path = tmp_path / "record.jsonl"
    path.write_text(json.dumps({"run": "a", "tables": tables, "result": {}, "rounds": {}}) + "\n")
    message = refusal(read_condensed, path)
    assert "names code to import" in message
    assert "is no record" not in message


def key_of(path: Path) -> Any:
    keys = pytest.importorskip("waffle_fl.deploy.keys", exc_type=ImportError)
    return keys.wire_form(path)


@pytest.mark.parametrize("reader", [read_json, key_of])
def test_a_fifo_is_refused(tmp_path: Path, reader: Callable[[Path], Any]) -> None:
    """A file that is not a regular file is refused in one line that says so."""
    path = tmp_path / "fifo.json"
    os.mkfifo(path)
    assert refusal(reader, path).startswith("expected a regular file")


@pytest.mark.parametrize("kind", [PersonalizedClassifier, PersonalizedRegressor])
def test_predict_before_fit_raises_not_fitted_error(kind: Any) -> None:
    """predict before fit raises scikit-learn's NotFittedError."""
    with pytest.raises(NotFittedError, match="call fit first"):
        kind().predict([[0.0]])


def test_the_fallback_not_fitted_error() -> None:
    """Without scikit-learn, NotFittedError is a WaffleError with the same built-in base types."""
    assert issubclass(sklearn_base.NotFittedError, WaffleError)
    assert {ValueError, AttributeError} <= set(sklearn_base.NotFittedError.__mro__) & set(NotFittedError.__mro__)
