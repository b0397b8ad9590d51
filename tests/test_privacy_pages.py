"""The pages on attacks and on accuracy against epsilon, and the parts of the attacks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.doc_tables import write_between
from benchmarks.privacy_accuracy_page import METHODS, NAMES, accuracy_table, choices_table, figure
from benchmarks.privacy_attacks import (
    MODES,
    attack_table,
    auc,
    classified,
    federation,
    likelihood_ratios,
    privacy_of,
    recovered,
    trap,
    views,
)

from waffle_fl import FlatModel
from waffle_fl.models import mlp
from waffle_fl.report.charts import to_svg

ROOT = Path(__file__).resolve().parents[1]


def record(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "results" / name).read_text().splitlines()]


def test_the_attack_table_matches_its_record() -> None:
    """The table of docs/privacy-attacks.md is that of its record, which has every attack in every mode."""
    lines = record("privacy-attacks.jsonl")
    assert Counter(line["mode"] for line in lines) == dict.fromkeys(MODES, 5)
    assert attack_table(lines) in (ROOT / "docs" / "privacy-attacks.md").read_text()


def test_the_accuracy_tables_match_their_record() -> None:
    """Tables and figure are those of the record, in which every method has equally many trials and a result."""
    lines, page = record("privacy-accuracy.jsonl"), (ROOT / "docs" / "privacy-accuracy.md").read_text()
    assert accuracy_table(lines) in page
    assert choices_table(lines) in page
    assert to_svg(figure(lines)) == (ROOT / "docs" / "figures" / "privacy-accuracy.svg").read_text()
    keys = Counter((line["kind"], line["data"], line["epsilon"], line["method"]) for line in lines)
    for data in NAMES:
        epsilons = {line["epsilon"] for line in lines if line["data"] == data}
        assert {keys["result", data, e, m] for e in epsilons for m in METHODS} == {1}
        assert len({keys["trial", data, e, m] for e in epsilons for m in METHODS}) == 1
    for line in lines:
        same = [
            other
            for other in lines
            if other["kind"] == "trial" and all(other[key] == line[key] for key in ("data", "epsilon", "method"))
        ]
        if line["kind"] == "result":
            assert line["options"] == max(same, key=lambda trial: float(trial["score"]))["options"]


def test_the_prose_on_accuracy_quotes_the_record() -> None:
    """The counts and losses in the text of docs/privacy-accuracy.md are those of the record."""
    page = " ".join((ROOT / "docs" / "privacy-accuracy.md").read_text().split())
    found = {
        (line["data"], line["epsilon"], line["method"]): fmean(line["accuracies"])
        for line in record("privacy-accuracy.jsonl")
        if line["kind"] == "result"
    }
    rows = sorted({key[:2] for key in found}, key=str)
    noised = [row for row in rows if row[1] is not None]

    def leads(method: str, among: list[tuple[str, float | None]]) -> int:
        return sum(found[*row, "waffle-paper"] > found[*row, method] for row in among)

    assert f"in {leads('mr-mtl', noised)} of the {len(noised)} rows with noise" in page
    assert f"in {leads('mr-mtl', rows)} of all {len(rows)}" in page
    lost = {row: found[row[0], None, "waffle-paper"] - found[*row, "waffle-paper"] for row in noised}
    weak, middle, strong = ([lost[row] for row in noised if a < row[1] <= b] for a, b in ((3, 10), (0.5, 3), (0, 0.5)))
    assert f"at most {max(weak):.1f} points at epsilon 8 or 10, at most {max(middle):.1f} at epsilon 1 to 3" in page
    assert (round(min(strong)) >= 15, round(max(strong))) == (True, 36)
    behind = {row: found[*row, "local"] - found[*row, "waffle-paper"] for row in noised}
    assert f"below Local in {sum(gap > 0 for gap in behind.values())} of the {len(noised)}" in page
    assert f"at epsilon 0.5, by {max(behind.values()):.1f} points" in page


def test_a_table_is_written_between_its_comments(tmp_path: Path) -> None:
    """Only what is between the comments changes; a page without them is an error."""
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- end of x -->\nb\n")
    write_between(page, "x", r"new \1")
    assert page.read_text() == "a\n<!-- x -->\nnew \\1\n<!-- end of x -->\nb\n"
    with pytest.raises(SystemExit, match="expected <!-- y --> once"):
        write_between(page, "y", "new")


def test_rows_are_read_from_an_update() -> None:
    """Chosen weights reveal nearly all rows of a table in the clear, most in a masked sum, and none with noise."""
    rng = np.random.default_rng(1)
    data = {
        f"site {i}": (torch.from_numpy(rng.standard_normal((12, 5))).float(), torch.from_numpy(rng.integers(0, 2, 12)))
        for i in range(4)
    }
    whole = federation(data, data["site 0"])
    model = FlatModel(lambda: mlp((5,), 2, hidden=512))
    start = trap(model, torch.cat([x for x, _ in data.values()]))
    found = {}
    for mode in ("clear", "masked", "dp 8"):
        (((seen,),)) = views([whole], model, mode, start, rounds=1, batch_size=64, lr=1.0)
        updates = [view.after - view.before for view in seen]
        found[mode] = sum(recovered(model, start, dy, x) for dy, (x, _) in zip(updates, data.values(), strict=True))
    assert found["clear"] > 40
    assert 20 < found["masked"] <= found["clear"]
    assert found["dp 8"] == 0


def test_attacks_recognise_what_differs() -> None:
    """Likelihood ratios and the classifier separate shifted cases, and guess where nothing differs."""
    rng = np.random.default_rng(1)
    members = rng.integers(0, 2, (40, 30)).astype(bool)
    for shift, least, most in ((0.0, 0.42, 0.58), (3.0, 0.95, 1.0)):
        features = rng.standard_normal((40, 2, 30))
        features[:, 0] += shift * members
        assert least < auc(likelihood_ratios(features, members).flatten(), members.flatten()) <= most
        truth = np.arange(40) % 2
        updates = rng.standard_normal((40, 10))
        updates[:, 3] += shift * truth
        scores = classified(updates[:20], truth[:20], updates[20:])
        assert (auc(scores, truth[20:] == 1) > 0.9) == bool(shift)


def test_modes_are_options_of_a_simulation() -> None:
    """The number of a mode is its epsilon."""
    assert privacy_of("clear") == {"privacy": "off"}
    assert privacy_of("masked+dp 8") == {"privacy": "masked+dp", "epsilon": 8.0, "delta": 1e-4}
