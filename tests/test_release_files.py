"""Workflows, issue forms and citation: valid, pinned, and of this version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import waffle_fl

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_and_limit_permissions(path: Path) -> None:
    """Every action is pinned to a commit, and the default permission is to read."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in actions)


def test_tests_run_on_three_pythons() -> None:
    """The workflow of the tests covers every Python that the package supports."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


@pytest.mark.parametrize("path", [form for form in FORMS if form.name != "config.yml"], ids=lambda path: path.name)
def test_issue_forms_are_complete(path: Path) -> None:
    """A form has a name, a description and at least one required field."""
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_the_citation_is_of_this_version() -> None:
    """CITATION.cff has authors and the version of the package, and the changelog starts with it."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == waffle_fl.__version__
    assert citation["authors"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == waffle_fl.__version__
