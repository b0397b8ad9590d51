"""The simulator: all agents of one or many federations as rows of one stack, on CPU or GPU.

`begin`, `step` and `finish` are row-local, so rows of many federations train together; `aggregate` runs for each
federation. One thread computes a row, so its bits depend neither on its neighbours nor on the machine's cores.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, training_key
from waffle_fl.batches import Batches
from waffle_fl.engines.cells import Cell, Outcome, State, fitted, on_device
from waffle_fl.engines.closing import Closed, Examiner, close, close_together, desk_of, screened_of, to_numbers
from waffle_fl.engines.dividing import Divided, helping
from waffle_fl.engines.families import families_of, once_a_family
from waffle_fl.engines.judging import Judge
from waffle_fl.engines.states import mapped
from waffle_fl.engines.steps import Graphs, one_thread, products
from waffle_fl.engines.training import Training
from waffle_fl.engines.workers import Hiring, Workers, shared
from waffle_fl.errors import Diverged, WaffleError
from waffle_fl.guard import Guard
from waffle_fl.models import FlatModel
from waffle_fl.wire import Envelope, Inbox, seal

ATTEMPTS = 3  # how often a round is tried when Alice's own update is not usable


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
    cells = [fitted(cell, model) for cell in cells]
    families = families_of(cells) if guard == "off" else [[i] for i in range(len(cells))]
    check_stack([cells[first] for first, *_ in families], model, batch_size)

    def each(some: Sequence[Cell], start: int) -> Iterator[list[Outcome]]:
        with closing(_Simulator(some, model, rounds, batch_size, epochs, augment, guard, workers)) as simulator:
            for r in range(start + 1, rounds + 1):  # A2.2
                if not simulator.live:
                    return
                with one_thread(), products(model.precision):
                    outcomes = simulator.round(r)
                yield outcomes

    if len(families) == len(cells):
        return each(cells, start)
    return once_a_family(each, families, on_device(cells, model), model, start, rounds)


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
    server, agents = fitted(cell, model).algorithm.init(model.init(cell.seed), cell.federation.agents)
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
        self.cells = on_device(cells, model)
        federations = [c.federation for c in self.cells]
        self.model, self.rounds, self.batch_size, self.epochs, self.guard = model, rounds, batch_size, epochs, guard
        self.augment = augment
        self.states = [cell.state or initial_state(cell, model) for cell in self.cells]
        self.live = list(range(len(cells)))
        self._trainings: dict[tuple[int, ...], Training | Divided] = {}  # of the live cells
        honest = not any(c.tamper or c.post for c in cells)
        cores = 1 if model.device.type == "cuda" else workers or os.cpu_count() or 1
        by_cells = honest and model.stacked and len(cells) >= cores  # else by rows
        self._hiring, self._row_cores = Hiring(cores if by_cells else 1), 1 if by_cells else cores
        self._workers: Workers | None = None
        self._closed: list[Closed] = []  # of the live cells, in shared memory where workers write
        self._graphs = Graphs(model)
        self._desks = [desk_of(f, batch_size, epochs, model.device) for f in federations]
        self._examiner = Examiner(model, self._row_cores)
        self._refused: dict[int, list[tuple[int, str]]] = {}
        self._ahead: dict[tuple[int, ...], list[Closed]] = {}
        self._looks_ahead = model.device.type == "cuda" and honest
        self._clock = time.perf_counter()

    def close(self) -> None:
        """End all workers: their cells are done, or not all of them live."""
        for team in (*self._trainings.values(), self._workers):
            if team:
                team.close()
        self._trainings, self._workers = {}, None
        self._examiner.close()

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
            outcomes = [self._outcome(i, c, m, r, attempt) for i, c, m in zip(pending, closed, measured, strict=True)]
            done |= {outcome.cell: outcome for outcome in outcomes}
            pending = [outcome.cell for outcome in outcomes if outcome.error]
            if pending:
                self._ahead.clear()  # it began from what was refused
        began, self._clock = self._clock, time.perf_counter()
        seconds = (self._clock - began) / len(self.live)
        if pending:
            self.close()
            self.live = [i for i in self.live if i not in pending]
            self._hiring = Hiring(min(self._hiring.cores, len(self.live)))
        for i in self.live:
            if self._workers:
                mapped(Tensor.copy_, self.states[i], done[i].state)
            else:
                self.states[i] = done[i].state
            done[i].measured["seconds"] = round(seconds, 6)
        return [done[i] for i in sorted(done)]

    def _begun(self, indices: Sequence[int], r: int, attempt: int) -> list[Closed]:
        """A round, begun: on a GPU the work is only queued; on a CPU workers may each do some of the cells."""
        if indices != self.live:  # some try again
            return self._here(indices, r, attempt)
        if not self._workers and self._hiring.pays(self.rounds - r + 1):
            self._hire()
        if self._workers:
            self._workers(r, attempt)
            return [
                closed._replace(server=mapped(torch.clone, closed.server), agents=mapped(torch.clone, closed.agents))
                for closed in self._closed  # the rest is read before the workers write again
            ]
        with self._hiring.watched():
            self._closed = self._here(indices, r, attempt)
        return self._closed

    def _here(self, indices: Sequence[int], r: int, attempt: int) -> list[Closed]:
        return self._close(indices, r, self._train(indices, r, attempt))

    def _hire(self) -> None:
        """Workers for the live cells, whose states and results lie in shared memory from now on."""
        for i in self.live:
            self.states[i] = shared(self.states[i])
        live, closed, cores = self.live, [shared(c) for c in self._closed], self._hiring.cores

        def work(share: int, r: int, attempt: int) -> None:
            own = slice(cores - 1 - share, None, cores)
            for place, result in zip(closed[own], self._here(live[own], r, attempt), strict=True):
                mapped(Tensor.copy_, place, result)

        self._closed, self._workers = closed, Workers(work, cores)

    def _begin_ahead(self, indices: Sequence[int], closed: Sequence[Closed], r: int) -> None:
        """Queue the next round before the last one's numbers are there; if they turn out bad it is begun again."""
        before = list(self.states)
        for i, c in zip(indices, closed, strict=True):
            self.states[i] = State(c.server, c.agents)
        self._ahead = {(r, 0, *indices): self._begun(indices, r, 0)}
        self.states = before

    def _train(self, indices: Sequence[int], r: int, attempt: int) -> list[tuple[Any, Any]]:
        """A2.3-12 for all rows of the cells."""
        given = [
            (cell.algorithm.broadcast(state.server, cell.federation.agents), state.agents)  # A2.3
            for cell, state in ((self.cells[i], self.states[i]) for i in indices)
        ]
        return self._training_of(tuple(indices)).round(given, r, attempt, self.rounds - r + 1)

    def _training_of(self, indices: tuple[int, ...]) -> Training | Divided:
        if indices not in self._trainings:
            cells = [self.cells[i] for i in indices]
            federations, seeds = [c.federation for c in cells], [c.seed for c in cells]
            cores = self._row_cores if list(indices) == self.live else 1  # a few that try again are soon done
            settings = (self.batch_size, self.epochs, self.model.dtype, self.augment, self.rounds)

            def training(algorithm: Algorithm, agents: Sequence[Sequence[int]], judge: Judge | None = None) -> Training:
                batches, counts = Batches(federations, seeds, *settings, agents), [len(some) for some in agents]
                return Training(algorithm, self.model, batches, self._graphs, counts, cores, judge)

            algorithm, sizes, helpers = cells[0].algorithm, [f.agents for f in federations], helping(cells)
            if any(helpers) and hasattr(algorithm, "helper"):
                parts = (algorithm, algorithm.helper(), self.model, sizes, helpers)
                self._trainings[indices] = Divided(*parts, training)
            else:
                judges = hasattr(algorithm, "candidates")
                judge = Judge(algorithm, self.model, federations, seeds, self.rounds) if judges else None
                self._trainings[indices] = training(algorithm, [range(size) for size in sizes], judge)
        return self._trainings[indices]

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
        cells = [self.cells[i] for i in indices]
        algorithms, federations = [cell.algorithm for cell in cells], [cell.federation for cell in cells]
        nets = [closed[i].own for i in indices]
        scores = self._examiner.examine(algorithms, federations, nets, r / self.rounds)
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
            up = cell.tamper(mapped(torch.clone, up), r)  # it may keep what workers will write over
        if cell.post:
            up, arrived, self._refused[i] = self._posted(cell, up, r, desk.steps.tolist())
            present = present & arrived
        return state.server, state.agents, agents, up, present, desk

    def _alike(self, indices: Sequence[int]) -> list[list[int]]:
        groups: dict[Any, list[int]] = {}
        for i in indices:
            groups.setdefault((self.cells[i].algorithm, self.cells[i].federation.agents), []).append(i)
        return list(groups.values())

    def _outcome(self, i: int, closed: Closed, measured: dict[str, Any], r: int, attempt: int) -> Outcome:
        """What a closed round brought, in plain numbers; a round that Alice could not train is not applied."""
        names, alice = self.cells[i].federation.names, self.cells[i].federation.alice
        heard, codes = measured.pop("heard"), measured.pop("codes")
        for key in ("loss", "validation_loss", "rmse", "validation_rmse"):
            if key in measured and not math.isfinite(measured[key]):
                measured[key] = None
        screened = screened_of(codes, names, self.cells[i].federation.samples.tolist())
        if screened:
            measured["screened"] = screened
        if self._refused[i]:
            measured["refused"] = [[names[agent], reason] for agent, reason in self._refused[i]]
        attackers = self.cells[i].attackers
        if attackers and "weights" in measured:
            measured["attackers_weight"] = sum(measured["weights"][agent] for agent in attackers)
        if heard[alice] and measured["loss"] is not None:
            return Outcome(i, r, {"round": r, **measured}, State(closed.server, closed.agents), attempt)
        error = Diverged(
            f"round {r}: the training of Alice ({names[alice]}) diverged (no finite update in {ATTEMPTS} attempts): "
            "lower lr, or set clip; the rounds before are kept"
        )
        return Outcome(i, r, {"round": r, **measured}, self.states[i], attempt, error)

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
