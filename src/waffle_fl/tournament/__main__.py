"""Run a tournament on a machine that has only torch and numpy: python -m waffle_fl.tournament FILE --minutes 9"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from waffle_fl.errors import WaffleError
from waffle_fl.experiment import Runtime
from waffle_fl.tournament.plan import load_tournament
from waffle_fl.tournament.running import jobs_of, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m waffle_fl.tournament", description=__doc__)
    parser.add_argument("file", type=Path, help="tournament file (.toml)")
    parser.add_argument("--data", nargs="*", default=(), help="only these data sets of the file")
    parser.add_argument("--methods", nargs="*", default=(), help="only these methods")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the records")
    parser.add_argument("--processes", type=int, default=1, help="trials and columns that train at the same time")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many minutes; run again to continue")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--allow-unverified", action="store_true")
    given = parser.parse_args()
    runtime = Runtime(
        device=given.device,
        data_dir=given.data_dir,
        allow_unverified=given.allow_unverified,
        minutes=given.minutes,
    )
    try:
        jobs = jobs_of(load_tournament(given.file), given.data, given.methods)
        failed = run(given.file, given.out, runtime, jobs, given.processes, partial(print, flush=True))
    except WaffleError as error:
        print(f"waffle: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
