"""Networks have their published sizes, and any module works as rows of flat parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from waffle_fl.errors import WaffleError
from waffle_fl.models import DLA, MODELS, Batch, FlatModel, LeNet5, builder


def batch_of(rows: int, size: int, shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, *shape, generator=g, dtype=torch.float64)
    y = torch.randint(0, classes, (rows, size), generator=g)
    return Batch(x, y, torch.ones(rows, size, dtype=torch.float64), torch.arange(rows) * 1000)


def rows_of(model: FlatModel, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    nets = [model.init(seed) for seed in range(rows)]
    return torch.stack([n.params for n in nets]), torch.stack([n.stats for n in nets])


def plain_gradient(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    nn.functional.cross_entropy(module(x), y).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def test_lenet5_has_its_published_size() -> None:
    """LeNet-5 on padded 28x28 images has 61,706 parameters, with ReLU and with tanh."""
    for name in ("lenet5", "lenet5-tanh"):
        assert sum(p.numel() for p in MODELS[name]((1, 28, 28), 10).parameters()) == 61706


def test_dla_has_its_published_size() -> None:
    """DLA has 16,291,386 parameters in 131 tensors, and 43 BatchNorm layers with 17,792 running statistics."""
    module = DLA()
    assert sum(p.numel() for p in module.parameters()) == 16291386
    assert len(list(module.parameters())) == 131
    assert sum(isinstance(m, nn.BatchNorm2d) for m in module.modules()) == 43
    assert FlatModel(DLA).stats_size == 17792


class Odd(nn.Module):
    """A module without a folded form: a bare parameter, and arithmetic on the batch's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.linear = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale)  # type: ignore[no-any-return]


def strided_cnn() -> nn.Module:
    first = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(4, 3, 2, stride=2, bias=False), nn.Flatten(), nn.Linear(12, 10))


def signal_cnn() -> nn.Module:
    first = [nn.Conv1d(3, 4, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(4, 3, 3, stride=2, dilation=2)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(9, 10))


BUILDERS = {
    "signal cnn": (signal_cnn, (3, 20), True),
    "lenet": (LeNet5, (1, 28, 28), True),
    "strided cnn": (strided_cnn, (2, 8, 8), True),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 10)), (6,), True),
    "odd": (Odd, (6,), False),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 10)), (6,), False),
}


@pytest.mark.parametrize("name", list(BUILDERS))
@pytest.mark.parametrize("stacked", [True, False])
def test_row_gradients_equal_module_gradients(name: str, stacked: bool) -> None:
    """Folded, under vmap or row by row, each row's gradient is that of its own module up to rounding in float64."""
    build, shape, folds = BUILDERS[name]
    model = FlatModel(build, precision="float64", stacked=stacked)
    params, stats = rows_of(model, 3)
    batch = batch_of(3, 5, shape)
    gradients = model.grad(params, stats, batch).params
    for i in range(3):
        module = build().double()
        module.load_state_dict(model.state_dict(model.init(i)))
        torch.testing.assert_close(gradients[i], plain_gradient(module, batch.x[i], batch.y[i]), rtol=1e-10, atol=1e-12)
    if stacked:
        assert model._uses_folded is folds


def test_padding_has_no_effect() -> None:
    """A padded sample changes no gradient, whatever its values."""
    model = FlatModel(lambda: nn.Linear(6, 10), precision="float64", stacked=True)
    params, stats = rows_of(model, 2)
    unpadded = batch_of(2, 3, (6,))
    padded = Batch(
        torch.cat([unpadded.x, 100 * torch.ones(2, 2, 6, dtype=torch.float64)], dim=1),
        torch.cat([unpadded.y, torch.zeros(2, 2, dtype=torch.int64)], dim=1),
        torch.cat([unpadded.weight, torch.zeros(2, 2, dtype=torch.float64)], dim=1),
        unpadded.key,
    )
    a, b = (model.grad(params, stats, batch).params for batch in (unpadded, padded))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_running_statistics_per_row() -> None:
    """BatchNorm's statistics are updated as in the module itself, are no parameters, and are used in predictions."""
    build = lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))  # noqa: E731
    model = FlatModel(build, precision="float64")
    assert model.size == 6 * 4 + 4 + 4 + 4 + 4 * 10 + 10
    assert model.stats_size == 8
    assert not model.stacked
    net, batch = model.init(1), batch_of(1, 5, (6,))
    after = model.grad(net.params[None], net.stats[None], batch).stats[0]
    module = build().double()
    module.load_state_dict(model.state_dict(net), strict=False)
    module(batch.x[0])
    torch.testing.assert_close(after, torch.cat([module[1].running_mean, module[1].running_var]))
    module.eval()
    torch.testing.assert_close(model.predict(net.params, after, batch.x[0]), module(batch.x[0]))


def test_dropout_depends_on_its_key_alone() -> None:
    """A row's dropout is the same folded, row by row and with other rows; another key drops other units."""
    build = lambda: nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 10))  # noqa: E731
    stacked, single = (FlatModel(build, precision="float64", stacked=s) for s in (True, False))
    params, stats = rows_of(stacked, 3)
    batch = batch_of(3, 4, (6,))
    folded = stacked.grad(params, stats, batch).params
    assert stacked._uses_folded
    torch.testing.assert_close(folded, single.grad(params, stats, batch).params, rtol=1e-10, atol=1e-12)
    alone = stacked.grad(params[1:2], stats[1:2], Batch(*(part[1:2] for part in batch))).params
    assert torch.equal(folded[1], alone[0])
    other = stacked.grad(params, stats, batch._replace(key=batch.key + 1)).params
    assert not torch.equal(folded, other)
    zeros = (folded[:, : 6 * 40].view(3, 40, 6) == 0).all(dim=2).float().mean()
    assert 0 < float(zeros) < 0.3  # a unit is dropped in all four samples with probability 1/16


def test_initial_models_depend_on_the_seed_alone() -> None:
    """The same seed gives the same bits in any state of torch's generator, and leaves that state unchanged."""
    model = FlatModel(LeNet5)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = model.init(3).params
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, model.init(3).params)
    assert not torch.equal(first, model.init(4).params)


def test_names_of_models() -> None:
    """auto selects the data set's network, a typo gets a suggestion, and module:factory imports the user's model."""
    assert isinstance(builder("auto", "mnist", (1, 28, 28), 10)(), LeNet5)
    assert isinstance(builder("waffle_fl.models.nets:linear", "mnist", (5,), 3)(), nn.Sequential)
    for name in ("lenet", "waffle_fl.nothing:x", "waffle_fl.models:nothing"):
        with pytest.raises(WaffleError, match=name.split(":")[0]):
            builder(name, "mnist", (1, 28, 28), 10)()


def test_models_that_cannot_train() -> None:
    """A model without parameters, and BatchNorm with a cumulative average, are rejected with one line."""
    with pytest.raises(WaffleError, match="parameters to train"):
        FlatModel(nn.ReLU)
    with pytest.raises(WaffleError, match="momentum"):
        FlatModel(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)))
    with pytest.raises(WaffleError, match="row by row"):
        FlatModel(DLA, stacked=True)


class Assigning(nn.Module):
    """A running mean by assignment, a scalar, an unused and a frozen parameter, and a view of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)
        self.conv, self.linear = nn.Conv2d(1, 3, 3), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.conv(x).view(len(x), -1) * self.frozen
        self.mean = 0.9 * self.mean + 0.1 * flat.detach().mean(dim=0)
        return self.linear(flat - self.mean) * self.scale  # type: ignore[no-any-return]


def test_unusual_modules_train() -> None:
    """A replaced buffer is recorded, a frozen parameter stays, an unused one has gradient 0, and views work."""
    model = FlatModel(Assigning, precision="float64")
    assert model.size == 1 + 3 + 3 * 9 + 3 + 120 + 10
    assert model.stats_size == 12 + 12
    params, stats = rows_of(model, 2)
    batch = batch_of(2, 4, (1, 4, 4))
    first = model.grad(params, stats, batch)
    again = model.grad(params, stats, batch)
    assert torch.equal(first.params, again.params)
    assert torch.equal(first.stats, again.stats)
    assert (first.params[:, 1:4] == 0).all()
    assert (first.stats[:, :12] == 1).all()
    module = Assigning().double()
    module.load_state_dict(model.state_dict(model.init(1)), strict=False)
    module(batch.x[1])
    torch.testing.assert_close(first.stats[1, 12:], module.mean)


def test_batch_statistics_are_never_padded() -> None:
    """BatchNorm trains row by row even without running statistics."""
    assert not FlatModel(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))).stacked
