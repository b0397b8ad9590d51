"""The demonstration: a server and four sites as processes on one machine, compared with the simulation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waffle_fl.config import RunConfig, check_run
from waffle_fl.data.files import data_dir
from waffle_fl.deploy.local_cluster import prepare
from waffle_fl.errors import WaffleError, writable
from waffle_fl.experiment import Runtime, execute
from waffle_fl.records import read_rounds
from waffle_fl.user_data.folder_reader import agents_in

ROUNDS = 5
MARK = "demonstration.txt"
HEART = "heart-disease"


def set_up(folder: Path) -> tuple[RunConfig, tuple[str, ...]]:
    """Return (the run, its sites): four hospitals if the heart-disease data is present, else four shares of digits."""
    with writable(folder):
        if folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
            raise WaffleError(f"{folder} is not empty and not an earlier demonstration: choose another --out")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MARK).write_text("made by waffle deploy demo, which deletes this folder when it is run again\n")
    heart = data_dir() / HEART
    common: dict[str, Any] = {"rounds": ROUNDS, "precision": "float64", "guard": "standard", "batch_size": 16}
    common |= {"min_category": 5}
    if heart.is_dir():
        names = tuple(agents_in(heart))
        given = {"data": str(heart), "alice": "va", "lr": 0.02, "weight_decay": 1e-3}
        prepare(folder / "federation", names, str(heart))
    else:
        names = ("east", "north", "south", "west")
        given = {"data": "digits", "split": "C", "agents": 4}
        prepare(folder / "federation", names, "digits")
    return check_run("waffle", {**common, **given}, {}), names


def compare(config: RunConfig, deployed: Path, simulated: Path) -> None:
    """Simulate the same config; raise if any bit of the results differs."""
    execute([(config, simulated)], Runtime(device="cpu"))
    for name, read in PARTS.items():
        if read(deployed) != read(simulated):
            raise WaffleError(f"the {name} of the deployment in {deployed} differs from that of {simulated}")


def seconds_of(folder: Path) -> list[float]:
    """Seconds of each round of a run."""
    return [float(line["seconds"]) for line in read_rounds(folder / "rounds.jsonl")]


def _rounds(folder: Path) -> list[dict[str, Any]]:
    lines = read_rounds(folder / "rounds.jsonl")
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


PARTS: dict[str, Callable[[Path], Any]] = {
    "model": lambda folder: (folder / "model.safetensors").read_bytes(),
    "record": _rounds,
}
