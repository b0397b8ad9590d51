"""Helpers shared by the tests of run folders."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from waffle_fl import cli
from waffle_fl.config import RunConfig, check_run
from waffle_fl.experiment import Listener, Runtime, execute
from waffle_fl.records import Run, read_rounds

TEMPLATE = {
    "server.x": torch.zeros(5),
    "server.past": torch.zeros(2, 3, dtype=torch.float64),
    "agents.y": torch.zeros(3, 5),
}
BINDING = {"binding": {"results_version": "1", "torch": "2", "device": "cpu", "data": "d474"}}
ROUNDS = 6


def config(method: str = "waffle-paper", **settings: Any) -> RunConfig:
    given = {"data": "synthetic", "model": "linear", "rounds": ROUNDS, "samples_per_agent": 20, **settings}
    return check_run(method, given, {})


def state(r: int) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, r) for name, tensor in TEMPLATE.items()}


def line(r: int, **more: Any) -> dict[str, Any]:
    return {"round": r, "accuracy": 0.5, "loss": 1.0, **more}


def recorded(folder: Path, checkpoints: tuple[int, ...], rounds: int) -> Path:
    """Create a run folder with this many logged rounds and these checkpoints."""
    with Run.opened(folder, config(), BINDING) as run:
        for r in range(1, rounds + 1):
            run.append(line(r))
            if r in checkpoints:
                run.checkpoint(r, state(r))
    return folder


def resumed(folder: Path) -> tuple[int, dict[str, Tensor] | None, list[str]]:
    with Run.opened(folder, config(), BINDING) as run:
        return run.resume(TEMPLATE)


def checkpoint(folder: Path, r: int) -> Path:
    return folder / f"checkpoint-{r:08d}.safetensors"


def flipped(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


class Halt(Exception):
    """Raised to end a run before its last round."""


class Watcher(Listener):
    """Record rounds and warnings, and halt the run after a given round."""

    def __init__(self, halt_after: int = 0) -> None:
        self.halt_after = halt_after
        self.warnings: list[str] = []
        self.rounds: list[int] = []

    def advanced(self, config: RunConfig, measured: Mapping[str, Any]) -> None:
        self.rounds.append(measured["round"])
        if measured["round"] == self.halt_after:
            raise Halt

    def warned(self, message: str) -> None:
        self.warnings.append(message)


def finish(folder: Path, chosen: RunConfig, listener: Listener | None = None, **runtime: Any) -> dict[str, Any]:
    (result,) = execute([(chosen, folder)], Runtime(**runtime), listener)
    return result


def halted(folder: Path, chosen: RunConfig, after: int = 3, **runtime: Any) -> Path:
    """Create the folder of a run that was halted before its end."""
    with pytest.raises(Halt):
        finish(folder, chosen, Watcher(after), **runtime)
    return folder


def bits(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the final model and every round without its wall-clock time."""
    lines = [{k: v for k, v in entry.items() if k != "seconds"} for entry in read_rounds(folder / "rounds.jsonl")]
    return (folder / "model.safetensors").read_bytes(), lines


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return bytes and modification time of every file but the lock."""
    files = [path for path in folder.iterdir() if path.name != ".lock"]
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the command line and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["waffle", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)
