"""What may be resumed, and which ends of a deployment fit, is decided by two integers."""

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
    "algorithms/waffle.py",
    "algorithms/contract.py",
    "models/flat.py",
    "batches.py",
    "update_encoding.py",
    "deploy/site.py",
)


def test_the_fingerprints_are_of_this_version() -> None:
    """Whoever raises RESULTS_VERSION writes the fingerprints anew: python tests/fingerprints.py."""
    assert KNOWN["results_version"] == RESULTS_VERSION


@pytest.mark.parametrize("name", fingerprints.configs())
def test_numbers_change_only_with_the_version(name: str) -> None:
    """A tiny run gives the numbers that are kept for this RESULTS_VERSION; other numbers need a higher version."""
    if name not in KNOWN["losses"]:
        pytest.fail(f"{name} is new: run python tests/fingerprints.py")
    assert fingerprints.losses(fingerprints.configs()[name]) == pytest.approx(KNOWN["losses"][name], rel=1e-9)


def test_an_edited_docstring_changes_nothing(tmp_path: Path) -> None:
    """A run that was begun before docstrings were edited is resumed, and the two ends still fit."""
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
    [result] = execute([(check_run("waffle", settings, {}), Path("run"))], Runtime(device="cpu"), until=until)
    print(json.dumps({**result, "software": software()}))

"""


def _in_copy(folder: Path, call: str) -> dict[str, str]:
    """What the call prints when the package is the copy in this folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + call], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
