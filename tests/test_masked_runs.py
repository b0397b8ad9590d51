"""Private rounds in the simulator: the same models as in the clear, and a server that stores no agent's numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.private_rounds import KINDS, table_of

from conftest import make_federation, outcomes_of, refusal, shared_model
from waffle_fl import SGD, Adam, FedAvg, RunSpec, Scaffold, Waffle, WafflePaper, WeightErosion, simulate
from waffle_fl.algorithms import ALGORITHMS
from waffle_fl.algorithms.hooks import AggregatesSums
from waffle_fl.config import check_run
from waffle_fl.engines.masked_round import MaskedRound
from waffle_fl.engines.run_spec import Outcome, own_net
from waffle_fl.experiment import Runtime, device_of, federation_of, model_of
from waffle_fl.experiment.factories import simulation_options

ROOT = Path(__file__).parents[1]
SIZES = (23, 9, 32, 14, 20)
STEP = SGD(0.05)
METHODS = {
    "waffle-paper": WafflePaper(STEP, omega="sigmoid(3.2)"),
    "waffle, as printed": WafflePaper(STEP, control="paper"),
    "waffle, gradients": WafflePaper(STEP, compared="gradients", denominator="range"),
    "waffle, directions": WafflePaper(STEP, compared="directions"),
    "weight erosion": WeightErosion(STEP, p_d=0.1),
    "fedavg": FedAvg(STEP, weighting="samples"),
    "scaffold": Scaffold(STEP),
    "decay and momentum": WafflePaper(SGD(0.05, 0.9, momentum_between_rounds="keep", lr_decay=0.9)),
    "averaged": Scaffold(replace(STEP, averaging=0.5)),
    "adam": FedAvg(Adam(0.01)),
    "waffle": Waffle(STEP),
    "waffle, yielding": Waffle(STEP, yielding=3.0, head_layers=2),
    "waffle, decay": Waffle(SGD(0.05, lr_decay=0.9)),
}


def spec_of(algorithm: Any, **options: Any) -> RunSpec:
    return RunSpec(algorithm, make_federation(SIZES), 1, **options)


def trained(algorithm: Any, **options: Any) -> list[Outcome]:
    return outcomes_of(spec_of(algorithm), shared_model(), **{"privacy": "masked", **options})


def assert_close(method: Any, one: Outcome, other: Outcome, tolerance: float) -> None:
    """Weights and models agree."""
    assert one.measured["weights"] == pytest.approx(other.measured["weights"], rel=0, abs=tolerance)
    nets = [own_net(spec_of(method), outcome.state, shared_model()) for outcome in (one, other)]
    torch.testing.assert_close(nets[0].params, nets[1].params, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_masked_runs_equal_clear_runs(name: str) -> None:
    """Where a sketch is exact, weights and models agree with the clear run to the step of the ring."""
    method = METHODS[name]
    clear, masked = trained(method, privacy="off"), trained(method)
    for one, other in zip(clear, masked, strict=True):
        assert_close(method, one, other, 1e-4)


@pytest.mark.parametrize("name", ["waffle-paper", "waffle, directions", "weight erosion"])
def test_distances_with_a_dealer(name: str) -> None:
    """With another agent as dealer distances are exact, whatever the size of a sketch would be."""
    method, options = METHODS[name], {"masked_distances": "dealer", "sketch_size": 2}
    for one, other in zip(trained(method, privacy="off"), trained(method, **options), strict=True):
        assert_close(method, one, other, 1e-4)


@pytest.mark.parametrize("name", ["waffle-paper", "scaffold", "decay and momentum"])
def test_the_engines_agree_on_masked_runs(name: str) -> None:
    """The readable engine agrees to a step of the ring; several processes and a resumed run give the same bits."""
    method = METHODS[name]
    expected = trained(method)
    for tolerance, options in ((1e-6, {"engine": "loop"}), (0.0, {"workers": 2})):
        for one, other in zip(trained(method, **options), expected, strict=True):
            assert_close(method, one, other, tolerance)
    rest = outcomes_of(spec_of(method, state=expected[2].state), shared_model(), start=3, privacy="masked")
    assert [o.measured["loss"] for o in rest] == [o.measured["loss"] for o in expected[3:]]


def test_the_server_stores_nothing_of_single_agents() -> None:
    """Neither control variates nor norms of updates are known to the server, and the record has none."""
    last = trained(METHODS["waffle-paper"])[-1]
    assert not last.state.server.c_i.any()
    assert last.state.agents.c_i.any()
    assert "norms" not in last.measured
    assert {"contributors", "uploaded", "weights", "distances"} <= last.measured.keys()


def test_contributors_are_recorded_and_alice_trains_on_alone() -> None:
    """The effective number falls to 1; once Alice holds all weight she alone sends her numbers."""
    method = WafflePaper(STEP, omega="constant(1)", psi="step(0.5)")
    rounds = [outcome.measured for outcome in trained(method, rounds=12)]
    assert rounds[0]["contributors"] > 4
    assert rounds[-1]["contributors"] == 1
    model = shared_model()
    assert rounds[-1]["uploaded"] == 8 * (2 * model.size + model.stats_size) < rounds[0]["uploaded"]


def test_floors_are_respected() -> None:
    """Below the floor all weight is Alice's."""
    method = WafflePaper(STEP, omega="constant(1)", psi="constant(0.6)")
    free = [outcome.measured["contributors"] for outcome in trained(method)]
    held = [outcome.measured for outcome in trained(method, min_contributors=4.5)]
    assert any(1 < number < 4.5 for number in free)
    assert all(line["contributors"] == 1 or line["contributors"] >= 4.5 for line in held)
    alone = next(line for line in held if line["contributors"] == 1)
    assert alone["weights"] == [1, 0, 0, 0, 0]


def test_a_floor_that_weights_by_samples_do_not_reach_is_an_error() -> None:
    """A method without Alice cannot let her train alone, so the run stops with the number that can be reached."""
    method = FedAvg(STEP, weighting="samples")
    assert "expected at most 4.31" in refusal(trained, method, min_contributors=4.9)


def test_partial_participation_is_masked_among_the_cohort() -> None:
    """Only the agents of a round exchange masks, and Alice is one of them."""
    federation = make_federation((20,) * 8)
    spec = RunSpec(WafflePaper(STEP), federation, 1)
    runs = [outcomes_of(spec, shared_model(), participation=0.6, privacy=p) for p in ("off", "masked")]
    for one, other in zip(*runs, strict=True):
        assert one.measured["participants"] == other.measured["participants"]
        assert one.measured["weights"] == pytest.approx(other.measured["weights"], abs=1e-4)


@pytest.mark.parametrize("method", ["waffle-paper", "waffle, gradients", "weight erosion", "fedavg", "scaffold"])
def test_the_guard_finds_attackers_that_follow_the_protocol(method: str) -> None:
    """From distances and reported lengths the guard rejects a flipped, a short and a long update, as in the clear."""

    def tamper(up: Any, r: int) -> Any:
        up.dy[1] *= -1
        up.dy[2] *= 1e-3
        up.dy[3] *= 30
        return up

    spec = RunSpec(METHODS[method], make_federation((*SIZES, 21, 18)), 1, tamper=tamper)
    for outcome in outcomes_of(spec, shared_model(), rounds=2, guard="standard", privacy="masked"):
        assert {"agent 1", "agent 2", "agent 3"} <= outcome.measured["screened"].keys()
        assert [outcome.measured["weights"][i] for i in (1, 2, 3)] == [0, 0, 0]
    honest = trained(METHODS[method], guard="standard", privacy="off")
    masked = trained(METHODS[method], guard="standard")
    reasons = [{k: v for k, v in o.measured.get("screened", {}).items() if v != "clipped"} for o in honest]
    assert all(a.items() <= o.measured.get("screened", {}).items() for a, o in zip(reasons, masked, strict=True))


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_sum_of_one_update_is_not_read(method: str) -> None:
    """A run in which only one agent's update is left stops, also if the others send control variates."""

    def tamper(up: Any, r: int) -> Any:
        up.dy[1:] *= -1
        return up

    options: dict[str, Any] = {"privacy": "masked", "guard": "standard"}
    text = refusal(outcomes_of, spec_of(METHODS[method], tamper=tamper), shared_model(), **options)
    assert "the sum would be its update" in text


def test_an_update_that_cannot_be_used_is_left_out() -> None:
    """An agent whose update is not finite, or too large for the ring, takes no part; Alice's own repeats the round."""

    def spoil(agent: int, factor: float) -> Any:
        def tamper(up: Any, r: int) -> Any:
            up.dy[agent] *= factor
            return up

        return tamper

    for factor, reason in ((float("nan"), "not finite"), (1e5, "too long")):
        spec = spec_of(WafflePaper(STEP), tamper=spoil(2, factor))
        for outcome in outcomes_of(spec, shared_model(), rounds=2, privacy="masked"):
            assert outcome.measured["screened"] == {"agent 2": reason}
            assert outcome.measured["weights"][2] == 0
    spec = spec_of(WafflePaper(STEP), tamper=spoil(0, float("nan")))
    (outcome,) = outcomes_of(spec, shared_model(), rounds=2, privacy="masked")
    assert outcome.attempt == 2
    assert "diverged" in str(outcome.error)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_other_methods_say_why_they_cannot_be_masked(method: str) -> None:
    """A method whose server needs single updates is refused in one line; Local sends nothing."""
    algorithm: Any = ALGORITHMS[method]()
    if method == "local" or isinstance(algorithm, AggregatesSums):
        assert len(trained(algorithm, rounds=1)) == 1
    else:
        text = refusal(trained, algorithm, rounds=1)
        assert "these methods do: fedavg, scaffold, weight-erosion, waffle" in text


def test_settings_that_need_single_updates_are_refused() -> None:
    """Robust rules, adaptive schedules, the guard, too few agents and impossible floors are refused in one line."""
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (FedAvg(STEP, aggregation="median"), {}, "aggregation = median"),
        (WafflePaper(STEP, psi="adaptive"), {}, "psi = adaptive"),
        (WafflePaper(STEP), {"participation": 0.4}, "at least 4 agents"),
        (WafflePaper(STEP), {"min_contributors": 6.0}, "expected at most 5"),
    ]
    for algorithm, options, text in wrong:
        assert text in refusal(trained, algorithm, **options)
    transport = replace(spec_of(WafflePaper(STEP)), transport=lambda agent, r, reply: [reply])
    assert "transport" in refusal(simulate, [transport], shared_model(), rounds=1, privacy="masked")


def run(method: str, data: str, **settings: Any) -> list[dict[str, Any]]:
    config = check_run(method, {"data": data, **settings}, {})
    s = config.settings
    federation = federation_of(s, "", False)
    model = model_of(s, federation, Runtime(), device_of("cpu"))
    stream = simulate([RunSpec(config.algorithm(), federation, s.seed)], model, **simulation_options(s, Runtime()))
    return [dict(outcomes[0].measured) for outcomes in stream]


def difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[float]:
    """Return the L1 distance of the weights of two runs per round."""
    pairs = [(a["weights"], b["weights"]) for a, b in zip(one, other, strict=True)]
    return [sum(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in pairs]


def test_digits_with_sketches() -> None:
    """Weights from sketches of 4,096 numbers are within 0.02 on average, the accuracy within the seeds' spread."""
    clear = [run("waffle-paper", "digits", rounds=8, seed=seed) for seed in (1, 2, 3)]
    masked = run("waffle-paper", "digits", rounds=8, seed=1, privacy="masked")
    assert sum(difference(clear[0], masked)) / 8 < 0.02
    last = [lines[-1]["accuracy"] for lines in clear]
    assert abs(masked[-1]["accuracy"] - last[0]) <= max(last) - min(last)


@pytest.mark.parametrize("split", ["C", "A*"])
def test_layers_of_digits_with_sketches(split: str) -> None:
    """WAFFLE's weights from sketches of each layer are within 0.02, and the accuracy is that of the clear run."""
    clear, masked = (run("waffle", "digits", rounds=4, split=split, privacy=p) for p in ("off", "masked"))
    assert max(difference(clear, masked)) < 0.02
    assert masked[-1]["accuracy"] == pytest.approx(clear[-1]["accuracy"], abs=0.01)


@pytest.mark.data
@pytest.mark.parametrize("method", ["waffle-paper", "waffle", "weight-erosion", "scaffold", "fedavg"])
def test_heart_disease(method: str, published: Path) -> None:
    """On Heart Disease the masked run makes the same predictions as the clear one."""
    options = {"target": "disease", "rounds": 12, "alice": "cleveland"}
    clear, masked = (run(method, str(published / "heart-disease"), **options, privacy=p) for p in ("off", "masked"))
    assert max(difference(clear, masked)) < 1e-3
    assert [line["accuracy"] for line in masked] == [line["accuracy"] for line in clear]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tables_match_their_record(kind: str) -> None:
    """The tables in docs/privacy.md equal results/private-rounds.jsonl."""
    record = [json.loads(line) for line in (ROOT / "results" / "private-rounds.jsonl").read_text().splitlines()]
    assert table_of(kind, record) in (ROOT / "docs" / "privacy.md").read_text()


def test_two_vectors_are_two_sums_of_the_same_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal steps the server of WAFFLE computes the control variates' sum with the weights of the next round, too.

    docs/privacy.md says so. With two contributors both control variates follow.
    """
    seen: list[tuple[Any, list[float], Any]] = []
    settled = MaskedRound.settled

    def keep(self: MaskedRound) -> Any:
        seen.append((self.server, self._decided.weights["dy"].tolist(), self.sums))
        return settled(self)

    monkeypatch.setattr(MaskedRound, "settled", keep)
    method = WafflePaper(STEP, omega="constant(1)", psi="constant(0.9)", clip=0.0)
    outcomes = outcomes_of(RunSpec(method, make_federation((16,) * 5), 1), shared_model(), rounds=3, privacy="masked")
    before = outcomes[1].state.agents.c_i  # of round 2, known to the agents alone
    server, weights, sums = seen[2]
    steps = 2  # of 8 samples
    computed = sums["c"] + server.c + sums["dy"] / (steps * STEP.lr)
    torch.testing.assert_close(computed, torch.tensor(weights, dtype=torch.float64) @ before, rtol=0, atol=1e-5)
    earlier = torch.tensor(seen[1][1], dtype=torch.float64)
    torch.testing.assert_close(server.c, earlier @ before, rtol=0, atol=1e-5)
    assert max(abs(a - b) for a, b in zip(weights, earlier.tolist(), strict=True)) > 1e-3
