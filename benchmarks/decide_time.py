"""How long does a decision take? `waffle decide` with its defaults, timed by part.

    python -m benchmarks.decide_time --data FOLDER photographs-750 digit-domains

FOLDER holds one folder per data set, with one folder or file per agent. `photographs-N` are class folders of CIFAR-10
images, N for each of four agents, which are written first. Every decision starts without earlier runs; runs and page
are kept in --runs, if it is given. One line per data set goes to the file --out, beside the earlier lines. The load is
that of the machine before and after; a load before above 0 means that other programs ran. The table of
docs/decision.md is written from --out.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.doc_tables import write_between
from benchmarks.references import write_photographs
from waffle_fl.cli import decide
from waffle_fl.experiment import Runtime, all_alices_of
from waffle_fl.records import read_json

RECORD, PAGE = Path("results/decide-time.jsonl"), Path("docs/decision.md")
PHOTOGRAPHS = "photographs-"
PARTS = {  # functions of cli/decide.py
    "chosen_training": "trials",
    "execute": "trainings",
    "measure_partners": "partners",
    "write_references": "references",
}


def timed(data: Path, out: Path) -> dict[str, Any]:
    """Run `waffle decide` on a folder and return its seconds, in all and by part, and what it decided."""
    seconds = dict.fromkeys(PARTS.values(), 0.0)

    def clocked(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds[part] += time.perf_counter() - began

        return call

    before, began = os.times(), time.perf_counter()
    with patch.multiple(decide, **{name: clocked(getattr(decide, name), part) for name, part in PARTS.items()}):
        decide.decide_command([str(data), "--out", str(out), "--quiet"])
    used = [now - then for now, then in zip(os.times()[:4], before[:4], strict=True)]
    study = decide.read_study(out)
    return {
        "seconds": round(time.perf_counter() - began, 1),
        **{part: round(value, 1) for part, value in seconds.items()},
        "cpu_seconds": round(sum(used), 1),
        "reduced": (read_json(out / decide.REDUCED) or {})["reduced"],
        "recommended": {name: list(one.partners) if one.join else [] for name, one in study.advice.items()}
        if study
        else {},
    }


def line_of(folder: Path, name: str, runs: Path) -> dict[str, Any]:
    """Return one line of the record."""
    data = folder / name
    if name.startswith(PHOTOGRAPHS) and not data.exists():
        write_photographs(data, int(name.removeprefix(PHOTOGRAPHS)))
    federation = all_alices_of(decide.check_run(decide.ALONE, {"data": str(data)}, {}).settings, Runtime())
    rows = [len(part[i]) for part in (federation.train, federation.test) for i in range(federation.agents)]
    load = os.getloadavg()[0]
    line = timed(data, runs / name)
    about = {"data": name, "agents": federation.agents, "samples": sum(rows), "sample": list(federation.shape)}
    return {**about, **line, "load": [round(load, 1), round(os.getloadavg()[0], 1)], "cores": os.cpu_count()}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the page."""
    head = "data | agents | images | pixels | trials | trainings | partner values | references | seconds in all"
    rows = ["| --- " * 9 + "|"]
    for line in lines:
        size = " x ".join(map(str, line["sample"][1:]))
        seconds = " | ".join(f"{line[part]:.0f}" for part in (*PARTS.values(), "seconds"))
        rows.append(f"| {line['data']} | {line['agents']} | {line['samples']:,} | {size} | {seconds} |")
    return "\n".join([f"| {head} |", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decide_time", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="name")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds a folder per name")
    parser.add_argument("--runs", type=Path, help="new folder that keeps the runs and pages")
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.names:
            line = line_of(given.data, name, given.runs or Path(temporary))
            print(json.dumps(line), flush=True)
            known = given.out.read_text(encoding="utf-8").splitlines() if given.out.exists() else []
            kept = [text for text in known if json.loads(text)["data"] != name]
            given.out.write_text("".join(f"{text}\n" for text in [*kept, json.dumps(line)]), encoding="utf-8")
    write_between(PAGE, "decide time", table([json.loads(line) for line in given.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
