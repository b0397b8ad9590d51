"""Two version numbers decide which runs can be resumed and which ends of a deployment are compatible."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fingerprints
import waffle_fl
from waffle_fl.versions import RESULTS_VERSION

KNOWN = json.loads(fingerprints.KEPT.read_text())
EDITED = (
    "algorithms/waffle_paper.py",
    "algorithms/contract.py",
    "models/flat.py",
    "batches.py",
    "update_encoding.py",
    "deploy/site.py",
)


def test_the_fingerprints_are_of_this_version() -> None:
    """The stored fingerprints belong to this RESULTS_VERSION; python tests/fingerprints.py rewrites them."""
    assert KNOWN["results_version"] == RESULTS_VERSION


@pytest.mark.parametrize("name", fingerprints.configs())
def test_numbers_change_only_with_the_version(name: str) -> None:
    """A tiny run gives the stored losses; other losses need a higher RESULTS_VERSION."""
    if name not in KNOWN["losses"]:
        pytest.fail(f"{name} is new: run python tests/fingerprints.py")
    assert fingerprints.losses(fingerprints.configs()[name]) == pytest.approx(KNOWN["losses"][name], rel=1e-9)


def test_an_edited_docstring_changes_nothing(tmp_path: Path) -> None:
    """After edits of docstrings runs still resume, and both ends of a deployment are still compatible."""
    source = Path(waffle_fl.__file__).parent
    shutil.copytree(source, tmp_path / "waffle_fl", ignore=shutil.ignore_patterns("__pycache__"))
    before = _in_copy(tmp_path, "run(until=2)")
    for name in EDITED:
        path = tmp_path / "waffle_fl" / name
        path.write_text(path.read_text().replace('"""', '"""Edited. ', 1))
    after = _in_copy(tmp_path, "run()")
    assert before["status"] == "paused"
    assert (after["status"], after["rounds"]) == ("finished", 3)
    assert after["software"] == before["software"]


SCRIPT = """
import json, sys
from pathlib import Path
from waffle_fl.config import check_run
from waffle_fl.deploy.site import software
from waffle_fl.experiment import Runtime, execute

def run(until=None):
    settings = {"data": "digits", "agents": 3, "samples_per_agent": 40, "rounds": 3}
    [result] = execute([(check_run("waffle-paper", settings, {}), Path("run"))], Runtime(device="cpu"), until=until)
    print(json.dumps({**result, "software": software()}))

"""


def _in_copy(folder: Path, call: str) -> dict[str, str]:
    """Return what the call prints when the package is the copy in this folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + call], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
