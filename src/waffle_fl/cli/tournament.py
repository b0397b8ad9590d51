"""`waffle bench` on a tournament file: run what is missing, or check the committed records."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from waffle_fl.cli.console import console_for
from waffle_fl.cli.display import show_verdicts
from waffle_fl.experiment import Runtime
from waffle_fl.tournament.checking import complete_scores, problems, read_claims, read_records, verdicts
from waffle_fl.tournament.plan import Tournament, load_tournament
from waffle_fl.tournament.running import jobs_of, run
from waffle_fl.tournament.standings import MethodStanding, standings

COLUMNS = ("method", "gap", "largest", "near best", "worst tenth", "above Local", "mean rank")


def run_tournament(file: Path, out: Path, runtime: Runtime, as_json: bool) -> int:
    """Train what the records in a folder lack, and print the standings."""
    tournament = load_tournament(file)
    console = console_for()
    if not as_json:
        console.print(f"records in {out}")
    failed = run(
        file, out, runtime, jobs_of(tournament), 1, partial(console.print, highlight=False) if not as_json else _silent
    )
    found = standings(complete_scores(tournament, read_records(tournament, out)))
    if as_json:
        print(json.dumps({"standings": [standing._asdict() for standing in found]}))
    else:
        show_standings(tournament, found, console)
    return 1 if failed else 0


def check_tournament(file: Path, as_json: bool, strict: bool) -> int:
    """Exit with 1 unless the committed records are complete and made with the trials that the tuning chose.

    If `strict`, the claims of the file also have to hold.
    """
    tournament, folder = load_tournament(file), file.parent.parent / "results"
    records = read_records(tournament, folder)
    wrong = problems(tournament, records)
    scores = complete_scores(tournament, records)
    claims = verdicts(read_claims(file, tournament.methods), scores)
    if as_json:
        print(json.dumps({"problems": wrong, "claims": [dataclasses.asdict(verdict) for verdict in claims]}))
    else:
        console = console_for()
        show_standings(tournament, standings(scores), console)
        show_verdicts(wrong, claims, console)
    return 1 if wrong or (strict and not all(claim.holds for claim in claims)) else 0


def show_standings(tournament: Tournament, found: list[MethodStanding], console: Console) -> None:
    """Print the methods, the one with the smallest mean gap to the best method first."""
    table = Table(title="\nPoints behind the best method", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for s in found:
        near, gains = f"{s.near} of {s.columns}", f"{100 * s.gains:.0f} %"
        table.add_row(
            tournament.title(s.method),
            f"{s.gap:.2f}",
            f"{s.largest:.2f}",
            near,
            f"{s.worst:.2f}",
            gains,
            f"{s.rank:.1f}",
        )
    if found:
        console.print(table)


def _silent(_: str) -> None:
    pass
