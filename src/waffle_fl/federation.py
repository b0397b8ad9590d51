"""build(dataset, partition) -> Federation: named agents, their samples indices into one shared pool of tensors."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from waffle_fl.data import Dataset
from waffle_fl.errors import WaffleError
from waffle_fl.partition import Partition


@dataclass(frozen=True)
class Federation:
    """Who holds what. Row i of everything is agent i; `ids` keep an agent's random numbers its own in any company."""

    x: Tensor  # the pool of all samples
    y: Tensor  # the pool of all labels
    names: tuple[str, ...]
    train: tuple[Tensor, ...]
    validation: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    relabel: Tensor  # (agents, classes): agent i calls class k relabel[i, k]
    class_names: tuple[str, ...]
    alice: int
    ids: tuple[int, ...]

    @property
    def agents(self) -> int:
        return len(self.names)

    @property
    def samples(self) -> Tensor:
        return torch.tensor([len(rows) for rows in self.train])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def only(self, agent: int) -> Federation:
        """A federation of one: what a single site sees of this one."""
        one = slice(agent, agent + 1)
        return replace(
            self,
            names=self.names[one],
            train=self.train[one],
            validation=self.validation[one],
            test=self.test[one],
            relabel=self.relabel[one],
            alice=0,
            ids=self.ids[one],
        )

    def without(self, *agents: str) -> Federation:
        """The federation that these agents did not join; the others keep their random numbers."""
        gone = {index_of(agent, self.names) for agent in agents}
        if self.alice in gone:
            raise WaffleError(f"{self.names[self.alice]} is Alice and cannot be left out of her own federation")
        stay = [i for i in range(self.agents) if i not in gone]

        def kept(parts: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(parts[i] for i in stay)

        return replace(
            self,
            names=kept(self.names),
            train=kept(self.train),
            validation=kept(self.validation),
            test=kept(self.test),
            relabel=self.relabel[stay],
            alice=stay.index(self.alice),
            ids=kept(self.ids),
        )

    def labels(self, agent: int, rows: Tensor) -> Tensor:
        """What the agent calls these samples; numbers to predict have no names to change."""
        return self.y[rows] if self.y.is_floating_point() else self.relabel[agent][self.y[rows]]

    def label_counts(self) -> Tensor:
        """(agents, classes): how many training samples of each label, as the agent itself labels them."""
        return torch.stack(
            [self.labels(i, rows).bincount(minlength=len(self.class_names)) for i, rows in enumerate(self.train)]
        )

    def digest(self) -> str:
        """A hash of who holds what: two runs that share it saw the same data."""
        h = hashlib.sha256()
        for rows in (*self.train, *self.validation, *self.test):
            h.update(rows.cpu().numpy().tobytes() + b"|")
        h.update(self.relabel.cpu().numpy().tobytes() + self.y.cpu().numpy().tobytes())
        h.update(repr((self.names, tuple(self.x.shape), _pool_digest(self.x))).encode())
        return h.hexdigest()

    def to(self, device: str | torch.device, dtype: torch.dtype) -> Federation:
        def on(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(part.to(device) for part in rows)

        return replace(
            self,
            x=self.x.to(device, dtype),
            y=self.y.to(device),
            train=on(self.train),
            validation=on(self.validation),
            test=on(self.test),
            relabel=self.relabel.to(device),
        )

    @classmethod
    def from_arrays(
        cls,
        agents: Mapping[str, tuple[Any, Any, Any, Any]] | Sequence[tuple[str, tuple[Any, Any, Any, Any]]],
        *,
        alice: str | int = 0,
        class_names: Sequence[str] = (),
        allow_duplicates: bool = False,
    ) -> Federation:
        """A federation from (x_train, y_train, x_test, y_test) per named agent, checked before any work."""
        items = list(agents.items() if isinstance(agents, Mapping) else agents)
        names = tuple(name for name, _ in items)
        if not names:
            raise WaffleError("expected at least one agent, got none")
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled is not None:
            raise WaffleError(f"two agents are called {doubled!r}: give each a name of its own")
        parts = [_checked(name, *_arrays(name, arrays)) for name, arrays in items]
        _same_kind(names, parts)
        if not allow_duplicates:
            _no_duplicates(names, parts)
        classes = max(int(y.max(initial=0)) for p in parts for y in (p[1], p[3])) + 1
        labels = tuple(class_names) or tuple(str(k) for k in range(classes))
        for name, part in zip(names, parts, strict=True):
            for y in (part[1], part[3]):
                bad = np.flatnonzero(y >= len(labels))
                if len(bad):
                    raise WaffleError(f"{name}: expected labels below {len(labels)}, got {y[bad[0]]} at index {bad[0]}")
        x = np.concatenate([block for p in parts for block in (p[0], p[2])])
        y = np.concatenate([block for p in parts for block in (p[1], p[3])]).astype(np.int64)
        edges = np.cumsum([0, *(len(block) for p in parts for block in (p[1], p[3]))])
        ranges = [torch.arange(a, b) for a, b in pairwise(edges)]
        nothing = torch.empty(0, dtype=torch.int64)
        federation = cls(
            torch.from_numpy(x).float(),
            torch.from_numpy(y),
            names,
            tuple(ranges[0::2]),
            (nothing,) * len(names),
            tuple(ranges[1::2]),
            torch.arange(len(labels)).repeat(len(names), 1),
            labels,
            index_of(alice, names),
            tuple(range(len(names))),
        )
        return check_alice(federation)


def pool_of(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """All samples and labels of a data set, training data first."""
    x = torch.from_numpy(np.concatenate([dataset.x_train, dataset.x_test]))
    return x, torch.from_numpy(np.concatenate([dataset.y_train, dataset.y_test]))


def build(
    dataset: Dataset, partition: Partition, alice: int | str | None = None, pool: tuple[Tensor, Tensor] | None = None
) -> Federation:
    """The federation that a partition makes of a data set; federations built on one `pool` share its memory."""
    names = tuple(f"agent {i}" for i in range(partition.agents))
    offset = len(dataset.y_train)
    x, y = pool or pool_of(dataset)
    federation = Federation(
        x,
        y,
        names,
        tuple(torch.from_numpy(rows) for rows in partition.train),
        tuple(torch.from_numpy(rows) for rows in partition.validation),
        tuple(torch.from_numpy(rows) + offset for rows in partition.test),
        torch.from_numpy(partition.relabel),
        dataset.class_names,
        index_of(partition.alice if alice is None else alice, names),
        tuple(range(partition.agents)),
    )
    used = torch.cat([*federation.train, *federation.validation])
    if len(torch.unique(used)) < len(used):
        raise WaffleError("a training sample belongs to two agents: the partition must be disjoint")
    return check_alice(federation)


def _pool_digest(x: Tensor) -> str:
    """A hash of all features; the pool that many federations share is hashed once."""
    if id(x) not in _known_pools or _known_pools[id(x)][0]() is not x:
        content = hashlib.blake2b(x.cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
        _known_pools[id(x)] = (weakref.ref(x), content)
    return _known_pools[id(x)][1]


_known_pools: dict[int, tuple[weakref.ref[Tensor], str]] = {}


def index_of(alice: int | str, names: Sequence[str]) -> int:
    """Alice's row, from her name or her number."""
    if isinstance(alice, str) and alice in names:
        return names.index(alice)
    if isinstance(alice, str) and not (alice.isascii() and alice.isdigit() and len(alice) < 10):
        raise WaffleError(f"there is no agent {alice!r}; the agents are {', '.join(names)}")
    if not 0 <= int(alice) < len(names):
        raise WaffleError(f"expected Alice's index between 0 and {len(names) - 1}, got {alice}")
    return int(alice)


def check_alice(federation: Federation) -> Federation:
    name, alice = federation.names[federation.alice], federation.alice
    if not len(federation.train[alice]):
        raise WaffleError(f"Alice ({name}) has no training samples: nothing can be personalised for her")
    if not len(federation.test[alice]):
        raise WaffleError(f"Alice ({name}) has no test samples: hold some out, or the result cannot be measured")
    return federation


def _arrays(name: str, given: Any) -> list[np.ndarray]:
    try:
        arrays = [np.asarray(array) for array in given]
    except (ValueError, TypeError):
        raise WaffleError(f"{name}: expected arrays with sides of equal length") from None
    if len(arrays) != 4 or any(array.ndim == 0 for array in arrays):
        raise WaffleError(f"{name}: expected the four arrays x_train, y_train, x_test, y_test, got {len(arrays)}")
    if arrays[1].ndim != 1 or arrays[3].ndim != 1:
        raise WaffleError(f"{name}: expected labels with one axis, one integer a sample")
    return arrays


def _checked(
    name: str, x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    for part, features, labels in (("training", x, y), ("test", x_test, y_test)):
        if len(features) != len(labels):
            raise WaffleError(f"{name}: {len(features)} {part} samples but {len(labels)} labels")
        if not np.issubdtype(labels.dtype, np.integer):
            raise WaffleError(f"{name}: expected integer labels, the {part} labels are {labels.dtype}")
        bad = np.flatnonzero(labels < 0)
        if len(bad):
            raise WaffleError(f"{name}: expected labels >= 0, got {labels[bad[0]]} at {part} index {bad[0]}")
        if not np.issubdtype(features.dtype, np.number) or np.issubdtype(features.dtype, np.complexfloating):
            raise WaffleError(f"{name}: expected numbers as features, the {part} features are {features.dtype}")
        flat = features.reshape(len(features), -1) if len(features) else np.empty((0, 1))
        with np.errstate(over="ignore"):
            wrong = np.flatnonzero(~np.isfinite(flat.astype(np.float32)).all(axis=1))
        if len(wrong):
            raise WaffleError(
                f"{name}: {len(wrong)} {part} samples hold NaN or infinity, the first at index {wrong[0]}: "
                "drop or repair them"
            )
    return x, y, x_test, y_test


def _same_kind(names: Sequence[str], parts: Sequence[tuple[np.ndarray, ...]]) -> None:
    first = parts[0][0]
    for name, arrays in zip(names, parts, strict=True):
        for features in (arrays[0], arrays[2]):
            if features.shape[1:] != first.shape[1:] or features.dtype != first.dtype:
                raise WaffleError(
                    f"all agents need samples of one kind: {names[0]} has {first.dtype} {first.shape[1:]}, "
                    f"{name} has {features.dtype} {features.shape[1:]}"
                )


def _no_duplicates(names: Sequence[str], parts: Sequence[tuple[np.ndarray, ...]]) -> None:
    """Neither a test sample that anyone trains on, nor one agent's data under two names, by hash of the rows."""
    trained: dict[bytes, str] = {}
    owner: dict[frozenset[bytes], str] = {}
    for name, (x, y, _, _) in zip(names, parts, strict=True):
        rows = _hashes(x, y)
        trained |= dict.fromkeys(rows, name)
        whole = frozenset(rows)
        if whole and whole in owner:
            raise WaffleError(f"{name} and {owner[whole]} hold the same training data: it would be counted twice")
        owner[whole] = name
    for name, (_, _, x_test, y_test) in zip(names, parts, strict=True):
        shared = [(i, trained[h]) for i, h in enumerate(_hashes(x_test, y_test)) if h in trained]
        if shared:
            first, trainer = shared[0]
            raise WaffleError(
                f"{name}: {len(shared)} test samples are training data of {trainer} too, the first at index {first}: "
                "remove them, or the result is too good"
            )


def _hashes(x: np.ndarray, y: np.ndarray) -> list[bytes]:
    return [
        hashlib.blake2b(row.tobytes() + int(label).to_bytes(8, "little"), digest_size=16).digest()
        for row, label in zip(x, y, strict=True)
    ]
