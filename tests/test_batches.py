"""Mini-batches of equal size, and the two other treatments of the remainder."""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from benchmarks.batches import three_sites
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import make_federation
from waffle_fl import SGD, FlatModel, Local, RunSpec, simulate
from waffle_fl.batches import Batches, Remainder, batch_sizes
from waffle_fl.config import RunConfig, check_run
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


def test_configs_of_before_kept_the_remainder() -> None:
    """A config without the setting was made with a small last batch; a new one spreads the remainder."""
    config = check_run("fedavg", {}, {})
    content = config.to_json()
    assert content["settings"].pop("remainder") == "spread"
    assert RunConfig.from_json(content).settings.remainder == "keep"
