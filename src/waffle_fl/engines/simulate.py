"""The simulator: all agents of one or many federations as rows of one stack, on CPU or GPU.

`begin`, `step` and `finish` are row-local, so rows of many federations train together; `aggregate` runs for each
federation. One thread computes a row, so its bits depend neither on its neighbours nor on the machine's cores.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net, training_key
from waffle_fl.batches import Batches
from waffle_fl.engines.closing import Closed, Examination, close, close_together, desk_of, score, to_numbers
from waffle_fl.engines.forks import can_fork, in_processes, shared_like
from waffle_fl.engines.steps import Graphs, one_step, products
from waffle_fl.errors import Diverged, WaffleError
from waffle_fl.federation import Federation
from waffle_fl.guard import OK, REASONS, Guard
from waffle_fl.models import FlatModel
from waffle_fl.wire import Envelope, Inbox, seal

ATTEMPTS = 3  # how often a round is tried when Alice's own update is not usable
CHUNK_BYTES = {"cpu": 2 << 30, "cuda": 24 << 30}

FORK_PAYS = 0.03  # seconds of training a round from which processes gain more than they cost

Tamper = Callable[[Any, int], Any]  # (updates of a federation, round) -> what arrives at the server
Post = Callable[[int, int, bytes], Iterable[bytes]]  # (agent, round, its reply) -> what arrives under its name


class State(NamedTuple):
    """Everything a federation carries from round to round."""

    server: Any
    agents: Any


@dataclass(frozen=True)
class Cell:
    """One federation, one algorithm, one seed: a run."""

    algorithm: Algorithm
    federation: Federation
    seed: int
    state: State | None = None  # where to go on from; None is the start
    tamper: Tamper | None = None  # what happens to the updates on their way, as tensors
    post: Post | None = None  # and as bytes: then every update is packed, posted and unpacked


@dataclass(frozen=True)
class Outcome:
    """What one round brought one cell: measurements for the record, and the state after it."""

    cell: int
    round: int
    measured: dict[str, Any]
    state: State
    error: Diverged | None = None


def simulate(
    cells: Sequence[Cell],
    model: FlatModel,
    *,
    rounds: int,
    start: int = 0,
    batch_size: int = 32,
    epochs: int = 1,
    augment: bool = False,
    guard: Guard = "off",
    workers: int = 0,
) -> Iterator[list[Outcome]]:
    """Train the cells' rows together and yield their outcomes, one list a round. Diverged cells drop out."""
    check_stack(cells, model, batch_size)
    simulator = _Simulator(cells, model, rounds, batch_size, epochs, augment, guard, workers)
    for r in range(start + 1, rounds + 1):  # A2.2
        if not simulator.live:
            return
        with _one_thread(), products(model.precision):
            outcomes = simulator.round(r)
        yield outcomes


def check_stack(cells: Sequence[Cell], model: FlatModel, batch_size: int) -> None:
    """What must hold before any work."""
    if len({training_key(cell.algorithm) for cell in cells}) > 1:
        raise WaffleError(
            "cells in one stack must train their rows alike: give them methods of one kind and the same step settings"
        )
    if model.normalises:
        for cell in cells:
            for name, n in zip(cell.federation.names, cell.federation.samples.tolist(), strict=True):
                if n and (batch_size == 1 or n % batch_size == 1):
                    raise WaffleError(
                        f"{name} has {n} samples, so a batch of {batch_size} leaves one alone, and BatchNorm cannot "
                        "normalise a single sample: choose another batch size"
                    )


def initial_state(cell: Cell, model: FlatModel) -> State:
    """A2.1: one random model for everyone."""
    server, agents = cell.algorithm.init(model.init(cell.seed), cell.federation.agents)
    return State(server, agents)


class _Simulator:
    """The states of the live cells, and one round of work on them."""

    def __init__(
        self,
        cells: Sequence[Cell],
        model: FlatModel,
        rounds: int,
        batch_size: int,
        epochs: int,
        augment: bool,
        guard: Guard,
        workers: int,
    ) -> None:
        federations = _on_device([c.federation for c in cells], model)
        self.cells = [replace(c, federation=f) for c, f in zip(cells, federations, strict=True)]
        self.model, self.rounds, self.batch_size, self.epochs, self.guard = model, rounds, batch_size, epochs, guard
        self.augment = augment
        self.states = [cell.state or initial_state(cell, model) for cell in self.cells]
        self.live = list(range(len(cells)))
        self._batches: dict[tuple[int, ...], Batches] = {}
        self._workers = workers or (1 if model.device.type == "cuda" else os.cpu_count() or 1)
        self._like: tuple[Any, Any] | None = None  # what a round's rows look like, known after the first
        self._round_seconds = 0.0  # how long training takes in this process
        self._graphs = Graphs(model)
        self._desks = [desk_of(f, batch_size, epochs, model.device) for f in federations]
        self._examinations: dict[Any, Examination] = {}
        self._refused: dict[int, list[tuple[int, str]]] = {}
        self._ahead: dict[tuple[int, ...], list[Closed]] = {}
        self._looks_ahead = model.device.type == "cuda" and not any(c.tamper or c.post for c in cells)
        self._clock = time.perf_counter()

    def round(self, r: int) -> list[Outcome]:
        """Train the live cells; a cell whose Alice sent nothing usable tries again, then drops out."""
        done: dict[int, Outcome] = {}
        pending = list(self.live)
        for attempt in range(ATTEMPTS):
            if not pending:
                break
            closed = self._ahead.pop((r, attempt, *pending), None) or self._begun(pending, r, attempt)
            if self._looks_ahead and not attempt and r < self.rounds:
                self._begin_ahead(pending, closed, r + 1)
            measured = to_numbers([c.measured for c in closed])
            outcomes = [self._outcome(i, c, m, r) for i, c, m in zip(pending, closed, measured, strict=True)]
            done |= {outcome.cell: outcome for outcome in outcomes}
            pending = [outcome.cell for outcome in outcomes if outcome.error]
        began, self._clock = self._clock, time.perf_counter()
        seconds = (self._clock - began) / len(self.live)
        self.live = [i for i in self.live if i not in pending]
        for i in self.live:
            self.states[i] = done[i].state
            done[i].measured["seconds"] = round(seconds, 6)
        return [done[i] for i in sorted(done)]

    def _begun(self, indices: Sequence[int], r: int, attempt: int) -> list[Closed]:
        """A round, begun: on a GPU the work is only queued."""
        return self._close(indices, r, self._train(indices, r, attempt))

    def _begin_ahead(self, indices: Sequence[int], closed: Sequence[Closed], r: int) -> None:
        """Queue the next round before the last one's numbers are there; if they turn out bad it is begun again."""
        before = list(self.states)
        for i, c in zip(indices, closed, strict=True):
            self.states[i] = State(c.server, c.agents)
        self._ahead = {(r, 0, *indices): self._begun(indices, r, 0)}
        self.states = before

    def _train(self, indices: Sequence[int], r: int, attempt: int) -> list[tuple[Any, Any]]:
        """A2.3-12 for all rows of the cells, chunk by chunk."""
        cells = [self.cells[i] for i in indices]
        algorithm = cells[0].algorithm
        batches = self._batches_of(tuple(indices))
        down = _stack(
            [
                c.algorithm.broadcast(self.states[i].server, c.federation.agents)
                for i, c in zip(indices, cells, strict=True)
            ]
        )  # A2.3
        agents = _stack([self.states[i].agents for i in indices])

        def train_chunk(rows: slice) -> tuple[Any, Any]:
            chunk_down, chunk_agents = _rows(down, rows), _rows(agents, rows)
            local = algorithm.begin(chunk_down, chunk_agents)  # A2.5
            local = self._steps(algorithm, local, batches, r, attempt, rows)  # A2.6-8
            return algorithm.finish(chunk_down, chunk_agents, local)  # A2.9-12

        new_agents, up = self._spread(train_chunk, batches.lengths)
        edges = _edges([c.federation.agents for c in cells])
        return [(_rows(new_agents, rows), _rows(up, rows)) for rows in edges]

    def _spread(self, train: Callable[[slice], tuple[Any, Any]], lengths: Sequence[int]) -> tuple[Any, Any]:
        """Train all rows: stacked here, or one by one among processes if a round is long enough to pay for them."""
        began = time.perf_counter()
        pays = not self.model.stacked and self._round_seconds > FORK_PAYS and can_fork()
        rows = len(lengths)
        processes = min(self._workers, rows) if pays else 1
        chunks = self._chunks(lengths)
        if processes == 1 or self._like is None:
            results = [train(chunk) for chunk in chunks]
            agents, up = _stack([a for a, _ in results]), _stack([u for _, u in results])
            self._round_seconds = time.perf_counter() - began
            self._like = agents, up
            return agents, up
        agents, up = (type(like)(*(shared_like(field, rows) for field in like)) for like in self._like)

        def both(chunk: slice) -> list[Tensor]:
            new_agents, new_up = train(chunk)
            return [*new_agents, *new_up]

        in_processes(both, chunks, [*agents, *up], processes)
        return agents, up

    def _steps(self, algorithm: Algorithm, local: Any, batches: Batches, r: int, attempt: int, rows: slice) -> Any:
        """All mini-batches of a round, for the rows of one chunk."""
        plan, steps = batches.plan(r, attempt, rows), batches.steps[rows]
        sizes, together = batches.sizes(rows, padded=self.model.stacked), min(steps)
        if self.model.device.type == "cuda":
            return self._graphs.run(algorithm, batches, local, plan, sizes, steps)
        for t, size in enumerate(sizes):
            local = one_step(algorithm, self.model, batches, local, plan, torch.tensor([t]), size, t < together)
        return local

    def _close(self, indices: Sequence[int], r: int, trained: Sequence[tuple[Any, Any]]) -> list[Closed]:
        """A2.13-16 for every cell. Nothing here waits for a GPU, and there cells of one kind are closed together."""
        settings = (r, self.rounds, self.batch_size, self.guard)
        work = {i: self._arrived(i, r, agents, up) for i, (agents, up) in zip(indices, trained, strict=True)}
        closed: dict[int, Closed] = {}
        for group in self._alike(indices):
            algorithm = self.cells[group[0]].algorithm
            if self.model.device.type == "cuda":
                done = close_together(algorithm, [work[i] for i in group], *settings)
            else:
                done = [close(algorithm, *settings, *work[i]) for i in group]
            closed |= dict(zip(group, done, strict=True))
        scores = self._scores(indices, [closed[i].own for i in indices])
        return [
            closed[i]._replace(measured={**scored, **closed[i].measured})
            for i, scored in zip(indices, scores, strict=True)
        ]

    def _arrived(self, i: int, r: int, agents: Any, up: Any) -> tuple[Any, ...]:
        """What the server has at hand when it closes the round of one cell."""
        cell, state, desk = self.cells[i], self.states[i], self._desks[i]
        present = desk.samples > 0
        self._refused[i] = []
        if cell.tamper:
            up = cell.tamper(up, r)
        if cell.post:
            up, arrived, self._refused[i] = self._posted(cell, up, r, desk.steps.tolist())
            present = present & arrived
        return state.server, state.agents, agents, up, present, desk

    def _alike(self, indices: Sequence[int]) -> list[list[int]]:
        groups: dict[Any, list[int]] = {}
        for i in indices:
            groups.setdefault((self.cells[i].algorithm, self.cells[i].federation.agents), []).append(i)
        return list(groups.values())

    def _scores(self, indices: Sequence[int], nets: Sequence[Net]) -> list[dict[str, Tensor]]:
        """Accuracy and loss of each Alice's model on her own test data, and on validation data where she has some."""
        federations = [self.cells[i].federation for i in indices]
        scores = self._score("test", federations, [f.test[f.alice] for f in federations], nets)
        judged = [k for k, f in enumerate(federations) if len(f.validation[f.alice])]
        if judged:
            theirs = [federations[k] for k in judged]
            held_out = [f.validation[f.alice] for f in theirs]
            for k, more in zip(
                judged, self._score("validation", theirs, held_out, [nets[k] for k in judged]), strict=True
            ):
                scores[k] |= {f"validation_{key}": value for key, value in more.items()}
        return scores

    def _score(
        self, kind: str, federations: Sequence[Federation], parts: Sequence[Tensor], nets: Sequence[Net]
    ) -> list[dict[str, Tensor]]:
        alike = len({id(f.x) for f in federations}) == 1 and federations[0].task == "classification"
        if not (alike and self.model.stacked and self.model.device.type == "cuda"):
            return [score(self.model, n, f, p) for n, f, p in zip(nets, federations, parts, strict=True)]
        key = (kind, *map(id, federations))
        if key not in self._examinations:
            self._examinations[key] = Examination(federations, parts)
        return self._examinations[key].score(self.model, nets)

    def _outcome(self, i: int, closed: Closed, measured: dict[str, Any], r: int) -> Outcome:
        """What a closed round brought, in plain numbers; a round that Alice could not train is not applied."""
        names, alice = self.cells[i].federation.names, self.cells[i].federation.alice
        heard, codes = measured.pop("heard"), measured.pop("codes")
        for key in ("loss", "validation_loss", "rmse", "validation_rmse"):
            if key in measured and not math.isfinite(measured[key]):
                measured[key] = None
        expected = self.cells[i].federation.samples.tolist()
        found = zip(names, codes, expected, strict=True)
        screened = {name: REASONS[int(code)] for name, code, samples in found if code != OK and samples}
        if screened:
            measured["screened"] = screened
        if self._refused[i]:
            measured["refused"] = [[names[agent], reason] for agent, reason in self._refused[i]]
        if heard[alice] and measured["loss"] is not None:
            return Outcome(i, r, {"round": r, **measured}, State(closed.server, closed.agents))
        error = Diverged(
            f"round {r}: the training of Alice ({names[alice]}) diverged (no finite update in {ATTEMPTS} attempts): "
            "lower lr, or set clip; the rounds before are kept"
        )
        return Outcome(i, r, {"round": r, **measured}, self.states[i], error)

    def _posted(self, cell: Cell, up: Any, r: int, steps: list[int]) -> tuple[Any, Tensor, list[tuple[int, str]]]:
        """Send every update through the cell's post, as bytes, and read what arrives."""
        envelope = Envelope(f"simulation {cell.seed}", r, self.model.fingerprint())
        template = {name: value[0].cpu() for name, value in up._asdict().items()}
        inbox = Inbox(template, envelope, steps)
        for agent in range(cell.federation.agents):
            for reply in cell.post(agent, r, seal(up, agent, envelope, steps[agent])) if cell.post else ():
                inbox.deliver(agent, reply)
        received, present = inbox.updates(type(up))
        device = self.model.device
        return type(up)(*(value.to(device) for value in received)), present.to(device), inbox.log

    def _batches_of(self, indices: tuple[int, ...]) -> Batches:
        if indices not in self._batches:
            cells = [self.cells[i] for i in indices]
            federations, seeds = [c.federation for c in cells], [c.seed for c in cells]
            self._batches = {
                indices: Batches(federations, seeds, self.batch_size, self.epochs, self.model.dtype, self.augment)
            }
        return self._batches[indices]

    def _chunks(self, lengths: Sequence[int]) -> list[slice]:
        """Rows that train together: as many as memory holds; unstacked, as many alike as go abreast."""
        if not self.model.stacked:
            alike = _edges([len(list(group)) for _, group in groupby(lengths)])
            return [chunk for rows in alike for chunk in _cut(rows, self.model.abreast)]
        row_bytes = 16 * self.model.size * self.model.dtype.itemsize
        return _cut(slice(0, len(lengths)), max(1, CHUNK_BYTES[self.model.device.type] // row_bytes))


def _on_device(federations: Sequence[Federation], model: FlatModel) -> list[Federation]:
    """Each distinct pool is moved once, so federations that share it go on sharing it."""
    pools: dict[int, Tensor] = {}
    moved = []
    for f in federations:
        pool = pools.setdefault(id(f.x), f.x.to(model.device, model.dtype))
        moved.append(replace(replace(f, x=pool[:0]).to(model.device, model.dtype), x=pool))
    return moved


def _stack(states: Sequence[Any]) -> Any:
    return type(states[0])(*(torch.cat(fields) for fields in zip(*states, strict=True)))


def _rows(state: Any, rows: slice) -> Any:
    return type(state)(*(field[rows] for field in state))


def _edges(sizes: Sequence[int]) -> list[slice]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _cut(rows: slice, size: int) -> list[slice]:
    return [slice(i, min(i + size, rows.stop)) for i in range(rows.start, rows.stop, size)]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
