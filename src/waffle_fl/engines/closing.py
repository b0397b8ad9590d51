"""The end of a round: screen what arrived, aggregate, and score Alice's model; for one cell, or for many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from waffle_fl.algorithms import Algorithm, Net, Round
from waffle_fl.algorithms.contract import lengths, row_of
from waffle_fl.engines.states import mapped, where_rows
from waffle_fl.federation import Federation
from waffle_fl.guard import OK, REASONS, Guard, screen
from waffle_fl.models import FlatModel

SCORE_ROWS = 2000
CACHED_ROWS = 500  # more do not fit a CPU's cache, and take nearly twice as long a sample
Answer = Callable[[Tensor], Tensor]  # samples -> what is said of them
Each = Callable[..., Iterable[Any]]  # map, or what does the same on several cores


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
    pulls = algorithm.pulls(server, up, desk.steps) if guard != "off" and hasattr(algorithm, "pulls") else None
    up, heard, codes = screen(up, desk.alice, present, guard, pulls)
    intact = heard & (codes == OK)
    suspect = present & ~heard if guard != "off" else None
    now = Round(r, rounds, desk.alice, heard, intact, desk.samples, desk.steps, batch_size, suspect)
    server, info = algorithm.aggregate(server, up, now)
    agents = where_rows(intact, agents, before)
    net = algorithm.personal(server, agents, len(heard))
    device = heard.device
    measured = {k: torch.as_tensor(v, dtype=torch.float64, device=device) for k, v in info._asdict().items()}
    if hasattr(algorithm, "relations"):
        measured["weights"] = row_of(algorithm.relations(server), desk.alice)
    if hasattr(up, "dy"):
        measured["norms"] = lengths(up.dy)
    own = Net(row_of(net.params, desk.alice), row_of(net.stats, desk.alice))
    return Closed(server, agents, own, {**measured, "heard": heard, "codes": codes})


def close_together(algorithm: Algorithm, work: Sequence[tuple[Any, ...]], *settings: Any) -> list[Closed]:
    """`close` for federations of one size under one algorithm, as a single batched computation."""
    stacked = [mapped(lambda *fields: torch.stack(fields), *states) for states in zip(*work, strict=True)]
    closed = torch.vmap(partial(close, algorithm, *settings))(*stacked)
    return [mapped(itemgetter(i), closed) for i in range(len(work))]


def answering(algorithm: Algorithm, model: FlatModel, net: Net, federation: Federation, moment: float = 1.0) -> Answer:
    """How Alice answers samples: as her model does, or as the algorithm does with her training data at hand."""
    answer = getattr(algorithm, "answer", None)
    if answer is None:
        return partial(model.predict, *net)
    own = federation.train[federation.alice]
    parts = (federation.x[part].to(model.device, model.dtype) for part in torch.split(own, SCORE_ROWS))
    known = torch.cat([model.features(*net, x)[1] for x in parts])
    labels = federation.labels(federation.alice, own, moment).to(model.device)
    return lambda x: answer(*model.features(*net, x), known, labels)  # type: ignore[no-any-return]


def score(
    model: FlatModel, answer: Answer, federation: Federation, rows: Tensor, moment: float = 0.0, each: Each = map
) -> dict[str, Tensor]:
    """Accuracy, or the error of a regression in its target's own unit, and mean loss of one model on these samples.

    `each` may count several parts of the samples at the same time; they are added up in their order.
    """
    correct, total = (torch.zeros((), dtype=torch.float64, device=model.device) for _ in range(2))
    parts = torch.split(rows, SCORE_ROWS if model.device.type == "cuda" else CACHED_ROWS)
    for right, lost in each(partial(_counted, model, answer, federation, moment), parts):
        correct, total = correct + right, total + lost
    return _graded(federation, correct / len(rows), total / len(rows))


@torch.no_grad()
def _counted(
    model: FlatModel, answer: Answer, federation: Federation, moment: float, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """How many of these samples are answered rightly, and the sum of their losses."""
    output = answer(federation.x[rows])
    target = federation.labels(federation.alice, rows, moment)
    right = output.argmax(dim=1) == target if output.ndim == 2 else torch.zeros_like(target)
    return right.sum(), model.losses(output, target).double().sum()


def _graded(federation: Federation, accuracy: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """Numbers that were predicted have no accuracy but an error, told in the target's own unit."""
    if federation.task == "regression":
        return {"rmse": federation.unit * loss.sqrt(), "loss": loss}
    return {"accuracy": accuracy, "loss": loss}


class Examination:
    """The held-out samples of many Alices, padded to one length, so that all their models are scored in one pass."""

    def __init__(self, federations: Sequence[Federation], parts: Sequence[Tensor]) -> None:
        self.federations, self.x = federations, federations[0].x
        self.rows = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
        self._still = all(f.later is None for f in federations)
        self._target = self._called(0.0)
        lengths = torch.tensor([len(part) for part in parts], device=self.rows.device)
        self.lengths = lengths.double()
        self.held = torch.arange(self.rows.shape[1], device=self.rows.device) < lengths[:, None]

    def _called(self, moment: float) -> Tensor:
        pairs = zip(self.federations, self.rows, strict=True)
        return torch.stack([f.labels(f.alice, rows, moment) for f, rows in pairs])

    @torch.no_grad()
    def score(self, model: FlatModel, nets: Sequence[Net], moment: float = 0.0) -> list[dict[str, Tensor]]:
        target = self._target if self._still else self._called(moment)
        output = model.predict_rows(torch.stack([net.params for net in nets]), self.x[self.rows])
        losses = model.losses(output.flatten(0, 1), target.flatten()).view(self.held.shape).double()
        right = (output.argmax(dim=2) == target) & self.held if output.ndim == 3 else torch.zeros_like(self.held)
        accuracy, loss = right.sum(dim=1) / self.lengths, torch.where(self.held, losses, 0.0).sum(dim=1) / self.lengths
        return [_graded(*graded) for graded in zip(self.federations, accuracy, loss, strict=True)]


class Examiner:
    """Scores many Alices' models, those that stack in one pass.

    On a CPU bits must not depend on company, so only parts of one length are stacked, and a stack of one, which would
    add up in another order, is made a pair. What is not stacked is shared out among threads, a core each: the passes
    are long enough that Python does not get in their way.
    """

    def __init__(self, model: FlatModel, cores: int = 1) -> None:
        self.model, self._on_gpu = model, model.device.type == "cuda"
        self._known: dict[tuple[int, ...], Examination] = {}
        self._cores = cores
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End the threads; they come back when they are needed."""
        if self._pool:
            self._pool.shutdown()
        self._pool = None

    def _each(self, work: Callable[[Tensor], Any], parts: Sequence[Tensor]) -> Iterable[Any]:
        if self._cores == 1 or len(parts) == 1:
            return map(work, parts)
        if not self._pool:
            self._pool = ThreadPoolExecutor(self._cores, initializer=torch.set_num_threads, initargs=(1,))
        return self._pool.map(work, parts)

    def examine(
        self,
        algorithms: Sequence[Algorithm],
        federations: Sequence[Federation],
        nets: Sequence[Net],
        moment: float,
    ) -> list[dict[str, Tensor]]:
        """Each Alice's model on her own test data, and on validation data where she has some, as she sees them now."""
        scores = self.score(algorithms, federations, [f.test[f.alice] for f in federations], nets, moment)
        judged = [k for k, f in enumerate(federations) if len(f.validation[f.alice])]
        asked, theirs = [algorithms[k] for k in judged], [federations[k] for k in judged]
        more = self.score(asked, theirs, [f.validation[f.alice] for f in theirs], [nets[k] for k in judged], moment)
        for k, found in zip(judged, more, strict=True):
            scores[k] |= {f"validation_{key}": value for key, value in found.items()}
        attacked = [(k, f, f.backdoor) for k, f in enumerate(federations) if f.backdoor is not None]
        stamped = self.score(
            [algorithms[k] for k, *_ in attacked],
            [f for _, f, _ in attacked],
            [rows for *_, rows in attacked],
            [nets[k] for k, *_ in attacked],
            moment,
        )
        for (k, *_), found in zip(attacked, stamped, strict=True):
            scores[k]["backdoor"] = found["accuracy"]  # how often the stamp has its way
        return scores

    def score(
        self,
        algorithms: Sequence[Algorithm],
        federations: Sequence[Federation],
        parts: Sequence[Tensor],
        nets: Sequence[Net],
        moment: float,
    ) -> list[dict[str, Tensor]]:
        """Accuracy and loss of each net on its part of the samples."""
        groups: dict[Any, list[int]] = {}
        for k, (algorithm, federation, part) in enumerate(zip(algorithms, federations, parts, strict=True)):
            alone = k if hasattr(algorithm, "answer") else None
            groups.setdefault((alone, id(federation.x), None if self._on_gpu else len(part)), []).append(k)
        found: dict[int, dict[str, Tensor]] = {}
        for group in (few for alike in groups.values() for few in self._cut(alike, len(parts[alike[0]]))):
            k = group[0]
            if len(group) == 1 or hasattr(algorithms[k], "answer"):
                answer = answering(algorithms[k], self.model, nets[k], federations[k], moment)
                found[k] = score(self.model, answer, federations[k], parts[k], moment, self._each)
                continue
            key = tuple(id(parts[k]) for k in group)
            if key not in self._known:
                self._known[key] = Examination([federations[k] for k in group], [parts[k] for k in group])
            found |= zip(group, self._known[key].score(self.model, [nets[k] for k in group], moment), strict=True)
        return [found[k] for k in range(len(nets))]

    def _cut(self, group: list[int], length: int) -> list[list[int]]:
        if not self.model.stacked or (length > SCORE_ROWS and not self._on_gpu):
            return [[k] for k in group]
        if self._on_gpu:
            return [group]
        most = max(2, SCORE_ROWS // length)
        return [2 * few if len(few) == 1 else few for few in (group[i : i + most] for i in range(0, len(group), most))]


def screened_of(codes: Sequence[float], names: Sequence[str], samples: Sequence[int]) -> dict[str, str]:
    """Why an agent's update was not taken as it was sent; who has no samples sends none."""
    found = zip(names, codes, samples, strict=True)
    return {name: REASONS[int(code)] for name, code, count in found if code != OK and count}


def to_numbers(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All tensors of all cells as plain numbers, fetched from the device in one go."""
    tensors = [value for entry in measured for value in entry.values() if isinstance(value, Tensor)]
    numbers = iter(torch.cat([t.double().flatten() for t in tensors]).tolist())

    def plain(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return [next(numbers) for _ in range(value.numel())] if value.ndim else next(numbers)

    return [{key: plain(value) for key, value in entry.items()} for entry in measured]
