"""The completion script works in a real bash and contains every command, method and flag."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cli_support import refusal, waffle
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.cli.menu import COMMANDS

BASH = shutil.which("bash")
COMPLETE = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _waffle; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The completion script for bash."""
    path = tmp_path_factory.mktemp("completion") / "waffle-paper"
    path.write_text(waffle("completion", "bash").out)
    return path


@pytest.mark.skipif(BASH is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["re"], {"report", "reproduce", "resume"}),
        (["run", "waf"], {"waffle-paper", "waffle"}),
        (["tune", "scaff"], {"scaffold"}),
        (["run", "waffle-paper", "--ome"], {"--omega"}),
        (["run", "fedprox", "--ome"], set()),
        (["run", "waffle-paper", "--rounds", "3", "--see"], {"--seed"}),
        (["predict", "folder", "--tr"], {"--trust"}),
        (["predict", ""], set()),
        (["report", "--det"], {"--details"}),
        (["deploy", "add"], {"add-site"}),
        (["completion", "z"], {"zsh"}),
        (["--ver"], {"--version"}),
        (["unknown", "x"], set()),
    ],
)
def test_bash_completes(script: Path, line: list[str], expected: set[str]) -> None:
    """The script offers the possible next words, flags only after a dash, and nothing where bash offers files."""
    command = [str(BASH), "--norc", "-c", COMPLETE, "bash", str(script), "waffle", *line]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected
    assert done.stderr == ""


@pytest.mark.skipif(BASH is None, reason="no bash on this machine")
def test_bash_registers_the_command(script: Path) -> None:
    """Sourcing the script registers the function, with file names as the default completion."""
    done = subprocess.run(
        [str(BASH), "--norc", "-c", 'source "$1"; complete -p waffle', "bash", str(script)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "complete -o default -F _waffle waffle"


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_command_and_method(shell: str) -> None:
    """The scripts for zsh and fish name all commands and methods."""
    words = set(waffle("completion", shell).out.replace("'", " ").split())
    assert {*COMMANDS, *ALGORITHMS, "--rounds"} <= words


def test_another_shell_is_refused() -> None:
    """An unsupported shell is refused in one line."""
    assert "choose one of bash, zsh, fish" in refusal(waffle("completion", "powershell"))
    assert waffle("completion").code == 2
