"""Every path of the repository that the docs cite in backticks exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("src", "tests", "docs", "benchmarks", "experiments", "packaging", "requirements", "results")
PLACEHOLDER = re.compile(r"\b[A-Z]{4,}\b")  # docs/algorithms/NAME.md


def cited_paths(text: str) -> set[str]:
    """Paths in backticks, outside of code blocks, that start with a folder of the repository or name a test file."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    words = re.findall(r"`([\w.*+-]+(?:/[\w.*+-]*)*)`", prose)
    paths = {word for word in words if word.split("/")[0] in FOLDERS and "/" in word}
    tests = {f"tests/{word}" for word in words if re.fullmatch(r"test_\w+\.py", word)}
    return {path for path in paths | tests if not PLACEHOLDER.search(path)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cited_paths_exist(page: Path) -> None:
    """Every cited path is an existing file or folder, or a pattern that matches one."""
    text = page.read_text(encoding="utf-8")
    assert [path for path in sorted(cited_paths(text)) if not any(ROOT.glob(path.rstrip("/")))] == []


def test_other_text_is_not_a_path() -> None:
    """Paths of user folders, placeholders and code blocks are not paths of the repository."""
    text = "`tests/gone.py` `runs/x` `docs/NAME.md` `test_gone.py` `results/*.jsonl` `tests`\n```\n`src/x`\n```\n"
    assert cited_paths(text) == {"tests/gone.py", "tests/test_gone.py", "results/*.jsonl"}


def test_many_paths_are_checked() -> None:
    """The docs cite more than 30 paths, so the check is not empty."""
    assert sum(len(cited_paths(page.read_text(encoding="utf-8"))) for page in PAGES) > 30
