"""The demonstrations: a server and four sites as processes on one machine, compared with the simulation."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waffle_fl.config import RunConfig, check_run
from waffle_fl.data.files import data_dir
from waffle_fl.deploy.jobs import Job
from waffle_fl.deploy.local_cluster import prepare
from waffle_fl.deploy.site_store import Ledger
from waffle_fl.engines.mixed_outputs import MEMORY_NAMES
from waffle_fl.errors import WaffleError, writable
from waffle_fl.experiment import Runtime, execute
from waffle_fl.records import read_rounds
from waffle_fl.tensorfile import read_named, read_shapes
from waffle_fl.user_data.folder_reader import agents_in

ROUNDS = 5
MARK = "demonstration.txt"
HEART = "heart-disease"
SHARES = ("east", "north", "south", "west")
MODES = {"clear": "off", "masked": "masked"}


def set_up(folder: Path) -> tuple[dict[str, RunConfig], tuple[str, ...]]:
    """Return (the run, its sites): four hospitals if the heart-disease data is present, else four shares of digits."""
    _clear(folder)
    heart = data_dir() / HEART
    common: dict[str, Any] = {"rounds": ROUNDS, "precision": "float64", "guard": "standard", "batch_size": 16}
    common |= {"min_category": 5}
    if heart.is_dir():
        names = tuple(agents_in(heart))
        given = {"data": str(heart), "alice": "va", "lr": 0.02, "weight_decay": 1e-3}
        prepare(folder / "federation", names, str(heart))
    else:
        names = SHARES
        given = {"data": "digits", "split": "C", "agents": 4}
        prepare(folder / "federation", names, "digits")
    return {"deployed": check_run("waffle", {**common, **given}, {})}, names


def set_up_masked(folder: Path) -> tuple[dict[str, RunConfig], tuple[str, ...]]:
    """Return (a run in the clear and the same with masks, their sites), with a network of 4,810 parameters."""
    _clear(folder)
    prepare(folder / "federation", SHARES, "digits")
    common = {"data": "digits", "split": "C", "agents": 4, "model": "mlp", "rounds": ROUNDS, "guard": "off"}
    return {name: check_run("waffle", {**common, "privacy": p}, {}) for name, p in MODES.items()}, SHARES


def masked_beside_clear(folder: Path, names: tuple[str, ...]) -> str:
    """Return the line that compares the two runs of `set_up_masked`."""
    rounds = {name: read_rounds(folder / name / "rounds.jsonl") for name in MODES}
    pairs = zip(*([line["weights"] for line in lines] for lines in rounds.values()), strict=True)
    largest = max(sum(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairs)
    clear, masked = (100 * lines[-1]["accuracy"] for lines in rounds.values())
    sent = {name: _bytes_sent(folder, name, names) / len(names) / ROUNDS / 1000 for name in MODES}
    ratio = sent["masked"] / sent["clear"]
    return (
        f"masked beside clear: weights differ by at most {largest:.4f} (L1), accuracy {masked:.1f} and {clear:.1f} %, "
        f"{sent['masked']:.1f} and {sent['clear']:.1f} KB per site and round (ratio {ratio:.2f})"
    )


def _bytes_sent(folder: Path, name: str, names: tuple[str, ...]) -> int:
    """Return the bytes of all updates, or of all masked messages, that have left the sites in a run."""
    run = Job.open(folder / "federation", name).run
    ledgers = (Ledger(folder / "federation" / "sites" / site / "ledger.jsonl").lines() for site in names)
    return sum(
        line["update"]["bytes"] for lines in ledgers for line in lines if line.get("run") == run and "update" in line
    )


def _clear(folder: Path) -> None:
    """Make the folder of a demonstration, and delete an earlier one."""
    with writable(folder):
        if folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
            raise WaffleError(f"{folder} is not empty and not an earlier demonstration: choose another --out")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MARK).write_text("made by waffle deploy demo, which deletes this folder when it is run again\n")


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


def models_in(folder: Path) -> dict[str, Any]:
    """Return the tensors of a run's models, without training samples: these never leave Alice's site."""
    path = folder / "model.safetensors"
    tensors = read_named(path, tuple(read_shapes(path)))
    return {name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in tensors.items() if name not in MEMORY_NAMES}


PARTS: dict[str, Callable[[Path], Any]] = {
    "model": models_in,
    "record": _rounds,
}
