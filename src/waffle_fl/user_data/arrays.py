"""Agents whose samples are arrays: in memory, in `.npz` files, or in a torch Dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from waffle_fl.atomic_files import check_regular
from waffle_fl.errors import WaffleError
from waffle_fl.user_data.agent_data import AgentData, CollectedData, ReadOptions, divide
from waffle_fl.user_data.array_checks import (
    Array,
    as_arrays,
    as_integers,
    check_kinds,
    check_names,
    check_range,
    check_samples,
    is_real,
    keys_of,
    model_inputs,
    native,
)
from waffle_fl.user_data.array_scaling import ArrayScaling, common_scaling, feature_moments, own_scaling
from waffle_fl.user_data.duplicates import AgentRows, dropped_note, settle, unrepeated
from waffle_fl.user_data.expansion import TIMES, check_expansion
from waffle_fl.user_data.preprocessing import MOST_CATEGORIES, MOST_CLASSES, Moments, Scope, Task, TaskOption, moments
from waffle_fl.user_data.row_digests import digests_of

SPLIT_NAMES, UNSPLIT_NAMES = ("x_train", "y_train", "x_test", "y_test"), ("x", "y")
NUMBERED: dict[TaskOption, tuple[int, str]] = {  # limit, as each class is an output of every agent's model
    "auto": (MOST_CATEGORIES, "; set task to classification if there are more, or to regression"),
    "classification": (10_000, "; number the classes from 0, or set task to regression"),
}


def gather(
    items: Sequence[tuple[str, Any]],
    options: ReadOptions,
    class_names: Sequence[str] = (),
) -> CollectedData:
    """Return the checked data of named agents: each (x_train, y_train, x_test, y_test), or (x, y), which is split.

    Unless the preprocessing is none, inputs and the targets of a regression are standardised.
    """
    check_names([name for name, _ in items])
    agents = {name: as_arrays(name, given) for name, given in items}
    task = _task_of([y for arrays in agents.values() for y in arrays[1::2]], options.task)
    if options.task == "auto" and task == "classification":
        agents = {
            name: [as_integers(a) if i % 2 else a for i, a in enumerate(arrays)] for name, arrays in agents.items()
        }
    for name, arrays in agents.items():
        check_samples(name, arrays, task)
    check_kinds(agents)
    agents = {name: [a if i % 2 else model_inputs(a) for i, a in enumerate(arrays)] for name, arrays in agents.items()}
    if task == "classification":
        check_range(agents, *((len(class_names), "") if class_names else NUMBERED[options.task]))
    made, digests, dropped = {}, {}, {}
    kind = np.int64 if task == "classification" else np.float64  # float32 after the targets are standardised
    for name, arrays in agents.items():
        arrays, dropped[name] = _without_repeats(arrays) if options.duplicates == "drop" else (arrays, 0)
        x, y = np.concatenate(arrays[::2]), np.concatenate(arrays[1::2]).astype(kind)
        keys = keys_of(x, y if task == "classification" else y.astype(np.float32))
        digests[name] = digests_of(keys)
        given = len(arrays[0]) if len(arrays) == 4 else None
        made[name] = AgentData(x, y, *divide(keys, y if task == "classification" else None, given, options))
    rows = {n: AgentRows(digests[n], np.concatenate([p.train, p.validation]), p.test) for n, p in made.items()}
    settled = settle(rows, any(len(arrays) == 4 for arrays in agents.values()), options.duplicates)
    made = {name: part._replace(test=settled.test[name]) for name, part in made.items()}
    notes = (*dropped_note(dropped), *settled.notes)
    if task == "regression":
        labels: tuple[str, ...] = ()
    else:
        largest = max(int(part.y.max(initial=0)) for part in made.values())
        labels = tuple(class_names) or tuple(str(k) for k in range(largest + 1))
    found = CollectedData(made, task, labels, notes=notes)
    return found if options.preprocessing == "none" else standardised(found, options.preprocessing)


def standardised(found: CollectedData, scope: Scope) -> CollectedData:
    """Return the data with inputs and targets standardised by the training samples of all agents, or of each."""
    parts = found.agents.values()
    features = [feature_moments(part.x, part.train) for part in parts] if scope == "federated" else []
    targets = [target_moments(part) for part in parts] if found.task == "regression" else []
    axes = next(iter(parts)).x.ndim - 1
    return with_scaling(found, common_scaling(features, targets, scope, axes))


def target_moments(part: AgentData) -> Moments:
    """Return the moments of the targets of an agent's training samples."""
    return moments(part.y[part.train].astype(np.float64))


def with_scaling(found: CollectedData, common: ArrayScaling) -> CollectedData:
    """Return the data as the common scaling makes it; with scope "local" each agent's inputs by their own."""
    agents, scalings = dict(found.agents), []
    for name, part in agents.items():
        own = own_scaling(common, part.x, part.train)
        y = own.targets(part.y) if found.task == "regression" else part.y
        agents[name] = part._replace(x=own.transform(part.x, name), y=y)
        scalings.append(own)
    return found._replace(agents=agents, scalings=tuple(scalings))


def _without_repeats(arrays: Sequence[Array]) -> tuple[list[Array], int]:
    """Return an agent's arrays with one of equal samples, and the number of samples dropped."""
    kept: list[Array] = []
    for x, y in zip(arrays[::2], arrays[1::2], strict=True):
        rows = unrepeated(digests_of(keys_of(x, y)))
        kept += [x[rows], y[rows]]
    return kept, sum(map(len, arrays[::2])) - sum(map(len, kept[::2]))


def _task_of(targets: Sequence[Array], wish: TaskOption) -> Task:
    """Return classification for integers and for few distinct integer-valued floats, else regression."""
    if wish != "auto":
        return wish
    if not any(y.dtype.kind == "f" for y in targets):
        return "classification"
    if not all(is_real(y) for y in targets):
        return "regression"
    different = np.unique(np.concatenate(targets))
    few_integers = len(different) <= MOST_CLASSES and bool((as_integers(different) == different).all())
    return "classification" if few_integers else "regression"


def read_npz(path: Path, times: float = TIMES) -> list[Array]:
    """Return the arrays x_train y_train x_test y_test of a file, or x y. Nothing is unpickled."""
    check_regular(path)
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as content:
            check_npz_size(path, content, times)
            names = next((names for names in (SPLIT_NAMES, UNSPLIT_NAMES) if set(names) <= set(content.files)), ())
            arrays = [native(content[name]) for name in names]
            found = " ".join(", ".join(content.files).split()) or "nothing"
    except WaffleError:
        raise
    except Exception as error:  # zipfile and NumPy raise many types for a damaged file
        reason = " ".join(str(error).split()) or "it is truncated"
        raise WaffleError(f"cannot read {path} as a .npz of plain arrays: {reason}; save it with numpy.savez") from None
    if not arrays:
        raise WaffleError(f"{path}: expected the arrays x_train y_train x_test y_test, or x y; got {found}")
    if any(x.ndim < 2 for x in arrays[::2]):
        raise WaffleError(f"{path}: expected samples with two or more axes, got shape {arrays[0].shape}")
    return arrays


def check_npz_size(path: Path, content: Any, times: float) -> None:
    """Raise WaffleError if the arrays of an open .npz are much larger than the file; nothing is decompressed."""
    check_expansion(path, sum(member.file_size for member in content.zip.infolist()), times)


def stacked(name: str, dataset: Any) -> tuple[Array, Array]:
    """Return all samples of a torch Dataset that has a length and yields (x, y) pairs."""
    try:
        pairs = [dataset[i] for i in range(len(dataset))]
        xs, ys = zip(*((np.asarray(x), np.asarray(y)) for x, y in pairs), strict=True)
        return np.stack(xs), np.stack(ys)
    except (TypeError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise WaffleError(
            f"{name}: expected a Dataset with a length and at least one (x, y) pair, all of one shape: {reason}"
        ) from None
