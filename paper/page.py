"""docs/results.md, its figures, and the tables on other pages: written from records, never by hand.

`waffle reproduce` writes them, and so does `python -m paper.page`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paper import beyond_tables, figures, robustness_tables
from paper.claims import Verdict
from paper.page_text import CAPTIONS, INTRODUCTION
from paper.sections import (
    Records,
    agreement,
    claims_table,
    convergence,
    data_section,
    departures,
    distances,
    local_from,
    method_table,
    momentum,
    printed_erosion,
    prose,
)
from paper.studies import STUDIES, find_root, read_study
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.claims.file_claims import check_claims, read_claims
from waffle_fl.claims.record_files import Part, read_lines, read_part
from waffle_fl.report.charts import to_svg
from waffle_fl.results import WEIGHING

STATING: dict[str, Callable[[Part, Sequence[Verdict]], Iterator[str]]] = {  # pages of files that state their claims
    beyond_tables.NAME: beyond_tables.sections,
    robustness_tables.NAME: robustness_tables.sections,
}


def read_records(root: Path) -> Records:
    parts = {name: part for study in STUDIES for name, part in read_study(root, study).items()}
    return Records(parts, read_lines(root, "drift"), read_lines(root, "momentum"), read_lines(root, "quadratics"))


def write(root: Path) -> list[Path]:
    """Write every figure and page; return what was written."""
    records = read_records(root)
    folder = root / "docs" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / f"{name}.svg": to_svg(chart()) for name, _, chart in pictures(records)}
    written[root / "docs" / "results.md"] = page(records)
    written |= {root / "docs" / f"{name}.md": with_tables(root, name) for name in STATING}
    shifts = read_part(root, beyond_tables.NAME)
    for method in ALGORITHMS:
        path = root / "docs" / "algorithms" / f"{method}.md"
        written[path] = with_results(path.read_text(encoding="utf-8"), records, shifts)
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    return list(written)


def page(records: Records) -> str:
    """docs/results.md."""
    sections = [
        "# The paper, reproduced",
        prose(INTRODUCTION),
        "## What was claimed, and whether it holds",
        claims_table(records),
        *data_section(records, "mnist", "mnist", "MNIST, 2,500 samples an agent"),
        *data_section(records, "mnist", "mnist-6000", "MNIST, the full split of 6,000 samples an agent"),
        "## What each departure from the printed rule does",
        departures(records),
        *data_section(records, "cifar10", "cifar10", "CIFAR-10 with DLA"),
        "### What WAFFLE compares",
        distances(records),
        "### Weight Erosion with the paper's p_d",
        printed_erosion(records),
        "### Control variates under momentum",
        momentum(records),
        "## When training becomes local",
        local_from(records),
        "## Does WAFFLE converge faster?",
        convergence(records),
        "## Figures",
        *(f"![{name}](figures/{name}.svg)\n\n{caption}" for name, caption, _ in pictures(records)),
        "## What agrees, what does not, and why",
        *agreement(records),
    ]
    return "\n\n".join(sections) + "\n"


def pictures(records: Records) -> list[tuple[str, str, Callable[[], Any]]]:
    """(name, caption, how to draw it) for every figure whose record is there."""
    name = "mnist" if records.runs("mnist") else "mnist-6000"
    main, cifar, sizes = records.runs(name), records.runs("cifar10"), records.parts["mnist-sizes"].runs
    scheduled = [run for run in main if run.config.method == "waffle"]
    weighed = [
        run for run in main if run.config.method in WEIGHING and run.row == "C" and run.config.settings.seed == 1
    ]
    drawn: dict[str, tuple[bool, Callable[[], Any]]] = {
        "drift": (True, lambda: figures.drift(records.drift)),
        "quadratics": (True, lambda: figures.quadratics(records.quadratics)),
        "labels": (bool(main), lambda: figures.labels(main)),
        "omega": (bool(scheduled), lambda: figures.omega(scheduled)),
        "weights": (len(weighed) == len(WEIGHING), lambda: figures.weights(weighed)),
        "accuracy-mnist": (bool(main), lambda: figures.accuracy(main)),
        "accuracy-cifar10": (bool(cifar), lambda: figures.accuracy(cifar)),
        "sizes": (all(sizes.values()), lambda: figures.sizes(sizes)),
    }
    record = f"results/{name}.jsonl"
    return [(key, prose(CAPTIONS[key].format(record=record)), draw) for key, (there, draw) in drawn.items() if there]


def with_tables(root: Path, name: str) -> str:
    """The page of a file that states its claims, what lies between the marks made from its record."""
    part, record = read_part(root, name), f"results/{name}.jsonl"
    missing, planned = len(part.missing()), len(part.planned())
    made = []
    if missing:
        makes = f"`python -m paper {name}` makes them"
        made.append(f"**{missing} of {planned} runs of `{record}` are missing**; {makes}.")
    if part.all_runs:
        made += STATING[name](part, check_claims(read_claims(root / "experiments" / f"{name}.toml"), part))
    text, inner = (root / "docs" / f"{name}.md").read_text(encoding="utf-8"), "\n\n".join(made)
    marks = re.compile(rf"(<!-- record: {name} -->\n).*?(<!-- end of record -->)", re.DOTALL)
    return marks.sub(lambda match: f"{match[1]}{inner}\n{match[2]}", text)


def with_results(text: str, records: Records, shifts: Part) -> str:
    """An algorithm's page, its results between the marks those of the records."""

    def fresh(match: re.Match[str]) -> str:
        tables = [made for made in (method_table(match[2], records), beyond_tables.of_method(shifts, match[2])) if made]
        inner = "\n\n".join(tables) or "No record yet."
        return f"{match[1]}{inner}\n{match[3]}"

    return re.sub(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", fresh, text, flags=re.DOTALL)


if __name__ == "__main__":
    write(find_root(Path.cwd()))
