"""Differential privacy at real sites: the simulator's arithmetic, secret noise, and a budget that survives restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

from flower_harness import Grid, bits, federation, run_job, run_simulation, small_config
from waffle_fl.config import RunConfig
from waffle_fl.deploy import privacy_budget
from waffle_fl.deploy.policy import Refused
from waffle_fl.deploy.privacy_budget import PrivacyBudget
from waffle_fl.deploy.settings_files import change
from waffle_fl.deploy.site import Site
from waffle_fl.engines.flower.messages import Message
from waffle_fl.errors import WaffleError
from waffle_fl.inference.model_card import card
from waffle_fl.inference.trained_run import open_run
from waffle_fl.privacy.accounting import Release, epsilon_of
from waffle_fl.privacy.secret_draws import SecretDraws
from waffle_fl.randomness import noise, normal
from waffle_fl.records import read_json

DP: dict[str, Any] = {"guard": "off", "privacy": "dp", "epsilon": 20.0, "delta": 1e-3, "noise_multipliers": (1.0,)}
ROUND = Release(1 / 3, 1.0, 3)  # what a site with 40 rows releases per round


def config(rounds: int = 3, **settings: Any) -> RunConfig:
    return small_config(rounds, **{**DP, **settings})


def lines(folder: Path, site: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sites" / site / "ledger.jsonl").read_text().splitlines()]


def releases(folder: Path, site: str) -> list[dict[str, Any]]:
    return [line["released"] for line in lines(folder, site) if "released" in line]


def test_sites_compute_what_the_simulator_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the simulator's random numbers in place of secret ones a deployment has its bits, else not."""
    reference = bits(run_simulation(config(), tmp_path / "reference"))
    secret = federation(tmp_path / "secret", ("a", "b", "c"))
    run_job(secret, config(), tmp_path / "other")
    assert bits(tmp_path / "other")[0] != reference[0]
    monkeypatch.setattr(privacy_budget, "SecretDraws", lambda secret, question: noise)
    folder = federation(tmp_path / "fed", ("a", "b", "c"))
    run_job(folder, config(), tmp_path / "run")
    assert bits(tmp_path / "run")[:2] == reference[:2]
    assert read_json(tmp_path / "run" / "provenance.json")["privacy"]["steps"] == [9, 9, 9]
    spent = [line["spent"] for line in releases(folder, "b")]
    assert spent == [round(epsilon_of([ROUND] * k, 1e-3), 4) for k in (1, 2, 3)]


def test_noise_is_secret_and_bound_to_the_question(tmp_path: Path) -> None:
    """A repeated request gets the same bits and is charged once; another question, or another secret, other noise."""
    folder = federation(tmp_path / "fed", ("a", "b", "c"))
    grid = Grid(folder)
    run_job(folder, config(1), tmp_path / "run", grid)
    name, request = next((n, m) for n, m in grid.requests if n == "b" and m.payloads)
    site = Site(folder / "sites" / name)

    def again(fields: dict[str, Any]) -> Message:
        with site.ledger.alone():
            return site.respond(Message({**request.fields, **fields}, request.payloads), "repeated")

    first, second = again({}), again({})
    assert first.payloads == second.payloads
    assert len({line["key"] for line in releases(folder, "b")}) == 1
    assert {line["spent"] for line in releases(folder, "b")} == {round(epsilon_of([ROUND], 1e-3), 4)}
    tasks = [{**request.fields["tasks"][0], "attempt": 1}]
    assert again({"tasks": tasks}).payloads != first.payloads
    (folder / "sites" / "b" / privacy_budget.SECRET).unlink()
    assert again({}).payloads != first.payloads
    assert releases(folder, "b")[-1]["spent"] == round(epsilon_of([ROUND] * 3, 1e-3), 4)


def test_a_site_whose_budget_is_spent_drops_out(tmp_path: Path) -> None:
    """Its last rounds are dropouts, the run goes on without it, and nothing of it leaves any more."""
    folder, budget = federation(tmp_path / "fed", ("a", "b", "c")), epsilon_of([ROUND] * 2, 1e-3) + 0.01
    change(folder / "sites" / "b" / "site.toml", epsilon=budget, delta=1e-3)
    run_job(folder, config(4), tmp_path / "run")
    _, rounds, result = bits(tmp_path / "run")
    assert result["status"] == "finished"
    assert ["agent 1" in line.get("screened", {}) for line in rounds] == [False, False, True, True]
    assert "the privacy budget of this site is spent" in rounds[2]["refused"][0][1]
    assert len(releases(folder, "b")) == 2
    assert len(releases(folder, "c")) == 4
    run_job(folder, config(1, seed=2), tmp_path / "next")  # another run has no budget either
    assert "agent 1" in bits(tmp_path / "next")[1][0]["screened"]


def test_the_run_ends_when_alice_s_budget_is_spent(tmp_path: Path) -> None:
    """The model of the last round that she took part in is the result."""
    folder, budget = federation(tmp_path / "fed", ("a", "b", "c")), epsilon_of([ROUND] * 2, 1e-3) + 0.01
    change(folder / "sites" / "a" / "site.toml", epsilon=budget, delta=1e-3)
    run_job(folder, config(4), tmp_path / "run")
    _, rounds, result = bits(tmp_path / "run")
    assert (result["status"], len(rounds)) == ("finished", 2)
    assert "accuracy" in result["metrics"]


def test_a_site_with_a_budget_refuses_runs_without_noise(tmp_path: Path) -> None:
    """It takes part in noised runs only, and in none whose noise is less than the run says."""
    folder = federation(tmp_path / "fed", ("a", "b", "c"))
    for name in ("a", "b", "c"):
        change(folder / "sites" / name / "site.toml", epsilon=1.0)
    with pytest.raises(WaffleError, match="takes part in runs with privacy = dp only"):
        run_job(folder, small_config(1), tmp_path / "clear")
    with pytest.raises(WaffleError, match=r"noise_multipliers: expected at least the noise that epsilon 1 needs"):
        run_job(folder, config(3, epsilon=1.0), tmp_path / "loud")
    assert not releases(folder, "a")


def test_a_budget_counts_every_run_and_needs_a_small_delta(tmp_path: Path) -> None:
    """A site with a budget refuses masked runs without noise, and a delta that allows to publish a row."""
    site = Site(federation(tmp_path / "fed", ("a", "b", "c")) / "sites" / "b")
    policy = replace(site.policy, epsilon=1.0)
    for privacy in ("off", "masked"):
        with pytest.raises(Refused):
            policy.check_work(config(privacy=privacy, noise_multipliers=()), 40, 100)
    budget = PrivacyBudget(site.ledger, replace(policy, delta=0.03), config(), "run", "label", b"s" * 32)
    with pytest.raises(Refused, match=r"delta in this site's site.toml: expected below 1 / 40 rows, got 0.03"):
        budget.charge("question", 40, 0)


def test_a_site_with_a_budget_reveals_nothing_besides_its_noised_updates(tmp_path: Path) -> None:
    """It does not answer whether a model singles out rows, and the hash of its data has a key that it keeps."""
    folder = federation(tmp_path / "fed", ("a", "b", "c"))
    change(folder / "sites" / "b" / "site.toml", epsilon=50.0, delta=1e-3, max_exposed=0.0)
    change(folder / "sites" / "c" / "site.toml", max_exposed=0.0)
    grid = Grid(folder)
    run_job(folder, config(1), tmp_path / "run", grid)
    assert "singles out" in json.dumps(lines(folder, "c"))
    assert releases(folder, "b")
    assert "singles out" not in json.dumps(lines(folder, "b"))
    request = next(m for n, m in grid.requests if n == "b" and m.payloads)
    site = Site(folder / "sites" / "b")
    settings = RunConfig.from_json(request.fields["config"]).settings
    guessed = site.data.digest(settings, request.fields["agent"], request.fields["run"].encode())
    assert guessed != request.fields["digest"]
    (folder / "sites" / "b" / "digest.secret").unlink()
    with site.ledger.alone(), pytest.raises(Refused, match="data has changed"):
        site.respond(request, "again")


def test_records_say_what_the_noise_derives_from(tmp_path: Path) -> None:
    """A deployment's noise is secret; that of a simulation derives from its seed, and the model card says so."""
    folder = federation(tmp_path / "fed", ("a", "b", "c"))
    run_job(folder, config(1), tmp_path / "real")
    run_simulation(config(1), tmp_path / "simulated")
    (kept,) = (folder / "sites" / "a" / "models").iterdir()
    for run, origin, said in (
        (tmp_path / "real", "secret", False),
        (kept, "secret", False),
        (tmp_path / "simulated", "seed", True),
    ):
        about = read_json(run / "provenance.json")["privacy"]
        assert (about["epsilon"], about["delta"], about["noise"]) == (20.0, 1e-3, origin)
        (limit,) = (line for line in card(open_run(run), {})["limits"] if "Differential privacy" in line)
        assert "epsilon 20 at delta 0.001 for each training sample" in limit
        assert ("do not publish this model as private" in limit) == said


def test_secret_draws_are_uniform_and_repeatable() -> None:
    """The stream depends on secret, question and key; normal draws have deviation 1."""
    keys = torch.tensor([5, -7])
    draw = SecretDraws(b"s" * 32, "question")
    found = draw(keys, 4000)
    assert torch.equal(found, SecretDraws(b"s" * 32, "question")(keys, 4000))
    assert torch.equal(found[:, :10], draw(keys, 10))
    for other in (SecretDraws(b"t" * 32, "question"), SecretDraws(b"s" * 32, "other")):
        assert not (found == other(keys, 4000)).any()
    assert found.min() >= 0
    assert (found.double() / 2**63).mean().item() == pytest.approx(0.5, abs=0.02)
    assert normal(keys, 4000, draw).std().item() == pytest.approx(1, abs=0.04)
    with pytest.raises(ValueError, match="at least 32 bytes"):
        SecretDraws(b"short", "question")
