"""pfl-research: its FederatedAveraging in its SimulatedBackend, the agents shared among the processes of torchrun."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.peers.side import Benchmark, work_of
from benchmarks.plain import flat


class Classifier(nn.Module):
    """A network with the loss and the metrics that pfl requires of a module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        with torch.no_grad():
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class RoundOnRequest(TrainingProcessCallback):
    """One round per request of the benchmark, which talks to the first process; the other processes wait for it."""

    def __init__(self, benchmark: Benchmark | None, rounds: int) -> None:
        self.benchmark, self.rounds = benchmark, rounds

    def wait(self) -> None:
        if self.benchmark:
            self.benchmark.wait()
        torch.distributed.barrier()

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if self.benchmark:
            self.benchmark.done(flat(model.pytorch_model))
        if central_iteration < self.rounds - 1:
            self.wait()
        return False, Metrics()


def run(folder: Path) -> None:
    """Run pfl's simulation on the work in a folder."""
    work, rank = work_of(folder), torch.distributed.get_rank()
    benchmark = Benchmark(folder, version("pfl")) if rank == 0 else None
    module = Classifier(work.module)
    # Every agent once per round, in turn; or a cohort of all agents, each with one order of its samples.
    orders = work.count if work.cohort == work.agents else 1
    names: list[Any] = [(r, i) for r in range(orders) for i in range(work.agents)]
    users = FederatedDataset(lambda name: Dataset(work.samples(*name)), MinimizeReuseUserSampler(names))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=work.count,
            evaluation_frequency=work.count,  # only in the first round, which is not timed
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, [WeightByUser()]),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch_size),
        callbacks=[RoundOnRequest(benchmark, work.count)],
    )
