"""Claims in experiment files, `vary` tables, and `waffle bench FILE --check`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paper import robustness_tables
from paper.studies import read_study

from conftest import refusal
from waffle_fl.attacks import ADAPTIVE, name_of
from waffle_fl.claims.file_claims import accuracies, changed, check_claims, matches, read_claims
from waffle_fl.claims.record_files import Part, read_part
from waffle_fl.cli.menu import main
from waffle_fl.config import RunConfig, load_experiments
from waffle_fl.results import FinishedRun, condense

ROOT = Path(__file__).parent.parent
FILE = """
methods = ["fedavg", "waffle-paper"]
splits = ["A"]
seeds = [1, 2]
rounds = 50
samples_per_agent = 20

[variants.honest.vary]
guard = ["off", "standard"]

[variants.attacked.vary]
attack = ["sign-flip(3)", "backdoor"]
attackers = [1, 3]
guard = ["off", "standard"]

[variants.rules.vary]
"fedavg.aggregation" = ["krum(1)", "median"]

[variants.rules]
methods = ["fedavg"]

[[claims]]
claim = "free"
of = { guard = "standard", attack = "none" }
against = { guard = "off" }
within = 0.5
at = [0.94, 1.0]

[[claims]]
claim = "held"
of = { guard = "standard", attack = ["sign-flip(3)", "backdoor"] }
against = { guard = "off", attack = "none", attackers = 1 }
within = 1.5
at = [0.94, 1.0]
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for folder in ("experiments", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "experiments" / "small.toml").write_text(FILE)
    return tmp_path


def finished(config: RunConfig, accuracy: float, late: float | None = None) -> FinishedRun:
    """A run with one accuracy in every round, and optionally another one in the last three rounds."""
    values = [accuracy] * 47 + [accuracy if late is None else late] * 3
    rounds: list[dict[str, Any]] = [{"round": r, "accuracy": value} for r, value in enumerate(values, start=1)]
    if config.settings.attack != "none":
        rounds = [{**line, "attackers_weight": 0.2, "backdoor": 0.9} for line in rounds]
    best = {"round": values.index(max(values)) + 1, "accuracy": max(values)}
    scores = {"best": best, "last": {"round": 50, "accuracy": values[-1]}}
    provenance = {"binding": {"data": config.settings.split, "device": "none"}, "test_samples": 100}
    return FinishedRun(Path(config.label), config, provenance, {"status": "finished", **scores}, rounds)


def recorded(clone: Path, **odd: Any) -> Part:
    """Write a record of the small file with accuracy 0.9; `case` = (filter, accuracies) changes the runs that match."""
    part = read_part(clone, "small")
    runs = []
    for config in part.planned().values():
        condition, accuracies = odd.get("case", ({"method": "no such method"}, ()))
        values = accuracies if matches(config, condition) else (0.9 + 0.001 * config.settings.seed,)
        runs.append(finished(config, *values))
    (clone / "results" / "small.jsonl").write_text("".join(f"{line}\n" for line in condense(runs, "accuracy")))
    return read_part(clone, "small")


def test_vary_makes_one_experiment_per_combination(clone: Path) -> None:
    """[vary] makes one experiment per combination of values; `method.option` sets an option."""
    found = {e.name: e for e in load_experiments(clone / "experiments" / "small.toml")}
    assert len(found) == 2 + 8 + 2
    one = found["small/attacked/sign-flip-3/3/standard"]
    assert (one.settings.attack, one.settings.attackers, one.settings.guard) == ("sign-flip(3)", 3, "standard")
    assert found["small/rules/krum-1"].options == {"fedavg": {"aggregation": "krum(1)"}}


def test_vary_needs_lists(tmp_path: Path) -> None:
    """A single value in [vary] is refused."""
    file = tmp_path / "x.toml"
    file.write_text('methods = ["waffle-paper"]\n[vary]\nguard = "off"\n')
    assert "expected lists" in refusal(load_experiments, file)


def check(clone: Path, *flags: str) -> int:
    return main(["bench", str(clone / "experiments" / "small.toml"), "--check", "--json", *flags])


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_claims_that_hold(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a complete record every claim holds, is printed with its closest case, and the exit code is 0."""
    recorded(clone)
    assert check(clone, "--strict") == 0
    found = printed(capsys)
    assert found["problems"] == []
    assert [claim["holds"] for claim in found["claims"]] == [True, True]
    assert "16 of 16 hold" in found["claims"][1]["numbers"]


@pytest.mark.parametrize(
    ("case", "broken"),
    [
        (({"guard": "standard", "attack": "none", "method": "waffle-paper"}, (0.896,)), "free"),
        (({"guard": "standard", "attack": "backdoor", "attackers": 3}, (0.88,)), "held"),
        (({"guard": "standard", "attack": "sign-flip(3)"}, (0.88, 0.9)), "held"),
        (({"guard": "standard", "attack": "sign-flip(3)"}, (0.9, 0.88)), "held"),
    ],
)
def test_claims_that_fail(clone: Path, capsys: pytest.CaptureFixture[str], case: Any, broken: str) -> None:
    """A cell that misses its bound, at either round, fails its claim and no other; --strict then exits with 1."""
    recorded(clone, case=case)
    assert check(clone) == 0
    assert [claim["claim"] for claim in printed(capsys)["claims"] if not claim["holds"]] == [broken]
    assert check(clone, "--strict") == 1
    assert [claim["claim"] for claim in printed(capsys)["claims"] if not claim["holds"]] == [broken]


def test_strict_needs_check(clone: Path) -> None:
    """--strict without --check is refused in one line before anything trains."""
    assert "only with --check" in refusal(main, ["bench", str(clone / "experiments" / "small.toml"), "--strict"])


def test_no_claim_holds_without_a_record(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a record the check fails and reports what is missing."""
    assert check(clone) == 1
    found = printed(capsys)
    assert "not complete" in found["problems"][0]
    assert not any(claim["holds"] for claim in found["claims"])
    assert "no complete record of 4 of 4 cells" in found["claims"][0]["numbers"]


def test_claims_need_all_methods_and_seeds(clone: Path) -> None:
    """A claim does not hold until every compared method and every seed is in the record."""
    part = recorded(clone)
    claims, name = read_claims(clone / "experiments" / "small.toml"), next(iter(part.runs))
    for removed in (lambda run: run.config.method == "waffle-paper", lambda run: run.config.settings.seed == 1):
        incomplete = replace(part, runs={**part.runs, name: [run for run in part.runs[name] if not removed(run)]})
        assert any("no complete record of" in verdict.numbers for verdict in check_claims(claims, incomplete))
    assert all(verdict.holds for verdict in check_claims(claims, part))


def test_a_claim_on_a_round_without_a_record_is_refused(clone: Path) -> None:
    """A claim on a round that the record does not keep is refused; a diverged run counts as 0."""
    config = next(iter(read_part(clone, "small").planned().values()))
    run = replace(finished(config, 0.9), rounds=[])
    assert "does not keep" in refusal(accuracies, [run], 0.5)
    assert accuracies([replace(run, result={**run.result, "status": "diverged"})], 0.5) == [0.0]


def test_failed_cells_are_counted_and_the_worst_named(clone: Path) -> None:
    """The verdict has the number of cells that hold, and names the cells that fail, the worst first."""
    part = recorded(clone, case=({"guard": "standard", "attack": "backdoor", "method": "fedavg"}, (0.5,)))
    verdict = check_claims(read_claims(clone / "experiments" / "small.toml"), part)[1]
    assert not verdict.holds
    assert verdict.numbers.startswith("12 of 16 hold; A FedAvg backdoor")


def test_a_misspelt_claim_key_is_refused(tmp_path: Path) -> None:
    """An unknown key of a claim is refused with the nearest known key."""
    file = tmp_path / "x.toml"
    file.write_text('[[claims]]\nclaim = "x"\nof = {}\nwihtin = 1\n')
    assert "did you mean within" in refusal(read_claims, file)
    file.write_text('[[claims]]\nclaim = "x"\nof = {}\n')
    assert "either against or published" in refusal(read_claims, file)


def test_changed_replaces_settings_and_options(clone: Path) -> None:
    """`changed` replaces settings and options by name and changes nothing else."""
    config = next(iter(read_part(clone, "small").planned().values()))
    other = changed(config, {"guard": "standard", "aggregation": "median"})
    assert other.settings == replace(config.settings, guard="standard")
    assert other.options["aggregation"] == "median"
    assert changed(config, {}).to_json() == config.to_json()
    assert "did you mean guard" in refusal(changed, config, {"gaurd": "standard"})


def test_impossible_comparisons_are_refused(clone: Path) -> None:
    """A claim that compares a run with itself, or uses a score that the run lacks, is refused."""
    part, (claim, *_) = recorded(clone), read_claims(clone / "experiments" / "small.toml")
    same = replace(claim, against={"guard": "standard"})
    assert "with itself" in refusal(check_claims, [same], part)
    assert "'selected', which A FedAvg guard standard does not have" in refusal(
        check_claims, [replace(claim, at=("selected",))], part
    )


def test_a_diverged_run_has_no_last_accuracy(clone: Path) -> None:
    """A diverged run has accuracy 0 by the last round, and its best accuracy by the best round."""
    config = next(iter(read_part(clone, "small").planned().values()))
    run = finished(config, 0.9)
    run = replace(run, result={**run.result, "status": "diverged"})
    assert accuracies([run], "last") == [0.0]
    assert accuracies([run], "best") == [0.9]


def test_every_experiment_file_is_a_study(clone: Path) -> None:
    """`python -m paper NAME` accepts any file in experiments/ and refuses other names."""
    assert list(read_study(clone, "small")) == ["small"]
    assert "unknown study" in refusal(read_study, clone, "smal")


def test_the_gates_of_the_robustness_file() -> None:
    """The gates are 0.5 points without attack and 1.5 points under each non-adaptive attack, at both rounds."""
    free, held, adapted = read_claims(ROOT / "experiments" / "robustness.toml")
    assert (free.within, held.within, adapted.within) == (0.5, 1.5, 1.5)
    assert tuple(free.at) == tuple(held.at) == tuple(adapted.at) == (0.94, 1.0)
    attacks = {e.settings.attack for e in load_experiments(ROOT / "experiments" / "robustness.toml")}
    assert {name_of(attack) for attack in adapted.of["attack"]} == set(ADAPTIVE)
    assert set(held.of["attack"]) == attacks - {"none", *adapted.of["attack"]}


def test_tables_of_a_record(clone: Path) -> None:
    """The page has every table: accuracies in both rounds, weights, backdoors and rules."""
    part = recorded(clone)
    text = "\n".join(robustness_tables.tables(part, ()))
    assert "| sign-flip(3) | 3 | 90.2 → 90.2 | 90.2 → 90.2 |" in text or "| sign-flip(3) | 3 | 90.1" in text
    assert "krum(1)" in text
    assert "| A | backdoor | 3 | 90.0 → 90.0 | 90.0 → 90.0 |" in text
    assert "20.0 → 20.0" in text


def test_costly_attacks_are_counted(clone: Path) -> None:
    """Cases over 1.5 points below the honest run are counted per method and guard, and the worst one is named."""
    case = {"method": "waffle-paper", "attack": "backdoor", "guard": "standard"}
    part = recorded(clone, case=(case, (0.5,)))
    text = "\n".join(
        robustness_tables.summary(part, check_claims(read_claims(clone / "experiments" / "small.toml"), part))
    )
    assert "0 of 16 cases without the guard, 4 with it: 8 per cell" in " ".join(text.split())
    assert "| FedAvg | 0 | 0 | 0.0 (A, sign-flip(3) x 3) |" in text
    assert "| WAFFLE (paper) | 0 | 4 | 40.1 (A, backdoor x 3) |" in text
