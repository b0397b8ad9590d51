"""Mini-batches of equal size, and the two other treatments of the remainder."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import pytest
import torch
from benchmarks.batches import three_sites
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import make_federation, make_model
from waffle_fl import SGD, FedALA, FedAvg, FlatModel, Local, RunSpec, Scaffold, WafflePaper, simulate
from waffle_fl.algorithms import Adam, Algorithm
from waffle_fl.batches import Batches, Remainder, batch_sizes
from waffle_fl.config import RunConfig, check_run
from waffle_fl.engines.aggregation import registered
from waffle_fl.engines.flower.site_trainer import SiteTrainer
from waffle_fl.engines.run_spec import RoundSettings
from waffle_fl.models.batch import squared_error

SAMPLES, BATCH_SIZES = st.integers(1, 400), st.integers(1, 64)


@given(SAMPLES, BATCH_SIZES)
def test_spread_batches_differ_by_at_most_one(samples: int, batch_size: int) -> None:
    """`spread` makes ceil(n / batch) batches of nearly equal size that hold every sample once."""
    sizes = batch_sizes(samples, batch_size, "spread")
    assert len(sizes) == -(-samples // batch_size)
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= batch_size


@given(SAMPLES, BATCH_SIZES)
def test_keep_and_drop(samples: int, batch_size: int) -> None:
    """`keep` fills all batches but the last; `drop` leaves that one out unless it is the only one."""
    kept, dropped = batch_sizes(samples, batch_size, "keep"), batch_sizes(samples, batch_size, "drop")
    assert sum(kept) == samples
    assert all(size == batch_size for size in kept[:-1])
    assert dropped == ([size for size in kept if size == batch_size] or kept)


@pytest.mark.parametrize("remainder", ["spread", "keep", "drop"])
def test_a_plan_has_these_sizes(remainder: Remainder) -> None:
    """Rows of different lengths have the sizes of `batch_sizes` in every epoch, and no sample twice in one."""
    federation = make_federation((33, 7, 16))
    batches = Batches([federation], [1], 8, 2, torch.float64, remainder=remainder)
    plan = batches.plan(3, 0, slice(0, 3))
    for row, samples in enumerate(federation.samples.tolist()):
        sizes = batch_sizes(samples, 8, remainder)
        assert plan.weight[row].sum(dim=1).tolist()[: 2 * len(sizes)] == sizes * 2
        assert int(plan.steps[row]) == 2 * len(sizes)
        for epoch in range(2):
            steps = slice(epoch * len(sizes), (epoch + 1) * len(sizes))
            used = plan.samples[row, steps][plan.weight[row, steps] > 0].tolist()
            assert len(set(used)) == len(used) == sum(sizes)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 30))
def test_a_fixed_number_of_steps_cycles_through_epochs(samples: int, batch_size: int, steps: int) -> None:
    """Each full pass holds every sample once, the passes differ only in order, and the last one may be cut short."""
    batches = Batches(
        [make_federation((samples, 17))], [1], batch_size, 1, torch.float64, remainder="keep", steps_per_round=steps
    )
    plan, sizes = batches.plan(2, 0, slice(0, 2)), batch_sizes(samples, batch_size, "keep")
    assert batches.steps == [steps, steps]
    assert plan.weight[0].sum(dim=1).tolist() == (sizes * steps)[:steps]
    assert batches.sizes(slice(0, 1), padded=False) == (sizes * steps)[:steps]
    for first in range(0, steps - len(sizes) + 1, len(sizes)):
        part = slice(first, first + len(sizes))
        used = plan.samples[0, part][plan.weight[0, part] > 0].tolist()
        assert sorted(used) == list(range(samples))


def test_whole_epochs_as_steps_change_no_bit() -> None:
    """As many steps as two epochs have give the same plan as two epochs."""
    federation = make_federation((33, 33))
    epochs = Batches([federation], [1], 8, 2, torch.float64)
    steps = Batches([federation], [1], 8, 1, torch.float64, steps_per_round=epochs.steps[0])
    for a, b in zip(epochs.plan(3, 0, slice(None)), steps.plan(3, 0, slice(None)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("algorithm", [FedAvg(SGD(0.1)), Scaffold(SGD(0.1)), FedALA(SGD(0.1))])
def test_engines_agree_on_a_fixed_number_of_steps(algorithm: Algorithm) -> None:
    """The fast engine, the readable one and a site make the same steps; K_i is the setting at every agent."""
    federation, model = make_federation((23, 9, 32)), make_model()
    spec, shape = RunSpec(algorithm, federation, 1), {"rounds": 3, "batch_size": 8, "steps_per_round": 7}
    *_, (fast,) = simulate([spec], model, **shape)
    *_, (loop,) = simulate([spec], model, engine="loop", **shape)
    assert fast.measured["loss"] == pytest.approx(loop.measured["loss"], abs=1e-12)
    site = SiteTrainer(algorithm, federation.only(1), model, 1, RoundSettings(1, 8, steps_per_round=7))
    assert site.steps == 7
    assert registered(federation, RoundSettings(3, 8, steps_per_round=7), model.device).steps.tolist() == [7, 7, 7]


def local_error(rows: int, remainder: Remainder) -> float:
    """Error of a site with so many rows that trains alone, mean over three seeds."""
    federation = three_sites(rows).only(1)
    model = FlatModel(lambda: nn.Linear(10, 1), loss=squared_error)
    specs = [RunSpec(Local(SGD(0.1)), federation, seed) for seed in (1, 2, 3)]
    *_, last = simulate(specs, model, rounds=20, batch_size=32, remainder=remainder, workers=1)
    return mean(outcome.measured["rmse"] for outcome in last)


def test_the_error_changes_smoothly_with_the_number_of_rows() -> None:
    """Removing rows one by one changes the error alone by little; with a small last batch it jumps at 193 rows."""
    errors = [local_error(rows, "spread") for rows in (195, 194, 193, 192, 191, 189, 187, 185)]
    assert max(errors) - min(errors) < 0.1
    assert local_error(193, "keep") > local_error(192, "keep") + 0.5


def ally_weight(rows: int, remainder: Remainder) -> float:
    """Weight of an ally with so many rows in Alice's model, mean over three seeds and all rounds, trained by Adam."""
    model = FlatModel(lambda: nn.Linear(10, 1), loss=squared_error)
    specs = [RunSpec(WafflePaper(Adam(0.03)), three_sites(rows), seed) for seed in (1, 2, 3)]
    stream = simulate(specs, model, rounds=20, batch_size=32, remainder=remainder, workers=1)
    return mean(outcome.measured["weights"][1] for outcomes in stream for outcome in outcomes)


def test_the_weight_of_an_ally_changes_smoothly_with_its_rows() -> None:
    """Removing rows one by one changes an ally's weight by a few percent, also where 7 mini-batches become 6."""
    weights = [ally_weight(rows, "spread") for rows in range(195, 184, -1)]
    assert max(weights) < 1.06 * min(weights)
    steps = [abs(after / before - 1) for before, after in pairwise(weights)]
    assert max(steps) < 0.05


def test_configs_of_before_kept_the_remainder() -> None:
    """A config without the setting was made with a small last batch; a new one spreads the remainder."""
    config = check_run("fedavg", {}, {})
    content = config.to_json()
    assert content["settings"].pop("remainder") == "spread"
    assert RunConfig.from_json(content).settings.remainder == "keep"
