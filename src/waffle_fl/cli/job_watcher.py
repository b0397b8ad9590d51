"""Watch a job of a deployment: follow its log and its records round by round until it ends."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from waffle_fl.cli.console import console_for
from waffle_fl.cli.display import show_all_agents, show_result
from waffle_fl.cli.progress import ProgressFlags, live
from waffle_fl.config import RunConfig
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Listener
from waffle_fl.records import read_json, read_rounds
from waffle_fl.results import mean_weights

LOOK = 0.5  # seconds between two polls of a running job
SILENCE = 20.0  # seconds without news after which Flower is asked for the run's status


def watch_until_interrupted(folder: Path, job: Any, output: ProgressFlags) -> int:
    """Watch a job until it ends, or until Ctrl-C, which stops watching but not the job."""
    try:
        return watch(folder, job, output)
    except KeyboardInterrupt:
        print(f"waffle: stopped watching; the job continues on the server and writes to {job.out}", file=sys.stderr)
        return 130


def watch(folder: Path, job: Any, output: ProgressFlags) -> int:
    """Submit a job unless it is already running, and follow its log and its records until it ends."""
    from waffle_fl.deploy.control_client import ControlClient

    client = ControlClient(folder)
    watched = job.is_running
    position = job.journal.last if watched else job.journal.end  # include the last line: it may already report the end
    number = None if watched else client.submit(job.name)
    if number:
        job.submitted_as(number)
    with live(output) as listener:
        _follow(client, number, job, position, listener)
    runs = runs_in(job.out)
    for _, run_folder in runs:
        result = read_json(run_folder / "result.json") or {}
        if result.get("status") == "diverged":
            raise WaffleError(result["message"])
    if output.json:
        print(json.dumps([{"run": str(f), **(read_json(f / "result.json") or {})} for _, f in runs]))
        return 0
    console = console_for()
    if len(runs) > 1:
        show_all_agents([(c.settings.alice, read_json(f / "result.json") or {}) for c, f in runs], console)
    for config, run_folder in runs if len(runs) == 1 else []:
        show_result(config, read_json(run_folder / "result.json") or {}, mean_weights(run_folder), console)
    console.print(f"run folder: {job.out}", highlight=False, markup=False, soft_wrap=True)
    return 0


def runs_in(out: Path) -> list[tuple[RunConfig, Path]]:
    """The runs of a job: its folder, or one subfolder per Alice."""
    folders = [out] if (out / "config.json").exists() else sorted(p.parent for p in out.glob("*/config.json"))
    return [(RunConfig.from_json(read_json(folder / "config.json")), folder) for folder in folders]


def _follow(client: Any, number: str | None, job: Any, position: int, listener: Listener) -> None:
    """Report every round and note to the listener until the job ends."""
    from waffle_fl.deploy.control_client import FINISHED, UNKNOWN

    reported: dict[Path, int] = {}
    received, status = time.monotonic(), ""
    while True:
        lines, position = job.journal.since(position)
        for config, folder in runs_in(job.out):
            if folder not in reported:
                listener.planned([(config, folder)], 0)
                ended = (folder / "result.json").exists()  # rounds of an ended run are not reported again
                reported[folder] = len(read_rounds(folder / "rounds.jsonl")) if ended else 0
            for measured in read_rounds(folder / "rounds.jsonl")[reported[folder] :]:
                listener.advanced(config, measured)
                reported[folder], received = reported[folder] + 1, time.monotonic()
        for line in lines:
            received = time.monotonic()
            if line.get("note"):
                listener.warned(str(line["note"]))
            if line.get("error"):
                raise WaffleError(str(line["error"]))
            if line.get("done"):
                return
        if not lines and time.monotonic() - received > SILENCE:
            before, status = status, client.status(number) if number else FINISHED
            received = time.monotonic()
            if status == UNKNOWN != before:
                listener.warned("the server does not answer: start it again, then run waffle deploy resume")
            ended = status.startswith(FINISHED) and not job.is_running
            if ended and not job.journal.since(position)[0]:
                raise WaffleError(
                    f"the ServerApp ended without a result ({status}): continue with waffle deploy resume"
                )
        time.sleep(LOOK)
