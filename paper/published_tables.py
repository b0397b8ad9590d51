"""The tables of docs/published.md: our runs beside the numbers that others published on the same data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev

from paper.claims import Verdict
from paper.markdown import prose, table
from paper.published_numbers import DIGITS, FLAMBY, OFFICE, PFLLIB, TEST_ROWS
from paper.sections import verdict_table
from waffle_fl.algorithms import TITLES
from waffle_fl.claims.record_files import Part
from waffle_fl.results import FinishedRun, methods_of

HEART = (  # FLamby's row, our variant and method
    ("Local", "alone", "local"),
    ("Pooled", "pooled", "local"),
    ("FedAvg", "published", "fedavg"),
    ("FedProx", "published", "fedprox"),
    ("SCAFFOLD", "published", "scaffold"),
)


def variant_of(part: Part, variant: str) -> list[FinishedRun]:
    """Return the runs of a variant of the file, of all Alices."""
    return [run for name, runs in part.runs.items() if name.split("/")[1] == variant for run in runs]


def by_alice(runs: Sequence[FinishedRun], method: str) -> dict[str, list[float]]:
    """Return the accuracies of a method in the last round, in percent, in the order of the seeds."""
    found: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run.config.settings.seed):
        if run.config.method == method and "last" in run.result:
            found.setdefault(run.config.settings.alice, []).append(100 * run.result["last"]["accuracy"])
    return found


def heart(part: Part, claims: Sequence[Verdict]) -> Iterator[str]:
    """Yield the tables of Fed-Heart-Disease."""
    yield verdict_table(claims)
    yield "### The published rows"
    yield prose(
        "Accuracy in percent on each hospital's own test rows after the last round, mean of the seeds 42 to 46: ours,",
        "then FLamby's. The last column counts the 20 pairs of hospital and seed with the same number of correct",
        "predictions.",
    )
    rows = []
    for title, variant, method in HEART:
        ours = by_alice(variant_of(part, variant), method)
        if set(ours) == set(TEST_ROWS):
            rows.append([title, *_beside(ours, title), f"{_identical(ours, title)} of 20"])
    yield table(["", *map(_title, TEST_ROWS), "identical"], rows)
    yield "### Other settings of the same rows"
    same, equal = variant_of(part, "pooled-same"), variant_of(part, "protocol")
    settings = {
        "Pooled, training rows standardised per hospital": by_alice(same, "local"),
        "FedAvg, equal weights": by_alice(equal, "fedavg"),
        "SCAFFOLD, equal weights, clipped": by_alice(equal, "scaffold"),
    }
    yield table(["", *map(_title, TEST_ROWS)], [[name, *_cells(found)] for name, found in settings.items() if found])
    for variant, step in (("protocol", "FLamby's step size, 0.001"), ("faster", "the step size 0.01")):
        runs = variant_of(part, variant)
        yield f"### Every method, 15 rounds of 100 updates, {step}"
        yield _all_methods(runs)


def _identical(ours: Mapping[str, Sequence[float]], title: str) -> int:
    """Count hospitals and seeds with as many correct predictions as published."""
    pairs = zip(TEST_ROWS.items(), FLAMBY[title], strict=True)
    return sum(
        round(accuracy * n / 100) == published
        for (name, n), counts in pairs
        for accuracy, published in zip(ours[name], counts, strict=True)
    )


def _beside(ours: Mapping[str, Sequence[float]], title: str) -> list[str]:
    pairs = zip(TEST_ROWS.items(), FLAMBY[title], strict=True)
    return [f"{mean(ours[name]):.1f}, {100 * mean(counts) / n:.1f}" for (name, n), counts in pairs]


def _cells(found: Mapping[str, Sequence[float]]) -> list[str]:
    return [_shown(values) for values in found.values()]


def _shown(values: Sequence[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def _title(name: str) -> str:
    return "VA" if name == "va" else name.capitalize()


def _all_methods(runs: Sequence[FinishedRun]) -> str:
    """Return one row per method, with the mean over hospitals; the best mean is bold."""
    found = {method: by_alice(runs, method) for method in methods_of(runs)}
    means = {method: mean(map(mean, cells.values())) for method, cells in found.items()}
    best = f"{max(means.values()):.1f}"
    rows = [
        [TITLES[method], *_cells(cells), f"**{best}**" if f"{means[method]:.1f}" == best else f"{means[method]:.1f}"]
        for method, cells in found.items()
    ]
    return table(["", *map(_title, TEST_ROWS), "mean of the hospitals"], rows)


def fashion(part: Part, claims: Sequence[Verdict]) -> Iterator[str]:
    """Yield the table of PFLlib's board."""
    if claims:
        yield verdict_table(claims)
    yield prose(
        "Accuracy in percent over the test samples of all clients; best round, as on the board, and last round, mean",
        "and deviation over the seeds. The last columns are the published number and ours minus it.",
    )
    rows = []
    for variant in ("board", "fedrep", "fedfomo", "pfedme", "long", "alice"):
        runs = variant_of(part, variant)
        for method in methods_of(runs):
            seeds = _curves([run for run in runs if run.config.method == method])
            if seeds:
                rows.append(_board_row(method, variant, seeds))
    yield table(["", "rounds", "best round", "last round", "published", "difference"], rows)


def _curves(runs: Sequence[FinishedRun]) -> list[list[float]]:
    """Return the accuracy over all clients in each round, per seed; runs for one Alice are weighted by test samples.

    A seed counts only if every Alice of the partition has her run.
    """
    seeds: dict[int, list[FinishedRun]] = {}
    for run in runs:
        seeds.setdefault(run.config.settings.seed, []).append(run)
    curves = []
    for group in seeds.values():
        everyone = group[0].config.settings.scored == "all"
        if len(group) == (1 if everyone else len(group[0].provenance["agents"])):
            samples = [run.provenance["test_samples"] for run in group]
            rounds = zip(*([line["accuracy"] for line in run.rounds] for run in group), strict=True)
            curves.append(
                [100 * sum(n * a for n, a in zip(samples, line, strict=True)) / sum(samples) for line in rounds]
            )
    return curves


def _board_row(method: str, variant: str, seeds: Sequence[Sequence[float]]) -> list[str]:
    best, last = [max(curve) for curve in seeds], [curve[-1] for curve in seeds]
    printed = PFLLIB.get(method)
    texts = [f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "") for values in (best, last)]
    shown = [f"{printed[0]:.2f} ± {printed[1]:.2f}", f"{mean(best) - printed[0]:+.2f}"] if printed else ["–", "–"]
    return [TITLES[method], str(len(seeds[0])), *texts, *shown]


def digits(part: Part, claims: Sequence[Verdict]) -> Iterator[str]:
    """Yield the table of the digit domains."""
    yield from _domains(part.all_runs, DIGITS, claims)


def office(part: Part, claims: Sequence[Verdict]) -> Iterator[str]:
    """Yield the tables of Office-Caltech10."""
    yield from _domains(variant_of(part, "published"), OFFICE, claims)
    more = variant_of(part, "all-images")
    if more:
        yield "With every training image instead of 62:"
        yield from _domains(more, {}, ())


def _domains(
    runs: Sequence[FinishedRun], published: Mapping[str, Mapping[str, float]], claims: Sequence[Verdict]
) -> Iterator[str]:
    """Yield the claims, and one row per method with the published number, if there is one, in parentheses."""
    if claims:
        yield verdict_table(claims)
    names = list(dict.fromkeys(run.config.settings.alice for run in runs))
    rows = []
    for method in methods_of(runs):
        found, printed = by_alice(runs, method), published.get(method, {})
        cells = [
            (_shown(found[name]) if name in found else "–") + (f" ({printed[name]:.1f})" if name in printed else "")
            for name in names
        ]
        rows.append([TITLES[method], *cells])
    yield table(["", *names], rows)
