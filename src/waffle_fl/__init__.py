"""waffle-fl: personalised federated learning.

data -> partition -> federation -> algorithms x engines -> records -> report

load("mnist")               a Dataset: verified, normalised
split(labels, ..., "C")     a Partition: which agent has which samples
build(dataset, split)       a Federation: all agents, including Alice
FlatModel(module)           any torch.nn.Module as rows of flat parameters
Waffle(), FedAvg() ...      algorithms: pure functions over explicit state
simulate([RunSpec(...)])    Outcomes: trained in one process, with stacked rows, on CPU or GPU

PersonalizedClassifier(alice="clinic").fit(federation).predict(X) does all of this with scikit-learn's interface.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from waffle_fl.algorithms.apfl import APFL as APFL
    from waffle_fl.algorithms.apple import APPLE as APPLE
    from waffle_fl.algorithms.cfl import CFL as CFL
    from waffle_fl.algorithms.cobo import CoBo as CoBo
    from waffle_fl.algorithms.contract import SGD as SGD
    from waffle_fl.algorithms.contract import Adam as Adam
    from waffle_fl.algorithms.contract import Algorithm as Algorithm
    from waffle_fl.algorithms.contract import Grad as Grad
    from waffle_fl.algorithms.contract import Net as Net
    from waffle_fl.algorithms.contract import Round as Round
    from waffle_fl.algorithms.ditto import Ditto as Ditto
    from waffle_fl.algorithms.fedala import FedALA as FedALA
    from waffle_fl.algorithms.fedamp import FedAMP as FedAMP
    from waffle_fl.algorithms.fedavg import FedAvg as FedAvg
    from waffle_fl.algorithms.fedavg_ft import FedAvgFT as FedAvgFT
    from waffle_fl.algorithms.fedbn import FedBN as FedBN
    from waffle_fl.algorithms.fedcollab import FedCollab as FedCollab
    from waffle_fl.algorithms.feddbe import FedDBE as FedDBE
    from waffle_fl.algorithms.fedfomo import FedFomo as FedFomo
    from waffle_fl.algorithms.fedpac import FedPAC as FedPAC
    from waffle_fl.algorithms.fedper import FedPer as FedPer
    from waffle_fl.algorithms.fedprox import FedProx as FedProx
    from waffle_fl.algorithms.fedrep import FedRep as FedRep
    from waffle_fl.algorithms.ifca import IFCA as IFCA
    from waffle_fl.algorithms.knn_per import KNNPer as KNNPer
    from waffle_fl.algorithms.local import Local as Local
    from waffle_fl.algorithms.mr_mtl import MRMTL as MRMTL
    from waffle_fl.algorithms.per_fedavg import PerFedAvg as PerFedAvg
    from waffle_fl.algorithms.pfedgraph import PFedGraph as PFedGraph
    from waffle_fl.algorithms.pfedme import PFedMe as PFedMe
    from waffle_fl.algorithms.scaffold import Scaffold as Scaffold
    from waffle_fl.algorithms.waffle import Waffle as Waffle
    from waffle_fl.algorithms.waffle_paper import WafflePaper as WafflePaper
    from waffle_fl.algorithms.weight_erosion import WeightErosion as WeightErosion
    from waffle_fl.data import Dataset as Dataset
    from waffle_fl.data import load as load
    from waffle_fl.engines.run_spec import Measured as Measured
    from waffle_fl.engines.run_spec import Outcome as Outcome
    from waffle_fl.engines.run_spec import RunSpec as RunSpec
    from waffle_fl.engines.simulate import simulate as simulate
    from waffle_fl.errors import WaffleError as WaffleError
    from waffle_fl.federation import Federation as Federation
    from waffle_fl.federation import build as build
    from waffle_fl.inference.estimators import PersonalizedClassifier as PersonalizedClassifier
    from waffle_fl.inference.estimators import PersonalizedRegressor as PersonalizedRegressor
    from waffle_fl.models.flat import FlatModel as FlatModel
    from waffle_fl.partition import Partition as Partition
    from waffle_fl.partition import split as split
    from waffle_fl.results import table_of_rounds as table_of_rounds

# Importing torch takes seconds, so each name is imported on first use. Classes of methods come from the registry of
# algorithms; the imports above are for type checkers.
_LAZY_MODULES = {
    **dict.fromkeys(("SGD", "Adam", "Algorithm", "Grad", "Net", "Round"), "algorithms.contract"),
    **dict.fromkeys(("Measured", "Outcome", "RunSpec"), "engines.run_spec"),
    "Dataset": "data",
    "Federation": "federation",
    "FlatModel": "models.flat",
    "Partition": "partition",
    "PersonalizedClassifier": "inference.estimators",
    "PersonalizedRegressor": "inference.estimators",
    "WaffleError": "errors",
    "build": "federation",
    "load": "data",
    "simulate": "engines.simulate",
    "split": "partition",
    "table_of_rounds": "results",
}


_RENAMED = {"Cell": "RunSpec"}  # public names of the previous release


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return getattr(import_module(f"{__name__}.{_LAZY_MODULES[name]}"), name)
    if name in _RENAMED:
        warnings.warn(f"waffle_fl.{name} is now waffle_fl.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name == "__all__":
        return sorted({*_LAZY_MODULES, *_methods()})
    found = _methods().get(name) if name[:1].isupper() else None
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    return sorted({"__version__", *_LAZY_MODULES, *_methods()})


def _methods() -> dict[str, Any]:
    registry = import_module(f"{__name__}.algorithms.registry")
    return {kind.__name__: kind for kind in registry.ALGORITHMS.values()}
