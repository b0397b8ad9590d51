"""Make the records of a study on a machine that has only torch and numpy: python -m paper STUDY --minutes 9"""

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
    """Prints one line per run."""

    def ended(self, config: RunConfig, result: Mapping[str, Any]) -> None:
        best = result.get("best", {}).get("accuracy")
        print(config.label, result["status"], f"{100 * best:.2f}" if best is not None else "-", flush=True)

    def warned(self, message: str) -> None:
        print(f"note: {message}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m paper", description=__doc__)
    parser.add_argument("study", help=f"{', '.join(STUDIES)}, or the name of another file in experiments/")
    parser.add_argument("--cell", default="", help="run only this experiment, split or cell, such as mnist/C/waffle")
    parser.add_argument("--methods", nargs="*", default=(), help="run only these methods")
    parser.add_argument("--seeds", type=int, nargs="*", default=(), help="seeds instead of those in the files")
    parser.add_argument("--rerun", action="store_true", help="also train runs that the records hold, and replace them")
    parser.add_argument("--anew", dest="rerun", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many minutes; run again to continue")
    parser.add_argument("--on", choices=("local", "ray"), default="local", help="train here or on a Ray cluster")
    parser.add_argument("--address", default="", help="with --on ray: address of the cluster")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs and their checkpoints")
    parser.add_argument("--stack", type=int, default=Runtime.stack, help="maximum number of runs trained together")
    parser.add_argument(
        "--checkpoint-seconds", type=float, default=Runtime.checkpoint_seconds, help="seconds between checkpoints"
    )
    parser.add_argument("--workers", type=int, default=Runtime.workers, help="threads or processes; 0: one per core")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--allow-unverified", action="store_true")
    given = vars(parser.parse_args())
    if "--anew" in sys.argv:
        print("note: --anew is now --rerun", file=sys.stderr)
    names = ("study", "cell", "seeds", "runs", "rerun", "methods")
    study, cell, seeds, runs, rerun, methods = (given.pop(key) for key in names)
    try:
        root = find_root(Path.cwd())
        run_missing(root, study, runs, Runtime(**given), Lines(), cell, seeds, rerun, methods)
    except WaffleError as error:
        print(f"waffle: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        print("stopped; every run is saved: run the same command again to continue", file=sys.stderr)
    for problem in problems(read_study(root, study)):
        print(problem, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
