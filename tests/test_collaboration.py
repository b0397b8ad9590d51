"""Methods in which agents use each other's models: special cases, properties and engine support."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import CLASSES, fitted, make_federation, outcomes_of, shared_model
from reference.collaboration import bipartition, nearest
from test_shared_training import outcomes
from waffle_fl.algorithms import ALGORITHMS, SGD, TITLES, about_of
from waffle_fl.algorithms.apple import APPLE
from waffle_fl.algorithms.cfl import CFL, bottlenecks, cosines, split_clusters
from waffle_fl.algorithms.fedala import FedALA
from waffle_fl.algorithms.fedamp import FedAMP, attention
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.fedfomo import FedFomo
from waffle_fl.algorithms.ifca import IFCA, starts
from waffle_fl.algorithms.knn_per import KNNPer
from waffle_fl.algorithms.local import Local
from waffle_fl.algorithms.model_offers import best_others, packed, spread
from waffle_fl.cli import _run as waffle
from waffle_fl.config import Settings, check_run
from waffle_fl.engines import candidate_losses
from waffle_fl.engines.candidate_losses import CandidateLosses
from waffle_fl.engines.evaluation import predictor_of
from waffle_fl.engines.run_spec import RunSpec, State, initial_state, on_device
from waffle_fl.engines.simulate import simulate
from waffle_fl.engines.tree import rows_of
from waffle_fl.experiment import Runtime, advice, federation_of, model_of
from waffle_fl.federation import Federation
from waffle_fl.models import FlatModel, Net, cnn, linear
from waffle_fl.report.charts import COLORS
from waffle_fl.tensorfile import read_named

LR = SGD(0.2)


def run(algorithm: Any, federation: Federation | None = None, rounds: int = 6, state: State | None = None) -> list[Any]:
    return outcomes_of(
        RunSpec(fitted(algorithm), federation or make_federation(), 3, state=state), shared_model(), rounds
    )


def models(algorithm: Any, outcome: Any, agents: int = 4) -> torch.Tensor:
    return algorithm.personal(outcome.state.server, outcome.state.agents, agents).params


def local_models(rounds: int = 6) -> torch.Tensor:
    return run(Local(LR), rounds=rounds)[-1].state.agents.y


def label_groups(sizes: tuple[int, ...] = (40, 40, 40, 40)) -> Federation:
    """Return a federation in which agents 1 and 3 have reversed labels."""
    federation = make_federation(sizes)
    flipped = federation.relabel.flip(1)
    odd = torch.arange(len(sizes))[:, None] % 2 == 1
    return replace(federation, relabel=torch.where(odd, flipped, federation.relabel))


def test_fedamp_without_attraction_is_local() -> None:
    """With lam = 0 every agent trains alone."""
    amp = FedAMP(LR, lam=0.0)
    torch.testing.assert_close(models(amp, run(amp)[-1]), local_models(), rtol=1e-12, atol=1e-12)


def test_fedamp_draws_models_together() -> None:
    """A stronger attraction keeps the agents' models closer to each other."""
    spreads = []
    for lam in (0.0, 0.5, 2.0):
        amp = FedAMP(LR, lam=lam, sigma=3.0)
        spreads.append(float(models(amp, run(amp)[-1]).std(dim=0).norm()))
    assert spreads[0] > spreads[1] > spreads[2]


@given(
    points=st.lists(st.floats(-3, 3), min_size=2, max_size=6),
    sigma=st.floats(0.05, 20),
    alpha=st.floats(0.05, 20),
    absent=st.integers(0, 5),
)
def test_attention_is_a_convex_combination(points: list[float], sigma: float, alpha: float, absent: int) -> None:
    """Rows of xi are non-negative, sum to 1, are 0 for missing agents, and favour nearer agents."""
    w = torch.tensor(points, dtype=torch.float64)[:, None]
    received = torch.arange(len(points)) != absent
    xi = attention(w, received, alpha, sigma)
    assert (xi >= -1e-12).all()
    torch.testing.assert_close(xi.sum(dim=1), torch.ones(len(points), dtype=torch.float64))
    for i in range(len(points)):
        others = [j for j in range(len(points)) if j != i]
        assert all(xi[i, j] == 0 for j in others if not received[j])
        ranked = sorted((j for j in others if received[j]), key=lambda j: abs(points[i] - points[j]))
        assert all(xi[i, a] >= xi[i, b] - 1e-15 for a, b in pairwise(ranked))


def test_ifca_with_one_cluster_is_fedavg() -> None:
    """IFCA with one cluster equals FedAvg bit for bit, weights included."""
    one, all_ = run(IFCA(LR, clusters=1))[-1], run(FedAvg(LR))[-1]
    assert torch.equal(one.state.server.theta[0], all_.state.server.x)
    assert one.measured["weights"] == all_.measured["weights"]


def test_ifca_separates_two_label_groups() -> None:
    """Agents with opposite labels end in different clusters, agents with equal labels in one."""
    last = run(IFCA(LR, clusters=2), label_groups(), rounds=12)[-1]
    assert last.measured["weights"] == [0.5, 0.0, 0.5, 0.0]
    assert last.state.server.chosen.sum(dim=0).tolist() == [2.0, 2.0]


def test_initial_clusters_differ_in_signs() -> None:
    """Initial cluster models differ only in signs; the first is unchanged, and gains of 1 are kept."""
    net = shared_model().init(3)
    params = torch.cat([net.params, torch.ones(5, dtype=torch.float64)])
    theta = starts(Net(params, net.stats), 3)
    assert torch.equal(theta[0], params)
    assert torch.equal(theta.abs(), params.abs().expand(3, -1))
    assert (theta[:, -5:] == 1).all()
    assert 0.3 < float((theta[1] != theta[2]).double().mean()) < 0.7


def test_cfl_without_splits_is_fedavg() -> None:
    """eps_mean = 0 keeps all agents in one cluster."""
    last = run(CFL(LR, eps_mean=0.0))[-1]
    expected = run(FedAvg(LR))[-1].state.server.x.expand(4, -1)
    torch.testing.assert_close(last.state.server.x, expected, rtol=1e-12, atol=1e-12)
    assert last.measured["clusters"] == 1


def test_cfl_separates_two_label_groups() -> None:
    """Agents with opposite labels are separated, and each cluster then trains its own model."""
    last = run(CFL(LR, eps_mean=0.3, eps_max=0.5), label_groups(), rounds=12)[-1]
    assert last.measured["weights"] == [0.5, 0.0, 0.5, 0.0]
    assert last.measured["clusters"] == 2
    assert torch.equal(last.state.server.x[0], last.state.server.x[2])


@given(agents=st.integers(2, 6), seed=st.integers(0, 999), absent=st.integers(0, 9))
def test_bipartition_is_optimal(agents: int, seed: int, absent: int) -> None:
    """Cutting the weakest link gives the optimal bipartition; missing agents stay in the first cluster."""
    dy = torch.randn(agents, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    received = torch.arange(agents) != absent
    together = received & received[:, None]
    members = [i for i in range(agents) if received[i]]
    label = split_clusters(
        torch.zeros(agents, dtype=torch.int64), bottlenecks(cosines(dy), together), together, received
    )
    if len(members) < 2:
        assert label.tolist() == [0] * agents
        return
    parts = {frozenset(i for i in members if label[i] == k) for k in label[members].tolist()}
    assert parts == {frozenset(part) for part in bipartition(members, dict(enumerate(dy)))}
    assert all(label[i] == label[members[0]] == 0 for i in range(agents) if not received[i])
    assert all(int(k) == min(i for i in members if label[i] == k) for k in label[members].unique() if k)


def test_fedfomo_weighs_similar_agents() -> None:
    """Models of agents with reversed labels have almost no weight; the agent's own and similar models have it all."""
    weights = torch.tensor([o.measured["weights"] for o in run(FedFomo(LR), label_groups(), rounds=10)])
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(10))
    assert weights[1:, [1, 3]].sum() < 0.05 * weights[1:, [0, 2]].sum()
    assert (weights[:, 2] > 0).any()


@given(agents=st.integers(1, 8), places=st.integers(1, 9), explore=st.floats(0, 1), r=st.integers(0, 99))
def test_offers(agents: int, places: int, explore: float, r: int) -> None:
    """An agent is offered as many others as fit, without itself, missing agents or duplicates."""
    score = torch.linspace(0, 1, agents, dtype=torch.float64).expand(agents, -1)
    present = torch.arange(agents) != 2
    offer = best_others(score, present, places, explore, torch.tensor(r))
    rows = torch.arange(agents, dtype=torch.float64)[:, None] + 1
    for i in range(agents):
        ids = offer.ids[i][offer.offered[i]].tolist()
        assert i not in ids
        assert 2 not in ids
        assert len(set(ids)) == len(ids) == min(places, sum(bool(present[j]) for j in range(agents) if j != i))
        if not explore:
            able = [j for j in range(agents) if j not in (i, 2)]
            assert sorted(ids) == able[-len(ids) :] if ids else True
    sent = packed(rows, offer)[:, :, 0]
    assert torch.equal(spread(sent, offer), torch.where(spread(torch.ones_like(sent), offer) > 0, rows.T, 0.0))


def test_offers_change_from_round_to_round() -> None:
    """With few places, exploration offers every model in time; without exploration the offers stay the same."""
    score, present = torch.zeros(9, 9, dtype=torch.float64), torch.ones(9, dtype=torch.bool)
    seen: dict[float, set[int]] = {0.0: set(), 0.5: set()}
    for explore, met in seen.items():
        for r in range(60):
            met.update(best_others(score, present, 2, explore, torch.tensor(r)).ids[0].tolist())
    assert seen == {0.0: {1, 2}, 0.5: set(range(1, 9))}


@pytest.mark.parametrize("kind", [FedFomo, APPLE])
def test_fewer_models_than_agents(kind: Any) -> None:
    """With two places for three others a run trains, and an agent mixes at most three models."""
    for outcome in run(kind(LR, models=2)):
        assert sum(weight > 0 for weight in outcome.measured["weights"]) <= 3
        assert outcome.error is None


def test_apple_with_its_own_core_model_is_local() -> None:
    """With p fixed at the agent's own core model, APPLE equals plain local SGD."""
    federation, model = make_federation(), shared_model()
    apple = APPLE(LR, eta_p=0.0, core_step="paper")
    server, agents = initial_state(RunSpec(apple, federation, 3), model)
    samples = federation.samples.double()
    shift = torch.eye(4, dtype=torch.float64) - samples / samples.sum()
    last = run(apple, state=State(server._replace(samples=samples, received=samples > 0, shift=shift), agents))[-1]
    torch.testing.assert_close(models(apple, last), local_models(), rtol=1e-11, atol=1e-12)
    assert last.measured["weights"] == pytest.approx([1, 0, 0, 0], abs=1e-12)


def test_missed_apple_agent_keeps_its_proportions() -> None:
    """A core model whose update was lost is not offered in the next round, and its agent trains on as before."""

    def lost(up: Any, r: int) -> Any:
        return type(up)(*(field.index_fill(0, torch.tensor([3]), torch.nan) if r == 4 else field for field in up))

    apple = APPLE(LR, eta_p=0.02)
    spec = RunSpec(apple, make_federation(), 3, tamper=lost)
    before, missed, after, _ = (o.state.server for o in outcomes_of(spec, shared_model(), rounds=6)[2:])
    assert torch.equal(missed.taken[3], before.taken[3])
    down = apple.broadcast(missed, 4)
    assert down.offered.sum(dim=1).tolist() == [2, 2, 2, 3]
    assert (down.p0[3] > 0).sum() == 4
    assert after.taken[0, 3] == 0
    assert after.taken[3, 0] != 0


def test_apple_pulls_proportions_back() -> None:
    """While lambda is positive, a large mu keeps p closer to the sample shares than mu = 0."""
    away = []
    for mu in (0.0, 20.0):
        state = run(APPLE(LR, eta_p=0.02, mu=mu, global_share=1.0))[-1].state
        away.append(float(state.server.shift.abs().sum()))
    assert away[0] > away[1] > 0


def test_fedala_without_learning_is_fedavg() -> None:
    """With eta_w = 0 every round starts from the global model, as in FedAvg; otherwise W stays in [0, 1]."""
    torch.testing.assert_close(run(FedALA(LR, eta_w=0.0))[-1].state.server.x, run(FedAvg(LR))[-1].state.server.x)
    W = run(FedALA(LR))[-1].state.agents.W
    assert 0 <= W.min() < 1
    assert W.max() == 1


def test_fedala_of_the_last_layer_takes_the_others_from_the_global_model() -> None:
    """With head_layers = 1 only the last layer has weights; earlier layers start from the global model."""
    ala = fitted(FedALA(LR, head_layers=1))
    state = run(ala)[-1].state
    head = 6 * CLASSES + CLASSES
    assert state.agents.W.shape == (4, head)
    local = ala.begin(ala.broadcast(state.server, 4), state.agents)
    assert torch.equal(local.y[:, :-head], state.server.x[:-head].expand(4, -1))
    assert not torch.equal(local.y[:, -head:], state.server.x[-head:].expand(4, -1))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("held_out", [True, False])
def test_candidate_losses_use_own_samples(stacked: bool, held_out: bool) -> None:
    """Losses are means over the agent's validation samples if it has any, else over its training samples."""
    federation, model = make_federation().to("cpu", torch.float64), shared_model(stacked=stacked)
    validation = tuple(f.clone() for f in (federation.test if held_out else federation.validation))
    federation = replace(federation, validation=validation)
    fomo = FedFomo(LR)
    server, agents = outcomes_of(RunSpec(fomo, federation, 3), model, rounds=3)[-1].state
    rows = slice(1, 3)
    down, agents = rows_of(fomo.broadcast(server, 4), rows), rows_of(agents, rows)
    down = CandidateLosses(fomo, model, [federation], [3]).into(down, agents, rows, 4)
    nets = fomo.candidates(down, agents)
    for row, agent in ((0, 1), (1, 2)):
        own = validation[agent] if held_out else federation.train[agent]
        for k in range(2 + 3):
            output = model.predict(nets.params[row, k], nets.stats[row, k], federation.x[own])
            expected = model.losses(output, federation.labels(agent, own)).mean()
            assert float(down.losses[row, k]) == pytest.approx(float(expected), rel=1e-12)


def test_candidate_losses_use_the_labels_of_the_round() -> None:
    """When an agent's labels drift, candidate losses use the labels of the current round."""
    plain, model = make_federation().to("cpu", torch.float64), shared_model()
    later, turn = plain.relabel.roll(1, dims=1), torch.full((len(plain.x),), 0.5, dtype=torch.float64)
    federation, fomo = replace(plain, later=later, turn=turn), FedFomo(LR)
    server, agents = outcomes_of(RunSpec(fomo, federation, 3), model, rounds=4)[-1].state
    down = fomo.broadcast(server, 4)
    judge, nets = CandidateLosses(fomo, model, [federation], [3], rounds=4), fomo.candidates(down, agents)
    for r in (2, 3):
        own = federation.train[1]
        output = model.predict(nets.params[1, 0], nets.stats[1, 0], federation.x[own])
        expected = model.losses(output, federation.labels(1, own, r / 4)).mean()
        losses = judge.into(down, agents, slice(None), r).losses
        assert float(losses[1, 0]) == pytest.approx(float(expected), rel=1e-12)


def test_candidate_losses_of_one_site() -> None:
    """A site with only its own data and row computes the same loss bits as the simulator."""
    federation, model = make_federation(), shared_model(torch.float32)
    ifca = IFCA(LR)
    (spec,) = on_device([RunSpec(ifca, federation, 3)], model)
    server, agents = outcomes_of(spec, model, rounds=2)[-1].state
    down = ifca.broadcast(server, 4)
    among = CandidateLosses(ifca, model, [spec.federation], [3]).into(down, agents, slice(None), 3).losses
    for i in range(4):
        row = slice(i, i + 1)
        alone = CandidateLosses(ifca, model, [spec.federation.only(i)], [3])
        losses = alone.into(rows_of(down, row), rows_of(agents, row), slice(None), 3).losses
        assert torch.equal(losses[0], among[i])


def test_candidate_losses_use_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a fixed number of samples, spread over all, is used for candidate losses."""
    monkeypatch.setattr(candidate_losses, "SAMPLES", 10)
    parts = [candidate_losses._subsample(torch.arange(n)) for n in (32, 9, 0)]
    assert [len(part) for part in parts] == [8, 9, 0]
    assert parts[0].max() >= 28


@pytest.mark.parametrize(("mix", "k", "scale"), [(0.5, 10, 0.1), (0.9, 3, 1.0), (1.0, 500, 0.5)])
def test_knn_per_agrees_with_the_reference(mix: float, k: int, scale: float) -> None:
    """The probabilities of each test sample agree with the reference's plain loops."""
    federation, model = make_federation().to("cpu", torch.float64), shared_model()
    knn = KNNPer(LR, mix=mix, k=k, scale=scale)
    state = outcomes_of(RunSpec(knn, federation, 3), model)[-1].state
    net = Net(state.server.x, state.server.stats)
    tensors = model.state_dict(net)

    def hidden(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ tensors["1.weight"].T + tensors["1.bias"])

    own, tests = federation.train[0], federation.test[0]
    known, labels = list(hidden(federation.x[own])), federation.labels(0, own).tolist()
    answer = predictor_of(knn, model, net, federation)(federation.x[tests])
    probabilities = model.predict(*net, federation.x[tests]).softmax(dim=1)
    expected = [
        nearest(sample, known, labels, row, k, mix, scale)
        for sample, row in zip(hidden(federation.x[tests]), probabilities, strict=True)
    ]
    torch.testing.assert_close(answer.exp(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_knn_per_without_neighbours_is_fedavg() -> None:
    """With mix = 0 model and scores equal FedAvg's bit for bit."""
    knn, avg = run(KNNPer(LR, mix=0.0))[-1], run(FedAvg(LR))[-1]
    assert torch.equal(knn.state.server.x, avg.state.server.x)
    assert knn.measured["accuracy"] == avg.measured["accuracy"]
    assert knn.measured["loss"] == pytest.approx(avg.measured["loss"], rel=1e-12)


def test_knn_per_corrects_a_shifted_concept() -> None:
    """When groups disagree about labels, the global model fails and an agent's own neighbours correct it."""
    scores = {mix: run(KNNPer(LR, mix=mix), label_groups(), rounds=12)[-1].measured["accuracy"] for mix in (0.0, 0.9)}
    assert scores[0.9] > scores[0.0]


def test_knn_per_of_numbers() -> None:
    """In regression the prediction mixes the model's output with the neighbours' mean."""
    known, labels = torch.tensor([[0.0], [1.0], [50.0]]), torch.tensor([1.0, 3.0, 99.0])
    answer = KNNPer(k=2, mix=0.5, scale=1e9).answer(torch.tensor([[4.0]]), torch.tensor([[0.5]]), known, labels)
    assert answer.tolist() == [[pytest.approx(3.0)]]


@pytest.mark.parametrize(
    ("build", "shape", "size"),
    [
        (lambda: linear((2, 3), 4), (2, 3), 6),
        (lambda: cnn((1, 6, 6), 4), (1, 6, 6), 64),
        (lambda: torch.nn.Sequential(torch.nn.Conv2d(1, 4, 6), torch.nn.Flatten()), (1, 6, 6), 36),
    ],
)
def test_features(build: Any, shape: tuple[int, ...], size: int) -> None:
    """Features are the input of the last linear layer, or the sample itself if there is no layer before it."""
    model, x = FlatModel(build), torch.randn(5, *shape)
    net = model.init(1)
    output, features = model.features(*net, x)
    assert torch.equal(output, model.predict(*net, x))
    assert features.shape == (5, size)
    if size == x[0].numel():
        assert torch.equal(features, x.flatten(1))


def test_knn_per_and_fedavg_share_a_stack() -> None:
    """kNN-Per and FedAvg share a stack, because they train in the same way; each has its own scores."""
    specs = [RunSpec(algorithm, make_federation(), 3) for algorithm in (FedAvg(LR), KNNPer(LR, mix=0.9, k=1))]
    first, second = outcomes(specs)[-1]
    assert torch.equal(first.state.server.x, second.state.server.x)
    assert first.measured["loss"] != second.measured["loss"]


@pytest.mark.parametrize(
    "method", ["fedamp", "fedfomo", "apple", "fedala", "ifca", "cfl", "knn-per", "cobo", "pfedgraph"]
)
def test_defaults_learn(method: str) -> None:
    """With its defaults each method learns the digits of split C in 20 rounds."""
    config = check_run(method, {"validation": 0.2}, {})
    federation = federation_of(config.settings)
    model = model_of(config.settings, federation, Runtime(), torch.device("cpu"))
    specs = [RunSpec(config.algorithm(), replace(federation, alice=i), 1) for i in range(3)]
    *_, last = simulate(specs, model, rounds=20, workers=1)
    assert sum(outcome.measured["accuracy"] for outcome in last) / 3 > 0.85


def test_fedfomo_without_validation_data_is_noted() -> None:
    """A note before the run says that training data favour an agent's own model."""
    notes = [
        advice(check_run("fedfomo", {"validation": v}, {}), federation_of(Settings(validation=v))) for v in (0.0, 0.2)
    ]
    assert [any("no validation data" in note for note in texts) for texts in notes] == [True, False]


def test_knn_per_run_folder(tmp_path: Path) -> None:
    """The run folder holds the mixed predictions, and a report can be made of it."""
    settings = ["--rounds", "2", "--samples-per-agent", "20", "--agents", "3", "--quiet"]
    for method in ("local", "knn-per"):
        assert waffle(["run", method, *settings, "--out", str(tmp_path / method)]) == 0
    predictions = read_named(tmp_path / "knn-per" / "predictions.safetensors", ("output", "target"))
    torch.testing.assert_close(predictions["output"].exp().sum(dim=1), torch.ones(len(predictions["output"])))
    result = json.loads((tmp_path / "knn-per" / "result.json").read_text())
    right = (predictions["output"].argmax(dim=1) == predictions["target"]).double().mean()
    assert result["metrics"]["accuracy"] == pytest.approx(float(right))
    assert waffle(["report", str(tmp_path), "--out", str(tmp_path / "page"), "--quiet"]) == 0


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_every_method_has_a_colour_and_a_description(method: str) -> None:
    """Charts and the decision page have a title, a colour and a sentence for each method."""
    assert TITLES[method] in COLORS
    assert about_of(method).in_words
