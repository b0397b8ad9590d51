"""The connection to a Ray cluster, made once per process."""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
from typing import Any, NamedTuple

from waffle_fl.errors import WaffleError
from waffle_fl.ray_cluster.event_queue import EventQueue
from waffle_fl.ray_cluster.worker import train_runs

DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anyone unless the user asks for it
    "RAY_raylet_start_wait_time_s": "120",  # on a busy machine a node needs longer than the usual 30 s to start
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what a later version does by default, with a warning until then
}


HOST_AND_PORT = re.compile(r"(?:ray://)?\[?(?P<host>[^/\]]+?)\]?:(?P<port>[0-9]{1,5})")
REACHED_SECONDS = 5.0
START = "start one with `ray start --head`"


class Cluster(NamedTuple):
    """A connected cluster."""

    ray: Any
    queue: Any  # the actor EventQueue
    train: Any  # the task `train_runs`

    def cpus(self) -> list[int]:
        """Return the number of cores of each node that is alive."""
        return self._of_nodes("CPU")

    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(self._of_nodes("GPU"))

    def _of_nodes(self, kind: str) -> list[int]:
        found = [int(node["Resources"].get(kind, 0)) for node in self.ray.nodes() if node["Alive"]]
        return [count for count in found if count]


def require_ray() -> Any:
    """Import Ray, or raise an error that says how to install it."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise WaffleError('--on ray needs Ray: pip install "waffle-fl[ray]"') from None


def check_address(address: str) -> None:
    """Raise an error if nothing listens at the address of a running cluster; Ray itself would try for minutes."""
    name = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        return
    found = HOST_AND_PORT.fullmatch(address)
    if not found:
        raise WaffleError(f"{name}: expected the address of a Ray cluster such as 10.0.0.1:6379, got {address!r}")
    try:
        socket.create_connection((found["host"], int(found["port"])), REACHED_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WaffleError(f"{name}: no Ray cluster answers at {address} ({reason}): correct it, or {START}") from None


def connect(address: str = "") -> Cluster:
    """Connect to the cluster, or start one on this machine if none runs and no address is given."""
    ray = require_ray()
    if not ray.is_initialized():
        _connected.clear()
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
        try:
            ray.init(address=address or None, **quiet)
        except Exception as error:  # a node that does not start raises the base class
            reason = " ".join(str(error).split())[:300]
            where = address or os.environ.get("RAY_ADDRESS") or "this machine"
            raise WaffleError(f"cannot use the Ray cluster at {where}: {reason}; {START}") from None
        # Ray prints on stdout, among tables and JSON, that it lost a worker; the driver reports that itself.
        printing: Any = importlib.import_module("ray._private.worker")
        printing.print_to_stdstream = lambda *_, **__: None
        _connected[address] = _with_queue(ray)
    elif address not in _connected:
        _connected[address] = next(iter(_connected.values()), None) or _with_queue(ray)
    return _connected[address]


_connected: dict[str, Cluster] = {}


def _with_queue(ray: Any) -> Cluster:
    """Start the queue on the driver's own node, which outlives the others."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    queue = ray.remote(EventQueue).options(num_cpus=0, scheduling_strategy=here).remote()
    # The driver starts lost runs again itself, and a process keeps its data and kernels for the next task.
    return Cluster(ray, queue, ray.remote(max_retries=0, max_calls=0)(train_runs))
