"""Reference implementation of every method: plain loops in float64, written from the papers without using the package.

A model is one flat vector. "Algorithm 1" is the paper's CalcWeights, "Algorithm 2" its WAFFLE; sections are those of
shared/algorithms.md. Every agent takes part in every round with at least one mini-batch, and every update is finite:
the reference has no fault handling.
"""

import copy
from collections.abc import Callable

from torch import nn
from torch.nn.utils import parameters_to_vector

from reference.collaboration import apple, cfl, fedala, fedamp, fedfomo, ifca, knn_per
from reference.features import feddbe, fedpac
from reference.kin import waffle
from reference.paper import apfl, ditto, fedavg, local, scaffold, waffle_paper, weight_erosion
from reference.partners import cobo, fedcollab, pfedgraph
from reference.personal import fedavg_ft, fedbn, fedper, fedprox, fedrep, mr_mtl, per_fedavg, pfedme
from reference.problem import Batches, Problem, Trace

METHODS: dict[str, Callable[..., Trace]] = {
    "local": local,
    "fedavg": fedavg,
    "scaffold": scaffold,
    "weight-erosion": weight_erosion,
    "waffle-paper": waffle_paper,
    "waffle": waffle,
    "apfl": apfl,
    "ditto": ditto,
    "mr-mtl": mr_mtl,
    "fedprox": fedprox,
    "fedavg-ft": fedavg_ft,
    "per-fedavg": per_fedavg,
    "pfedme": pfedme,
    "fedper": fedper,
    "fedrep": fedrep,
    "fedbn": fedbn,
    "fedamp": fedamp,
    "fedfomo": fedfomo,
    "apple": apple,
    "fedala": fedala,
    "ifca": ifca,
    "cfl": cfl,
    "knn-per": knn_per,
    "cobo": cobo,
    "pfedgraph": pfedgraph,
    "fedcollab": fedcollab,
    "feddbe": feddbe,
    "fedpac": fedpac,
}


def run(
    method: str,
    module: nn.Module,
    batches: Batches,
    *,
    alice: int = 0,
    lr: float = 0.1,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    keeps_momentum: bool = False,
    lr_decay: float = 1.0,
    **options: object,
) -> Trace:
    """Run one method from the module's parameters over all rounds, without changing the module."""
    assert all(agent for agents in batches for agent in agents), "every agent needs a mini-batch in every round"
    nets = [copy.deepcopy(module).double() for _ in batches[0]]
    start = parameters_to_vector(nets[0].parameters()).detach().clone()
    problem = Problem(nets, start, batches, alice, lr, momentum, weight_decay, keeps_momentum, lr_decay)
    return METHODS[method](problem, **options)
