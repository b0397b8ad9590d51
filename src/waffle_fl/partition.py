"""split(labels, kind, agents) -> Partition: the samples of each agent. Pure functions of labels and a seed.

The paper's distributions are lists of ten shares that sum to one. Agent i holds the list rolled i times, so the lists
of all agents form a share matrix (agent x label); the samples of each label are divided by its column, disjointly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from waffle_fl.errors import WaffleError, suggest
from waffle_fl.randomness import generator
from waffle_fl.shifts import Dirichlet, Drift, Prior, Quantity, Shift, Sizes, Swap, read_shifts
from waffle_fl.shifts.labels import Indices, Shares, caps, serve

DISTRIBUTIONS: dict[str, tuple[float, ...]] = {
    "A": (0.1,) * 10,
    "B": (0.25,) * 4 + (0.0,) * 6,
    "C": (0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.2, 0.1, 0.0, 0.0),
}
Division: TypeAlias = Literal["disjoint", "drawn"]
"""Whether agents divide the samples, or each draws its own from all of them."""

SPLITS = ("A", "B", "C", "A*", "B*", "C*")


@dataclass(frozen=True)
class Partition:
    """Each agent's indices into the training and test data, and how it labels the classes."""

    train: tuple[Indices, ...]
    validation: tuple[Indices, ...]
    test: tuple[Indices, ...]
    relabel: Indices  # (agents, classes): agent i labels class k relabel[i, k]
    shares: Shares
    alice: int
    shift: str = ""  # beyond the split: docs/shifts.md
    later: Indices | None = None  # (agents, classes): agent i's label of class k after concept drift
    seed: int = 0
    is_drawn: bool = False  # a sample may belong to several agents

    @property
    def agents(self) -> int:
        """Number of agents."""
        return len(self.train)


def share_matrix(kind: str, agents: int, classes: int, direction: Literal["left", "right"] = "left") -> Shares:
    """Return a matrix of the distribution's list, rolled once more in each row (the paper's table rolls left)."""
    name = kind.removesuffix("*")
    if name not in DISTRIBUTIONS:
        raise WaffleError(f"unknown split {kind!r}{suggest(kind, SPLITS)}")
    row = np.full(classes, 1 / classes) if name == "A" else np.asarray(DISTRIBUTIONS[name])
    if len(row) != classes:
        raise WaffleError(
            f"split {kind} is defined for {len(row)} classes, the data has {classes}: give a share matrix"
        )
    sign = -1 if direction == "left" else 1
    return np.stack([np.roll(row, sign * i) for i in range(agents)])


def check_shares(shares: Shares, agents: int, classes: int) -> Shares:
    """Check a share matrix: right shape, finite, not negative, no agent without a share."""
    if shares.shape != (agents, classes):
        raise WaffleError(f"expected a share matrix of {agents} agents x {classes} labels, got {shares.shape}")
    if not np.isfinite(shares).all() or (shares < 0).any():
        raise WaffleError("expected shares that are finite and not negative")
    if shares.max(initial=0) > 1e100:
        raise WaffleError("expected shares below 1e100")
    empty = np.flatnonzero(shares.sum(axis=1) == 0)
    if len(empty):
        raise WaffleError(f"agent {empty[0]} has no share of any label: remove it or give it one")
    return shares


def divide(labels: Indices, shares: Shares, rng: np.random.Generator, per_agent: int = 0) -> list[Indices]:
    """Divide the samples of each label by its column; then keep `per_agent` per agent, in the agent's proportions.

    The column with the largest sum uses all samples of its label, so no sample is used twice and proportions are kept.
    """
    return [np.concatenate(_thinned(part, per_agent)) for part in by_label(labels, shares, rng)]


def by_label(labels: Indices, shares: Shares, rng: np.random.Generator) -> list[list[Indices]]:
    """Return each agent's samples of each label: every column divided among the rows."""
    edges = np.vstack([np.zeros(shares.shape[1]), np.cumsum(shares, axis=0)]) / shares.sum(axis=0).max()
    parts: list[list[Indices]] = [[] for _ in shares]
    for label in range(shares.shape[1]):
        samples = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.round(edges[:, label] * len(samples)).astype(int)
        for agent, part in enumerate(parts):
            part.append(samples[cuts[agent] : cuts[agent + 1]])
    return parts


def _thinned(part: list[Indices], total: int) -> list[Indices]:
    """Keep `total` samples (0: all) in the proportions of the part; the largest remainders are rounded up."""
    sizes = np.array([len(p) for p in part])
    if not total or sizes.sum() <= total:
        return part
    exact = sizes * total / sizes.sum()
    kept = np.floor(exact).astype(int)
    kept[np.argsort(kept - exact, kind="stable")[: total - kept.sum()]] += 1
    return [p[:k] for p, k in zip(part, kept, strict=True)]


def draw(labels: Indices, shares: Shares, sizes: Sequence[Indices], rng: np.random.Generator) -> list[list[Indices]]:
    """Return for each list of sizes the samples that each agent draws, in the proportions of its row of shares.

    No agent draws a sample twice. Of each label an agent gets a window, at a random place, of one random order.
    """
    rows = shares / shares.sum(axis=1, keepdims=True)
    counts = [_apportioned(rows, size) for size in sizes]
    agents: list[list[Indices]] = [[] for _ in sizes]
    drawn: list[list[Indices]] = [[] for _ in sizes]
    for label in range(shares.shape[1]):
        samples = rng.permutation(np.flatnonzero(labels == label))
        needed = np.sum([count[:, label] for count in counts], axis=0)
        if needed.max() > len(samples):
            expected = f"division: expected at most {len(samples)} samples of label {label} per agent"
            raise WaffleError(f"{expected}, as many as there are, got {needed.max()}: choose fewer samples_per_agent")
        start = rng.integers(max(1, len(samples)), size=len(rows))
        for k, count in enumerate(counts):
            own = count[:, label]
            within = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
            drawn[k].append(samples[(np.repeat(start, own) + within) % max(1, len(samples))])
            agents[k].append(np.repeat(np.arange(len(rows)), own))
            start = start + own
    return [_by_agent(np.concatenate(a), np.concatenate(d), len(rows)) for a, d in zip(agents, drawn, strict=True)]


def _apportioned(rows: Shares, sizes: Indices) -> Indices:
    """Return whole numbers per agent and label that sum to the sizes; the largest remainders are rounded up."""
    exact = rows * sizes[:, None]
    counts = np.floor(exact + 1e-9).astype(int)
    ranks = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    more: Indices = counts + (ranks < (sizes - counts.sum(axis=1))[:, None])
    return more


def _by_agent(agents: Indices, samples: Indices, count: int) -> list[Indices]:
    order = np.argsort(agents, kind="stable")
    return np.split(samples[order], np.cumsum(np.bincount(agents, minlength=count))[:-1])


def hold_out(part: list[Indices], per_agent: int, fraction: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Return (validation, training) samples of an agent.

    Validation samples come in addition to the `per_agent` training samples if there are enough, else from these.
    """
    kept = _thinned(part, per_agent)
    train = rng.permutation(np.concatenate(kept))
    cut = round(fraction * len(train))
    spare = [samples[len(used) :] for samples, used in zip(part, kept, strict=True)]
    if cut and sum(map(len, spare)) >= cut:
        return np.concatenate(_thinned(spare, cut)), train
    return train[:cut], train[cut:]


def check_sizes(sizes: Sequence[float], agents: int) -> Shares:
    """Return the relative sizes of all agents; the list is repeated as needed."""
    found = np.asarray(sizes, np.float64)
    if not np.isfinite(found).all() or (found <= 0).any() or found.max(initial=0) > 1e100:
        raise WaffleError("expected sizes that are numbers above 0 and below 1e100")
    return np.resize(found, agents)


def all_allowed(labels: Indices, shares: Shares, rng: np.random.Generator) -> list[Indices]:
    """Return for each agent all samples its distribution allows: all of the commonest label, others in proportion."""
    return [divide(labels, row[None], rng)[0] for row in shares]


def concept_shift(agents: int, classes: int, alice: int, seed: int, shared: bool = False) -> Indices:
    """Return a random permutation of the class labels for every agent but Alice, or one for all of these."""
    own = np.arange(classes)
    return np.stack(
        [
            own if i == alice else generator(seed, "concept", 0 if shared else i).permutation(classes)
            for i in range(agents)
        ]
    )


def split(
    train_labels: Indices,
    test_labels: Indices,
    kind: str,
    *,
    agents: int = 10,
    classes: int = 10,
    alice: int = 0,
    seed: int = 0,
    samples_per_agent: int = 0,
    validation: float = 0.0,
    test: Literal["share", "all"] = "share",
    shares: Sequence[Sequence[float]] | None = None,
    sizes: Sequence[float] = (),
    direction: Literal["left", "right"] = "left",
    permutation_seed: int = 0,
    shared_permutation: bool = False,
    shift: str = "",
    division: Division = "disjoint",
) -> Partition:
    """Return the partition named `kind`; a name that ends in * also permutes the labels of all agents but Alice.

    `shift` is text such as `dirichlet(0.5) + swap(4)`. Labels and concepts are shifted here, features in `build`. With
    the division "drawn" each agent draws `samples_per_agent` of all samples, so there may be more agents than samples.
    """
    if shares is None:
        matrix = share_matrix(kind, agents, classes, direction)
    else:
        try:
            given = np.asarray(shares, np.float64)
        except ValueError:
            raise WaffleError("expected a share matrix of numbers with rows of one length") from None
        matrix = check_shares(given, agents, classes)
    if sizes:
        matrix = matrix * check_sizes(sizes, agents)[:, None]
    shifts = check_shifts(shift, agents)
    matrix, kept = skewed(matrix, shifts, samples_per_agent, seed)
    tested = next((s.moved(matrix, seed) for s in shifts if isinstance(s, Prior)), matrix)
    if division == "drawn":
        parts = _drawn_parts(train_labels, test_labels, matrix, tested, kept, validation, test, seed)
    else:
        has_sizes = any(isinstance(s, Dirichlet | Quantity | Sizes) for s in shifts)
        parts = _disjoint_parts(train_labels, test_labels, matrix, tested, kept, validation, test, seed, has_sizes)
    train, held_out, tests = parts
    starved = [agent for agent, rows in enumerate(train) if len(held_out[agent]) and not len(rows)]
    if shifts and starved:
        raise WaffleError(
            f"validation leaves agent {starved[0]} nothing to train on: expected less than {validation:g}"
        )
    own = np.tile(np.arange(classes), (agents, 1))
    shifted = concept_shift(agents, classes, alice, permutation_seed, shared_permutation)
    relabel, later = concepts(shifted if kind.endswith("*") else own, shifts, alice, permutation_seed)
    return Partition(
        tuple(train),
        tuple(held_out),
        tuple(tests),
        relabel,
        matrix,
        alice,
        shift,
        later,
        seed,
        division == "drawn",
    )


Parts = tuple[list[Indices], list[Indices], list[Indices]]  # training, validation and test samples of each agent


def _disjoint_parts(
    train_labels: Indices,
    test_labels: Indices,
    matrix: Shares,
    tested: Shares,
    kept: Sequence[int],
    validation: float,
    test: Literal["share", "all"],
    seed: int,
    has_sizes: bool,
) -> Parts:
    """Divide the samples of each label by its column of the share matrix."""
    parts = by_label(train_labels, matrix, generator(seed, "train split"))
    if has_sizes:
        parts = serve(parts, train_labels, matrix)
    held_out, train = zip(
        *(
            hold_out(part, kept[agent], validation, generator(seed, "validation", agent))
            for agent, part in enumerate(parts)
        ),
        strict=True,
    )
    share_out = divide if test == "share" else all_allowed
    return list(train), list(held_out), share_out(test_labels, tested, generator(seed, "test split"))


def _drawn_parts(
    train_labels: Indices,
    test_labels: Indices,
    matrix: Shares,
    tested: Shares,
    kept: Sequence[int],
    validation: float,
    test: Literal["share", "all"],
    seed: int,
) -> Parts:
    """Let each agent draw its samples; of the test data it draws as large a share as of the training data."""
    sizes = np.asarray(kept)
    if (sizes < 1).any():
        raise WaffleError("division: expected samples_per_agent with drawn, which says how many each agent draws")
    both = [sizes, np.round(validation * sizes).astype(int)]
    train, held_out = draw(train_labels, matrix, both, generator(seed, "train split"))
    rng = generator(seed, "test split")
    if test == "share":
        share = np.maximum(1, np.round(sizes * len(test_labels) / len(train_labels))).astype(int)
        return train, held_out, draw(test_labels, tested, [share], rng)[0]
    known = {row.tobytes(): row for row in tested}
    allowed = dict(zip(known, all_allowed(test_labels, np.stack(list(known.values())), rng), strict=True))
    return train, held_out, [allowed[row.tobytes()] for row in tested]  # agents of one distribution share the indices


def check_shifts(text: str, agents: int) -> tuple[Shift, ...]:
    """Parse the shifts of a text and check them against the number of agents."""
    shifts = read_shifts(text)
    most = max((getattr(shift, "groups", 0) for shift in shifts), default=0)
    if most > agents:
        raise WaffleError(f"shift: expected at most as many groups as there are agents, got {most} and {agents}")
    return shifts


def skewed(matrix: Shares, shifts: Sequence[Shift], samples_per_agent: int, seed: int) -> tuple[Shares, list[int]]:
    """Return the share matrix after all skews, and how many samples of its share each agent keeps (0: all)."""
    sizes = np.ones(len(matrix))
    for shift in shifts:
        if isinstance(shift, Dirichlet):
            matrix = shift.skewed(matrix, seed)
        elif isinstance(shift, Quantity | Sizes):
            sizes = shift.sizes(len(matrix), seed)
            matrix = matrix * sizes[:, None]
    return matrix, caps(samples_per_agent, sizes)


def concepts(
    relabel: Indices, shifts: Sequence[Shift], alice: int, permutation_seed: int
) -> tuple[Indices, Indices | None]:
    """Return each agent's labels before drift and after it (None without drift); swaps apply on top of `relabel`."""
    agents, classes = relabel.shape
    for shift in shifts:
        if isinstance(shift, Swap):
            relabel = np.take_along_axis(shift.concepts(agents, classes, alice, permutation_seed), relabel, axis=1)
    for shift in shifts:
        if isinstance(shift, Drift):
            drifted = shift.concepts(agents, classes, alice, permutation_seed)
            return relabel, np.take_along_axis(drifted, relabel, axis=1)
    return relabel, None
