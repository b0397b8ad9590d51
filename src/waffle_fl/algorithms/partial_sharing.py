"""Partial sharing: some layers are personal and never leave the agent; the others are averaged as in FedAvg.

FedPer, FedRep and FedBN use these functions. They differ in which layers are personal and when these are trained.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import chain, groupby
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from waffle_fl.algorithms.contract import Net, Rows, broadcast_to
from waffle_fl.algorithms.fedavg import Down, Server, Up
from waffle_fl.errors import WaffleError
from waffle_fl.models.layers import Layers, Stretches

Runs: TypeAlias = tuple[int, ...]  # lengths of alternating shared and personal runs; the first is shared


class Parts(NamedTuple):
    """Shared and personal runs of a model's parameters and statistics; empty before `for_model`."""

    params: Runs = ()
    stats: Runs = ()


class Agents(NamedTuple):
    own: Rows
    own_stats: Rows


def parts(layers: Layers, own: Set[str]) -> Parts:
    """Return the shared and personal parts of a model; `own` names the personal layers."""
    return Parts(_runs(layers.params, own), _runs(layers.stats, own))


def _runs(stretches: Stretches, own: Set[str]) -> Runs:
    kinds = groupby(stretches, key=lambda stretch: stretch[0] in own)
    runs = [(is_own, sum(count for _, count in group)) for is_own, group in kinds]
    shared_first = runs if runs and not runs[0][0] else [(False, 0), *runs]
    return tuple(count for _, count in shared_first) + (0,) * (len(shared_first) % 2)


def cut(flat: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Split vectors or rows into (shared, personal)."""
    pieces = torch.split(flat, _require_layers(runs), dim=-1)
    return torch.cat(pieces[::2], dim=-1), torch.cat(pieces[1::2], dim=-1)


def join(shared: Tensor, own: Tensor, runs: Runs) -> Tensor:
    """Merge shared and personal parts: the inverse of `cut`."""
    lengths = _require_layers(runs)
    pieces = zip(torch.split(shared, lengths[::2], dim=-1), torch.split(own, lengths[1::2], dim=-1), strict=True)
    return torch.cat(list(chain.from_iterable(pieces)), dim=-1)


def _require_layers(runs: Runs) -> list[int]:
    if not runs:
        raise WaffleError("this method must know the model's layers: call for_model(method, model.layers) first")
    return list(runs)


def start(parts: Parts, net: Net, agents: int) -> tuple[Server, Agents]:
    """Return the initial state: the shared part at the server, the same personal part at every agent."""
    (x, own), (stats, own_stats) = cut(net.params, parts.params), cut(net.stats, parts.stats)
    return Server(x, stats), Agents(*broadcast_to(Net(own, own_stats), agents))


def full_model(parts: Parts, shared: Down | Net, agents: Agents) -> Net:
    """Return every agent's model, merged from the shared part and its personal part."""
    params, stats = shared
    return Net(join(params, agents.own, parts.params), join(stats, agents.own_stats, parts.stats))


def finish(parts: Parts, down: Down, trained: Net) -> tuple[Agents, Up]:
    """Return the personal part, which stays at the agent, and the update of the shared part."""
    (x, own), (stats, own_stats) = cut(trained.params, parts.params), cut(trained.stats, parts.stats)
    return Agents(own, own_stats), Up(x - down.x, stats)


def personal(parts: Parts, server: Server, agents: Agents, count: int) -> Net:
    return full_model(parts, broadcast_to(Net(server.x, server.stats), count), agents)
