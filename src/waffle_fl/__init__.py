"""waffle-fl: personalised federated learning.

data -> partition -> federation -> algorithms x engines -> records -> report

load("mnist")            a Dataset: verified, normalised
split(labels, ..., "C")  a Partition: who holds which sample
build(dataset, split)    a Federation: agents, Alice among them
FlatModel(module)        any torch.nn.Module as rows of flat parameters
Waffle(), FedAvg() ...   algorithms: pure functions over explicit state
simulate([Cell(...)])    one process, stacked rows, CPU or GPU

PersonalizedClassifier(alice="clinic").fit(federation).predict(X) is the whole of it, as scikit-learn has it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from waffle_fl.algorithms.apfl import APFL
    from waffle_fl.algorithms.apple import APPLE
    from waffle_fl.algorithms.cfl import CFL
    from waffle_fl.algorithms.contract import SGD
    from waffle_fl.algorithms.ditto import Ditto
    from waffle_fl.algorithms.fedala import FedALA
    from waffle_fl.algorithms.fedamp import FedAMP
    from waffle_fl.algorithms.fedavg import FedAvg
    from waffle_fl.algorithms.fedavg_ft import FedAvgFT
    from waffle_fl.algorithms.fedbn import FedBN
    from waffle_fl.algorithms.fedfomo import FedFomo
    from waffle_fl.algorithms.fedper import FedPer
    from waffle_fl.algorithms.fedprox import FedProx
    from waffle_fl.algorithms.fedrep import FedRep
    from waffle_fl.algorithms.ifca import IFCA
    from waffle_fl.algorithms.knn_per import KNNPer
    from waffle_fl.algorithms.local import Local
    from waffle_fl.algorithms.per_fedavg import PerFedAvg
    from waffle_fl.algorithms.pfedme import PFedMe
    from waffle_fl.algorithms.scaffold import Scaffold
    from waffle_fl.algorithms.waffle import Waffle
    from waffle_fl.algorithms.waffle_kin import WaffleKin
    from waffle_fl.algorithms.weight_erosion import WeightErosion
    from waffle_fl.data import load
    from waffle_fl.engines.cells import Cell
    from waffle_fl.engines.simulate import simulate
    from waffle_fl.errors import WaffleError
    from waffle_fl.federation import Federation, build
    from waffle_fl.models.flat import FlatModel
    from waffle_fl.partition import split
    from waffle_fl.use.estimators import PersonalizedClassifier, PersonalizedRegressor

# Torch takes seconds to import, so each name is fetched when it is first used.
_HOMES = {
    "APFL": "algorithms.apfl",
    "APPLE": "algorithms.apple",
    "IFCA": "algorithms.ifca",
    "SGD": "algorithms.contract",
    "CFL": "algorithms.cfl",
    "Cell": "engines.cells",
    "Ditto": "algorithms.ditto",
    "FedALA": "algorithms.fedala",
    "FedAMP": "algorithms.fedamp",
    "FedAvg": "algorithms.fedavg",
    "FedAvgFT": "algorithms.fedavg_ft",
    "FedBN": "algorithms.fedbn",
    "FedFomo": "algorithms.fedfomo",
    "FedPer": "algorithms.fedper",
    "FedProx": "algorithms.fedprox",
    "FedRep": "algorithms.fedrep",
    "Federation": "federation",
    "FlatModel": "models.flat",
    "KNNPer": "algorithms.knn_per",
    "Local": "algorithms.local",
    "PFedMe": "algorithms.pfedme",
    "PerFedAvg": "algorithms.per_fedavg",
    "PersonalizedClassifier": "use.estimators",
    "PersonalizedRegressor": "use.estimators",
    "Scaffold": "algorithms.scaffold",
    "Waffle": "algorithms.waffle",
    "WaffleKin": "algorithms.waffle_kin",
    "WaffleError": "errors",
    "WeightErosion": "algorithms.weight_erosion",
    "build": "federation",
    "load": "data",
    "simulate": "engines.simulate",
    "split": "partition",
}

__all__ = [
    "APFL",
    "APPLE",
    "CFL",
    "IFCA",
    "SGD",
    "Cell",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedBN",
    "FedFomo",
    "FedPer",
    "FedProx",
    "FedRep",
    "Federation",
    "FlatModel",
    "KNNPer",
    "Local",
    "PFedMe",
    "PerFedAvg",
    "PersonalizedClassifier",
    "PersonalizedRegressor",
    "Scaffold",
    "Waffle",
    "WaffleError",
    "WaffleKin",
    "WeightErosion",
    "build",
    "load",
    "simulate",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
