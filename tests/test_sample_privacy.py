"""Differential privacy: sampling, clipping, noise and accounting, and what an attacker learns from the result."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from torch import Tensor, nn

from waffle_fl import FedAvg, Federation, FlatModel, Local, WafflePaper
from waffle_fl.algorithms import ALGORITHMS, SGD
from waffle_fl.engines.noise_checks import check_noise
from waffle_fl.engines.private_gradients import batches_of, gradients_per_step, release_of
from waffle_fl.engines.run_spec import RoundSettings, RunSpec, fitted
from waffle_fl.engines.simulate import simulate
from waffle_fl.errors import WaffleError
from waffle_fl.models import Batch, mlp
from waffle_fl.poisson_batches import PoissonBatches, room_for, sampling_rate
from waffle_fl.privacy.accounting import Release, epsilon_of, noise_multiplier, width_for
from waffle_fl.randomness import normal

FEATURES, ROWS = 6, 40
DP: dict[str, Any] = {"privacy": "dp", "noise_multipliers": (1.0,), "delta": 1e-3, "epsilon": 1e3, "batch_size": 8}


def federation(agents: int = 4, rows: int = ROWS) -> Federation:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((agents, rows + 10, FEATURES))
    y = (x[:, :, 0] + 0.3 * rng.standard_normal((agents, rows + 10)) > 0).astype(int)
    parts = [(f"a{i}", (x[i, :rows], y[i, :rows], x[i, rows:], y[i, rows:])) for i in range(agents)]
    return Federation.from_arrays(parts, class_names=("a", "b"))


def network() -> FlatModel:
    return FlatModel(lambda: mlp((FEATURES,), 2), precision="float64")


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 3))


def tensors(state: Any) -> Tensor:
    return torch.cat([field.double().flatten() for field in (*state.server, *state.agents)])


def trained(method: Any, some: Federation, model: FlatModel | None = None, rounds: int = 2, **options: Any) -> Tensor:
    stream = simulate([RunSpec(method, some, 3)], model or network(), rounds=rounds, workers=1, **{**DP, **options})
    return tensors([*stream][-1][0].state)


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "delta", "known"),
    [(200, 16, 50, 1e-3, (2.95, 1.16)), (1000, 32, 50, 5e-4, (2.08, 0.90)), (6000, 32, 20, 8.3e-5, (0.88, 0.56))],
)
def test_noise_for_an_epsilon_is_the_accountants(
    rows: int, batch: int, epochs: int, delta: float, known: tuple[float, float]
) -> None:
    """The noise multipliers for epsilon 2 and 8 are those of the PLD accountant with Poisson sampling."""
    steps = rows // batch * epochs
    found = [noise_multiplier(epsilon, delta, batch / rows, steps) for epsilon in (2.0, 8.0)]
    assert list(known) == [round(multiplier, 2) for multiplier in found]


def test_epsilon_of_several_releases_is_that_of_their_composition() -> None:
    """Releases in parts cost what they cost at once, a release of no steps costs nothing, and more noise costs less."""
    whole, parts = [Release(0.1, 2.0, 100)], [Release(0.1, 2.0, 60), Release(0.1, 2.0, 40), Release(0.3, 1.0, 0)]
    assert epsilon_of(whole, 1e-3) == epsilon_of(parts, 1e-3)
    assert 0 < epsilon_of([Release(0.1, 4.0, 100)], 1e-3) < epsilon_of(whole, 1e-3)
    assert epsilon_of([*whole, Release(0.1, 4.0, 100)], 1e-3) > epsilon_of(whole, 1e-3)


def test_batches_are_poisson_samples() -> None:
    """Each sample is in each batch with the same probability, independently of the others; sizes vary as a binomial."""
    some = federation(2, 100)
    s = RoundSettings(1, 8, steps_per_round=400, **{k: v for k, v in DP.items() if k != "batch_size"})
    batches = batches_of(FedAvg(), network(), [some], [1], s)
    assert isinstance(batches, PoissonBatches)
    plan, rate = batches.plan(1, 0, slice(0, 2)), sampling_rate(100, 8, "spread")
    counts = plan.weight.sum(dim=2)
    assert rate == pytest.approx(1 / 13)
    assert counts.mean().item() == pytest.approx(100 * rate, abs=4 * math.sqrt(100 * rate / 800))
    assert counts.var().item() == pytest.approx(100 * rate * (1 - rate), rel=0.2)
    assert counts.min() < 3
    assert counts.max() > 12
    for row in range(2):
        held = [plan.samples[row, t][plan.weight[row, t] > 0] for t in range(400)]
        assert all(len(set(batch.tolist())) == len(batch) for batch in held)
        times = torch.cat(held).bincount(minlength=len(some.x))[some.train[row]].double()
        assert times.sum() == counts[row].sum()
        assert times.min() > 0
        assert times.var().item() == pytest.approx(400 * rate * (1 - rate), rel=0.5)
    again = batches.plan(1, 0, slice(0, 2))
    assert torch.equal(plan.samples, again.samples)
    assert not torch.equal(plan.weight, batches.plan(2, 0, slice(0, 2)).weight)


@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_a_batch_has_room(size: int) -> None:
    """A Poisson sample larger than its room has a probability below 1e-13."""
    room = room_for(size)
    tail = sum(math.exp(-size + k * math.log(size) - math.lgamma(k + 1)) for k in range(room + 1, room + 200))
    assert tail < 1e-13


@pytest.mark.parametrize("kind", ["folded", "vmapped", "single"])
@pytest.mark.parametrize("models", [1, 2])
def test_clipping_is_per_sample(kind: str, models: int) -> None:
    """The sum has each sample's own gradient, scaled down to the clip norm; padding adds nothing."""
    image = kind == "single"
    model = FlatModel(convolutions if image else (lambda: mlp((FEATURES,), 3)), precision="float64", stacked=not image)
    x = torch.randn(2, 5, *((1, 6, 6) if image else (FEATURES,)), dtype=torch.float64)
    x[0, 1] *= 100
    weight = torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.float64)
    batch = Batch(x, torch.randint(0, 3, (2, 5)), weight, torch.tensor([7, 8]))
    model.prepared(x[0], batch.y[0])
    model._uses_folded = kind == "folded"
    nets = [model.init(seed) for seed in range(2 * models)]
    params, stats = torch.stack([net.params for net in nets]), torch.stack([net.stats for net in nets])
    sums = [model.clipped_sums(params, stats, batch, 0.7, plain) for plain in (False, True)]
    if not image:  # without dropout: single gradients by the ordinary function
        expected = torch.zeros_like(params)
        for i in range(len(params)):
            for j in range(5):
                one = Batch(*(part[i % 2 : i % 2 + 1, j : j + 1] for part in batch[:3]), batch.key[i % 2 : i % 2 + 1])
                g = model.plain_grad(params[i : i + 1], stats[i : i + 1], one).params[0]
                expected[i] += weight[i % 2, j] * g / max(1.0, float(g.norm()) / 0.7)
        torch.testing.assert_close(sums[0], expected)
    torch.testing.assert_close(sums[0], sums[1])
    assert (sums[0].norm(dim=1) <= 0.7 * weight.sum(dim=1).repeat(models) + 1e-12).all()


@pytest.mark.parametrize("stacked", [True, False])
def test_one_sample_moves_the_sum_by_at_most_the_clip_norm(stacked: bool) -> None:
    """Without one sample the sum differs by at most the clip norm, also if the sample is huge or not finite."""
    model = FlatModel(lambda: mlp((FEATURES,), 2), precision="float64", stacked=stacked)
    x, y = torch.randn(1, 6, FEATURES, dtype=torch.float64), torch.randint(0, 2, (1, 6))
    net = model.init(1)
    params, stats = net.params[None], net.stats[None]
    for value in (1e9, math.nan):
        x[0, 5] = value
        with_it, without = (
            model.clipped_sums(
                params, stats, Batch(x, y, torch.tensor([[1.0] * 5 + [last]]).double(), torch.tensor([1])), 0.5
            )
            for last in (1.0, 0.0)
        )
        assert (with_it - without).norm() <= 0.5 * (1 + 1e-9)


def test_a_step_is_the_noised_sum_over_the_expected_batch_size() -> None:
    """A slow twin of DP-FedAvg on a linear model: sampled rows, clipped gradients, noise, and empty batches too."""
    some, rounds, lr, clip, sigma = federation(3, 10), 4, 0.5, 0.3, 1.7
    model = FlatModel(lambda: nn.Linear(FEATURES, 2), precision="float64")
    options = {**DP, "sample_clip": clip, "noise_multipliers": (sigma,), "batch_size": 1, "delta": 1e-2}
    s = RoundSettings(rounds, **options)
    batches: Any = batches_of(FedAvg(), model, [some.to("cpu", torch.float64)], [3], s)
    vector, empty = model.init(3).params, 0
    for r in range(1, rounds + 1):
        plan, ends = batches.plan(r, 0, slice(0, 3)), []
        for agent in range(3):
            y = vector.clone()
            for t in range(10):
                rows = plan.samples[agent, t][plan.weight[agent, t] > 0]
                empty += not len(rows)
                weight, bias, total = y[:12].view(2, FEATURES), y[12:], torch.zeros(14, dtype=torch.float64)
                for i in rows.tolist():
                    at = some.x[i].double()
                    error = torch.softmax(weight @ at + bias, 0) - torch.eye(2, dtype=torch.float64)[some.y[i]]
                    g = torch.cat([torch.outer(error, at).flatten(), error])
                    total += g / max(1.0, float(g.norm()) / clip)
                z = normal(plan.noise_keys[agent : agent + 1] + (t << 16), 14)[0]
                y = y - lr * (total + clip * sigma * z) / 1.0  # the expected size is 1
            ends.append(y)
        vector = torch.stack(ends).mean(dim=0)
    found = trained(FedAvg(SGD(lr)), some, model, rounds, **options)
    assert empty > 10
    torch.testing.assert_close(found, vector, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["fedavg", "waffle-paper", "ditto", "mr-mtl", "local"])
def test_both_engines_agree(method: str) -> None:
    """The fast engine and the readable one draw the same samples and the same noise."""
    fast, loop = (trained(ALGORITHMS[method](sgd=SGD(0.1)), federation(), engine=engine) for engine in ("fast", "loop"))
    torch.testing.assert_close(fast, loop, rtol=1e-9, atol=1e-9)


def test_a_stack_changes_no_bit() -> None:
    """A run has the same bits alone, beside another run, and beside agents with fewer samples."""
    model, both = FlatModel(lambda: mlp((FEATURES,), 2)), [federation(4), federation(3, 25)]
    specs = [RunSpec(WafflePaper(SGD(0.1)), some, 3) for some in both]
    *_, together = simulate(specs, model, rounds=2, workers=1, **DP)
    for outcome, some in zip(together, both, strict=True):
        assert torch.equal(tensors(outcome.state), trained(WafflePaper(SGD(0.1)), some, model))


def test_several_gradients_of_a_sample_get_more_noise() -> None:
    """A step that computes two gradients adds noise of sqrt(2) the deviation to each, so it costs as much as one."""
    model = network()
    assert gradients_per_step(ALGORITHMS["fedavg"](), model) == 1
    assert gradients_per_step(ALGORITHMS["ditto"](), model) == 2
    spec = fitted(RunSpec(ALGORITHMS["apfl"](), federation(), 1), model)
    assert gradients_per_step(spec.algorithm, model) == 2


@pytest.mark.parametrize("method", ["fedpac", "feddbe", "ifca", "fedfomo", "fedala", "cobo", "knn-per"])
def test_methods_that_use_samples_otherwise_are_refused(method: str) -> None:
    """A method that reads samples other than through gradients is refused with one line."""
    model = network()
    spec = fitted(RunSpec(ALGORITHMS[method](), federation(), 1), model)
    with pytest.raises(WaffleError, match=r"^privacy = dp: \w+ also uses .*, which the noise does not cover$"):
        check_noise(spec.algorithm, model, spec.federation, RoundSettings(1, **DP))


def test_what_noise_cannot_cover_is_refused() -> None:
    """Batch statistics, a delta that allows to publish a row, and too little noise are refused."""
    method, some, s = FedAvg(), federation(), RoundSettings(1, **DP)
    normed = FlatModel(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 2)))
    with pytest.raises(WaffleError, match="batch normalisation mixes the samples"):
        check_noise(method, normed, some, s)
    with pytest.raises(WaffleError, match="delta: expected below 1 / 40"):
        check_noise(method, network(), some, RoundSettings(1, **{**DP, "delta": 0.03}))
    with pytest.raises(WaffleError, match=r"noise_multipliers: expected at least 0\.2, got 0\.1"):
        check_noise(method, network(), some, RoundSettings(1, **{**DP, "noise_multipliers": (1.0, 0.1)}))
    with pytest.raises(WaffleError, match=r"noise_multipliers: .* with which a0 would spend"):
        check_noise(method, network(), some, RoundSettings(5, **{**DP, "epsilon": 1.0}))
    for epsilon in (0.1, 1.0):
        s = RoundSettings(5, **{**DP, "epsilon": epsilon, "noise_multipliers": ()})
        release = release_of(s, ROWS, 0)
        assert 0.99 * epsilon < epsilon_of([release], 1e-3, width_for(epsilon)) <= epsilon
        check_noise(method, network(), some, replace(s, noise_multipliers=(release.multiplier,)))


def test_masked_rounds_can_be_noised() -> None:
    """`masked+dp` gives what `dp` gives, except for the rounding of masked sums."""
    model = network()
    noised, both = (trained(FedAvg(SGD(0.1)), federation(), model, privacy=privacy) for privacy in ("dp", "masked+dp"))
    torch.testing.assert_close(noised, both, rtol=0, atol=1e-5)
    assert not torch.equal(noised, both)


def test_canaries_stay_below_the_bound() -> None:
    """Membership inference on an inserted record is certain without noise, and below the bound of epsilon with it.

    The canary's gradient is orthogonal to all others, so the attack is nearly the best one: its advantage is close to
    the largest one that the accountant allows, and with a fifth of the noise it exceeds the bound of epsilon.
    """
    epsilon, delta, half, rows, steps = 1.0, 1e-3, 500, 20, 20
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((rows, FEATURES)), rng.integers(0, 2, rows)
    x[:, -1], x[-1], y[-1] = 0.0, 0.0, 1
    absent = x.copy()  # the gradient of a row of zeros is 0: as if it were not there
    x[-1, -1] = 50.0  # the canary
    parts = [(f"a{i}", (x if i < half else absent, y, x[:2], y[:2])) for i in range(2 * half)]
    some = Federation.from_arrays(parts, class_names=("a", "b"), duplicates="keep")
    model = FlatModel(lambda: nn.Linear(FEATURES, 2, bias=False), precision="float64")
    rate = sampling_rate(rows, 5, "spread")
    multiplier = noise_multiplier(epsilon, delta, rate, steps)
    noise = {**DP, "delta": delta, "batch_size": 5, "steps_per_round": steps, "rounds": 1}
    advantage = {}
    for share in (0.0, 0.2, 1.0):  # of the noise that epsilon needs
        given = {"privacy": "dp", "noise_multipliers": (share * multiplier,)} if share else {"privacy": "off"}
        options = {**noise, **given, "epsilon": epsilon if share == 1 else 1e3}
        *_, ((outcome,)) = simulate([RunSpec(Local(SGD(0.001)), some, 3)], model, workers=1, **options)
        weights = outcome.state.agents.y.view(2, half, 2, FEATURES)[..., -1]
        score = weights[..., 1] - weights[..., 0]  # the canary's gradient points this way
        choose, judge = score[:, : half // 2], score[:, half // 2 :]  # the threshold is chosen on one half
        rates = [(choose > limit).double().mean(dim=1) for limit in choose.flatten()]
        limit = choose.flatten()[max(range(len(rates)), key=lambda i: float(rates[i][0] - rates[i][1]))]
        inside, outside = (judge > limit).double().mean(dim=1).tolist()
        advantage[share] = inside - outside
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier)), steps))
    largest, deviation = accountant.get_delta(0.0), math.sqrt(2 * 0.25 / (half / 2))
    bound = (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)
    assert advantage[0.0] > 0.95
    assert advantage[0.2] > bound
    assert 0 < advantage[1.0] < min(bound, largest + 3 * deviation)
    assert largest < bound
