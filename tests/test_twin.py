"""Every algorithm agrees with its reference implementation, which was written from the publications without it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from conftest import BATCH, CLASSES, FEATURES, fitted, make_federation, shared_model
from reference import run as run_reference
from waffle_fl.algorithms import ALGORITHMS, SGD
from waffle_fl.algorithms.schedules import sigmoid
from waffle_fl.batches import Batches
from waffle_fl.engines.run_spec import RunSpec
from waffle_fl.engines.simulate import simulate
from waffle_fl.models import FlatModel, mlp

ROUNDS, SEED = 5, 5  # FedCollab exchanges models from the fourth round on, IFCA changes a cluster in the fifth

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("local", {}),
    ("local", {"clip": 0.5}),
    ("fedavg", {}),
    ("fedavg", {"weighting": "samples"}),
    ("scaffold", {}),
    ("scaffold", {"clip": 0.3, "eta_g": 0.7}),
    ("weight-erosion", {"p_d": 0.05}),
    ("weight-erosion", {"p_d": 0.02, "p_s": 2.0}),
    ("weight-erosion", {"p_d": 0.01, "p_s": 0.2, "counted": "batches"}),
    ("waffle-paper", {}),
    ("waffle-paper", {"control": "paper", "denominator": "range", "clip": 0.0}),
    ("waffle-paper", {"control": "paper", "denominator": "max", "clip": 0.5}),
    ("waffle-paper", {"control": "anchored", "denominator": "range", "eta_g": 0.8}),
    ("waffle-paper", {"compared": "gradients"}),
    ("waffle-paper", {"compared": "directions"}),
    ("waffle-paper", {"correction": 0.3}),
    ("scaffold", {"correction": 0.3, "clip": 0.3}),
    ("waffle-paper", {"compared": "gradients", "control": "paper", "denominator": "range", "clip": 0.3}),
    ("waffle-paper", {"omega": sigmoid(6.0), "psi": sigmoid(2.0, 1.0)}),
    ("waffle-paper", {"omega": "adaptive", "psi": "adaptive"}),
    ("waffle-paper", {"omega": "adaptive", "psi": sigmoid(2.0), "denominator": "range", "control": "paper"}),
    ("waffle", {}),
    ("waffle", {"head_layers": 2, "yielding": 2.0, "averaging": 0.6, "own": 0.7, "clip": 0.4}),
    ("apfl", {}),
    ("apfl", {"adaptive": "round", "mix": 0.3}),
    ("apfl", {"adaptive": "off", "mix": 0.8}),
    ("ditto", {}),
    ("ditto", {"lam": 0.3, "clip": 0.4}),
    ("mr-mtl", {}),
    ("mr-mtl", {"lam": 0.3, "clip": 0.4, "weighting": "samples"}),
    ("fedprox", {}),
    ("fedprox", {"mu": 2.0, "clip": 0.5, "weighting": "samples"}),
    ("fedavg-ft", {}),
    ("fedavg-ft", {"tuning": 3, "clip": 0.4, "weighting": "samples"}),
    ("fedavg-ft", {"tuning": 9}),
    ("per-fedavg", {}),
    ("per-fedavg", {"inner_lr": 0.3, "clip": 0.4}),
    ("per-fedavg", {"variant": "hessian-free", "difference_step": 0.1}),
    ("pfedme", {}),
    ("pfedme", {"lam": 0.7, "inner_steps": 2, "eta": 0.5, "beta": 1.5, "clip": 0.4}),
    ("fedper", {}),
    ("fedper", {"head_layers": 2, "clip": 0.4}),
    ("fedper", {"weighting": "samples"}),
    ("fedrep", {}),
    ("fedrep", {"head_share": 0.7, "clip": 0.4}),
    ("fedbn", {}),
    ("fedbn", {"weighting": "samples", "clip": 0.4}),
    ("fedamp", {}),
    ("fedamp", {"lam": 0.5, "alpha": 0.4, "sigma": 2.0, "clip": 0.6}),
    ("fedfomo", {}),
    ("fedfomo", {"clip": 0.4}),
    ("apple", {}),
    ("apple", {"core_step": "lr", "clip": 0.0}),
    ("apple", {"eta_p": 0.02, "mu": 2.0, "global_share": 0.5, "core_step": "paper", "clip": 0.4}),
    ("fedala", {}),
    ("fedala", {"eta_w": 5.0, "rehearsed": 0.3, "head_layers": 1, "clip": 0.4}),
    ("ifca", {}),
    ("ifca", {"clusters": 2, "clip": 0.4}),
    ("cfl", {"eps_mean": 0.4, "eps_max": 0.3}),
    ("cfl", {"eps_mean": 9.0, "eps_max": 0.0, "clip": 0.4}),
    ("knn-per", {}),
    ("cobo", {}),
    ("cobo", {"rho": 0.4, "gamma": 0.5, "rehearsed": 0.6, "clip": 0.8}),
    ("cobo", {"rho": 0.2, "gamma": 0.5, "pairs": 2, "rehearsed": 1.0}),
    ("pfedgraph", {}),
    ("pfedgraph", {"alpha": 0.2, "lam": 0.5, "used": "mixed", "clip": 0.4}),
    ("pfedgraph", {"alpha": 5.0, "lam": 0.2, "cosine": "repel", "saturation": 0.9}),
    ("fedcollab", {}),
    ("fedcollab", {"C": 0.5, "alone": 2, "models": 2, "clip": 0.4}),
    ("fedcollab", {"C": 1.0, "alone": 1, "models": 1, "start": "initial", "weighting": "equal"}),
    ("fedpac", {}),
    ("fedpac", {"lam": 3.0, "head_share": 0.7, "used": "mixed", "clip": 0.4}),
    ("fedpac", {"lam": 0.0, "heads": "own", "weighting": "equal"}),
    ("feddbe", {}),
    ("feddbe", {"kappa": 3.0, "mu": 0.4, "clip": 0.6, "weighting": "equal"}),
    ("feddbe", {"kappa": 0.0}),
    ("feddbe", {"memory": False}),
]


@cache
def batches_of(alice: int, epochs: int = 1) -> list[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Return the simulator's mini-batches in the form of the reference: lists of (x, y)."""
    federation = make_federation(alice=alice)
    batches = Batches([federation], [SEED], BATCH, epochs, torch.float64)
    rounds = []
    for r in range(1, ROUNDS + 1):
        plan = batches.plan(r, 0, slice(None))
        rounds.append(
            [
                [
                    (federation.x[rows[held]].double(), federation.labels(i, rows[held]))
                    for rows, held in zip(plan.samples[i, : batches.steps[i]], plan.weight[i] > 0, strict=False)
                ]
                for i in range(federation.agents)
            ]
        )
    return rounds


def module_of(model: FlatModel) -> torch.nn.Module:
    module = mlp((FEATURES,), CLASSES, hidden=6).double()
    module.load_state_dict(model.state_dict(model.init(SEED)))
    return module


def check_stack(method: str, sgd: SGD, options: dict[str, Any]) -> None:
    """Check that the models and weights of every round agree with the reference."""
    federation, model = make_federation(alice=2), shared_model()
    algorithm = fitted(ALGORITHMS[method](sgd=sgd, **options))
    extra = {"batch_size": BATCH} if method == "weight-erosion" else {}
    trace = run_reference(
        method, module_of(model), batches_of(2), alice=2, lr=sgd.lr, momentum=sgd.momentum,
        weight_decay=sgd.weight_decay, keeps_momentum=sgd.momentum_between_rounds == "keep", **options, **extra,
    )  # fmt: skip
    specs = [RunSpec(algorithm, federation, SEED)]
    outcomes = [one for (one,) in simulate(specs, model, rounds=ROUNDS, batch_size=BATCH, workers=1)]
    for outcome, expected, weights in zip(outcomes, trace.models, trace.weights, strict=True):
        net = algorithm.personal(outcome.state.server, outcome.state.agents, federation.agents)
        torch.testing.assert_close(net.params[2], expected, rtol=1e-12, atol=1e-12)
        assert outcome.measured["weights"] == pytest.approx(weights, abs=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_stack_agrees_with_the_reference(method: str, options: dict[str, Any], momentum: float) -> None:
    """In float64 the stacked path and the reference's loops differ only by rounding in every round."""
    check_stack(method, SGD(0.2, momentum, 0.01 if momentum else 0.0), options)


@pytest.mark.parametrize(("method", "options"), VARIANTS)
def test_kept_momentum_agrees_with_the_reference(method: str, options: dict[str, Any]) -> None:
    """With an optimiser that is created once, before the first round, every method agrees with the reference."""
    check_stack(method, SGD(0.1, 0.6, 0.01, "keep"), options)


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_row_by_row_agrees_with_the_reference(method: str) -> None:
    """The path for models that do not stack agrees with the reference, with two epochs per round."""
    federation, model = make_federation(), shared_model(stacked=False)
    algorithm = fitted(ALGORITHMS[method](sgd=SGD(0.2)))
    trace = run_reference(method, module_of(model), batches_of(0, epochs=2), lr=0.2)
    spec = RunSpec(algorithm, federation, SEED)
    for outcomes, expected in zip(
        simulate([spec], model, rounds=ROUNDS, batch_size=BATCH, epochs=2, workers=1), trace.models, strict=True
    ):
        state = outcomes[0].state
        net = algorithm.personal(state.server, state.agents, federation.agents)
        torch.testing.assert_close(net.params[0], expected, rtol=1e-12, atol=1e-12)
