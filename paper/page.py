"""Write the generated pages in docs/ and their figures from the records in results/.

`waffle reproduce` and `python -m paper.page` both call `write`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paper import figures, published_tables, robustness_tables, tournament_page
from paper.cell_tables import cifar_section, full_section, mnist_section, summary_table
from paper.cells import our_runs
from paper.claims import Verdict
from paper.markdown import Records, prose
from paper.overview import overview
from paper.page_text import (
    CAPTIONS,
    COLUMNS_TEXT,
    CONVERGENCE_INTRODUCTION,
    DEPARTURES_INTRODUCTION,
    HISTORY,
    INTRODUCTION,
)
from paper.sections import (
    agreement,
    claims_table,
    convergence,
    departures,
    distances,
    local_from,
    method_table,
    momentum,
    printed_erosion,
    swings,
)
from paper.studies import STUDIES, find_root, read_study
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.claims.file_claims import check_claims, read_claims
from waffle_fl.claims.record_files import Part, read_lines, read_part
from waffle_fl.report.charts import to_svg

Sections = Callable[[Part, Sequence[Verdict]], Iterator[str]]
WEIGHED = ("weight-erosion", "waffle-paper")  # methods in the figure of weights
RECORD_SECTIONS: tuple[tuple[str, str, Sections], ...] = (  # page in docs/, record, and the text between its markers
    ("robustness", robustness_tables.NAME, robustness_tables.summary),
    ("robustness-tables", robustness_tables.NAME, robustness_tables.tables),
    ("published", "flamby-heart", published_tables.heart),
    ("published", "pfllib", published_tables.fashion),
    ("published", "fedbn-digits", published_tables.digits),
    ("published", "fedbn-office", published_tables.office),
)
FIGURES = {  # page in docs/ -> its figures, the first one at its top
    "results": ("accuracy-mnist", "accuracy-cifar10", "labels", "sizes", "drift"),
    "results-convergence": ("weights", "omega"),
    "results-departures": ("quadratics",),
}


def read_records(root: Path) -> Records:
    """Read the records of the paper's studies, and the computed ones."""
    parts = {name: part for study in STUDIES for name, part in read_study(root, study).items()}
    return Records(parts, read_lines(root, "drift"), read_lines(root, "momentum"), read_lines(root, "quadratics"))


def write(root: Path) -> list[Path]:
    """Write every figure and page; return their paths."""
    written = contents(root)
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(written)


def stale_pages(root: Path) -> list[str]:
    """Return one line per figure or page that is not what the records give."""
    return [
        f"{path.relative_to(root)} is not what the records give: run python -m paper.page"
        for path, text in contents(root).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def contents(root: Path) -> dict[Path, str]:
    """Return every figure and page as the records give it."""
    records, folder = read_records(root), root / "docs" / "figures"
    made = {folder / f"{name}.svg": to_svg(chart()) for name, _, chart in pictures(records)}
    if records.runs("mnist") and records.runs("mnist-permutations"):
        made[folder / "overview.svg"] = to_svg(overview(records.parts))
    made[root / "docs" / "results.md"] = results_page(records)
    made[root / "docs" / "results-convergence.md"] = convergence_page(records)
    made[root / "docs" / "results-departures.md"] = departures_page(records)
    made[root / "README.md"] = with_summary((root / "README.md").read_text(encoding="utf-8"), records)
    read = {record: with_verdicts(root, record) for record in {record for _, record, _ in RECORD_SECTIONS}}
    for name, record, sections in RECORD_SECTIONS:
        path = root / "docs" / f"{name}.md"
        text = made.get(path) or path.read_text(encoding="utf-8")
        made[path] = with_tables(text, *read[record], sections)
    tournaments = {name: tournament_page.read_standings(root, name) for name in tournament_page.PAGES}
    for method in ALGORITHMS:
        path = root / "docs" / "algorithms" / f"{method}.md"
        made[path] = with_results(path.read_text(encoding="utf-8"), records, tournaments["tournament"])
    for found in tournaments.values():
        made |= tournament_page.contents(root, found)
    return made


def results_page(records: Records) -> str:
    """Return docs/results.md: our numbers next to the paper's."""
    first, *others = FIGURES["results"]
    sections = [
        "# The paper, reproduced",
        *figure(records, first),
        prose(INTRODUCTION),
        prose(COLUMNS_TEXT),
        "## Claims",
        claims_table(records),
        "## What was changed after seeing results",
        HISTORY.strip(),
        *mnist_section(records),
        *full_section(records),
        *cifar_section(records),
        "## Figures",
        *(text for name in others for text in figure(records, name)),
        "## Agreement with the paper, and reasons for differences",
        *agreement(records),
    ]
    return "\n\n".join(sections) + "\n"


def convergence_page(records: Records) -> str:
    """Return docs/results-convergence.md: how fast the methods converge, and when training becomes local."""
    first, *others = FIGURES["results-convergence"]
    sections = [
        "# How fast the methods converge",
        *figure(records, first),
        prose(CONVERGENCE_INTRODUCTION),
        "## Does WAFFLE converge faster?",
        convergence(records),
        "## When training becomes local",
        local_from(records),
        "## Why the last rounds swing",
        swings(records),
        *(text for name in others for text in figure(records, name)),
    ]
    return "\n\n".join(sections) + "\n"


def departures_page(records: Records) -> str:
    """Return docs/results-departures.md: what each departure from the printed rules changes."""
    sections = [
        "# Departures from the printed rules",
        *(text for name in FIGURES["results-departures"] for text in figure(records, name)),
        prose(DEPARTURES_INTRODUCTION),
        "## Each departure, on MNIST",
        departures(records),
        "## What WAFFLE compares",
        distances(records),
        "## Weight Erosion with the paper's p_d",
        printed_erosion(records),
        "## Control variates under momentum",
        momentum(records),
    ]
    return "\n\n".join(sections) + "\n"


def with_summary(text: str, records: Records) -> str:
    """Return the README with the table between its markers made from the records."""
    made = f"\\1{summary_table(records)}\n\\2".replace("\\*", "\\\\*")
    return re.sub(r"(<!-- summary -->\n).*?(<!-- end of summary -->)", made, text, flags=re.DOTALL)


def figure(records: Records, name: str) -> Iterator[str]:
    """Yield a figure and its caption, or nothing if its record is missing."""
    for key, caption, _ in pictures(records):
        if key == name:
            yield f"![{name}](figures/{name}.svg)"
            yield caption


def pictures(records: Records) -> list[tuple[str, str, Callable[[], Any]]]:
    """Return (name, caption, function that draws it) for every figure whose record exists."""
    name = "mnist" if records.runs("mnist") else "mnist-6000"
    main, cifar, sizes = records.runs(name), our_runs(records.parts["cifar10"]), records.parts["mnist-sizes"].runs
    scheduled = [run for run in main if run.config.method == "waffle-paper"]
    weighed = [run for run in main if run.config.method in WEIGHED and run.row == "C" and run.config.settings.seed == 1]
    drawn: dict[str, tuple[bool, Callable[[], Any]]] = {
        "drift": (True, lambda: figures.drift(records.drift)),
        "quadratics": (True, lambda: figures.quadratics(records.quadratics)),
        "labels": (bool(main), lambda: figures.labels(main)),
        "omega": (bool(scheduled), lambda: figures.omega(scheduled)),
        "weights": (len(weighed) == len(WEIGHED), lambda: figures.weights(weighed)),
        "accuracy-mnist": (bool(main), lambda: figures.accuracy(main)),
        "accuracy-cifar10": (bool(cifar), lambda: figures.accuracy(cifar)),
        "sizes": (all(sizes.values()), lambda: figures.sizes(sizes)),
    }
    record = f"results/{name}.jsonl"
    return [(key, prose(CAPTIONS[key].format(record=record)), draw) for key, (there, draw) in drawn.items() if there]


def with_verdicts(root: Path, record: str) -> tuple[Part, list[Verdict]]:
    """Return a record and the verdicts on the claims of its file."""
    part = read_part(root, record)
    claims = read_claims(root / "experiments" / f"{record}.toml") if part.all_runs else []
    return part, check_claims(claims, part)


def with_tables(text: str, part: Part, verdicts: Sequence[Verdict], sections: Sections) -> str:
    """Return a page with the text between a record's markers made from the record."""
    record = part.name
    missing, planned = len(part.missing()), len(part.planned())
    made = []
    if missing:
        command = f"`python -m paper {record}` makes them"
        made.append(f"**{missing} of {planned} runs of `experiments/{record}.toml` have no record**; {command}.")
    if part.all_runs:
        made += sections(part, verdicts)
    inner = "\n\n".join(made)
    marker = re.compile(rf"(<!-- record: {record} -->\n).*?(<!-- end of record -->)", re.DOTALL)
    return marker.sub(lambda match: f"{match[1]}{inner}\n{match[2]}", text)


def with_results(text: str, records: Records, tournament: tournament_page.Standings) -> str:
    """Return an algorithm's page with the text between its markers made from the records."""

    def tables_of(match: re.Match[str]) -> str:
        tables = method_table(match[2], records), tournament_page.of_method(tournament, match[2])
        inner = "\n\n".join(filter(None, tables)) or "No record yet."
        return f"{match[1]}{inner}\n{match[3]}"

    return re.sub(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", tables_of, text, flags=re.DOTALL)


if __name__ == "__main__":
    write(find_root(Path.cwd()))
