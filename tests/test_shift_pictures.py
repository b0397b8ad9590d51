"""The pictures of shifts drawn by `waffle data`, and their page in the docs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from test_shifts import EXAMPLES, ROOT
from waffle_fl.cli.menu import main
from waffle_fl.shifts import KINDS, Covariate, read_shifts

pytestmark = pytest.mark.docs


@pytest.mark.parametrize("shift", [*EXAMPLES, "dirichlet(0.5) + rotate(30) + swap(2)"])
def test_every_shift_is_drawn(shift: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`waffle data` draws a shift and prints the group of each agent."""
    out = tmp_path / "shift.svg"
    assert main(["data", "digits", "--shift", shift, "--agents", "5", "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["split"] == "A"
    assert facts["shift"] == shift
    text = out.read_text()
    assert text.startswith("<svg")
    covariate = [s for s in read_shifts(shift) if isinstance(s, Covariate)]
    assert ("<image" in text) == bool(covariate)
    assert all(len(groups) == 5 for groups in facts["shifted"].values())


def test_vectors_are_drawn_as_strips(tmp_path: Path) -> None:
    """Samples that are not images are drawn as strips."""
    out = tmp_path / "strip.png"
    assert main(["data", "synthetic", "--shift", "scale(0.5)", "--out", str(out), "--quiet"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_pictures_of_the_docs_match_their_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every picture of docs/shifts.md is shown once, and its command draws the same bytes."""
    page = (ROOT / "docs" / "shifts.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("docs/shifts").mkdir(parents=True)
    for line in re.findall(r"^waffle (data digits .*)$", page, re.MULTILINE):
        assert main([*shlex.split(line), "--json"]) == 0
    drawn = {path.name: path.read_text() for path in Path("docs/shifts").iterdir()}
    assert drawn == {path.name: path.read_text() for path in (ROOT / "docs" / "shifts").iterdir()}
    assert set(re.findall(r"\(shifts/(.*?)\)", page)) == set(drawn)


def test_the_snippet_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python of docs/shifts.md runs unchanged and prints the shifted agents."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "shifts.md").read_text(), re.DOTALL)
    exec(snippet, {})
    assert capsys.readouterr().out == f"{(('rotate(30)', (0, 1) * 5),)}\n"


def test_the_docs_have_every_shift() -> None:
    """The table of docs/shifts.md has one row per kind of shift, and the page shows a picture of each."""
    page = (ROOT / "docs" / "shifts.md").read_text()
    for kind in KINDS:
        assert f"\n| `{kind}(" in page
        assert re.search(rf'^waffle data digits .*"{kind}\(', page, re.MULTILINE)
