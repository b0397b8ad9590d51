"""The width of piped tables, and progress bars of resumed runs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from cli_support import waffle
from waffle_fl.algorithms import TITLES
from waffle_fl.cli.console import console_for
from waffle_fl.cli.display import ProgressDisplay
from waffle_fl.config import RunConfig, Settings
from waffle_fl.experiment import Runtime, execute

RESULTS = Path(__file__).parent.parent / "results"


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def test_a_piped_table_is_complete(tmp_path: Path) -> None:
    """Each row of a piped table is one line with every method's number, not cut or wrapped."""
    shown = waffle("report", RESULTS / "mnist.jsonl", "--out", tmp_path)
    assert shown.code == 0
    assert "…" not in shown.out
    lines = shown.out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:1] == ["split"])
    assert all(title in lines[head] for title in ("WAFFLE (paper)", "FedAvg", "Ditto", "APFL"))
    row = lines[head + 2].split()
    assert row[0] == "A"
    named = lines[head].replace("WAFFLE (paper)", "")
    assert len(row) - 2 == len([title for title in TITLES.values() if title in named])


def test_columns_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """$COLUMNS sets the width of piped output."""
    monkeypatch.setenv("COLUMNS", "70")
    assert console_for().width == 70


def test_progress_starts_at_the_resumed_round(tmp_path: Path) -> None:
    """A run resumed from round 3 of 5 shows 3/5 before its next round and 5/5 at the end."""
    config = RunConfig(method="local", settings=Settings(data="synthetic", rounds=5))
    runs = [(config, tmp_path / "run")]
    execute(runs, Runtime(device="cpu"), until=3)
    seen = []

    class Recorded(ProgressDisplay):
        def advanced(self, *arguments: object) -> None:
            seen.append(self.progress.tasks[0].completed)
            super().advanced(*arguments)  # type: ignore[arg-type]

    with Recorded(Console(file=io.StringIO())) as listener:
        execute(runs, Runtime(device="cpu"), listener)
    assert seen == [3, 4]
    assert (listener.progress.tasks[0].completed, listener.progress.tasks[0].total) == (5, 5)


def test_progress_of_several_runs_adds_up(tmp_path: Path) -> None:
    """Runs of one method share a bar, which starts with the sum of their finished rounds."""
    runs = [
        (RunConfig(method="local", settings=Settings(data="synthetic", rounds=4, seed=seed)), tmp_path / f"run-{seed}")
        for seed in (1, 2, 3)
    ]
    execute(runs[:2], Runtime(device="cpu"), until=2)
    with ProgressDisplay(Console(file=io.StringIO())) as listener:
        execute(runs, Runtime(device="cpu"), listener)
    assert (listener.progress.tasks[0].completed, listener.progress.tasks[0].total) == (12, 12)
