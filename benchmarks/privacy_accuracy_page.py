"""The tables and the figure of docs/privacy-accuracy.md: python -m benchmarks.privacy_accuracy_page

They are made from results/privacy-accuracy.jsonl, and only from data sets that are complete in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import altair as alt
from paper.figures import styled
from paper.markdown import table

from benchmarks.doc_tables import write_between
from waffle_fl.algorithms import TITLES
from waffle_fl.report.charts import inline, to_svg
from waffle_fl.tournament.record import read_lines

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "results" / "privacy-accuracy.jsonl"
PAGE, FIGURE = ROOT / "docs" / "privacy-accuracy.md", ROOT / "docs" / "figures" / "privacy-accuracy.svg"
METHODS = ("local", "fedavg", "waffle-paper", "mr-mtl")
COLOURS = ("#8c8c8c", "#4c78a8", "#d1495b", "#3a7d44")  # of the methods
NAMES = {"heart-disease": "Heart Disease", "har": "HAR", "mnist": "MNIST B"}
WITHOUT = "none"  # the epsilon of runs without noise

Line = dict[str, Any]


def results_of(record: Sequence[Line]) -> list[Line]:
    """Return the lines with results."""
    return [line for line in record if line["kind"] == "result"]


def epsilons_of(record: Sequence[Line], data: str) -> list[float | None]:
    """Return the epsilons of a data set, the smallest first and training without noise last."""
    found = {line["epsilon"] for line in results_of(record) if line["data"] == data}
    return sorted(found, key=lambda epsilon: epsilon or float("inf"))


def shown(epsilon: float | None) -> str:
    return WITHOUT if epsilon is None else f"{epsilon:g}"


def accuracy_table(record: Sequence[Line]) -> str:
    """Return mean and standard deviation over the seeds in percent; the best mean of a row is bold."""
    rows = []
    for data, name in NAMES.items():
        for epsilon in epsilons_of(record, data):
            lines = {m: _only(record, data, epsilon, m) for m in METHODS}
            best = max(fmean(line["accuracies"]) for line in lines.values())
            cells = []
            for line in lines.values():
                text = f"{fmean(line['accuracies']):.1f} ± {stdev(line['accuracies']):.1f}"
                cells.append(f"**{text}**" if fmean(line["accuracies"]) == best else text)
            rows.append([name, shown(epsilon), *cells])
    return table(["data", "epsilon", *(TITLES[m] for m in METHODS)], rows)


def choices_table(record: Sequence[Line]) -> str:
    """Return what was chosen on validation rows."""
    rows = []
    for data, name in NAMES.items():
        for epsilon in epsilons_of(record, data):
            chosen = [_only(record, data, epsilon, m)["options"] for m in METHODS]
            texts = [", ".join(f"{key} {value}" for key, value in options.items()) for options in chosen]
            rows.append([name, shown(epsilon), *(text.replace("_", " ") for text in texts)])
    return table(["data", "epsilon", *(TITLES[m] for m in METHODS)], rows)


def _only(record: Sequence[Line], data: str, epsilon: float | None, method: str) -> Line:
    about = {"data": data, "epsilon": epsilon, "method": method}
    (line,) = (line for line in results_of(record) if about.items() <= line.items())
    return line


def figure(record: Sequence[Line]) -> Any:
    """Draw accuracy against epsilon, one panel per data set; bars are one standard deviation of the seeds."""
    panels = []
    for data, name in NAMES.items():
        order = [shown(epsilon) for epsilon in epsilons_of(record, data)]
        values = list(_points(record, data))
        titles = [TITLES[m] for m in METHODS]
        base = alt.Chart(inline(values), width=230, height=230, title=name).encode(
            x=alt.X(
                "epsilon:N", sort=order, title="epsilon", axis=alt.Axis(labelAngle=0), scale=alt.Scale(padding=0.5)
            ),
            color=alt.Color("method:N", title=None, sort=titles, scale=alt.Scale(domain=titles, range=[*COLOURS])),
            xOffset=alt.XOffset("method:N", sort=titles, scale=alt.Scale(range=[2, 20])),
        )
        y = alt.Y("mean:Q", title="accuracy in percent" if not panels else None, scale=alt.Scale(zero=False))
        bars = base.mark_rule(strokeWidth=1).encode(y=alt.Y("low:Q", scale=alt.Scale(zero=False)), y2="high:Q")
        lines = base.mark_line(point=True, strokeWidth=2).encode(y=y)
        panels.append(bars + lines)
    return styled(alt.hconcat(*panels))


def _points(record: Sequence[Line], data: str) -> Iterator[dict[str, Any]]:
    for epsilon in epsilons_of(record, data):
        for method in METHODS:
            found = _only(record, data, epsilon, method)["accuracies"]
            mean, spread = fmean(found), stdev(found)
            about = {"method": TITLES[method], "epsilon": shown(epsilon)}
            yield {**about, "mean": mean, "low": mean - spread, "high": mean + spread}


def main() -> None:
    """Write the tables and the figure."""
    record = read_lines(RECORD)
    write_between(PAGE, "accuracy", accuracy_table(record))
    write_between(PAGE, "choices", choices_table(record))
    FIGURE.write_text(to_svg(figure(record)), encoding="utf-8")


if __name__ == "__main__":
    main()
