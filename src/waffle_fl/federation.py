"""build(dataset, partition) -> Federation: named agents whose samples are indices into one shared pool of tensors."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from waffle_fl.data import Dataset
from waffle_fl.errors import WaffleError
from waffle_fl.partition import Partition
from waffle_fl.shifts import Covariate, Drift, read_shifts, shifted_groups
from waffle_fl.shifts.covariates import materialise
from waffle_fl.user_data import (
    ArrayScaling,
    CollectedData,
    Duplicates,
    Preprocessing,
    ReadOptions,
    ScopeOption,
    Task,
    TaskOption,
    gather,
    read_folder,
    stacked,
)


class TargetScale(NamedTuple):
    """The mean and deviation with which the targets of a regression were standardised."""

    mean: float = 0.0
    deviation: float = 1.0


@dataclass(frozen=True)
class Federation:
    """The agents and their data. Index i is agent i everywhere.

    `ids` seed each agent's random numbers, so that these do not depend on which other agents take part.
    """

    x: Tensor  # the pool of all samples
    y: Tensor  # the pool of all labels
    names: tuple[str, ...]
    train: tuple[Tensor, ...]
    validation: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    relabel: Tensor  # (agents, classes): agent i labels class k relabel[i, k]
    class_names: tuple[str, ...]
    alice: int
    ids: tuple[int, ...]
    task: Task = "classification"
    preparations: tuple[Preprocessing, ...] = ()  # for tables: each agent's preprocessing
    scalings: tuple[ArrayScaling, ...] = ()  # for arrays that were standardised: each agent's scaling
    notes: tuple[str, ...] = ()  # warnings about the data for readers of the results
    later: Tensor | None = None  # (agents, classes): agent i's label of class k after concept drift
    turn: Tensor | None = None  # per sample of the pool: the share of the rounds after which it has its later label
    shifted: tuple[tuple[str, tuple[int, ...]], ...] = ()  # each shift, and every agent's group in it
    backdoor: Tensor | None = None  # Alice's stamped test samples, if there is a backdoor attack
    newcomers: tuple[str, ...] = ()  # agents that join after training: they have no training data here

    @property
    def preprocessing(self) -> Preprocessing | None:
        """Alice's preprocessing, which makes her model's inputs; None if the samples were already numbers."""
        return self.preparations[self.alice] if self.preparations else None

    @property
    def scaling(self) -> ArrayScaling | None:
        """Alice's scaling of arrays or images; None for tables and for samples that are used as given."""
        return self.scalings[self.alice] if self.scalings else None

    @property
    def outputs(self) -> int:
        """Number of outputs of a model per sample."""
        return len(self.class_names) if self.task == "classification" else 1

    @property
    def unit(self) -> float:
        """The size of a regression error of 1 in the target's unit."""
        return self.target_scale(self.alice).deviation

    def target_scale(self, agent: int) -> TargetScale:
        """Return the mean and deviation with which the agent's targets were standardised, if they were."""
        fitted = self.preparations or self.scalings
        return TargetScale(fitted[agent].target_mean, fitted[agent].target_deviation) if fitted else TargetScale()

    @property
    def agents(self) -> int:
        """Number of agents."""
        return len(self.names)

    @property
    def samples(self) -> Tensor:
        """Number of training samples of each agent."""
        return torch.tensor([len(rows) for rows in self.train])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x.shape[1:])

    def without_test(self) -> Federation:
        """Return the federation with each agent's validation data in place of its test data, which is not used."""
        return replace(self, test=self.validation, backdoor=None)

    def only(self, agent: int) -> Federation:
        """Return a federation of this agent alone, as a single site sees it."""
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
            preparations=self.preparations[one],
            scalings=self.scalings[one],
            later=None if self.later is None else self.later[one],
            shifted=tuple((shift, groups[one]) for shift, groups in self.shifted),
        )

    def without(self, *agents: str) -> Federation:
        """Return the federation without these agents; the others keep their random numbers."""
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
            preparations=kept(self.preparations) if self.preparations else (),
            scalings=kept(self.scalings) if self.scalings else (),
            later=None if self.later is None else self.later[stay],
            shifted=tuple((shift, kept(groups)) for shift, groups in self.shifted),
        )

    def before_joining(self, *agents: str) -> Federation:
        """Return the federation before these agents join: they have no training and no validation data."""
        later = {index_of(agent, self.names, "a newcomer") for agent in agents}
        if self.alice in later:
            raise WaffleError(f"newcomers: expected other agents than Alice, got {self.names[self.alice]}")
        for i in sorted(later):
            if not len(self.train[i]) or not len(self.test[i]):
                raise WaffleError(f"newcomers: expected agents with training and test data, got {self.names[i]}")

        def emptied(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(part[:0] if i in later else part for i, part in enumerate(parts))

        names = tuple(self.names[i] for i in sorted(later))
        return replace(self, train=emptied(self.train), validation=emptied(self.validation), newcomers=names)

    def labels(self, agent: int, rows: Tensor, progress: float = 0.0) -> Tensor:
        """Return the agent's labels of these samples after the share `progress` of the rounds; numbers never change."""
        if self.y.is_floating_point():
            return self.y[rows]
        called = self.relabel[agent][self.y[rows]]
        if self.later is None or self.turn is None:
            return called
        return torch.where(self.turn[rows] < progress, self.later[agent][self.y[rows]], called)

    def drifts(self, agent: int) -> bool:
        """Whether the agent's labels change before the last round."""
        return self.later is not None and not self.later[agent].equal(self.relabel[agent])

    def label_counts(self, part: Literal["train", "test"] = "train") -> Tensor:
        """Return (agents, classes): the number of training or test samples per label, as each agent labels them."""
        if self.task == "regression":
            return torch.empty(self.agents, 0, dtype=torch.int64)
        return torch.stack(
            [
                self.labels(i, rows).bincount(minlength=len(self.class_names))
                for i, rows in enumerate(getattr(self, part))
            ]
        )

    def digest(self) -> str:
        """Return a hash of all data and its division: two runs with the same digest used the same data."""
        h = hashlib.sha256()
        for rows in (*self.train, *self.validation, *self.test):
            h.update(rows.cpu().numpy().tobytes() + b"|")
        h.update(self.relabel.cpu().numpy().tobytes() + self.y.cpu().numpy().tobytes())
        if self.later is not None and self.turn is not None:
            h.update(self.later.cpu().numpy().tobytes() + self.turn.cpu().numpy().tobytes())
        h.update(repr((self.names, tuple(self.x.shape), _pool_digest(self.x))).encode())
        return h.hexdigest()

    def to(self, device: str | torch.device, dtype: torch.dtype, moved: dict[int, Any] | None = None) -> Federation:
        """Return the federation with its data on the device.

        Pass the same `moved` for several federations to move the tensors that they share only once.
        """
        known = {} if moved is None else moved

        def on(part: Any, dtype: torch.dtype | None = None) -> Any:
            if part is not None and id(part) not in known:
                known[id(part)] = tuple(map(on, part)) if isinstance(part, tuple) else part.to(device, dtype)
            return known.get(id(part))

        return replace(
            self,
            x=on(self.x, dtype),
            y=on(self.y),
            train=on(self.train),
            validation=on(self.validation),
            test=on(self.test),
            relabel=on(self.relabel),
            later=on(self.later),
            turn=on(self.turn),
            backdoor=on(self.backdoor),
        )

    @classmethod
    def from_arrays(
        cls,
        agents: Mapping[str, Sequence[Any]] | Sequence[tuple[str, Sequence[Any]]],
        *,
        alice: str | int = 0,
        class_names: Sequence[str] = (),
        duplicates: Duplicates = "error",
        preprocessing: ScopeOption = "none",
        task: TaskOption = "classification",
        test_share: float = 0.25,
        validation: float = 0.0,
        split_seed: int = 0,
    ) -> Federation:
        """Return a federation from named agents, after checking their arrays.

        An agent is (x_train, y_train, x_test, y_test), or (x, y), of which `test_share` is held out for testing.
        Numbers are used as given; `preprocessing` "federated" or "local" standardises them as those of a folder.
        """
        items = list(agents.items() if isinstance(agents, Mapping) else agents)
        how = ReadOptions(
            preprocessing=preprocessing,
            task=task,
            test_share=test_share,
            validation=validation,
            split_seed=split_seed,
            duplicates=duplicates,
        )
        return check_alice(cls.from_gathered(gather(items, how, class_names), alice))

    @classmethod
    def from_datasets(cls, agents: Mapping[str, Any], **options: Any) -> Federation:
        """Return a federation from torch Datasets of (x, y): one per agent, or (training, test).

        Options: see from_arrays.
        """
        pairs = {name: given if isinstance(given, tuple | list) else (given,) for name, given in agents.items()}
        arrays = {name: [a for part in given for a in stacked(name, part)] for name, given in pairs.items()}
        return cls.from_arrays(arrays, **{"task": "auto", **options})

    @classmethod
    def from_folder(cls, folder: str | Path, *, alice: str | int | None = None, **reading: Any) -> Federation:
        """Return a federation from a folder with one file or folder per agent (docs/user-data.md).

        `reading`: see ReadOptions. By default Alice is the first agent that has training and test samples.
        """
        return check_alice(cls.from_gathered(read_folder(Path(folder), ReadOptions(**reading)), alice))

    @classmethod
    def from_gathered(cls, found: CollectedData, alice: str | int | None) -> Federation:
        """Return a federation from its agents' collected data."""
        names, parts = tuple(found.agents), list(found.agents.values())
        able = (i for i, part in enumerate(parts) if len(part.train) and len(part.test))
        edges = np.cumsum([0, *(len(part.y) for part in parts)])[:-1].tolist()

        def pooled(which: str) -> tuple[Tensor, ...]:
            return tuple(torch.from_numpy(getattr(p, which) + edge) for p, edge in zip(parts, edges, strict=True))

        y = np.concatenate([part.y for part in parts])
        return cls(
            torch.from_numpy(np.concatenate([part.x for part in parts])).float(),
            torch.from_numpy(y.astype(np.float32 if found.task == "regression" else np.int64)),
            names,
            pooled("train"),
            pooled("validation"),
            pooled("test"),
            torch.arange(len(found.class_names)).repeat(len(names), 1),
            found.class_names,
            next(able, 0) if alice is None else index_of(alice, names),
            tuple(range(len(names))),
            found.task,
            found.preparations,
            found.scalings,
            found.notes,
        )


def pool_of(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Return all samples and labels of a data set, training data first."""
    x = torch.from_numpy(np.concatenate([dataset.x_train, dataset.x_test]))
    return x, torch.from_numpy(np.concatenate([dataset.y_train, dataset.y_test]))


def build(
    dataset: Dataset, partition: Partition, alice: int | str | None = None, pool: tuple[Tensor, Tensor] | None = None
) -> Federation:
    """Divide a data set among agents by a partition; federations built on the same `pool` share its memory."""
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
    if not partition.is_drawn and len(torch.unique(used)) < len(used):
        raise WaffleError("a training sample belongs to two agents: the partition must be disjoint")
    return check_alice(_shifted(federation, partition) if partition.shift else federation)


def _shifted(federation: Federation, partition: Partition) -> Federation:
    """Return the federation with each agent's shifted features, and the time at which each sample's label changes."""
    shifts, seed, alice = read_shifts(partition.shift), partition.seed, partition.alice
    covariates = [shift for shift in shifts if isinstance(shift, Covariate)]
    if covariates:
        parts = {name: getattr(federation, name) for name in ("train", "validation", "test")}
        x, origin, moved = materialise(federation.x, parts, covariates, alice, seed)
        federation = replace(federation, x=x, y=federation.y[origin], **moved)  # type: ignore[arg-type]
    for drift in shifts:
        if isinstance(drift, Drift) and partition.later is not None:
            turn = torch.from_numpy(drift.turns(len(federation.x), seed))
            federation = replace(federation, later=torch.from_numpy(partition.later), turn=turn)
    return replace(federation, shifted=shifted_groups(partition.shift, federation.agents, alice))


def _pool_digest(x: Tensor) -> str:
    """Return a hash of all features; a pool that many federations share is hashed once."""
    if id(x) not in _known_pools or _known_pools[id(x)][0]() is not x:
        content = hashlib.blake2b(x.cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
        _known_pools[id(x)] = (weakref.ref(x), content)
    return _known_pools[id(x)][1]


_known_pools: dict[int, tuple[weakref.ref[Tensor], str]] = {}


def index_of(alice: int | str, names: Sequence[str], who: str = "Alice") -> int:
    """Return the index of Alice, or of another agent, from its name or its index."""
    if isinstance(alice, str) and alice in names:
        return names.index(alice)
    if isinstance(alice, str) and not (alice.isascii() and alice.isdigit() and len(alice) < 10):
        raise WaffleError(f"there is no agent {alice!r}; the agents are {', '.join(names)}")
    if not 0 <= int(alice) < len(names):
        raise WaffleError(f"expected {who}'s index between 0 and {len(names) - 1}, got {alice}")
    return int(alice)


def check_alice(federation: Federation) -> Federation:
    name, alice = federation.names[federation.alice], federation.alice
    if not len(federation.train[alice]):
        raise WaffleError(f"Alice ({name}) has no training samples: nothing can be personalised for her")
    if not len(federation.test[alice]):
        raise WaffleError(f"Alice ({name}) has no test samples: hold some out, or the result cannot be measured")
    return federation
