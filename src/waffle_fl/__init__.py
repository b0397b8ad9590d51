"""waffle-fl: personalised federated learning.

data -> partition -> federation -> algorithms x engines -> records -> report

load("mnist")            a Dataset: verified, normalised
split(labels, ..., "C")  a Partition: who holds which sample
build(dataset, split)    a Federation: agents, Alice among them
FlatModel(module)        any torch.nn.Module as rows of flat parameters
Waffle(), FedAvg() ...   algorithms: pure functions over explicit state
simulate([Cell(...)])    one process, stacked rows, CPU or GPU
"""

from __future__ import annotations

__version__ = "0.1.0"

from waffle_fl.algorithms import SGD
from waffle_fl.algorithms.apfl import APFL
from waffle_fl.algorithms.ditto import Ditto
from waffle_fl.algorithms.fedavg import FedAvg
from waffle_fl.algorithms.local import Local
from waffle_fl.algorithms.scaffold import Scaffold
from waffle_fl.algorithms.waffle import Waffle
from waffle_fl.algorithms.weight_erosion import WeightErosion
from waffle_fl.data import load
from waffle_fl.engines.simulate import Cell, simulate
from waffle_fl.errors import WaffleError
from waffle_fl.federation import Federation, build
from waffle_fl.models import FlatModel
from waffle_fl.partition import split

__all__ = [
    "APFL",
    "SGD",
    "Cell",
    "Ditto",
    "FedAvg",
    "Federation",
    "FlatModel",
    "Local",
    "Scaffold",
    "Waffle",
    "WaffleError",
    "WeightErosion",
    "build",
    "load",
    "simulate",
    "split",
]
