"""Flower's simulation: its message API, its FedAvg strategy, two actors with one core and one thread each."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.side import Benchmark, Work, work_of

client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train one agent for one epoch, from the model in the message."""
    config = message.content["config"]
    work = work_of(Path(config["work"]))
    x, y = work.samples(config["server-round"] - 1, context.node_config["partition-id"])
    work.module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(work.module.parameters(), lr=work.lr)
    for inputs, labels in zip(x.split(work.batch_size), y.split(work.batch_size), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(work.module(inputs), labels).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(work.module.state_dict()), "metrics": MetricRecord({"share": 1})}
    return Message(RecordDict(content), reply_to=message)


class RoundOnRequest(FedAvg):
    """Flower's FedAvg with equal weights, one round per request of the benchmark."""

    def __init__(self, benchmark: Benchmark, work: Work) -> None:
        # Nodes appear one by one while the strategy already runs: without these minima a first round can miss some.
        super().__init__(
            fraction_train=work.cohort / work.agents,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_available_nodes=work.agents,
            weighted_by_key="share",
        )
        self.benchmark = benchmark

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.benchmark.wait()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        self.benchmark.done(torch.cat([a.flatten() for a in arrays.to_torch_state_dict().values()]))
        return arrays, metrics


def run(folder: Path) -> None:
    """Run Flower's simulation on the work in a folder."""
    benchmark, work = Benchmark(folder, version("flwr")), work_of(folder)
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        RoundOnRequest(benchmark, work).start(
            grid,
            ArrayRecord(work.module.state_dict()),
            num_rounds=work.count,
            train_config=ConfigRecord({"work": str(folder)}),
        )

    run_simulation(
        server,
        client,
        num_supernodes=work.agents,
        backend_config={
            "init_args": {"num_cpus": 2},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
