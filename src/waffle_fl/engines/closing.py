"""The end of a round: screen what arrived, aggregate, and score Alice's model; for one cell, or for many at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net, Round
from waffle_fl.algorithms.contract import row_of
from waffle_fl.engines.steps import where_rows
from waffle_fl.federation import Federation
from waffle_fl.guard import OK, Guard, screen
from waffle_fl.models import FlatModel

SCORE_ROWS = 2000


class Desk(NamedTuple):
    """What the server knows of a federation before any update arrives; tensors, so that many can be stacked."""

    samples: Tensor  # (N,)
    steps: Tensor  # (N,), K_i as planned
    alice: Tensor  # ()


class Closed(NamedTuple):
    """A round after aggregation, its measurements still on the device."""

    server: Any
    agents: Any
    own: Net  # Alice's model
    measured: dict[str, Tensor]


def desk_of(federation: Federation, batch_size: int, epochs: int, device: torch.device) -> Desk:
    samples = federation.samples.to(device)
    return Desk(samples, epochs * -(-samples // batch_size), torch.tensor(federation.alice, device=device))


def close(
    algorithm: Algorithm,
    r: int,
    rounds: int,
    batch_size: int,
    guard: Guard,
    server: Any,
    before: Any,
    agents: Any,
    up: Any,
    present: Tensor,
    desk: Desk,
) -> Closed:
    """A2.13-16 for one federation; an agent whose update was not taken as it was sent keeps the state it had."""
    up, heard, codes = screen(up, desk.alice, present, guard)
    intact = heard & (codes == OK)
    now = Round(r, rounds, desk.alice, heard, intact, desk.samples, desk.steps, batch_size)
    server, info = algorithm.aggregate(server, up, now)
    agents = where_rows(intact, agents, before)
    net = algorithm.personal(server, agents, len(heard))
    device = heard.device
    measured = {k: torch.as_tensor(v, dtype=torch.float64, device=device) for k, v in info._asdict().items()}
    if hasattr(up, "dy"):
        measured["norms"] = up.dy.double().norm(dim=1)
    own = Net(row_of(net.params, desk.alice), row_of(net.stats, desk.alice))
    return Closed(server, agents, own, {**measured, "heard": heard, "codes": codes})


def close_together(algorithm: Algorithm, work: Sequence[tuple[Any, ...]], *settings: Any) -> list[Closed]:
    """`close` for federations of one size under one algorithm, as a single batched computation."""
    stacked = [_stacked([arguments[k] for arguments in work]) for k in range(len(work[0]))]
    closed = torch.vmap(partial(close, algorithm, *settings))(*stacked)
    return [_taken(closed, i) for i in range(len(work))]


def _stacked(states: Sequence[Any]) -> Any:
    if isinstance(states[0], Tensor):
        return torch.stack(list(states))
    return type(states[0])(*(_stacked(fields) for fields in zip(*states, strict=True)))


def _taken(state: Any, i: int) -> Any:
    if isinstance(state, Tensor):
        return state[i]
    if isinstance(state, dict):
        return {key: _taken(value, i) for key, value in state.items()}
    return type(state)(*(_taken(field, i) for field in state))


@torch.no_grad()
def score(model: FlatModel, net: Net, federation: Federation, rows: Tensor) -> dict[str, Tensor]:
    """Accuracy, or the error of a regression in its target's own unit, and mean loss of one model on these samples."""
    correct, total = (torch.zeros((), dtype=torch.float64, device=model.device) for _ in range(2))
    for part in torch.split(rows, SCORE_ROWS):
        output = model.predict(net.params, net.stats, federation.x[part])
        target = federation.labels(federation.alice, part)
        total += model.losses(output, target).double().sum()
        if output.ndim == 2 and federation.task == "classification":
            correct += (output.argmax(dim=1) == target).sum()
    loss = total / len(rows)
    if federation.task == "regression":
        return {"rmse": federation.unit * loss.sqrt(), "loss": loss}
    return {"accuracy": correct / len(rows), "loss": loss}


class Examination:
    """The held-out samples of many Alices, padded to one length, so that all their models are scored in one pass."""

    def __init__(self, federations: Sequence[Federation], parts: Sequence[Tensor]) -> None:
        self.x = federations[0].x
        self.rows = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
        self.target = torch.stack([f.labels(f.alice, rows) for f, rows in zip(federations, self.rows, strict=True)])
        lengths = torch.tensor([len(part) for part in parts], device=self.rows.device)
        self.lengths = lengths.double()
        self.held = torch.arange(self.rows.shape[1], device=self.rows.device) < lengths[:, None]

    @torch.no_grad()
    def score(self, model: FlatModel, nets: Sequence[Net]) -> list[dict[str, Tensor]]:
        output = model.predict_rows(torch.stack([net.params for net in nets]), self.x[self.rows])
        losses = model.losses(output.flatten(0, 1), self.target.flatten()).view(self.held.shape).double()
        right = (output.argmax(dim=2) == self.target) & self.held
        accuracy, loss = right.sum(dim=1) / self.lengths, torch.where(self.held, losses, 0.0).sum(dim=1) / self.lengths
        return [{"accuracy": a, "loss": b} for a, b in zip(accuracy, loss, strict=True)]


def to_numbers(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All tensors of all cells as plain numbers, fetched from the device in one go."""
    tensors = [value for entry in measured for value in entry.values() if isinstance(value, Tensor)]
    numbers = iter(torch.cat([t.double().flatten() for t in tensors]).tolist())

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return [next(numbers) for _ in range(value.numel())] if value.ndim else next(numbers)

    return [{key: plain(value) for key, value in entry.items()} for entry in measured]
