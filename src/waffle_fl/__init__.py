"""waffle-fl: personalised federated learning.

data -> partition -> federation -> algorithms x engines -> records -> report

load("mnist")            a Dataset: verified, normalised
split(labels, "C")       a Partition: who holds which sample
build(dataset, split)    a Federation: agents, Alice among them
FlatModel(module)        any torch.nn.Module as rows of flat parameters
Waffle(), FedAvg() ...   algorithms: pure functions over explicit state
simulate([Cell(...)])    one process, stacked rows, CPU or GPU
"""

from __future__ import annotations

__version__ = "0.1.0"

from waffle_fl.errors import WaffleError

__all__ = ["WaffleError", "__version__"]
