"""FlatModel trains any module with the gradients of plain autograd, stacked or row by row."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from conftest import BATCH, CLASSES, FEATURES, make_federation
from waffle_fl import SGD, FedAvg, RunSpec, simulate
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation
from waffle_fl.models import Batch, FlatModel, Net, ready
from waffle_fl.models.seeding import generator_states
from waffle_fl.models.stacking_trial import warn_once

Build = Callable[[], nn.Module]
WORDS = 7


class Attention(nn.Module):
    """Attention over the five features as five tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(1, 4), nn.Linear(4, CLASSES)
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.enter(x[..., None])
        return self.leave(self.attention(tokens, tokens, tokens)[0].mean(dim=1))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True)
        self.enter, self.leave = nn.Linear(1, 4), nn.Linear(4, CLASSES)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.encoder(self.enter(x[..., None])).mean(dim=1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], dropout: float = 0.0) -> None:
        super().__init__()
        self.cells = kind(1, 4, num_layers=2, batch_first=True, dropout=dropout)  # type: ignore[arg-type]
        self.leave = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.cells(x[..., None])[0][:, -1])  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Encoder and decoder share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.leave = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, CLASSES)
        self.decoder = nn.Linear(FEATURES, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.encoder(x)) @ self.decoder.weight)  # type: ignore[no-any-return]


class TiedWords(nn.Module):
    """Embedding and output layer share their word vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).mean(dim=1))  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """Draws random numbers from torch, NumPy or Python."""

    def __init__(self, source: str = "torch") -> None:
        super().__init__()
        self.leave, self.source = nn.Linear(FEATURES, CLASSES), source

    def forward(self, x: Tensor) -> Tensor:
        draws = {"torch": lambda: torch.rand(x.shape, dtype=x.dtype), "numpy": np.random.rand, "python": random.random}
        return self.leave(x + draws[self.source]())  # type: ignore[no-any-return,operator]


class Branching(nn.Module):
    """The path and the number of loop steps depend on the values of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.leave = (nn.Linear(FEATURES, n) for n in (FEATURES, FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.abs().mean() > 1)):
            x = torch.tanh(self.one(x) if x.sum() > 0 else self.other(x))
        return self.leave(x)  # type: ignore[no-any-return]


class InPlace(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(x.mul_(2).clamp_(min=0))  # type: ignore[no-any-return]


class Centred(nn.Module):
    """Mixes the samples of a batch, so that padding changes the other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(x - x.mean(dim=0))  # type: ignore[no-any-return]


class Masked(nn.Module):
    """Selects entries by a mask, so that shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.leave = nn.Parameter(torch.ones(())), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[x > 0] = self.scale * x[x > 0]
        return self.leave(y)  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    module[0].weight.requires_grad_(False)
    return module


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(CLASSES))


def normalised(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), layer, nn.Linear(4, CLASSES))


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 3), nn.Flatten(), nn.Linear(3 * FEATURES, CLASSES))


DETERMINISTIC_MODULES: dict[str, Build] = {  # each row's gradient equals autograd's on the module itself
    "attention": Attention,
    "transformer": lambda: Transformer(0.0),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(FEATURES, 4)), nn.Tanh(), nn.Linear(4, CLASSES)),
    "tied": Tied,
    "lazy": lazy,
    "BatchNorm": lambda: normalised(nn.BatchNorm1d(4)),
    "GroupNorm": lambda: normalised(nn.GroupNorm(2, 4)),
    "embedding": embedding,
    "tied words": TiedWords,
    "frozen": frozen,
    "branching": Branching,
    "in place": InPlace,
    "centred": Centred,
    "masked": Masked,
}
RANDOM_MODULES: dict[str, Build] = {
    "attention": lambda: Attention(0.3),
    "transformer": Transformer,
    "LSTM": lambda: Recurrent(nn.LSTM, 0.3),
    "torch.rand": Noisy,
    "NumPy": lambda: Noisy("numpy"),
    "Python": lambda: Noisy("python"),
    "AlphaDropout": lambda: normalised(nn.AlphaDropout(0.5)),
    "RReLU": lambda: normalised(nn.RReLU()),
    "Dropout1d": lambda: nn.Sequential(
        nn.Unflatten(1, (FEATURES, 1)), nn.Dropout1d(), nn.Flatten(), nn.Linear(FEATURES, CLASSES)
    ),
}
WORD_MODULES = ("embedding", "tied words")


@pytest.fixture(autouse=True)
def clear_warnings() -> Iterator[None]:
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def federation_for(name: str) -> Federation:
    """Return three agents, with word indices as inputs where the module embeds words."""
    if name not in WORD_MODULES:
        return make_federation((19, 8, 11))
    numbers, classes = np.random.default_rng(0), WORDS if name == "tied words" else CLASSES
    agents = {}
    for i, n in enumerate((19, 8, 11)):
        y = np.arange(n + 7) % classes
        x = numbers.integers(0, WORDS, (n + 7, FEATURES))
        x[:, 0] = y
        agents[f"agent {i}"] = (x[:n], y[:n], x[n:], y[n:])
    return Federation.from_arrays(agents, class_names=[f"class {k}" for k in range(classes)], duplicates="keep")


def model_for(name: str, build: Build, federation: Federation, prepared: bool = True) -> FlatModel:
    model = FlatModel(build, precision="float64")
    return model.prepared(federation.x[:2], federation.y[:2]) if prepared or name == "lazy" else model


def rows_of(federation: Federation, model: FlatModel, size: int = 6) -> tuple[Net, Batch]:
    """Return three models and one mini-batch for each."""
    nets = [model.init(seed) for seed in range(3)]
    picked = torch.stack([rows[:size] for rows in federation.train])
    weight = torch.ones(3, size, dtype=torch.float64)
    batch = Batch(federation.x.double()[picked], federation.y[picked], weight, torch.arange(3) + 11)
    return Net(torch.stack([net.params for net in nets]), torch.stack([net.stats for net in nets])), batch


def own_gradient(build: Build, state: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[nn.Module, Tensor]:
    module = build().double()
    module(x.clone())  # gives lazy layers their size
    module.load_state_dict(state, strict=False)
    module.train()
    nn.functional.cross_entropy(module(x.clone()), y).backward()
    gradients = [p.grad for p in module.parameters() if p.requires_grad]
    return module, torch.cat([g.flatten() for g in gradients if g is not None])


@pytest.mark.parametrize("name", list(DETERMINISTIC_MODULES))
def test_row_gradients_equal_autograd(name: str) -> None:
    """Gradients, outputs, losses and features of each of three rows equal the module's own to 1e-10 in float64."""
    federation = federation_for(name)
    model = model_for(name, DETERMINISTIC_MODULES[name], federation)
    net, batch = rows_of(federation, model)
    before = batch.x.clone()
    gradients = model.grad(*net, batch).params
    assert torch.equal(before, batch.x)
    losses = model.batch_losses(*net, batch)
    for i in range(3):
        x = batch.x[i].long() if name in WORD_MODULES else batch.x[i]
        own = Net(net.params[i], net.stats[i])
        module, expected = own_gradient(DETERMINISTIC_MODULES[name], model.state_dict(own), x, batch.y[i])
        torch.testing.assert_close(gradients[i], expected, rtol=1e-10, atol=1e-12)
        module.load_state_dict(model.state_dict(own), strict=False)  # the statistics before the forward pass
        output = module.eval()(x.clone())
        torch.testing.assert_close(model.predict(*own, batch.x[i]), output.detach(), rtol=1e-10, atol=1e-12)
        expected_losses = nn.functional.cross_entropy(output, batch.y[i], reduction="none")
        torch.testing.assert_close(losses[i], expected_losses.detach(), rtol=1e-10, atol=1e-12)
        assert len(model.features(*own, batch.x[i])[1]) == len(batch.x[i])
    if not model.stats_size:
        rows = model.predict_rows(net.params, batch.x)
        alone = torch.stack([model.predict(p, p[:0], x) for p, x in zip(net.params, batch.x, strict=True)])
        torch.testing.assert_close(rows, alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", list(DETERMINISTIC_MODULES))
def test_any_module_trains(name: str) -> None:
    """Two rounds of three agents end with the same model whether or not the model was prepared."""
    federation = federation_for(name)
    ends = []
    for prepared in (True, False):
        model = model_for(name, DETERMINISTIC_MODULES[name], federation, prepared)
        specs = [RunSpec(FedAvg(SGD(0.1)), federation, 1)]
        *_, outcomes = simulate(specs, model, rounds=2, batch_size=BATCH, epochs=1, workers=1)
        ends.append(outcomes[0].state.server.x)
        assert ends[-1].isfinite().all()
        assert not torch.equal(ends[-1], model.init(1).params)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", list(DETERMINISTIC_MODULES))
def test_training_equals_a_plain_loop(name: str) -> None:
    """Two rounds of one agent on all its samples equal as many steps of torch.optim.SGD."""
    federation = federation_for(name).only(0)
    model = model_for(name, DETERMINISTIC_MODULES[name], federation)
    specs = [RunSpec(FedAvg(SGD(0.1)), federation, 1)]
    *_, outcomes = simulate(specs, model, rounds=2, batch_size=32, epochs=2, workers=1)
    x, y = federation.x[federation.train[0]], federation.y[federation.train[0]]
    x = x.long() if name in WORD_MODULES else x.double()
    module = DETERMINISTIC_MODULES[name]().double()
    module(x.clone())
    module.load_state_dict(model.state_dict(model.init(1)), strict=False)
    steps = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for _ in range(4):
        steps.zero_grad()
        nn.functional.cross_entropy(module(x.clone()), y).backward()
        steps.step()
    server = outcomes[0].state.server
    found = model.state_dict(Net(server.x, server.stats))
    expected = {key: value for key, value in module.state_dict().items() if key in found}
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", list(RANDOM_MODULES))
def test_draws_depend_on_the_row_key(name: str) -> None:
    """A row's draws depend only on its key, not on other rows, and leave the global generators unchanged."""
    federation = federation_for(name)
    model = model_for(name, RANDOM_MODULES[name], federation)
    assert not model.stacked
    assert not model.capturable
    net, batch = rows_of(federation, model)
    together = model.grad(*net, batch).params
    alone = model.grad(net.params[1:2], net.stats[1:2], Batch(*(part[1:2] for part in batch))).params
    torch.rand(3)
    again = model.grad(*net, batch).params
    other = model.grad(*net, batch._replace(key=batch.key + 1)).params
    assert torch.equal(together[1], alone[0])
    assert torch.equal(together, again)
    assert not torch.equal(together, other)
    torch.testing.assert_close(
        model.predict(net.params[0], net.stats[0], batch.x[0]),
        model.predict(net.params[0], net.stats[0], batch.x[0]),
        rtol=0,
        atol=0,
    )
    torch.manual_seed(0)
    before = generator_states(model.device)
    model.grad(*net, batch)
    model.predict(net.params[0], net.stats[0], batch.x[0])
    assert generator_states(model.device) == before


@pytest.mark.parametrize("name", list(RANDOM_MODULES))
def test_random_modules_repeat(name: str) -> None:
    """Two runs of two rounds agree bit for bit, with one worker or two, prepared or not."""
    federation = federation_for(name)

    def end(prepared: bool, workers: int) -> Tensor:
        model = model_for(name, RANDOM_MODULES[name], federation, prepared)
        specs = [RunSpec(FedAvg(SGD(0.1)), federation, 1)]
        *_, outcomes = simulate(specs, model, rounds=2, batch_size=BATCH, workers=workers)
        return outcomes[0].state.server.x  # type: ignore[no-any-return]

    first = end(True, 1)
    torch.manual_seed(5)
    assert torch.equal(first, end(True, 2))
    assert torch.equal(first, end(False, 1))


def test_row_by_row_training_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One log line says which module trains row by row and why, whether this is found in preparation or in training."""
    federation = federation_for("")
    with caplog.at_level(logging.WARNING, "waffle_fl"):
        for prepared in (False, True, True):
            model = model_for("", Noisy, federation, prepared)
            net, batch = rows_of(federation, model)
            for _ in range(2):
                model.grad(*net, batch)
    (record,) = caplog.records
    assert record.getMessage() == (
        "Noisy trains row by row, which is slower than stacked rows: its forward pass draws random numbers"
    )


@pytest.mark.parametrize(
    ("build", "stacked", "folds"),
    [
        (lambda: nn.Linear(FEATURES, CLASSES), True, True),
        (lambda: normalised(nn.Dropout(0.5)), True, True),
        (lambda: normalised(nn.LayerNorm(4)), True, False),
        (Tied, True, False),
        (lambda: Recurrent(nn.LSTM), True, False),
        (lambda: Transformer(0.0), False, False),
        (Centred, False, False),
        (Branching, False, False),
        (Masked, False, False),
    ],
)
def test_rows_are_stacked_where_gradients_agree(build: Build, stacked: bool, folds: bool) -> None:
    """Only modules whose padded stack has the gradients of single rows are stacked."""
    model = model_for("", build, federation_for(""))
    assert (model.stacked, model._uses_folded) == (stacked, folds)


def test_training_starts_from_a_module_s_weights() -> None:
    """The weights of a given module are the initial model of every seed, and the module stays unchanged."""
    module = nn.Linear(FEATURES, CLASSES)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    model = FlatModel(module, precision="float64")
    assert torch.equal(model.init(1).params, weights.double())
    assert torch.equal(model.init(2).params, weights.double())
    assert module.weight.dtype == torch.float32
    with torch.no_grad():
        module.weight.zero_()
    assert torch.equal(model.init(1).params, weights.double())
    factory = FlatModel(lambda: module, precision="float64")
    assert factory.init(1).params.dtype == torch.float64
    assert module.weight.dtype == torch.float32


def test_tied_weights() -> None:
    """A tied matrix occurs once in the flat vector; a saved model names it twice and loads into the module."""
    model = FlatModel(TiedWords, precision="float64")
    assert model.size == WORDS * 4 + WORDS
    net = model.init(3)
    state = model.state_dict(net)
    assert set(state) == {"encoder.weight", "decoder.weight", "decoder.bias"}
    assert torch.equal(state["encoder.weight"], state["decoder.weight"])
    module = TiedWords().double()
    module.load_state_dict(state)
    x = torch.randint(0, WORDS, (4, FEATURES))
    torch.testing.assert_close(model.predict(*net, x.double()), module(x).detach())


def test_weight_norm_is_part_of_its_layer() -> None:
    """The two parts of a weight-normed matrix belong to the layer that uses them."""
    model = FlatModel(DETERMINISTIC_MODULES["weight norm"])
    assert model.layers.names == ("0", "2")
    assert set(model.state_dict(model.init(0))) == {
        *("0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"),
        *("2.weight", "2.bias"),
    }


def test_lazy_layers_need_a_sample() -> None:
    """Without a sample, one line says what to do; after preparation the same seed gives the same model."""
    model = FlatModel(lazy, precision="float64")
    for read in (lambda: model.size, lambda: model.stacked, lambda: model.layers, lambda: model.init(1)):
        with pytest.raises(WaffleError, match=r"lazy layers \(0, 2\): call model.prepared\(x, y\)"):
            read()
    assert not hasattr(FlatModel(nn.Linear(2, 2)), "nothing")
    federation = federation_for("")
    assert model.prepared(federation.x[:2], federation.y[:2]) is model
    assert model.size == FEATURES * 4 + 4 + 4 * CLASSES + CLASSES
    assert torch.equal(model.init(1).params, model_for("lazy", lazy, federation).init(1).params)
    assert not torch.equal(model.init(1).params, model.init(2).params)


def test_ready_modules_work_without_flat_model() -> None:
    """Outside FlatModel too, lazy layers have their size and word indices may be floats."""
    assert ready(lazy, (FEATURES,))()[0].in_features == FEATURES
    module, words = ready(embedding, (FEATURES,))(), torch.randint(0, WORDS, (2, FEATURES))
    assert torch.equal(module(words.float()), module(words))


def test_preparing_does_not_change_generators() -> None:
    federation = federation_for("")
    before = generator_states(torch.device("cpu"))
    for build in (Noisy, Transformer, lazy):
        model_for("", build, federation)
    assert generator_states(torch.device("cpu")) == before
