"""A run with other settings goes to a numbered folder with a note; an explicit --out is never changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_support import refusal, toml, waffle

RUN = ["run", "local", "--data", "synthetic", "--rounds"]
FOLDER = Path("runs/synthetic-C-local-1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def rounds_in(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["settings"]["rounds"])


def test_other_settings_go_to_a_numbered_folder() -> None:
    """Each set of settings has its own folder; repeating a command finds its finished run."""
    assert waffle(*RUN, "2").code == 0
    second, third = waffle(*RUN, "3"), waffle(*RUN, "4")
    for shown, number, rounds in ((second, 2, 3), (third, 3, 4)):
        assert shown.code == 0
        note = f"note: {FOLDER} holds a run with other settings (settings.rounds was 2, now {rounds}): writing to "
        assert f"{note}{FOLDER}-{number}\n" in shown.err
        assert f"run folder: {FOLDER}-{number}\n" in shown.out
    assert [rounds_in(folder) for folder in sorted(Path("runs").iterdir())] == [2, 3, 4]
    again = waffle(*RUN, "3", "--json", "--quiet")
    assert json.loads(again.out)["run"] == f"{FOLDER}-2"
    assert again.err == ""
    assert len(list(Path("runs").iterdir())) == 3


def test_an_explicit_folder_with_other_settings_is_refused() -> None:
    """--out with another config is refused, and no other folder is created."""
    assert waffle(*RUN, "2", "--out", "mine").code == 0
    assert "mine holds a finished run" in refusal(waffle(*RUN, "3", "--out", "mine", "--quiet"))
    assert [path.name for path in Path().iterdir()] == ["mine"]


def test_alice_all_numbers_the_folder_of_the_grid() -> None:
    """With --alice all the folder of the grid is numbered, not the folder of each run."""
    line = ["--data", "synthetic", "--agents", "2", "--alice", "all", "--quiet"]
    for rounds in ("2", "3"):
        assert waffle("run", "local", *line, "--rounds", rounds).code == 0
    first, second = sorted(Path("runs").iterdir())
    assert second.name == f"{first.name}-2"
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}


def test_a_changed_experiment_file_gets_a_new_folder(here: Path) -> None:
    """More seeds go into the existing folder; another number of rounds goes into a new one."""
    text = 'methods = ["local"]\ndata = "synthetic"\nsplits = ["C"]\nrounds = {}\nseeds = {}\n'
    for rounds, seeds in ((2, [1]), (2, [1, 2]), (3, [1])):
        shown = waffle("bench", toml(here, text.format(rounds, seeds)), "--quiet")
        assert shown.code == 0, shown.err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["grid", "grid-2"]
    assert sorted(path.name for path in Path("runs/grid").iterdir() if path.name != "report") == [
        "synthetic-C-local-1",
        "synthetic-C-local-2",
    ]
