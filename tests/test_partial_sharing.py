"""Methods that share only part of the model: splitting parameters into shared and personal layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from conftest import BATCH, CLASSES, FEATURES, fitted, make_federation, refusal, shared_model
from waffle_fl.algorithms import ALGORITHMS, SGD, for_model, training_key
from waffle_fl.algorithms.fedavg import FedAvg, Local
from waffle_fl.algorithms.fedbn import FedBN
from waffle_fl.algorithms.fedper import FedPer
from waffle_fl.algorithms.fedrep import FedRep
from waffle_fl.algorithms.partial_sharing import cut, join, parts
from waffle_fl.batches import Batches
from waffle_fl.cli.flags import options_class
from waffle_fl.config import RunConfig, Settings, check_run
from waffle_fl.engines.run_spec import RunSpec, initial_state
from waffle_fl.engines.simulate import simulate
from waffle_fl.experiment import Runtime, execute
from waffle_fl.experiment.factories import advice
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel, LeNet5

SIZES = (24, 10, 32, 14)  # no mini-batch of one sample, which batch normalisation rejects


def normalised() -> nn.Module:
    """Two layers with batch normalisation between them, and batch normalisation without parameters behind them."""
    body = nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU()
    return nn.Sequential(*body, nn.Linear(6, CLASSES), nn.BatchNorm1d(CLASSES, affine=False))


def normalising() -> FlatModel:
    return FlatModel(normalised, precision="float64")


def test_layers_are_in_order_of_definition() -> None:
    """Layers have the modules' names, their parameter counts, and a flag for normalisation."""
    assert FlatModel(LeNet5).layers.names == ("conv1", "conv2", "fc1", "fc2", "fc3")
    layers = normalising().layers
    assert layers.names == ("0", "1", "3", "4")
    assert layers.batch_norms == {"1", "4"}
    assert layers.params == (("0", 30), ("0", 6), ("1", 6), ("1", 6), ("3", 18), ("3", 3))
    assert layers.stats == (("1", 6), ("1", 6), ("4", 3), ("4", 3))


def test_a_head_counts_the_layers_that_train() -> None:
    """Modules without trainable parameters are not counted and belong to the layer before them."""
    layers = normalising().layers
    assert layers.head(0) == frozenset()
    assert layers.head(1) == {"3", "4"}
    assert layers.head(3) == {"0", "1", "3", "4"}
    assert refusal(layers.head, 4) == "expected head_layers of at most 3, which is all this model has, got 4"


@given(st.sets(st.sampled_from(["0", "1", "3", "4"])))
def test_split_and_join_are_inverse(own: set[str]) -> None:
    """Splitting and joining vectors and rows is lossless, and every number is either shared or personal."""
    layers = normalising().layers
    for stretches, runs in zip((layers.params, layers.stats), parts(layers, own), strict=True):
        layer_of = [layer for layer, count in stretches for _ in range(count)]
        flat = torch.arange(float(len(layer_of)))
        shared, kept = cut(flat, runs)
        assert [layer_of[int(i)] in own for i in shared] == [False] * len(shared)
        assert [layer_of[int(i)] in own for i in kept] == [True] * len(kept)
        assert torch.equal(join(shared, kept, runs), flat)
        rows = torch.stack([flat, -flat])
        assert torch.equal(join(*cut(rows, runs), runs), rows)


@pytest.mark.parametrize(("kind", "travels"), [(FedPer, (48, 12)), (FedRep, (48, 12)), (FedBN, (57, 0))])
def test_only_shared_layers_are_sent(kind: Any, travels: tuple[int, int]) -> None:
    """The server holds, sends and receives no parameter or statistic of a personal layer."""
    algorithm, federation, model = kind(SGD(0.1)), make_federation(SIZES), normalising()
    seen = []

    def watch(up: Any, r: int) -> Any:
        seen.append((up.dy.shape[1], up.stats.shape[1]))
        return up

    spec = RunSpec(algorithm, federation, 3, tamper=watch)
    (*_, (last,)) = simulate([spec], model, rounds=2, batch_size=BATCH)
    assert set(seen) == {travels}
    assert (len(last.state.server.x), len(last.state.server.stats)) == travels
    net = for_model(algorithm, model.layers).personal(*last.state, 4)
    assert net.params.shape == (4, model.size)
    assert net.stats.shape == (4, model.stats_size)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("kind", "personal"), [(FedBN, ("1.", "4.")), (FedPer, ("3.", "4.")), (FedAvg, ())])
def test_batch_normalisation_agrees_with_a_loop(kind: Any, personal: tuple[str, ...], momentum: float) -> None:
    """Parameters and statistics agree with a plain loop over modules, their optimisers and state dicts."""
    federation, model = make_federation(SIZES, alice=2), normalising()
    algorithm = for_model(kind(SGD(0.2, momentum)), model.layers)
    (*_, (last,)) = simulate([RunSpec(algorithm, federation, 5)], model, rounds=3, batch_size=BATCH)
    net = algorithm.personal(*last.state, 4)
    found = model.state_dict(type(net)(net.params[2], net.stats[2]))
    expected = by_hand(federation, model, personal, momentum)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-11, atol=1e-12)


def by_hand(federation: Federation, model: FlatModel, personal: tuple[str, ...], momentum: float) -> dict[str, Any]:
    """Return Alice's network after three rounds in which all layers but `home` are averaged, in plain PyTorch."""
    start = normalised().double()
    start.load_state_dict(model.state_dict(model.init(5)), strict=False)
    networks = [copy.deepcopy(start) for _ in range(federation.agents)]
    batches = Batches([federation], [5], BATCH, 1, torch.float64)
    for r in (1, 2, 3):
        plan = batches.plan(r, 0, slice(None))
        for i, network in enumerate(networks):
            optimiser = torch.optim.SGD(network.parameters(), lr=0.2, momentum=momentum)
            for rows, weight in zip(plan.samples[i, : batches.steps[i]], plan.weight[i], strict=False):
                optimiser.zero_grad()
                held = rows[weight > 0]
                output = network(federation.x[held].double())
                nn.functional.cross_entropy(output, federation.labels(i, held)).backward()
                optimiser.step()
        states = [network.state_dict() for network in networks]
        shared = [name for name in states[0] if not name.startswith(personal or "none") and "num_batches" not in name]
        mean = {name: torch.stack([state[name] for state in states]).mean(dim=0) for name in shared}
        for network in networks:
            network.load_state_dict(mean, strict=False)
    return networks[federation.alice].state_dict()


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_every_method_trains_batch_normalisation(method: str) -> None:
    """Every method trains a model with batch statistics, and its models stay finite."""
    spec = RunSpec(ALGORITHMS[method](sgd=SGD(0.05)), make_federation(SIZES), 3)
    (*_, (last,)) = simulate([spec], normalising(), rounds=3, batch_size=BATCH)
    assert last.error is None
    assert all(torch.isfinite(tensor).all() for part in last.state for tensor in part)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbn"])
def test_split_is_no_hyperparameter(method: str) -> None:
    """The split of the model is in no flag, config or file; different splits never share a graph or a stack."""
    config = RunConfig(method=method, settings=Settings())
    assert "parts" not in config.to_json()["options"]
    assert not hasattr(options_class(method)(), "parts")
    assert "unknown key 'parts'" in refusal(check_run, method, {}, {"parts": 1})
    algorithm = config.algorithm()
    assert "this method must know the model's layers" in refusal(algorithm.init, shared_model().init(0), 4)
    assert training_key(for_model(algorithm, shared_model().layers)) == training_key(fitted(algorithm))
    assert training_key(for_model(algorithm, normalising().layers)) != training_key(fitted(algorithm))


def test_a_head_larger_than_the_model_is_refused_before_any_work(tmp_path: Path) -> None:
    """The error is one line, and no run folder is created."""
    config = check_run("fedper", {"rounds": 1}, {"head_layers": 3})
    line = refusal(execute, [(config, tmp_path / "run")], Runtime())
    assert "head_layers of at most 2" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stacked", [True, False])
def test_step_positions(stacked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step t counts from 0 and K_i is the row's number of mini-batches, regardless of the other rows."""
    positions: dict[int, list[int]] = {}
    step = FedAvg.step

    def watched(self: FedAvg, local: Local, grad: Any) -> Local:
        assert grad.t.shape == (1,)
        for k in grad.steps.tolist():
            positions.setdefault(k, []).append(int(grad.t))
        return step(self, local, grad)

    monkeypatch.setattr(FedAvg, "step", watched)
    spec = RunSpec(FedAvg(SGD(0.1)), make_federation((23, 8)), 3)  # 3 steps and 1 step
    list(simulate([spec], shared_model(stacked=stacked), rounds=1, batch_size=BATCH, workers=1))
    assert positions[3] == [0, 1, 2]
    assert positions[1][:1] == [0]


def test_initial_states_form_the_seed_s_model() -> None:
    """Before the first round every agent's personal and shared layers form the seed's model."""
    model = normalising()
    for kind in (FedPer, FedRep, FedBN):
        spec = RunSpec(kind(SGD(0.1)), make_federation(SIZES), 3)
        net = for_model(spec.algorithm, model.layers).personal(*initial_state(spec, model), 4)
        assert torch.equal(net.params, model.init(3).params.expand(4, -1))
        assert torch.equal(net.stats, model.init(3).stats.expand(4, -1))


def test_degenerate_settings_are_noted() -> None:
    """A note before the run says that nothing is personal, nothing is shared, or mini-batches are too few."""
    federation = make_federation((23, 8))

    def notes(method: str, **options: Any) -> list[str]:
        config = RunConfig(method=method, settings=Settings(batch_size=BATCH), options=options)
        return advice(config, federation, getattr(fitted(config.algorithm()), "parts", None))

    assert notes("fedbn") == ["no layer of this model is personal: one model for all agents"]
    assert notes("fedper", head_layers=2) == ["every layer of this model is personal: this is Local"]
    assert notes("per-fedavg") == ["agent 1: fewer than 2 mini-batches per round, which an update needs"]
    assert notes("fedper") == notes("fedrep") == notes("fedavg") == []
