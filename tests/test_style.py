"""The words of the repository: plain technical English and the field's names. CONTRIBUTING.md has the rules."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_PROSE = (
    "results/",
    "requirements/",
    "LICENSE",
    "docs/figures/",
    "docs/shifts/",
    "docs/images/",
    "tests/fingerprints",
)
UNITS = "agent|round|row|run|site|method|split|chart|core|process|federation|line|seed|class|step|batch|epoch|page|file"
PHRASES = {
    rf"\b(one|ms|seconds|MB|bytes|steps|epochs?|times|messages?|samples|lines?|rows?) an? ({UNITS})\b": "per",
    rf"\b(one|a|an) (\w+ )?(line|row|file|folder|message|bar|key|model|panel|process|number) an? ({UNITS})\b": "per",
    r"\b[Ww]hoever\b|\bhe whose\b": "the agent that ..., the run whose ...",
    r"\b([Nn]o|[Ee]very|[Ss]ome)body\b": "no agent, all agents, an agent",
    r"\b[Mm]end(s|ed|ing)?\b": "fix",
    r"\b(any|other|whatever|same) company\b": "regardless of what else is in the batch",
    r"\bturned away\b|\bat the door\b|\bcareful colleague\b": "rejected",
    r"\b(was|were|is|are|be|been) (heard|told)\b": "received, reported",
    r"\bfor nothing\b|\bmade otherwise\b|\bif told how\b|\bdiffer besides\b": "say what happens",
    r"\bcalled as\b": "named after",
}
NAMES = {
    r"\b(Vessel|vessels?|Course|Parcel|Envelope|Inbox|Letter|Desk|Examiner)\b": "the table of names",
    r"\b(of_the_model|chords|judged_on|everyone_of)\b": "the table of names",
    r"waffle_fl[./](own|use|reproduce|folders|storage|notation|memory|deltas|wire)\b": "the new module",
    r"\b(own|use|reproduce)/(__init__|\w+\.py)": "user_data/, inference/, paper/",
    r"\b(clientapp|serverapp|watching|holdings|rehearsal|loopback|attendance)\.py\b": "the new module",
}


def tracked_texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    texts = (".py", ".md", ".toml", ".html", ".js", ".yml", ".yaml", ".cff", "Makefile")
    return [ROOT / name for name in listed if name.endswith(texts) and not name.startswith(NOT_PROSE)]


@pytest.mark.parametrize("path", tracked_texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_words_and_names(path: Path) -> None:
    """No phrase that needs a second reading, and no name that was replaced."""
    if path == Path(__file__):
        return
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}, write: {better}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for pattern, better in (PHRASES | NAMES).items()
        for match in re.finditer(pattern, line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short_and_begin_with_an_example(page: Path) -> None:
    """A page has at most 400 lines, and its first screen shows a command, code, a picture or a table."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400
    assert any(line.lstrip().startswith(("```", "![", "<img", "|")) for line in lines[:30])
