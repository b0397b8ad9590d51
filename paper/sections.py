"""The sections of docs/results.md, results-convergence.md and results-departures.md, each a function of the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isnan

from paper.cells import Cells, cells, our_runs, printed_cell, printed_text, study_cells, title
from paper.claims import LEVEL, RIVALS, Verdict, agreement_test, percent, verdicts
from paper.convergence import Comparison, compare, mean_change
from paper.markdown import Records, absent, prose, table
from paper.page_text import (
    CONCEPT_SHIFT_REASON,
    CONVERGENCE_TEXT,
    DEPARTURE_NAMES,
    DEPARTURES_TEXT,
    DISTANCE_NAMES,
    DISTANCES_CHOICE,
    DISTANCES_TEXT,
    EROSION_TEXT,
    EXPLANATIONS,
    LOCAL_FROM_TEXT,
    METHOD_REASONS,
    MOMENTUM_TEXT,
    REASONS,
    SIGNIFICANT,
    SWINGS_TEXT,
)
from paper.printed_table import GLOBAL, METHODS, P_D, SPLITS, TITLES
from paper.studies import STUDIES
from waffle_fl.results import PROTOCOLS, WEIGHING, FinishedRun, Protocol, scores

PROTOCOL_NAMES: dict[Protocol, str] = {"best": "best round", "last": "last round", "selected": "selected"}
TITLE = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
WITH_OTHERS, ALONE = (71, 90), (98, 100)  # rounds in which WAFFLE's Alice has partners on CIFAR-10, or none
SWINGING = {"local": (WITH_OTHERS, ALONE), "fedavg": (WITH_OTHERS, ALONE), "waffle-paper": (WITH_OTHERS, ALONE)}


def claims_table(records: Records) -> str:
    """Return the claims about the paper's studies, one row per claim, and what is known about those that fail."""
    rows, notes = [], []
    for study in STUDIES:
        runs = records.runs(study)
        for verdict in verdicts(study, records.parts):
            word = verdict.word if verdict.holds else f"**{verdict.word}**" if runs else "no record yet"
            kind = "main" if verdict.main else ""
            rows.append([TITLE[study], kind, verdict.claim, word, verdict.numbers if runs else ""])
            if runs and not verdict.holds and (study, verdict.claim) in EXPLANATIONS:
                notes.append(f"{TITLE[study]}, {verdict.claim}: {EXPLANATIONS[study, verdict.claim].strip()}")
    made = table(["", "", "claim", "verdict", "numbers"], rows)
    made += f"\n\n{prose(SIGNIFICANT)}"
    if not notes:
        return made
    items = "\n".join(prose(f"- {note}.") for note in notes)
    return f"{made}\n\nWhat is known about the claims that do not hold or are undecided:\n\n{items}"


def verdict_table(claims: Sequence[Verdict]) -> str:
    """Return the claims that an experiment file states, one row per claim."""
    rows = [
        [verdict.claim, verdict.word if verdict.holds else f"**{verdict.word}**", verdict.numbers] for verdict in claims
    ]
    return table(["claim", "verdict", "numbers"], rows)


def departures(records: Records) -> str:
    """Return the tables of departures from the printed rules on MNIST."""
    main = {"ours": "waffle-paper", **{method: method for method in ("scaffold", "apfl", "local", "ditto")}}
    return _variants(records, "mnist-departures", "mnist", main, (DEPARTURES_TEXT,), DEPARTURE_NAMES)


def distances(records: Records) -> str:
    """Return the tables of what WAFFLE's distances compare, on CIFAR-10."""
    texts, main = (DISTANCES_TEXT, DISTANCES_CHOICE), {"directions": "waffle-paper"}
    return _variants(records, "cifar10-departures", "cifar10-reset", main, texts, DISTANCE_NAMES)


def _variants(
    records: Records, name: str, other: str, main: Mapping[str, str], texts: Sequence[str], names: Mapping[str, str]
) -> str:
    """Return one table per protocol, one row per variant; `main` maps rows to methods of the record `other`."""
    groups = {variant.rpartition("/")[2]: runs for variant, runs in records.parts[name].runs.items()}
    groups |= {row: [run for run in records.runs(other) if run.config.method == main[row]] for row in main}
    if not any(groups.values()):
        return absent(records, name)
    made = [text for text in (absent(records, name), *map(prose, texts)) if text]
    for protocol, name in PROTOCOLS.items():
        rows = [
            [text, *(_variant_cell(groups[variant], protocol, split) for split in SPLITS)]
            for variant, text in names.items()
        ]
        made.append(f"Accuracy, {name}:\n\n" + table(["", *SPLITS], rows))
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
    for name in ("mnist", "mnist-6000", "cifar10", "cifar10-reset"):
        for method in WEIGHING:
            runs = [run for run in our_runs(records.parts[name]) if run.config.method == method and run.rounds]
            first = {run.row: run for run in runs if "weights" in run.rounds[0]}
            if first:
                shown = [_local_round(first[split]) if split in first else "–" for split in SPLITS]
                rows.append([f"`{name}`", TITLES[method], *shown])
    return (
        f"{prose(LOCAL_FROM_TEXT)}\n\n{table(['record', 'method', *SPLITS], rows)}"
        if rows
        else absent(records, "mnist")
    )


def swings(records: Records) -> str:
    """Return how much the accuracy changes between rounds on CIFAR-10, before and after Alice is alone."""
    runs = [run for run in our_runs(records.parts["cifar10"]) if len(run.rounds) == run.config.settings.rounds]
    rows = []
    for method in SWINGING:
        for first, last in SWINGING[method]:
            shown = [TITLES[method], f"{first} to {last}"]
            for split in SPLITS:
                some = [run for run in runs if run.config.method == method and run.row == split]
                shown.append(f"{mean_change(some, first, last):.1f}" if some else "–")
            rows.append(shown)
    return f"{prose(SWINGS_TEXT)}\n\n{table(['method', 'rounds', *SPLITS], rows)}"


def _local_round(run: FinishedRun) -> str:
    alone = (line["round"] for line in run.rounds if line["weights"][0] == 1)
    return str(next(alone, "never"))


def convergence(records: Records) -> str:
    """Return the rounds that WAFFLE and its rivals need to a common accuracy, with a paired test."""
    texts = [prose(CONVERGENCE_TEXT)]
    for name in ("mnist", "mnist-6000", "cifar10"):
        runs = our_runs(records.parts[name])
        compared = [(other, compare(runs, "waffle-paper", other)) for other in RIVALS]
        rows = [_comparison(other, c) for other, comparisons in compared for c in comparisons]
        if rows:
            head = ["against", "split", "target", "WAFFLE", "other method", "difference", "pairs", "p"]
            texts.append(f"`results/{name}.jsonl`:\n\n{table(head, rows)}")
            texts.append("\n".join(_summary(other, comparisons[-1]) for other, comparisons in compared if comparisons))
    return "\n\n".join(texts)


def _comparison(other: str, c: Comparison) -> list[str]:
    target = "–" if c.target is None else f"{100 * c.target:.2f}"
    return [
        TITLES[other],
        c.splits,
        target,
        _rounds(c.ours, c.our_reached, c.pairs),
        _rounds(c.theirs, c.their_reached, c.pairs),
        f"{c.ours - c.theirs:+.1f}",
        str(c.pairs),
        f"{c.p_value:.2g}",
    ]


def _rounds(rounds: float, reached: int, pairs: int) -> str:
    return f"{rounds:.1f}" if reached == pairs else f"at least {rounds:.1f}, {reached} of {pairs} reach it"


def _summary(other: str, overall: Comparison) -> str:
    gain, p = overall.theirs - overall.ours, f"(p = {overall.p_value:.2g})"
    if overall.p_value >= LEVEL:
        return f"- WAFFLE and {TITLES[other]} do not differ significantly over all splits {p}."
    speed = "fewer" if gain > 0 else "more"
    return f"- WAFFLE needs {abs(gain):.1f} {speed} rounds than {TITLES[other]} over all splits {p}."


def agreement(records: Records) -> Iterator[str]:
    """Yield, per record, how many cells agree with the paper, and the others by method with a likely reason."""
    for study, name in (("mnist", "mnist"), ("mnist", "mnist-6000"), ("cifar10", "cifar10")):
        found = cells(records.runs(name)) if name == "mnist-6000" else study_cells(study, records.parts)
        if not found:
            continue
        tests = {(split, m): agreement_test(found, study, split, m) for split in SPLITS for m in METHODS}
        tested = {key: p for key, p in tests.items() if not isnan(p)}
        far = [key for key, p in tested.items() if p < LEVEL]
        yield f"### `results/{name}.jsonl`"
        untested = f" {len(tests) - len(tested)} cells have too few seeds for a test." if len(tested) < 30 else ""
        yield prose(
            f"{len(tested) - len(far)} of {len(tested)} tested cells agree with the paper: p is at least {LEVEL}",
            f"in the table above.{untested}",
        )
        if far:
            shifted = any(split.endswith("*") and method in GLOBAL for split, method in far)
            yield prose("The others follow, by method.", REASONS[name], CONCEPT_SHIFT_REASON if shifted else "")
            yield "\n".join(
                _differences(found, study, name, method, far) for method in dict.fromkeys(m for _, m in far)
            )


def _differences(found: Cells, study: str, name: str, method: str, far: Sequence[tuple[str, str]]) -> str:
    """Return the cells of a method that differ from the paper, and the likely reason."""
    gaps = [
        f"{split} {percent(found, split, method) - printed.mean:+.2f}"
        for split, m in far
        if m == method and (printed := printed_cell(study, split, method))
    ]
    return prose(f"- **{title(study, method)}**:", ", ".join(gaps) + ".", METHOD_REASONS.get((name, method), ""))


def method_table(method: str, records: Records) -> str:
    """Return one method's accuracy in every record next to the paper's, or "" if there is none."""
    rows = []
    for data, name in (("mnist", "mnist"), ("mnist", "mnist-6000"), ("cifar10", "cifar10")):
        runs = [run for run in our_runs(records.parts[name]) if run.config.method == method]
        by_protocol = {protocol: scores(runs, protocol) for protocol in PROTOCOLS}
        for split in SPLITS:
            cells = [by_protocol[p].get((split, method)) for p in PROTOCOLS]
            if cells[0]:
                shown = [score.text() if score and not isnan(score.mean) else "–" for score in cells]
                rows.append([f"`{name}`", split, printed_text(data, split, method), *shown])
    return table(["record", "split", "paper", *PROTOCOL_NAMES.values()], rows) if rows else ""
