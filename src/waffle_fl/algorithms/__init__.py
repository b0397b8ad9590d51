"""One algorithm, one file, a few pure functions over explicit state. `contract.py` says which."""

from __future__ import annotations

from waffle_fl.algorithms.apfl import APFL
from waffle_fl.algorithms.apple import APPLE
from waffle_fl.algorithms.contract import SGD, Algorithm, Net, Round, training_key
from waffle_fl.algorithms.ditto import Ditto
from waffle_fl.algorithms.fedala import FedALA
from waffle_fl.algorithms.fedamp import FedAMP
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.fedfomo import FedFomo
from waffle_fl.algorithms.ifca import IFCA
from waffle_fl.algorithms.knn_per import KNNPer
from waffle_fl.algorithms.local import Local
from waffle_fl.algorithms.scaffold import Scaffold
from waffle_fl.algorithms.waffle import Waffle
from waffle_fl.algorithms.weight_erosion import WeightErosion

ALGORITHMS: dict[str, type[Algorithm]] = {
    "local": Local,
    "fedavg": FedAvg,
    "scaffold": Scaffold,
    "weight-erosion": WeightErosion,
    "waffle": Waffle,
    "apfl": APFL,
    "ditto": Ditto,
    "fedamp": FedAMP,
    "fedfomo": FedFomo,
    "apple": APPLE,
    "fedala": FedALA,
    "ifca": IFCA,
    "knn-per": KNNPer,
}

TITLES = {
    "local": "Local",
    "fedavg": "FedAvg",
    "scaffold": "SCAFFOLD",
    "weight-erosion": "WE",
    "waffle": "WAFFLE",
    "apfl": "APFL",
    "ditto": "Ditto",
    "fedamp": "FedAMP",
    "fedfomo": "FedFomo",
    "apple": "APPLE",
    "fedala": "FedALA",
    "ifca": "IFCA",
    "knn-per": "kNN-Per",
}

__all__ = ["ALGORITHMS", "SGD", "TITLES", "Algorithm", "Net", "Round", "training_key"]
