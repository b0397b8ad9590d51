"""The sections of docs/results.md and docs/results-departures.md, each a function of the records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from textwrap import fill
from typing import Any

from paper.claims import EXPLANATIONS, Verdict, percent, verdicts, waffle_above
from paper.convergence import Comparison, compare
from paper.page_text import (
    CONCEPT_SHIFT_REASON,
    CONVERGENCE_TEXT,
    DEPARTURE_NAMES,
    DEPARTURES_TEXT,
    DISTANCE_NAMES,
    DISTANCES_CHOICE,
    DISTANCES_TEXT,
    EROSION_TEXT,
    LOCAL_FROM_TEXT,
    METHOD_REASONS,
    MOMENTUM_TEXT,
    NOTHING_SELECTED,
    REASONS,
    one_line,
)
from paper.printed_table import GLOBAL, P_D, SPLITS, TABLE
from paper.studies import STUDIES
from waffle_fl.algorithms import TITLES
from waffle_fl.claims.record_files import Part
from waffle_fl.report.tables import protocols_of
from waffle_fl.results import PROTOCOLS, WEIGHING, FinishedRun, Protocol, Score, best_of, methods_of, scores

PROTOCOL_NAMES: dict[Protocol, str] = {"best": "best round", "last": "last round", "selected": "selected"}
TITLE = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
FAR = {"mnist": 0.5, "cifar10": 2.0}  # points; larger differences are explained if they exceed two deviations too
EXCEPTION = re.compile(r"; (?:named|exception): ")  # separates the reasons of exceptions in a verdict's numbers


@dataclass(frozen=True)
class Records:
    """The records that the pages are made from."""

    parts: Mapping[str, Part]
    drift: Sequence[Mapping[str, Any]]
    momentum: Sequence[Mapping[str, Any]]
    quadratics: Sequence[Mapping[str, Any]]

    def runs(self, name: str) -> list[FinishedRun]:
        return self.parts[name].all_runs


def prose(*texts: str) -> str:
    """Return the texts as one wrapped paragraph."""
    return fill(one_line(*texts), 120, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])


def claims_table(records: Records) -> str:
    """Return the claims about the paper's studies, one row per claim."""
    rows, notes = [], []
    for study in STUDIES:
        runs = records.runs(study)
        for verdict in verdicts(study, runs):
            word = verdict.word if verdict.holds else f"**{verdict.word}**" if runs else "no record yet"
            kind = "main" if verdict.main else ""
            rows.append([TITLE[study], kind, verdict.claim, word, verdict.numbers if runs else ""])
            if runs and not verdict.holds and (study, verdict.claim) in EXPLANATIONS:
                notes.append(f"{TITLE[study]}, {verdict.claim}: {EXPLANATIONS[study, verdict.claim]}")
    if records.runs("cifar10-departures"):
        rows.append(_as_printed(records))
    made = table(["", "", "claim", "verdict", "numbers"], rows)
    if not notes:
        return made
    items = "\n".join(prose(f"- {note}.") for note in notes)
    return f"{made}\n\nWhat is known about the claims that do not hold:\n\n{items}"


def _as_printed(records: Records) -> list[str]:
    """Return the row of the claim that fails on CIFAR-10 with the printed distances."""
    printed = records.parts["cifar10-departures"].runs["cifar10-departures/updates"]
    others = [run for run in records.runs("cifar10") if run.config.method != "waffle"]
    verdict = waffle_above(scores([*others, *printed], "best"))
    word = verdict.word if verdict.holds else f"**{verdict.word}**"
    return [TITLE["cifar10"], "", f"{verdict.claim}, with the printed distances", word, verdict.numbers]


def verdict_table(claims: Sequence[Verdict]) -> str:
    """Return the claims that an experiment file states, one row per claim."""
    rows, notes = [], []
    for verdict in claims:
        numbers, *reasons = EXCEPTION.split(verdict.numbers)
        rows.append([verdict.claim, "yes" if verdict.holds else "**no**", numbers])
        notes += reasons
    return with_reasons(table(["claim", "holds", "numbers"], rows), notes)


def with_reasons(made: str, reasons: Sequence[str]) -> str:
    """Return a table of claims with the reasons of its exceptions listed below it."""
    if not reasons:
        return made
    items = "\n".join(prose(f"- {reason[:1].upper()}{reason[1:]}.") for reason in reasons)
    return f"{made}\n\nExceptions that the claims allow, and the reason for each:\n\n{items}"


def absent(records: Records, name: str) -> str:
    """Return a sentence on the missing runs of a record, or "" if it is complete."""
    part = records.parts[name]
    missing, planned = len(part.missing()), len(part.planned())
    study = next(study for study, names in STUDIES.items() if name in names)
    command = f"`python -m paper {study} --cell {name}` makes them"
    return f"**{missing} of {planned} runs of `results/{name}.jsonl` are missing**; {command}." if missing else ""


def data_section(records: Records, data: str, name: str, title: str) -> Iterator[str]:
    """Yield the section of a record: its settings and its table, each cell next to the paper's."""
    yield f"## {title}"
    if absent(records, name):
        yield absent(records, name)
    runs = records.runs(name)
    if not runs:
        return
    yield setting(runs)
    yield cell_table(runs, data)
    if "selected" not in protocols_of(runs):
        yield NOTHING_SELECTED


def setting(runs: Sequence[FinishedRun]) -> str:
    first = runs[0]
    s, seeds = first.config.settings, sorted({run.config.settings.seed for run in runs})
    device = ", ".join(sorted({str(run.provenance.get("binding", {}).get("device")) for run in runs}))
    parts = [
        f"{s.rounds} rounds, batch {s.batch_size}, lr {s.lr}, {s.precision} on {device}",
        f"seeds {', '.join(map(str, seeds))}",
        f"{first.provenance.get('test_samples')} test samples on {first.row}",
    ]
    notes = {run.provenance["data_note"] for run in runs if run.provenance.get("data_note")}
    return "; ".join([*parts, *sorted(notes)]) + "."


def cell_table(runs: Sequence[FinishedRun], data: str) -> str:
    """Return one row per cell: the paper, the protocols and the difference. The best method per split is bold."""
    by_protocol = {protocol: scores(runs, protocol) for protocol in protocols_of(runs)}
    rows = []
    for split in SPLITS:
        for method in methods_of(runs):
            printed = TABLE[data].get((split, method))
            found = percent(by_protocol["best"], split, method)
            gap = f"{found - printed.mean:+.2f}" if printed and not isnan(found) else "–"
            cells = [_cell(cells, split, method) for cells in by_protocol.values()]
            rows.append([split, TITLES[method], _printed(data, split, method), cells[0], gap, *cells[1:]])
    names = [PROTOCOL_NAMES[protocol] for protocol in by_protocol]
    return table(["split", "method", "paper", names[0], "difference", *names[1:]], rows)


def _cell(cells: Mapping[tuple[str, str], Score], split: str, method: str) -> str:
    score = cells.get((split, method))
    if score is None or (isnan(score.mean) and not score.diverged):
        return "–"
    text = score.text()
    return f"**{text}**" if method in best_of(dict(cells), split) else text


def _printed(data: str, split: str, method: str) -> str:
    printed = TABLE[data].get((split, method))
    if printed is None:
        return "–"
    return f"{printed.mean:.2f}" + (f" ± {printed.std:.2f}" if printed.std is not None else "")


def departures(records: Records) -> str:
    """Return the tables of departures from the printed rules on MNIST."""
    main = {"ours": "waffle", "scaffold": "scaffold", "apfl": "apfl"}
    return _variants(records, "mnist-departures", "mnist", main, (DEPARTURES_TEXT,), DEPARTURE_NAMES)


def distances(records: Records) -> str:
    """Return the tables of what WAFFLE's distances compare, on CIFAR-10."""
    texts, main = (DISTANCES_TEXT, DISTANCES_CHOICE), {"directions": "waffle"}
    return _variants(records, "cifar10-departures", "cifar10", main, texts, DISTANCE_NAMES)


def _variants(
    records: Records, name: str, other: str, main: Mapping[str, str], texts: Sequence[str], names: Mapping[str, str]
) -> str:
    """Return one table per protocol, one row per variant; `main` maps rows to methods of the record `other`."""
    groups = {variant.rpartition("/")[2]: runs for variant, runs in records.parts[name].runs.items()}
    groups |= {row: [run for run in records.runs(other) if run.config.method == main[row]] for row in main}
    if not any(groups.values()):
        return absent(records, name)
    made = [text for text in (absent(records, name), *map(prose, texts)) if text]
    for protocol, title in PROTOCOLS.items():
        rows = [
            [text, *(_variant_cell(groups[variant], protocol, split) for split in SPLITS)]
            for variant, text in names.items()
        ]
        made.append(f"Accuracy, {title}:\n\n" + table(["", *SPLITS], rows))
    return "\n\n".join(made)


def _variant_cell(runs: Sequence[FinishedRun], protocol: Protocol, split: str) -> str:
    score = next((score for (row, _), score in scores(runs, protocol).items() if row == split), None)
    if score is None:
        return "–"
    diverged = f", {score.diverged} of {score.seeds} diverged" if score.diverged else ""
    return score.text().replace(" (diverged)", "") + diverged


def printed_erosion(records: Records) -> str:
    runs = records.runs("cifar10-printed")
    if not runs:
        return absent(records, "cifar10-printed")
    rows = [
        [run.row, str(P_D["cifar10"][run.row]), *(f"{1 - line['weights'][0]:.3f}" for line in run.rounds[:3])]
        for run in sorted(runs, key=lambda run: SPLITS.index(run.row))
    ]
    head = ["split", "p_d", "others' weight in round 1", "round 2", "round 3"]
    return f"{prose(EROSION_TEXT)}\n\n{table(head, rows)}"


def momentum(records: Records) -> str:
    """Return the distance from the optimum after some rounds, one row per form of control variates."""
    shown = (1, 2, 5, 10, 20)
    rows = [[line["form"], *(f"{line['distances'][r - 1]:.2g}" for r in shown)] for line in records.momentum]
    return f"{prose(MOMENTUM_TEXT)}\n\n{table(['correction', *(f'round {r}' for r in shown)], rows)}"


def local_from(records: Records) -> str:
    """Return the first round in which Alice holds all the weight, in the first seed of each cell."""
    rows = []
    for name in ("mnist", "mnist-6000", "cifar10"):
        for method in WEIGHING:
            runs = [run for run in records.runs(name) if run.config.method == method and run.rounds]
            first = {run.row: run for run in runs if "weights" in run.rounds[0]}
            if first:
                shown = [_local_round(first[split]) if split in first else "–" for split in SPLITS]
                rows.append([f"`{name}`", TITLES[method], *shown])
    return (
        f"{prose(LOCAL_FROM_TEXT)}\n\n{table(['record', 'method', *SPLITS], rows)}"
        if rows
        else absent(records, "mnist")
    )


def _local_round(run: FinishedRun) -> str:
    alone = (line["round"] for line in run.rounds if line["weights"][0] == 1)
    return str(next(alone, "never"))


def convergence(records: Records) -> str:
    """Return the rounds that WAFFLE and its rivals need, with a paired test: the paper's headline claim."""
    texts = [prose(CONVERGENCE_TEXT)]
    for name in ("mnist", "mnist-6000", "cifar10"):
        runs = records.runs(name)
        compared = [(other, compare(runs, "waffle", other)) for other in ("weight-erosion", "apfl")] if runs else []
        rows = [
            [TITLES[other], c.splits, f"{c.ours:.1f}", f"{c.theirs:.1f}", f"{c.ours - c.theirs:+.1f}", str(c.pairs),
             f"{c.p_value:.2g}"]
            for other, comparisons in compared
            for c in comparisons
        ]  # fmt: skip
        if rows:
            head = ["against", "split", "WAFFLE", "other method", "difference", "pairs", "p"]
            texts.append(f"`results/{name}.jsonl`:\n\n{table(head, rows)}")
            texts.append("\n".join(_summary(other, comparisons[-1]) for other, comparisons in compared if comparisons))
    return "\n\n".join(texts)


def _summary(other: str, overall: Comparison) -> str:
    gain, p = overall.theirs - overall.ours, f"(p = {overall.p_value:.2g})"
    if overall.p_value >= 0.05:
        return f"- WAFFLE and {TITLES[other]} do not differ significantly over all splits {p}."
    speed = "faster" if gain > 0 else "slower"
    return f"- WAFFLE is {speed} than {TITLES[other]} by {abs(gain):.1f} rounds over all splits {p}."


def agreement(records: Records) -> Iterator[str]:
    """Yield, per record, how many cells agree with the paper, and the others by method with a likely reason."""
    for study, name in (("mnist", "mnist"), ("mnist", "mnist-6000"), ("cifar10", "cifar10")):
        cells = scores(records.runs(name), "best")
        gaps = {key: percent(cells, *key) - printed.mean for key, printed in TABLE[study].items() if key in cells}
        if not gaps:
            continue
        far = {
            key: gap
            for key, gap in gaps.items()
            if not abs(gap) <= max(FAR[study], 200 * (cells[key].std or 0.0), 2 * (TABLE[study][key].std or 0.0))
        }
        yield f"### `results/{name}.jsonl`"
        yield prose(
            f"{len(gaps) - len(far)} of {len(gaps)} cells agree with the paper: they lie within {FAR[study]} points",
            "of it, or within two standard deviations of either.",
        )
        if far:
            shifted = any(split.endswith("*") and method in GLOBAL for split, method in far)
            yield prose("The others follow, by method.", REASONS[name], CONCEPT_SHIFT_REASON if shifted else "")
            yield "\n".join(
                prose(
                    f"- **{TITLES[method]}**:",
                    ", ".join(f"{split} {gap:+.2f}" for (split, m), gap in far.items() if m == method) + ".",
                    METHOD_REASONS.get((name, method), ""),
                )
                for method in dict.fromkeys(method for _, method in far)
            )


def method_table(method: str, records: Records) -> str:
    """Return one method's accuracy in every record next to the paper's, or "" if there is none."""
    rows = []
    for data, name in (("mnist", "mnist"), ("mnist", "mnist-6000"), ("cifar10", "cifar10")):
        runs = [run for run in records.runs(name) if run.config.method == method]
        by_protocol = {protocol: scores(runs, protocol) for protocol in PROTOCOLS}
        for split in SPLITS:
            cells = [by_protocol[p].get((split, method)) for p in PROTOCOLS]
            if cells[0]:
                shown = [score.text() if score and not isnan(score.mean) else "–" for score in cells]
                rows.append([f"`{name}`", split, _printed(data, split, method), *shown])
    return table(["record", "split", "paper", *PROTOCOL_NAMES.values()], rows) if rows else ""
