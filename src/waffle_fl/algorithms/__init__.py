"""One algorithm, one file, a few pure functions over explicit state. `contract.py` says which."""

from __future__ import annotations

from waffle_fl.algorithms.apfl import APFL
from waffle_fl.algorithms.apple import APPLE
from waffle_fl.algorithms.cfl import CFL
from waffle_fl.algorithms.contract import SGD, Algorithm, Grad, Net, Round, hyperparameters, training_key
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
from waffle_fl.algorithms.kept_momentum import for_model
from waffle_fl.algorithms.knn_per import KNNPer
from waffle_fl.algorithms.local import Local
from waffle_fl.algorithms.per_fedavg import PerFedAvg
from waffle_fl.algorithms.pfedme import PFedMe
from waffle_fl.algorithms.scaffold import Scaffold
from waffle_fl.algorithms.waffle import Waffle
from waffle_fl.algorithms.waffle_kin import WaffleKin
from waffle_fl.algorithms.weight_erosion import WeightErosion

ALGORITHMS: dict[str, type[Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "scaffold": Scaffold,
    "weight-erosion": WeightErosion,
    "waffle": Waffle,
    "waffle-kin": WaffleKin,
    "apfl": APFL,
    "ditto": Ditto,
    "fedprox": FedProx,
    "fedavg-ft": FedAvgFT,
    "per-fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbn": FedBN,
    "fedamp": FedAMP,
    "fedfomo": FedFomo,
    "apple": APPLE,
    "fedala": FedALA,
    "ifca": IFCA,
    "cfl": CFL,
    "knn-per": KNNPer,
}

TITLES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "scaffold": "SCAFFOLD",
    "weight-erosion": "WE",
    "waffle": "WAFFLE",
    "waffle-kin": "WAFFLE-kin",
    "apfl": "APFL",
    "ditto": "Ditto",
    "fedprox": "FedProx",
    "fedavg-ft": "FedAvg+FT",
    "per-fedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedbn": "FedBN",
    "fedamp": "FedAMP",
    "fedfomo": "FedFomo",
    "apple": "APPLE",
    "fedala": "FedALA",
    "ifca": "IFCA",
    "cfl": "CFL",
    "knn-per": "kNN-Per",
}

__all__ = [
    "ALGORITHMS",
    "SGD",
    "TITLES",
    "Algorithm",
    "Grad",
    "Net",
    "Round",
    "for_model",
    "hyperparameters",
    "training_key",
]
