"""A dependency whose private modules are used has an upper bound, and the locked version is within it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
CONTENT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ASKED = [*CONTENT["dependencies"], *CONTENT["optional-dependencies"]["flower"]]


@pytest.mark.parametrize("name", ["tyro", "flwr"])
def test_a_bound_admits_the_locked_version(name: str) -> None:
    """The next minor version is not installed unseen, and the locked one is."""
    (asked,) = (found for found in map(Requirement, ASKED) if found.name == name)
    assert any(bound.operator in ("<", "==", "~=") for bound in asked.specifier)
    for lock in ("dev.txt", "deploy.txt"):
        text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
        (locked,) = re.findall(rf"^{name}==(\S+)", text, re.MULTILINE)
        assert locked in asked.specifier


def test_private_modules_are_those_of_bounded_packages() -> None:
    """No other package's private module is imported."""
    pattern = re.compile(r"^\s*from (\w+)(?:\.\w+)* import _(?!_)\w+|^\s*(?:from|import) (\w+)[\w.]*\._(?!_)\w+", re.M)
    found = {
        one or other
        for path in (ROOT / "src").rglob("*.py")
        for one, other in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert found - {"waffle_fl", "torch"} <= {"tyro", "flwr"}
