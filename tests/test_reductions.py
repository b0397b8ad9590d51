"""Settings with which one algorithm must equal another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import BATCH, CLASSES, FEATURES, fitted, make_federation, make_model, outcomes_of, shared_model
from reference.features import combination
from reference.partners import bound, partitions
from waffle_fl.algorithms import SGD, Round, fedavg
from waffle_fl.algorithms.apfl import APFL
from waffle_fl.algorithms.cobo import CoBo, partners
from waffle_fl.algorithms.contract import sums_of
from waffle_fl.algorithms.ditto import Ditto
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.fedavg_ft import FedAvgFT
from waffle_fl.algorithms.fedbn import FedBN
from waffle_fl.algorithms.fedcollab import FedCollab, form_coalitions
from waffle_fl.algorithms.feddbe import FedDBE
from waffle_fl.algorithms.fedpac import FedPAC, head_weights
from waffle_fl.algorithms.fedper import FedPer
from waffle_fl.algorithms.fedprox import FedProx
from waffle_fl.algorithms.fedrep import FedRep
from waffle_fl.algorithms.local import Local
from waffle_fl.algorithms.mr_mtl import MRMTL
from waffle_fl.algorithms.per_fedavg import PerFedAvg
from waffle_fl.algorithms.pfedgraph import PFedGraph, graph, on_simplex
from waffle_fl.algorithms.pfedme import PFedMe
from waffle_fl.algorithms.scaffold import Agents, Scaffold, Up, received_control_variates
from waffle_fl.algorithms.waffle import Waffle
from waffle_fl.algorithms.waffle_paper import WafflePaper
from waffle_fl.algorithms.weight_erosion import WeightErosion
from waffle_fl.batches import Batches
from waffle_fl.engines.run_spec import RunSpec, State
from waffle_fl.engines.simulate import simulate
from waffle_fl.models import Batch, Net, mlp

LR = SGD(0.2)


def alice_s_model(
    algorithm: Any, rounds: int = 6, sizes: tuple[int, ...] = (23, 9, 32, 14), **options: Any
) -> torch.Tensor:
    federation = make_federation(sizes)
    state = outcomes_of(RunSpec(algorithm, federation, 3), shared_model(), rounds, **options)[-1].state
    return algorithm.personal(state.server, state.agents, federation.agents).params[0]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-11, atol=1e-12)


def random_up(seed: int = 0) -> tuple[Up, Round]:
    g = torch.Generator().manual_seed(seed)
    up = Up(torch.randn(4, 7, generator=g, dtype=torch.float64), torch.zeros(4, 0, dtype=torch.float64))
    steps = torch.tensor([3, 2, 4, 2])
    return up, Round(3, 20, torch.tensor(1), steps > 0, steps > 0, steps * BATCH, steps, BATCH)


def test_scaffold_without_correction_is_fedavg() -> None:
    """Without the correction c - c_i SCAFFOLD is FedAvg, and its control variates are still the mean gradients."""
    scaffold = Scaffold(LR, clip=0.0, correction=0.0)
    assert close(alice_s_model(scaffold), alice_s_model(FedAvg(LR)))
    up, context = random_up()
    server, _ = scaffold.init(Net(torch.zeros(7).double(), torch.zeros(0).double()), 4)
    for _ in range(2):
        server, _ = scaffold.aggregate(server, up, context)
        assert close(server.c_i, -up.dy / (context.steps[:, None].double() * LR.lr))


def test_waffle_with_equal_weights_is_scaffold() -> None:
    """With all weights 1/N, WAFFLE's model and control variates equal SCAFFOLD's under both control rules."""
    net = Net(torch.linspace(0, 1, 7, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    scaffold = Scaffold(LR)
    for control in ("anchored", "paper"):
        waffle = WafflePaper(LR, control=control)
        a, _ = scaffold.init(net, 4)
        b, _ = waffle.init(net, 4)
        for seed in range(3):
            up, context = random_up(seed)
            a, _ = scaffold.aggregate(a, up, context)
            c_i = received_control_variates(b, up, context, waffle.sgd.lr, waffle.correction)
            rows = waffle.summed_rows(waffle.broadcast(b, 4), Agents(b.c_i), up, context.steps)
            quarter = torch.full((4,), 0.25, dtype=torch.float64)
            b = waffle.combine(b, sums_of(dict.fromkeys(rows, quarter), rows), context)._replace(c_i=c_i)
            assert all(close(x, y) for x, y in zip(a, b[:4], strict=True))


def test_two_agents_under_max_are_scaffold() -> None:
    """With two agents WAFFLE's default weights are equal until 95 % of the rounds: a whole run equals SCAFFOLD's."""
    runs = [alice_s_model(a, rounds=5, sizes=(23, 14)) for a in (Scaffold(LR),)]
    federation = make_federation((23, 14))
    outcomes = outcomes_of(RunSpec(WafflePaper(LR), federation, 3), shared_model(), rounds=100)
    assert close(outcomes[4].state.server.x, runs[0])


def test_waffle_with_all_weight_on_alice_is_local() -> None:
    """With psi = 0 other agents enter only through the history of 1/N; afterwards Alice's steps are plain SGD."""
    federation, model = make_federation(), shared_model()
    outcomes = outcomes_of(
        RunSpec(WafflePaper(LR, omega="constant(0)", psi="constant(0)"), federation, 3), model, rounds=8
    )
    server = outcomes[3].state.server
    assert outcomes[3].measured["weights"] == [1, 0, 0, 0]
    torch.testing.assert_close(server.c, server.c_i[0])
    local = Local(LR, clip=2.0)
    state = (local.init(model.init(0), 4)[0], local.init(model.init(0), 4)[1])
    agents = state[1]._replace(y=server.x.repeat(4, 1))
    spec = RunSpec(local, federation, 3, state=State(state[0], agents))
    alone = [o[0] for o in simulate([spec], model, rounds=8, start=4, batch_size=BATCH)]
    assert close(outcomes[-1].state.server.x, alone[-1].state.agents.y[0])


def test_printed_control_rule_is_biased() -> None:
    """Once Alice trains alone, c = c_A under "anchored"; the printed rule c += dc keeps a constant bias c - c_A."""
    biases = {}
    for control in ("anchored", "paper"):
        algorithm = WafflePaper(LR, control=control, omega="constant(0)", psi="constant(0)")
        outcomes = outcomes_of(RunSpec(algorithm, make_federation(), 3), shared_model(), rounds=12)
        biases[control] = [float((o.state.server.c - o.state.server.c_i[0]).norm()) for o in outcomes[4:]]
    assert max(biases["anchored"]) < 1e-12
    assert min(biases["paper"]) > 1e-3
    assert biases["paper"][0] == pytest.approx(biases["paper"][-1])


def test_scaffold_s_first_step_is_fedavg_s() -> None:
    """While all control variates are zero, a round of SCAFFOLD equals a round of FedAvg."""
    assert close(alice_s_model(Scaffold(LR, clip=0.0), rounds=1), alice_s_model(FedAvg(LR), rounds=1))


def test_scaffold_s_control_variate_is_the_mean_gradient() -> None:
    """Option II without clipping: c_i+ is the mean gradient of the round, and c stays the mean of all c_i."""
    federation, model = make_federation(), make_model()
    seen: list[torch.Tensor] = []

    def watched(params: torch.Tensor, stats: torch.Tensor, batch: Batch) -> Net:
        net = grad(params, stats, batch)
        seen.append(net.params)
        return net

    grad, model.grad = model.grad, watched  # type: ignore[method-assign]
    outcomes = outcomes_of(RunSpec(Scaffold(LR, clip=0.0), federation, 3), model, rounds=4)
    gradients = torch.stack(seen[-4:])  # the last round has four steps; the agents make 3, 2, 4 and 2 of them
    means = torch.stack([gradients[:k, i].mean(dim=0) for i, k in enumerate((3, 2, 4, 2))])
    after = outcomes[-1].state.server
    torch.testing.assert_close(after.c_i, means)
    torch.testing.assert_close(after.c, after.c_i.mean(dim=0))


def test_server_and_agent_compute_the_same_control_variate() -> None:
    """The server's copy of c_i equals the agent's bit for bit, so that it is not sent."""
    for algorithm in (Scaffold(LR), WafflePaper(SGD(0.1, 0.9, 5e-4))):
        state = outcomes_of(RunSpec(algorithm, make_federation(), 3), shared_model(torch.float32), rounds=5)[-1].state
        assert torch.equal(state.server.c_i, state.agents.c_i)


def test_a_clipped_agent_keeps_its_control_variate() -> None:
    """An agent with many more samples than Alice is clipped in every round; server and agent both keep the old c_i."""
    for algorithm in (Scaffold(LR), WafflePaper(LR)):
        outcomes = outcomes_of(RunSpec(algorithm, make_federation((8, 9, 60, 10)), 3), shared_model(), guard="standard")
        assert all(o.measured["screened"]["agent 2"] == "clipped" for o in outcomes)
        state = outcomes[-1].state
        assert torch.equal(state.server.c_i, state.agents.c_i)
        assert not state.server.c_i[2].any()


def test_clipped_agent_is_compared_by_its_update() -> None:
    """A clipped agent keeps its old c_i, but its distance is computed from its update."""
    algorithm = WafflePaper(LR, compared="gradients")
    server, _ = algorithm.init(Net(torch.linspace(0, 1, 7, dtype=torch.float64), torch.zeros(0).double()), 4)
    up, context = random_up(0)
    cut = context._replace(intact=context.received & (torch.arange(4) != 2))
    after, info = algorithm.aggregate(server, up, cut)
    assert torch.equal(after.c_i[2], server.c_i[2])
    new_control_variates = algorithm.new_control_variates(server, up, context.steps)
    assert close(info.distances[2], (new_control_variates[2] - new_control_variates[1]).norm())
    assert close(algorithm.aggregate(server, up, context)[1].weights, info.weights)


def test_a_rejected_agent_keeps_its_control_variate() -> None:
    """An agent whose update is rejected keeps its control variate, whatever the reason."""

    def tamper(up: Any, r: int) -> Any:
        replacements = {2: 20 * up.dy[3], 3: -1000 * up.dy[0], 4: -up.dy[0], 5: 0 * up.dy[3]}
        return up._replace(dy=torch.stack([*up.dy[:3], replacements.get(r, up.dy[3])]))

    for algorithm in (Scaffold(LR), WafflePaper(LR)):
        spec = RunSpec(algorithm, make_federation(), 3, tamper=tamper)
        outcomes = outcomes_of(spec, shared_model(), rounds=5, guard="standard")
        assert all(o.measured["screened"]["agent 3"] != "clipped" for o in outcomes[1:])
        states = [o.state for o in outcomes]
        assert all(torch.equal(state.server.c_i, state.agents.c_i) for state in states)
        assert all(torch.equal(state.server.c_i[3], states[0].server.c_i[3]) for state in states)


def test_fedavg_with_one_agent_is_local() -> None:
    """FedAvg with a single agent equals Local."""
    assert close(alice_s_model(FedAvg(LR), sizes=(23,)), alice_s_model(Local(LR), sizes=(23,)))


def test_weight_erosion_without_erosion_is_fedavg() -> None:
    """p_d = 0 keeps every weight at 1."""
    assert close(alice_s_model(WeightErosion(LR, p_d=0.0)), alice_s_model(FedAvg(LR)))


def test_weight_erosion_at_once_is_local() -> None:
    """With a huge p_d Alice is alone from the first round."""
    assert close(alice_s_model(WeightErosion(LR, p_d=1e9)), alice_s_model(Local(LR)))


def test_the_size_penalty_erodes_small_agents_faster() -> None:
    """With p_s > 0 an agent that reuses its data more often loses weight faster; weights never rise."""
    runs = {}
    for p_s in (0.0, 2.0):
        spec = RunSpec(WeightErosion(LR, p_d=0.02, p_s=p_s), make_federation(), 3)
        runs[p_s] = torch.tensor([o.measured["alpha"] for o in outcomes_of(spec, shared_model())])
    assert runs[2.0][-1, 1] < runs[0.0][-1, 1]
    for alphas in runs.values():
        assert (alphas.diff(dim=0) <= 0).all()
        assert alphas[-1, 0] == 1


def test_weight_erosion_when_alice_s_update_is_zero() -> None:
    """When Alice's update is zero no distance is defined, so weights do not erode."""
    up, context = random_up()
    up = up._replace(dy=up.dy.index_fill(0, torch.tensor([1]), 0.0))
    erosion = WeightErosion(LR, p_d=0.5)
    server, _ = erosion.init(Net(torch.zeros(7, dtype=torch.float64), torch.zeros(0)), 4)
    after, _ = erosion.aggregate(server, up, context)
    assert after.alpha.tolist() == [1.0] * 4


def test_apfl_without_mixing() -> None:
    """Mix 0 is the agent's FedAvg model before averaging; mix 1 is Local."""
    assert close(alice_s_model(APFL(LR, mix=1.0, adaptive="off")), alice_s_model(Local(LR)))
    federation, model = make_federation(), shared_model()
    apfl = outcomes_of(RunSpec(APFL(LR, mix=0.0, adaptive="off"), federation, 3), model)[-1].state
    fedavg = outcomes_of(RunSpec(FedAvg(LR), federation, 3), model)[-1].state
    assert close(apfl.server.x, fedavg.server.x)
    assert close(APFL(LR).personal(apfl.server, apfl.agents, 4).params[0], apfl.agents.w[0])


def test_ditto_without_regularisation_is_local() -> None:
    """With lam = 0 the personal model equals Local's, and the global model FedAvg's."""
    assert close(alice_s_model(Ditto(LR, lam=0.0)), alice_s_model(Local(LR)))
    federation, model = make_federation(), shared_model()
    ditto = outcomes_of(RunSpec(Ditto(LR), federation, 3), model)[-1].state
    assert close(ditto.server.x, outcomes_of(RunSpec(FedAvg(LR), federation, 3), model)[-1].state.server.x)


def test_strong_regularisation_keeps_ditto_at_the_global_model() -> None:
    """A larger lam keeps the personal model closer to the global model."""
    distances = []
    for lam in (0.0, 1.0, 4.0):
        state = outcomes_of(RunSpec(Ditto(LR, lam=lam), make_federation(), 3), shared_model())[-1].state
        distances.append(float((state.agents.v[0] - state.server.x).norm()))
    assert distances[0] > distances[1] > distances[2]


def test_mr_mtl_without_regularisation_is_local() -> None:
    """With lam = 0 every model is Local's, and the server holds their mean; a larger lam keeps models closer to it."""
    assert close(alice_s_model(MRMTL(LR, lam=0.0)), alice_s_model(Local(LR)))
    distances = []
    for lam in (0.0, 1.0, 4.0):
        state = outcomes_of(RunSpec(MRMTL(LR, lam=lam), make_federation(), 3), shared_model())[-1].state
        assert close(state.server.x, state.agents.w.mean(dim=0))
        distances.append(float((state.agents.w[0] - state.server.x).norm()))
    assert distances[0] > distances[1] > distances[2]


def test_fedprox_without_proximal_term_is_fedavg() -> None:
    """mu = 0 removes the proximal term; a larger mu keeps agents closer to the global model."""
    assert close(alice_s_model(FedProx(LR, mu=0.0)), alice_s_model(FedAvg(LR)))
    norms = [
        outcomes_of(RunSpec(FedProx(LR, mu=mu), make_federation(), 3), shared_model())[0] for mu in (0.0, 1.0, 4.0)
    ]
    lengths = [sum(outcome.measured["norms"]) for outcome in norms]
    assert lengths[0] > lengths[1] > lengths[2]


def test_fine_tuning_continues_from_fedavg() -> None:
    """With F rounds of tuning the last model is FedAvg's after R - F rounds followed by F rounds of Local."""
    federation, model = make_federation(), shared_model()
    fedavg = outcomes_of(RunSpec(FedAvg(LR), federation, 3), model, rounds=5)[2].state.server.x
    agents = Local(LR).init(Net(fedavg, fedavg[:0]), 4)
    spec = RunSpec(Local(LR), federation, 3, state=State(*agents))
    alone = [o[0] for o in simulate([spec], model, rounds=5, start=3, batch_size=BATCH)]
    assert close(alice_s_model(FedAvgFT(LR, tuning=2), rounds=5), alone[-1].state.agents.y[0])


def test_fine_tuning_only_is_local() -> None:
    """With at least as many rounds of tuning as rounds, Alice trains alone."""
    for tuning in (6, 9):
        assert close(alice_s_model(FedAvgFT(LR, tuning=tuning)), alice_s_model(Local(LR)))


def test_per_fedavg_without_adaptation() -> None:
    """inner_lr = 0 is FedAvg on every second mini-batch, and the personal model is the global one."""
    algorithm = PerFedAvg(LR, inner_lr=0.0)
    federation, model = make_federation((16, 16)), shared_model()
    state = outcomes_of(RunSpec(algorithm, federation, 3), model, rounds=1)[-1].state
    batches = Batches([federation.to("cpu", torch.float64)], [3], BATCH, 1, torch.float64)
    second = batches.batch(batches.plan(1, 0, slice(None)), torch.ones(1, dtype=torch.int64), BATCH)
    start = model.init(3)
    g = model.grad(start.params.expand(2, -1), start.stats.expand(2, -1), second).params
    assert close(state.server.x, start.params - LR.lr * g.mean(dim=0))
    assert close(algorithm.personal(*state, 2).params[0], start.params)


def test_the_difference_of_gradients_is_the_hessian() -> None:
    """As delta decreases, a Hessian-free update converges to (I - inner_lr H) d with the exact Hessian H."""
    module = mlp((FEATURES,), CLASSES, hidden=6).double()
    shapes = [p.shape for p in module.parameters()]
    names = [name for name, _ in module.named_parameters()]

    def loss(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        tensors = {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return torch.nn.functional.cross_entropy(torch.func.functional_call(module, tensors, (x,)), y)

    federation, model = make_federation((24,)), shared_model()
    batches = Batches([federation.to("cpu", torch.float64)], [3], BATCH, 1, torch.float64)
    plan = batches.plan(1, 0, slice(None))
    first, second, third = (batches.batch(plan, torch.tensor([t]), BATCH) for t in range(3))
    w = model.init(3).params
    slope = torch.func.grad(loss)
    d = slope(w - 0.5 * slope(w, first.x[0], first.y[0]), second.x[0], second.y[0])
    _, curvature = torch.autograd.functional.hvp(lambda at: loss(at, third.x[0], third.y[0]), w, d)
    expected = w - LR.lr * (d - 0.5 * curvature)
    errors = []
    for h in (1e-1, 1e-2, 1e-3):
        algorithm = PerFedAvg(LR, inner_lr=0.5, variant="hessian-free", difference_step=h)
        state = outcomes_of(RunSpec(algorithm, federation, 3), model, rounds=1)[-1].state
        errors.append(float((state.server.x - expected).norm()))
    assert errors[0] > errors[1] >= errors[2]
    assert errors[2] < 1e-7


def test_pfedme_with_full_steps_is_fedavg() -> None:
    """With one inner step from w and eta lam = 1, w and the server follow plain SGD."""
    federation, model = make_federation(), shared_model()
    pfedme = outcomes_of(RunSpec(PFedMe(LR, lam=2.0, eta=0.5, inner_steps=1), federation, 3), model)[-1].state
    assert close(pfedme.server.x, outcomes_of(RunSpec(FedAvg(LR), federation, 3), model)[-1].state.server.x)


def test_strong_regularisation_keeps_pfedme_at_the_global_model() -> None:
    """A larger lam keeps the personal model closer to its local model w."""
    distances = []
    for lam in (0.5, 2.0, 4.0):
        state = outcomes_of(RunSpec(PFedMe(LR, lam=lam, eta=0.05), make_federation(), 3), shared_model())[-1].state
        distances.append(float((state.agents.theta[0] - state.server.x).norm()))
    assert distances[0] > distances[1] > distances[2]


def test_fedper_between_fedavg_and_local() -> None:
    """FedPer without a head is FedAvg; with all layers in the head it is Local."""
    assert close(alice_s_model(fitted(FedPer(LR, head_layers=0))), alice_s_model(FedAvg(LR)))
    assert close(alice_s_model(fitted(FedPer(LR, head_layers=2))), alice_s_model(Local(LR)))


def test_fedrep_trains_one_part_at_a_time() -> None:
    """FedRep without a head is FedAvg, without a body Local; otherwise each part trains in its share of the steps."""
    assert close(alice_s_model(fitted(FedRep(LR, head_layers=0))), alice_s_model(FedAvg(LR)))
    assert close(alice_s_model(fitted(FedRep(LR, head_layers=2))), alice_s_model(Local(LR)))
    federation, model = make_federation((16,)), shared_model()
    algorithm = fitted(FedRep(LR))
    state = outcomes_of(RunSpec(algorithm, federation, 3), model, rounds=1)[-1].state
    start, at = model.init(3), len(state.server.x)
    batches = Batches([federation.to("cpu", torch.float64)], [3], BATCH, 1, torch.float64)
    plan, y = batches.plan(1, 0, slice(None)), start.params.clone()
    for t, part in ((0, slice(at, None)), (1, slice(at))):
        g = model.grad(y[None], start.stats[None], batches.batch(plan, torch.tensor([t]), BATCH)).params[0]
        y[part] -= LR.lr * g[part]
    assert close(algorithm.personal(*state, 1).params[0], y)


def test_an_agent_of_one_mini_batch_trains_head_and_body() -> None:
    """FedRep's phases need two steps; in a single step both parts train, as in FedPer."""
    assert close(
        alice_s_model(fitted(FedRep(LR)), rounds=3, sizes=(8, 5)),
        alice_s_model(fitted(FedPer(LR)), rounds=3, sizes=(8, 5)),
    )


def test_fedbn_without_batch_normalisation_is_fedavg() -> None:
    """Without batch normalisation every layer is averaged."""
    assert close(alice_s_model(fitted(FedBN(LR))), alice_s_model(FedAvg(LR)))


def test_waffle_that_shares_all_is_fedavg() -> None:
    """Without head, yielding and averaging every layer is shared by all agents, and the mean is FedAvg's."""
    kin = Waffle(LR, head_layers=0, yielding=0.0, averaging=0.0)
    assert close(alice_s_model(fitted(kin)), alice_s_model(FedAvg(LR)))


def test_opposite_updates_separate_at_once() -> None:
    """An agent whose head moves against Alice's starts the next round with its own head, with weight 0 in hers."""
    algorithm = fitted(Waffle(LR, yielding=0.0))
    net = shared_model().init(3)
    server, agents = algorithm.init(net, 3)
    head = algorithm.cut.sizes[-1]
    dy = torch.ones(3, len(net.params), dtype=net.params.dtype)
    dy[2, -head:] = -1
    steps = torch.full((3,), 2)
    context = Round(1, 9, torch.tensor(0), steps > 0, steps > 0, steps, steps, 1)
    server, info = algorithm.aggregate(server, FedAvg(LR).finish(*_trained(dy))[1], context)
    assert info.head.tolist() == [0.5, 0.5, 0.0]
    starts = algorithm.begin(algorithm.broadcast(server, 3), agents._replace(y=server.y)).y
    assert torch.equal(starts[1], server.x)
    assert torch.equal(starts[2, :-head], server.x[:-head])
    assert torch.equal(starts[2, -head:], net.params[-head:] - 1)


def test_cobo_without_pull_is_local() -> None:
    """With rho = 0 no agent is pulled towards another, whatever the weights are."""
    assert close(alice_s_model(CoBo(LR, rho=0.0, gamma=1.0)), alice_s_model(Local(LR)))


def test_cobo_s_weights_follow_the_rule() -> None:
    """W of a pair moves by gamma K times the product of its gradients, and stays in [0, 1]; other weights stay."""
    algorithm = CoBo(LR, gamma=0.01, pairs=1)
    net = Net(torch.zeros(2).double(), torch.zeros(0).double())
    steps = torch.tensor([3, 5, 4, 5, 3])
    now = Round(2, 9, torch.tensor(0), steps > 0, steps > 0, steps, steps, 1)
    server, _ = algorithm.init(net, 5)
    server = server._replace(present=now.received, paired=now.received, W=torch.full((5, 5), 0.5).double())
    offer, _ = partners(server.paired, 1, server.r)
    slopes = torch.tensor([[1.0, 0.0], [2.0, 2.0], [-3.0, 1.0], [90.0, 0.0], [-90.0, 0.0]]).double()
    dy = torch.zeros(5, 2).double()
    up = algorithm.finish(*_measured(algorithm, server, slopes))[1]._replace(dy=dy)
    after, _ = algorithm.aggregate(server, up, now)
    for i in range(5):
        for j in range(5):
            change = 0.01 * min(steps[i], steps[j]) * float(slopes[i] @ slopes[j]) if j in offer.ids[i] else 0.0
            assert float(after.W[i, j]) == pytest.approx(min(max(0.5 + change, 0.0), 1.0))


def _measured(algorithm: CoBo, server: Any, slopes: torch.Tensor) -> Any:
    """Return down, agents and local training of agents whose gradient is the same at every midpoint."""
    down = algorithm.broadcast(server, len(slopes))
    agents = algorithm.init(Net(slopes[0] * 0, slopes[0, :0]), len(slopes))[1]
    return down, agents, algorithm.begin(down, agents)._replace(g=slopes[:, None].expand(-1, 2, -1))


@pytest.mark.parametrize("agents", range(1, 8))
def test_cobo_s_partners_are_mutual(agents: int) -> None:
    """On the ring an agent is the partner of its partners, at the place that is reported, and of no agent twice."""
    present = torch.tensor([i != 1 for i in range(agents + 1)])
    offer, place = partners(present, 3, torch.tensor(7))
    for i in range(agents + 1):
        found = offer.ids[i][offer.offered[i]].tolist()
        assert len(set(found)) == len(found) == (0 if i == 1 else min(6, agents - 1))
        assert i not in found
        for s in range(6):
            if offer.offered[i, s]:
                assert offer.ids[offer.ids[i, s], place[s]] == i


def test_pfedgraph_with_a_large_alpha_is_fedavg() -> None:
    """If only the shares of samples count, all agents start from the same mean, which is FedAvg's."""
    graphed = PFedGraph(LR, alpha=1e9, lam=0.0, used="mixed")
    torch.testing.assert_close(alice_s_model(graphed), alice_s_model(FedAvg(LR, weighting="samples")))


def test_pfedgraph_with_a_small_alpha_is_local() -> None:
    """If only similarity counts, an agent's own model has all the weight."""
    assert close(alice_s_model(PFedGraph(LR, alpha=1e-9, lam=0.0)), alice_s_model(Local(LR)))


def test_pfedgraph_s_cosine_term_attracts() -> None:
    """An attracting term brings the models closer in angle than no term, a repelling one farther apart."""

    def spread(**options: Any) -> float:
        algorithm = PFedGraph(LR, **options)
        state = outcomes_of(RunSpec(algorithm, make_federation(), 3), shared_model())[-1].state
        rows = torch.nn.functional.normalize(algorithm.personal(*state, 4).params)
        return float((rows @ rows.T).mean())

    assert spread(lam=2.0, cosine="repel") < spread(lam=0.0) < spread(lam=2.0)


def test_weights_of_the_graph_by_hand() -> None:
    """Two agents: w_1 = p_1 + (cos_11 - cos_12) / (4 alpha), limited to [0, 1]; cosines may saturate."""
    updates, samples = torch.tensor([[1.0, 0.0], [1.0, 0.5]]).double(), torch.tensor([1, 3])
    gap = 1 - 1 / 1.25**0.5
    for alpha, saturation, own in ((0.1, 1.0, 0.25 + gap / 0.4), (0.01, 1.0, 1.0), (0.1, 0.8, 0.25)):
        w = graph(updates, samples, samples > 0, alpha, saturation)
        assert w[0].tolist() == pytest.approx([own, 1 - own])
    assert on_simplex(torch.tensor([[0.2, 0.3, 0.5], [5.0, 1.0, -1e30]]).double()).tolist() == [
        pytest.approx([0.2, 0.3, 0.5]),
        [1.0, 0.0, 0.0],
    ]


def test_fedcollab_that_values_no_samples_is_local() -> None:
    """With C = 0 only the distance counts, and every agent stays alone."""
    assert close(alice_s_model(FedCollab(LR, C=0.0, alone=2)), alice_s_model(Local(LR)))


def test_fedcollab_that_values_samples_is_fedavg() -> None:
    """With a large C all agents form one coalition; from the initial model it trains as FedAvg does."""
    federation, model, joined = make_federation(), shared_model(), FedCollab(LR, C=1e6, alone=2, start="initial")
    outcomes = outcomes_of(RunSpec(joined, federation, 3), model, rounds=6)
    assert [o.measured["coalitions"] for o in outcomes] == [4, 4, 1, 1, 1, 1]
    average = FedAvg(LR, weighting="samples")
    spec = RunSpec(average, federation, 3, state=State(*average.init(model.init(3), 4)))
    *_, (last,) = simulate([spec], model, rounds=6, start=3, batch_size=BATCH)
    assert close(outcomes[-1].state.server.x[0], last.state.server.x)


@pytest.mark.parametrize("C", [0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_coalitions_are_the_best_of_all_partitions(seed: int, C: float) -> None:
    """The greedy search with restarts finds a partition with the least bound; an absent agent stays alone."""
    g = torch.Generator().manual_seed(seed)
    distance = torch.rand(7, 7, generator=g, dtype=torch.float64)
    distance = torch.minimum(distance, distance.T).fill_diagonal_(0)
    samples, present = torch.randint(5, 200, (7,), generator=g), torch.arange(7) != 2
    label = form_coalitions(distance, samples, present, C).tolist()
    assert label.count(label[2]) == 1
    others = [i for i in range(7) if i != 2]
    sizes, apart = [int(samples[i]) for i in others], distance[others][:, others].tolist()
    found = [[k for k, i in enumerate(others) if label[i] == name] for name in {label[i] for i in others}]
    least = min(bound(partition, apart, sizes, C) for partition in partitions(list(range(6))))
    assert bound(found, apart, sizes, C) == pytest.approx(least)


def test_fedpac_with_own_heads_is_fedrep() -> None:
    """Without alignment and with its own head every agent trains as in FedRep."""
    own = FedPAC(LR, lam=0.0, heads="own", used="mixed", weighting="equal")
    assert close(alice_s_model(fitted(own)), alice_s_model(fitted(FedRep(LR))))


def test_heads_of_two_agents_by_hand() -> None:
    """At distance d of the class means, an agent's own head weighs (V_2 + d^2) / (V_1 + V_2 + d^2)."""
    means, variance = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.5]]).double(), torch.tensor([0.2, 0.1]).double()
    alpha = head_weights(means, variance, torch.ones(2) > 0)
    assert alpha[0].tolist() == pytest.approx([0.35 / 0.55, 0.2 / 0.55])
    assert alpha[1].tolist() == pytest.approx([0.1 / 0.55, 0.45 / 0.55])
    assert head_weights(means, variance, torch.tensor([True, False]))[0].tolist() == [1, 0]


@pytest.mark.parametrize("seed", range(20))
def test_heads_are_combined_by_the_best_weights(seed: int) -> None:
    """The weights equal those of the best of all supports, also if variances differ by orders of magnitude."""
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(6, 4, generator=g, dtype=torch.float64) * torch.rand(6, 1, generator=g, dtype=torch.float64)
    variance = 10 ** (3 * torch.rand(6, generator=g, dtype=torch.float64) - 3)
    alpha = head_weights(means, variance, torch.ones(6) > 0)
    for i in range(6):
        assert alpha[i].tolist() == pytest.approx(combination(list(means), variance.tolist(), i), abs=1e-9)


def test_feddbe_without_vector_and_pull_is_fedavg() -> None:
    """Without the personal vector and the pull on the features all agents train as in FedAvg."""
    plain = fitted(FedDBE(LR, kappa=0.0, memory=False))
    assert close(alice_s_model(plain), alice_s_model(FedAvg(LR, weighting="samples")))


def test_feddbe_s_first_round_is_fedavg_s() -> None:
    """The first round only measures the mean of the features."""
    dbe = fitted(FedDBE(LR, kappa=9.0))
    assert close(alice_s_model(dbe, rounds=1), alice_s_model(FedAvg(LR, weighting="samples"), rounds=1))


def test_feddbe_s_model_adds_the_vector_to_the_features() -> None:
    """The model of an agent computes W (f(x) + m) + b."""
    dbe, model, federation = fitted(FedDBE(LR)), shared_model(), make_federation()
    state = outcomes_of(RunSpec(dbe, federation, 3), model)[-1].state
    shared, own = Net(state.server.x, state.server.stats), dbe.personal(*state, 4)
    x = federation.x[:9].double()
    output = model.predict(*shared, x)
    weight = model.state_dict(shared)["3.weight"]
    assert state.agents.m.abs().min() > 0
    for i in range(4):
        expected = output + state.agents.m[i] @ weight.T
        torch.testing.assert_close(model.predict(own.params[i], own.stats[i], x), expected)


def _trained(dy: torch.Tensor) -> Any:
    """Return down, agents and local training that produce these updates."""
    down = fedavg.Down(torch.zeros_like(dy), dy[:, :0])
    return down, fedavg.Agents(), fedavg.Local(dy, dy[:, :0], dy[:, :0])
