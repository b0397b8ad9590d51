"""A dependency whose private modules are used has an upper bound that the locked version meets."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
CONTENT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [*CONTENT["dependencies"], *CONTENT["optional-dependencies"]["flower"]]


@pytest.mark.parametrize("name", ["tyro", "flwr"])
def test_the_locked_version_is_within_its_bound(name: str) -> None:
    """The bound excludes untested minor versions and includes the locked one."""
    (requirement,) = (found for found in map(Requirement, REQUIREMENTS) if found.name == name)
    assert any(bound.operator in ("<", "==", "~=") for bound in requirement.specifier)
    for lock in ("dev.txt", "deploy.txt"):
        text = (ROOT / "requirements" / lock).read_text(encoding="utf-8")
        (locked,) = re.findall(rf"^{name}==(\S+)", text, re.MULTILINE)
        assert locked in requirement.specifier


def test_only_bounded_packages_use_private_modules() -> None:
    """Private modules are imported only from packages with an upper bound."""
    pattern = re.compile(r"^\s*from (\w+)(?:\.\w+)* import _(?!_)\w+|^\s*(?:from|import) (\w+)[\w.]*\._(?!_)\w+", re.M)
    found = {
        one or other
        for path in (ROOT / "src").rglob("*.py")
        for one, other in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert found - {"waffle_fl", "torch"} <= {"tyro", "flwr"}
