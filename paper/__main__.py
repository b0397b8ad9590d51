"""Make a study's records on a machine with torch and numpy alone: python -m paper STUDY --minutes 9"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paper.run_missing import run_missing
from paper.studies import STUDIES, find_root, read_study
from waffle_fl.claims.record_files import problems
from waffle_fl.config import RunConfig
from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Interrupted, Listener, Runtime


class Lines(Listener):
    """One line a run."""

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        best = result.get("best", {}).get("accuracy")
        print(config.label, result["status"], f"{100 * best:.2f}" if best is not None else "-", flush=True)

    def warned(self, message: str) -> None:
        print(f"note: {message}", file=sys.stderr, flush=True)


def _share(text: str) -> tuple[int, int]:
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise WaffleError(f"expected --share K/N with K from 1 to N, such as 2/4, got {text!r}")
    return int(k), int(n)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m paper", description=__doc__)
    parser.add_argument("study", help=f"{', '.join(STUDIES)}, or the name of another file in experiments/")
    parser.add_argument("--cell", default="", help="only this experiment, split or cell, such as mnist/C/waffle")
    parser.add_argument("--methods", nargs="*", default=(), help="only these, by their names")
    parser.add_argument("--seeds", type=int, nargs="*", default=(), help="these seeds in place of the files'")
    parser.add_argument("--anew", action="store_true", help="run also what the records hold, and replace it there")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many minutes; the same call goes on")
    parser.add_argument("--share", default="1/1", help="2/4 is the second of four processes at work on the same study")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs and their checkpoints")
    parser.add_argument("--stack", type=int, default=Runtime.stack, help="runs that train together at most")
    parser.add_argument("--checkpoint-seconds", type=float, default=Runtime.checkpoint_seconds, help="between saves")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--allow-unverified", action="store_true")
    given = vars(parser.parse_args())
    names = ("study", "cell", "seeds", "runs", "anew", "share", "methods")
    study, cell, seeds, runs, anew, share, methods = (given.pop(key) for key in names)
    try:
        root = find_root(Path.cwd())
        run_missing(root, study, runs, Runtime(**given), Lines(), cell, seeds, anew, _share(share), methods)
    except WaffleError as error:
        print(f"waffle: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("stopped; every run is saved, and the same command goes on from here", file=sys.stderr)
    for problem in problems(read_study(root, study)):
        print(problem, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
