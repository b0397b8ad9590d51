"""The tables of docs/robustness.md and docs/robustness-tables.md, from the record of experiments/robustness.toml."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean

from paper.cell_tables import setting
from paper.claims import Verdict
from paper.markdown import prose, table
from paper.sections import verdict_table
from waffle_fl.algorithms import TITLES
from waffle_fl.attacks import ADAPTIVE, NONE, name_of
from waffle_fl.claims.file_claims import accuracies
from waffle_fl.claims.record_files import Part
from waffle_fl.results import WEIGHING, FinishedRun, methods_of, rows_of

NAME = "robustness"
COSTLY = 1.5  # points of accuracy
MOMENTS = {0.94: "in round 0.94 R, the last before WAFFLE's Alice trains alone", 1.0: "in the last round"}

Row = tuple[str, int]  # (attack, number of attackers)
Cells = Mapping[tuple[str, str, Row, str, str], Sequence[FinishedRun]]  # split, method, attack, guard, aggregation


def summary(part: Part, claims: Sequence[Verdict]) -> Iterator[str]:
    """Yield the settings, the claims, and how many attacks are costly."""
    runs = part.all_runs
    yield setting(runs)
    yield verdict_table(claims)
    cells = cells_of(runs)
    adapted, others = [], []
    for row in attacks_in(cells):
        if row[0] not in (NONE, "never joined"):
            (adapted if name_of(row[0]) in ADAPTIVE else others).append(row)
    yield f"### Cases in which an attack costs more than {COSTLY} points"
    yield _costs(cells, rows_of(runs), _attacked_methods(runs), others)
    if adapted:
        yield f"### The same for {' and '.join(ADAPTIVE)}, which are adapted to distance rules and to the guard"
        yield _costs(cells, rows_of(runs), _attacked_methods(runs), adapted)


def tables(part: Part, _claims: Sequence[Verdict]) -> Iterator[str]:
    """Yield the tables of accuracies, weights, backdoors and robust rules."""
    runs = part.all_runs
    cells, methods = cells_of(runs), _attacked_methods(runs)
    for split in rows_of(runs):
        yield f"## Accuracy in percent on split {split}, guard off → standard"
        for at, when in MOMENTS.items():
            yield f"### Split {split}, {when}"
            head = ["attack", "attackers", *(TITLES[method] for method in methods)]
            yield table(head, [_row(cells, split, methods, row, at) for row in attacks_in(cells)])
    yield "## Weight of the malicious agents, in percent, guard off → standard"
    yield "Mean of round 0.94 R, the last before WAFFLE's Alice trains alone, and the last round."
    yield _weights(cells, rows_of(runs))
    yield "## Success of the backdoor, in percent of Alice's stamped test samples, guard off → standard"
    yield _backdoors(cells, rows_of(runs), methods)
    yield "## FedAvg with robust aggregation instead of the mean"
    yield "Accuracy in percent in the last round, guard off:"
    yield _rules(cells, rows_of(runs))


def _attacked_methods(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the methods that attacks can affect: all but Local."""
    return [method for method in methods_of(runs) if method != "local"]


def cells_of(runs: Sequence[FinishedRun]) -> Cells:
    """Group runs by table cell."""
    cells: dict[tuple[str, str, Row, str, str], list[FinishedRun]] = {}
    for run in runs:
        s = run.config.settings
        absent = len(s.leave_out)
        row = ("never joined", absent) if absent else (s.attack, s.attackers if s.attack != NONE else 0)
        rule = run.config.options.get("aggregation", "mean")
        cells.setdefault((run.row, run.config.method, row, s.guard, rule), []).append(run)
    return cells


def attacks_in(cells: Cells) -> list[Row]:
    """Return the rows: no attack first, then the federation without the malicious agents, then the file's attacks."""
    found = list(dict.fromkeys(row for _, _, row, _, _ in cells))
    return sorted(found, key=lambda row: (row[0] != NONE, row[0] != "never joined", found.index(row)))


def _costs(cells: Cells, splits: Sequence[str], methods: Sequence[str], attacks: Sequence[Row]) -> str:
    """Return, per method, how many attacks are costly, over all splits and both rounds."""
    lost: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for method in methods:
        by_guard = lost.setdefault(method, {"off": [], "standard": []})
        for split, at, row in ((split, at, row) for split in splits for at in MOMENTS for row in attacks):
            honest = _accuracy(cells.get((split, method, (NONE, 0), "off", "mean"), ()), at)
            for guard, costs in by_guard.items():
                found = _accuracy(cells.get((split, method, row, guard, "mean"), ()), at)
                if honest is not None and found is not None:
                    costs.append((honest - found, f"{split}, {row[0]} x {row[1]}"))
    count = {method: [sum(cost > COSTLY for cost, _ in costs) for costs in lost[method].values()] for method in methods}
    rows = []
    for method in sorted(methods, key=lambda method: count[method]):
        if lost[method]["standard"]:
            cost, case = max(lost[method]["standard"])
            rows.append([TITLES[method], *map(str, count[method]), f"{cost:.1f} ({case})"])
    head = ["", "guard off", "guard standard", "largest cost with the guard, in points"]
    cases = max((len(by_guard["standard"]) for by_guard in lost.values()), default=0)
    names = ", ".join(dict.fromkeys(attack for attack, _ in attacks))
    off, on = (sum(counted[k] for counted in count.values()) for k in (0, 1))
    text = prose(
        f"{off} of {cases * len(methods):,} cases without the guard, {on} with it: {cases} per cell of the table, two",
        f"rounds on each split. Attacks: {names}.",
    )
    return f"{text}\n\n{table(head, rows)}"


def _row(cells: Cells, split: str, methods: Sequence[str], row: Row, at: float) -> list[str]:
    shown = [
        _pair(*(_accuracy(cells.get((split, m, row, guard, "mean"), ()), at) for guard in ("off", "standard")))
        for m in methods
    ]
    return [row[0], str(row[1]), *shown]


def _accuracy(runs: Sequence[FinishedRun], at: float) -> float | None:
    return 100 * mean(accuracies(runs, at)) if runs else None


def _pair(off: float | None, on: float | None) -> str:
    return f"{_text(off)} → {_text(on)}" if on is not None else _text(off)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _mean_of(runs: Sequence[FinishedRun], key: str, last: bool = False) -> float | None:
    """Return the mean of a measure in percent over all rounds, or of the last round."""
    values = [[line[key] for line in run.rounds if line.get(key) is not None] for run in runs]
    means = [mean(found[-1:] if last else found) for found in values if found]
    return 100 * mean(means) if means else None


def _weights(cells: Cells, splits: Sequence[str]) -> str:
    columns = [(split, method) for split in splits for method in WEIGHING]
    rows = [
        [
            row[0],
            str(row[1]),
            *(
                _pair(*(_mean_of(cells.get((*c, row, g, "mean"), ()), "attackers_weight") for g in ("off", "standard")))
                for c in columns
            ),
        ]
        for row in attacks_in(cells)
        if row[0] not in (NONE, "never joined")
    ]
    return table(["attack", "attackers", *(f"{TITLES[method]}, {split}" for split, method in columns)], rows)


def _backdoors(cells: Cells, splits: Sequence[str], methods: Sequence[str]) -> str:
    rows = []
    for split in splits:
        for row in attacks_in(cells):
            found = [
                [
                    _mean_of(cells.get((split, m, row, g, "mean"), ()), "backdoor", last=True)
                    for g in ("off", "standard")
                ]
                for m in methods
            ]
            if any(off is not None for off, _ in found):
                rows.append([split, row[0], str(row[1]), *(_pair(*pair) for pair in found)])
    return table(["split", "attack", "attackers", *(TITLES[method] for method in methods)], rows)


def _rules(cells: Cells, splits: Sequence[str]) -> str:
    rules = list(dict.fromkeys(rule for *_, rule in cells))
    rows = [
        [
            split,
            row[0],
            str(row[1]),
            *(_text(_accuracy(cells.get((split, "fedavg", row, "off", r), ()), 1.0)) for r in rules),
        ]
        for split in splits
        for row in attacks_in(cells)
        if row[0] != "never joined"
    ]
    return table(["split", "attack", "attackers", *rules], rows)
