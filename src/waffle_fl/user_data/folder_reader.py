"""read_folder(folder) -> Gathered: one file or folder an agent, recognised, split and turned into numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from waffle_fl.errors import WaffleError, suggest
from waffle_fl.user_data import images, tables
from waffle_fl.user_data.agent_data import AgentData, Array, CollectedData, Divided, ReadOptions, check_classes, divide
from waffle_fl.user_data.array_checks import check_duplicates
from waffle_fl.user_data.arrays import gather, read_npz
from waffle_fl.user_data.preprocessing import Preprocessing, aim_of, fit
from waffle_fl.user_data.tables import HEART_CATEGORICAL, HEART_TARGET, UCI_HEART, Table, read_table

LAYOUTS = (
    "one file an agent (.csv, .tsv, .parquet, .npz), or one folder an agent with a folder of images for each class, "
    "or with `train` and `test` in it"
)


def read_folder(folder: Path, how: ReadOptions) -> CollectedData:
    """The federation in a folder; a mistake in any file is told before any work."""
    found = agents_in(folder)
    kinds = {kind for kind, _ in found.values()}
    if len(kinds) > 1:
        raise WaffleError(f"{folder} mixes {' and '.join(sorted(kinds))}: expected all agents in one layout")
    paths = {name: path for name, (_, path) in found.items()}
    readers: dict[str, Callable[[], CollectedData]] = {
        "tables": lambda: _from_tables({n: tables_at(p) for n, p in paths.items()}, how),
        "arrays": lambda: _from_npz(paths, how),
        "images": lambda: _from_images(paths, how),
    }
    if kinds != {"tables"} and (how.target or how.categorical):
        raise WaffleError(f"target and categorical are for tables, {folder} holds {kinds.pop()}: leave them out")
    return readers[kinds.pop()]()


def agents_in(folder: Path) -> dict[str, tuple[str, Path]]:
    """name -> (layout, where it lies), sorted by name; what looks like no agent's data is passed over."""
    try:
        if not folder.is_dir():
            raise WaffleError(f"there is no folder {folder}: expected {LAYOUTS}")
        entries = [(layout_of(path), path) for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    except OSError as error:
        raise WaffleError(f"cannot read {error.filename or folder}: {error.strerror}") from None
    found: dict[str, tuple[str, Path]] = {}
    for layout, path in entries:
        heart = UCI_HEART.fullmatch(path.name)
        name = heart["name"] if heart else path.name if path.is_dir() else path.stem
        if layout and name in found:
            raise WaffleError(f"{path} and {found[name][1]} are both called {name!r}: give each agent one name")
        if layout:
            found[name] = layout, path
    if not found:
        raise WaffleError(f"{folder} holds no agent's data: expected {LAYOUTS}")
    return found


def layout_of(path: Path) -> str:
    if path.is_dir():
        inside = [p for p in sorted(path.iterdir()) if not p.name.startswith(".")]
        if any(p.stem == "train" and _is_table(p) for p in inside):
            return "tables"
        return "images" if images.classes_of(path) or (path / "train").is_dir() else ""
    return "arrays" if path.suffix.lower() == ".npz" else "tables" if _is_table(path) else ""


def _is_table(path: Path) -> bool:
    return not path.is_dir() and (path.suffix.lower() in tables.SUFFIXES or bool(UCI_HEART.fullmatch(path.name)))


def tables_at(path: Path) -> list[Table]:
    """One table that is still to be split, or a training and a test table."""
    if not path.is_dir():
        return [read_table(path)]
    files = {p.stem: p for p in sorted(path.iterdir()) if _is_table(p)}
    if "test" not in files:
        raise WaffleError(f"{path} has {files['train'].name} but no test table: add one, or give one file an agent")
    return [read_table(files["train"]), read_table(files["test"])]


def _from_tables(agents: Mapping[str, Sequence[Table]], how: ReadOptions) -> CollectedData:
    """An agent has one table, which we split, or a training and a test table."""
    everyone = [table for own in agents.values() for table in own]
    target, categorical = goal_of(everyone, how)
    check_columns(everyone, target, categorical)
    aim = aim_of(target, everyone, how.task)
    check_classes(aim.task, aim.classes)
    rows = {name: divided(own, aim, how) for name, own in agents.items()}
    given = any(len(own) == 2 for own in agents.values())
    check_duplicates(
        {n: (_keys(agents[n]), np.concatenate([r.train, r.validation]), r.test) for n, r in rows.items()}, given
    )
    training = {n: own[0].taken(rows[n].train) for n, own in agents.items()}
    fitted = fit(aim, training, categorical, how.preprocessing, how.min_category)
    made = {name: parts_of(own, fitted[name], rows[name]) for name, own in agents.items()}
    strange = sum(fitted[name].strange(table) for name, own in agents.items() for table in own)
    which = "held-out rows have a category nobody trained on"
    if how.min_category > 1:
        which = f"rows have a category that fewer than {how.min_category} training rows of every agent have"
    note = f"{strange} {which}: it counts as none of the known ones"
    return CollectedData(made, aim.task, aim.classes, tuple(fitted.values()), (note,) if strange else ())


def goal_of(everyone: Sequence[Table], how: ReadOptions) -> tuple[str, tuple[str, ...]]:
    """The column to predict and those that name categories; the files of UCI Heart Disease are known."""
    heart = all(UCI_HEART.fullmatch(table.path.name) for table in everyone)
    return how.target or (HEART_TARGET if heart else ""), how.categorical or (HEART_CATEGORICAL if heart else ())


def divided(own: Sequence[Table], aim: Preprocessing, how: ReadOptions) -> Divided:
    """Which of an agent's rows are for what."""
    labels = _targets(aim, own) if aim.task == "classification" else None
    return divide(_lots(own), labels, len(own[0]) if len(own) == 2 else None, how)


def parts_of(own: Sequence[Table], fitted: Preprocessing, rows: Divided) -> AgentData:
    """An agent's tables as numbers."""
    x = np.concatenate([fitted.transform(table, "ignore") for table in own])
    return AgentData(x, _targets(fitted, own), *rows)


def _keys(own: Sequence[Table]) -> list[bytes]:
    return [key for table in own for key in table.row_keys()]


def _lots(own: Sequence[Table]) -> list[bytes]:
    """What each row is drawn by: its text. Rows of equal content, however written, share the least of their texts."""
    keys, texts = _keys(own), [text for table in own for text in table.row_texts()]
    least: dict[bytes, bytes] = {}
    for key, text in zip(keys, texts, strict=True):
        least[key] = min(text, least.get(key, text))
    return [least[key] for key in keys]


def _targets(prepared: Preprocessing, own: Sequence[Table]) -> Array:
    return np.concatenate([found for table in own if (found := prepared.targets(table)) is not None])


def check_columns(everyone: Sequence[Table], target: str, categorical: Sequence[str]) -> None:
    first = everyone[0]
    if not target:
        raise WaffleError(f"which column is to be predicted? give target, one of {', '.join(first.columns)}")
    for wanted, what in ((target, "target"), *((name, "categorical") for name in categorical)):
        if wanted not in first.columns:
            raise WaffleError(f"{what}: {first.path} has no column {wanted!r}{suggest(wanted, first.columns)}")
    for table in everyone[1:]:
        lacking, more = first.columns.keys() - table.columns, table.columns.keys() - first.columns
        if lacking or more:
            odd = f"lacks {sorted(lacking)[0]!r}" if lacking else f"adds {sorted(more)[0]!r}"
            raise WaffleError(f"all agents need the same columns: {table.path} {odd}, compared with {first.path}")


def _from_npz(paths: Mapping[str, Path], how: ReadOptions) -> CollectedData:
    found = gather([(name, read_npz(path)) for name, path in paths.items()], how)
    present = sorted({int(k) for part in found.agents.values() for k in np.unique(part.y)} if found.class_names else ())
    check_classes(found.task, [found.class_names[k] for k in present])
    return found


def _from_images(paths: Mapping[str, Path], how: ReadOptions) -> CollectedData:
    if how.task == "regression":
        raise WaffleError("images in folders by class have classes, not numbers: leave task at auto")
    places = {n: [p / "train", p / "test"] if (p / "train").is_dir() else [p] for n, p in paths.items()}
    for runtime in (runtime for given in places.values() for runtime in given):
        if not runtime.is_dir():
            raise WaffleError(f"there is no {runtime}: expected `train` and `test`, or a folder for each class")
    classes = sorted({c for given in places.values() for runtime in given for c in images.classes_of(runtime)})
    check_classes("classification", classes)
    arrays = [
        (n, [a for runtime in given for a in images.read_images(runtime, classes)]) for n, given in places.items()
    ]
    return gather(arrays, how, classes)
