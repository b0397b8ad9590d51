"""The command `waffle reproduce`: run the paper's studies and compare them with the printed numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from pathlib import Path

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paper.cells import COLUMNS, methods_in, printed_cell, study_cells, title
from paper.claims import percent, verdicts
from paper.page import stale_pages
from paper.page import write as write_pages
from paper.printed_table import SPLITS
from paper.run_missing import run_missing
from paper.studies import find_root, read_study
from waffle_fl.claims.record_files import Part, problems
from waffle_fl.claims.verdict import Verdict
from waffle_fl.cli.console import console_for
from waffle_fl.cli.display import score_text, show_verdicts
from waffle_fl.cli.flags import parse
from waffle_fl.cli.progress import ProgressFlags, live
from waffle_fl.experiment import Runtime


def reproduce(arguments: Sequence[str]) -> int:
    """Train the missing runs of a study, write its pages, and check its claims."""

    @dataclass(frozen=True)
    class Reproduce:
        """Train the missing runs of a study of the paper, then write docs/results.md and its figures."""

        study: tyro.conf.Positional[str]
        """mnist or cifar10."""
        check: bool = False
        """Train nothing. Exit with 1 unless the committed records are complete and every page says what they say."""
        strict: bool = False
        """With --check: also exit with 1 unless every main claim holds."""
        cell: str = ""
        """Run only this experiment, split or cell, such as mnist/C/waffle."""
        seeds: tuple[int, ...] = ()
        """Use these seeds instead of those in the experiment files."""
        rerun: bool = False
        """Also train runs that the records already hold, and replace them in the records."""
        runs: Path = Path("runs")
        """Folder of the runs and their checkpoints."""
        runtime: Runtime = field(default_factory=Runtime)
        output: ProgressFlags = field(default_factory=ProgressFlags)

    args = parse(Reproduce, arguments, "reproduce")
    root = find_root(Path.cwd())
    if not args.check:
        with live(args.output) as listener:
            selection = (args.cell, args.seeds, args.rerun)
            run_missing(root, args.study, args.runs, args.runtime, listener, *selection)
        write_pages(root)
    parts = read_study(root, args.study)
    claims = verdicts(args.study, parts)
    wrong = [*problems(parts), *(stale_pages(root) if args.check else [])]
    if args.output.json:
        print(json.dumps({"problems": wrong, "claims": [dataclasses.asdict(verdict) for verdict in claims]}))
    else:
        show_study(args.study, parts, args.cell, wrong, claims, console_for())
    failed = args.strict and not all(verdict.holds for verdict in claims if verdict.main)
    return 1 if args.check and (wrong or failed) else 0


def show_study(
    study: str,
    parts: Mapping[str, Part],
    cell: str,
    wrong: Sequence[str],
    claims: Sequence[Verdict],
    console: Console,
) -> None:
    """Print each cell of a study next to the paper's number, then the problems of its records, then each claim."""
    table = Table(title=f"\n{study}: accuracy in percent", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found = {column: study_cells(study, parts, column) for column in COLUMNS}
    shown = [column for column, cells in found.items() if any(score.seeds for score in cells.values())]
    for name in ("split", "method", "paper", *(COLUMNS[column] for column in shown), "best - paper"):
        table.add_column(name, justify="left" if name in ("split", "method") else "right", no_wrap=True)
    for split, method in ((split, method) for split in SPLITS for method in methods_in(found["best"])):
        if f"{study}/{split}/{method}/".startswith(f"{cell}/") or not cell:
            printed = printed_cell(study, split, method)
            gap = percent(found["best"], split, method) - printed.mean if printed else nan
            texts = [score_text(found[column].get((split, method)), False, 2) for column in shown]
            table.add_row(
                escape(split),
                title(study, method),
                f"{printed.mean:.2f}" if printed else "–",
                *texts,
                "–" if isnan(gap) else f"{gap:+.2f}",
            )
    if table.row_count:
        console.print(table)
    show_verdicts(wrong, claims, console)
