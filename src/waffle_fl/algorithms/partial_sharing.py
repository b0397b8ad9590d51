"""Partial sharing: some layers are each agent's own and never leave it; the others are averaged as FedAvg does.

FedPer, FedRep and FedBN are made of this. They differ in whose a layer is, and in when it is trained.
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

Runs: TypeAlias = tuple[int, ...]  # lengths of what is shared and what is own, in turn, the first one shared


class Parts(NamedTuple):
    """Where a model is cut; before `for_model` nobody knows."""

    params: Runs = ()
    stats: Runs = ()


class Agents(NamedTuple):
    own: Rows
    own_stats: Rows


def parts(layers: Layers, own: Set[str]) -> Parts:
    """The model cut into the layers that are shared and those that are an agent's own."""
    return Parts(_runs(layers.params, own), _runs(layers.stats, own))


def _runs(stretches: Stretches, own: Set[str]) -> Runs:
    kinds = groupby(stretches, key=lambda stretch: stretch[0] in own)
    runs = [(is_own, sum(count for _, count in group)) for is_own, group in kinds]
    shared_first = runs if runs and not runs[0][0] else [(False, 0), *runs]
    return tuple(count for _, count in shared_first) + (0,) * (len(shared_first) % 2)


def cut(flat: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """(what is shared, what is own) of vectors or rows."""
    pieces = torch.split(flat, _require_layers(runs), dim=-1)
    return torch.cat(pieces[::2], dim=-1), torch.cat(pieces[1::2], dim=-1)


def join(shared: Tensor, own: Tensor, runs: Runs) -> Tensor:
    """The whole again, each number in its place."""
    lengths = _require_layers(runs)
    pieces = zip(torch.split(shared, lengths[::2], dim=-1), torch.split(own, lengths[1::2], dim=-1), strict=True)
    return torch.cat(list(chain.from_iterable(pieces)), dim=-1)


def _require_layers(runs: Runs) -> list[int]:
    if not runs:
        raise WaffleError("this method must know the model's layers: give it those by for_model(method, model.layers)")
    return list(runs)


def start(parts: Parts, net: Net, agents: int) -> tuple[Server, Agents]:
    """The server starts with what is shared, every agent with the same numbers of its own."""
    (x, own), (stats, own_stats) = cut(net.params, parts.params), cut(net.stats, parts.stats)
    return Server(x, stats), Agents(*broadcast_to(Net(own, own_stats), agents))


def full_model(parts: Parts, shared: Down | Net, agents: Agents) -> Net:
    """Every agent's model: what it was sent around what is its own."""
    params, stats = shared
    return Net(join(params, agents.own, parts.params), join(stats, agents.own_stats, parts.stats))


def finish(parts: Parts, down: Down, trained: Net) -> tuple[Agents, Up]:
    """An agent keeps what is its own and sends the update of what is shared."""
    (x, own), (stats, own_stats) = cut(trained.params, parts.params), cut(trained.stats, parts.stats)
    return Agents(own, own_stats), Up(x - down.x, stats)


def personal(parts: Parts, server: Server, agents: Agents, count: int) -> Net:
    return full_model(parts, broadcast_to(Net(server.x, server.stats), count), agents)
