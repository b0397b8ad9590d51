"""Renamed flags, whose old names still work with a note, and flags that are given twice."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from paper import __main__ as paper_main

from cli_support import SMALL, refusal, waffle
from waffle_fl.cli.flags import RENAMED, parse, replace_old_flags

GRID = 'methods = ["local"]\nsplits = ["A"]\ndata = "synthetic"\n'


@pytest.mark.parametrize("command", RENAMED)
def test_the_help_lists_only_new_names(command: str) -> None:
    """The new name of every renamed flag is in the help of its command, the old name is not."""
    method = ["waffle-paper"] if command in ("run", "tune") else []
    words = waffle(command, *method, "--help").out.replace(",", " ").split()
    for old, new in RENAMED[command].items():
        assert new in words
        assert old not in words


def test_old_names_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """Old names are replaced, also in the form --flag=value, for their command only, with one note each on stderr."""
    assert replace_old_flags(["--over", "omega", "--together=2"], "tune waffle") == [
        "--only",
        "omega",
        "--parallel-trials=2",
    ]
    shown = capsys.readouterr()
    assert shown.err == "note: --over is now --only\nnote: --together is now --parallel-trials\n"
    assert shown.out == ""
    assert replace_old_flags(["--over", "a=b", "--plan"], "deploy run waffle") == ["--over", "a=b", "--plan"]
    assert capsys.readouterr().err == ""


def test_an_old_flag_does_what_the_new_one_does(tmp_path: Path) -> None:
    """`bench --plan` prints the same as `bench --dry-run`, and a note on stderr."""
    file = tmp_path / "grid.toml"
    file.write_text(GRID)
    new, old = (waffle("bench", file, flag, "--out", tmp_path / "out") for flag in ("--dry-run", "--plan"))
    assert (new.code, new.err) == (0, "")
    assert (old.code, old.err) == (0, "note: --plan is now --dry-run\n")
    assert old.out == new.out


def test_a_run_still_takes_alone(tmp_path: Path) -> None:
    """`run --alone` trains the run and prints the note."""
    shown = waffle("run", "local", *SMALL, "--alone", "--quiet", "--workers", "1", "--out", tmp_path / "run")
    assert (shown.code, shown.err) == (0, "note: --alone is now --no-baselines\n")


def test_a_flag_of_several_values_is_given_once(tmp_path: Path) -> None:
    """A list in two parts is refused, since the first part would be ignored; one list, and one value twice, are not."""
    error = refusal(waffle("data", tmp_path, "--target", "y", "--missing=-9", "--missing", "999"))
    assert "--missing is given 2 times: list all values after one, as in --missing A B" in error
    once = waffle("data", tmp_path / "absent", "--target", "y", "--missing", "-9", "999", "--target", "z")
    assert "given" not in refusal(once)


def test_flags_that_default_to_true_are_suggested() -> None:
    """A misspelt --no-baselines is refused with the right name."""
    assert "did you mean --no-baselines?" in refusal(waffle("run", "waffle-paper", "--no-baseline"))


def test_parse_replaces_old_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`parse` replaces old flags for every command."""

    @dataclass(frozen=True)
    class Flags:
        """Flags of a command."""

        new: bool = False
        """Renamed."""

    monkeypatch.setitem(RENAMED, "command", {"--old": "--new"})
    assert parse(Flags, ["--old"], "command").new
    assert capsys.readouterr().err == "note: --old is now --new\n"


def test_the_paper_module_still_takes_anew(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m paper` accepts --anew without `parse`, and its help lists --rerun only."""
    line = ["paper", "mnist"]  # which fails in a folder that is no clone
    monkeypatch.setattr(sys, "argv", [*line, "--anew"])
    assert paper_main.main() == 2
    assert capsys.readouterr().err.splitlines()[0] == "note: --anew is now --rerun"
    monkeypatch.setattr(sys, "argv", [*line, "--help"])
    with pytest.raises(SystemExit):
        paper_main.main()
    helped = capsys.readouterr().out
    assert "--rerun" in helped
    assert "--anew" not in helped
