"""read_folder(folder) -> CollectedData: detect the layout, read one file or folder per agent, split and preprocess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from waffle_fl.errors import WaffleError, suggest
from waffle_fl.user_data import images, tables
from waffle_fl.user_data.agent_data import AgentData, Array, CollectedData, ReadOptions, RowSplit, check_classes, divide
from waffle_fl.user_data.array_checks import check_duplicates
from waffle_fl.user_data.arrays import gather, read_npz
from waffle_fl.user_data.preprocessing import Preprocessing, aim_of, fit
from waffle_fl.user_data.tables import HEART_CATEGORICAL, HEART_TARGET, UCI_HEART, Table, read_table

LAYOUTS = (
    "one file per agent (.csv, .tsv, .parquet, .npz), or one folder per agent that contains one folder of images per "
    "class, or `train` and `test`"
)


def read_folder(folder: Path, options: ReadOptions) -> CollectedData:
    """Return the data of all agents in a folder; raise WaffleError for an error in any file."""
    found = agents_in(folder)
    kinds = {kind for kind, _ in found.values()}
    if len(kinds) > 1:
        raise WaffleError(f"{folder} mixes {' and '.join(sorted(kinds))}: expected all agents in one layout")
    paths = {name: path for name, (_, path) in found.items()}
    readers: dict[str, Callable[[], CollectedData]] = {
        "tables": lambda: _from_tables({n: tables_at(p) for n, p in paths.items()}, options),
        "arrays": lambda: _from_npz(paths, options),
        "images": lambda: _from_images(paths, options),
    }
    if kinds != {"tables"} and (options.target or options.categorical):
        raise WaffleError(f"target and categorical are for tables, {folder} holds {kinds.pop()}: leave them out")
    return readers[kinds.pop()]()


def agents_in(folder: Path) -> dict[str, tuple[str, Path]]:
    """Return name -> (layout, path), sorted by name; entries of no known layout are skipped."""
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
            raise WaffleError(f"{path} and {found[name][1]} are both called {name!r}: give each agent its own name")
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
    """Return one table, which is split later, or a training and a test table."""
    if not path.is_dir():
        return [read_table(path)]
    files = {p.stem: p for p in sorted(path.iterdir()) if _is_table(p)}
    if "test" not in files:
        raise WaffleError(f"{path} has {files['train'].name} but no test table: add one, or use one file per agent")
    return [read_table(files["train"]), read_table(files["test"])]


def _from_tables(agents: Mapping[str, Sequence[Table]], options: ReadOptions) -> CollectedData:
    """Return the data of agents that have one table, which is split, or a training and a test table."""
    all_tables = [table for own in agents.values() for table in own]
    target, categorical = goal_of(all_tables, options)
    check_columns(all_tables, target, categorical)
    aim = aim_of(target, all_tables, options.task)
    check_classes(aim.task, aim.classes)
    rows = {name: divided(own, aim, options) for name, own in agents.items()}
    given = any(len(own) == 2 for own in agents.values())
    check_duplicates(
        {n: (_keys(agents[n]), np.concatenate([r.train, r.validation]), r.test) for n, r in rows.items()}, given
    )
    training = {n: own[0].select(rows[n].train) for n, own in agents.items()}
    fitted = fit(aim, training, categorical, options.preprocessing, options.min_category)
    made = {name: parts_of(own, fitted[name], rows[name]) for name, own in agents.items()}
    unknown_rows = sum(fitted[name].count_unknown(table) for name, own in agents.items() for table in own)
    which = "held-out rows have a category that is in no agent's training rows"
    if options.min_category > 1:
        which = f"rows have a category that fewer than {options.min_category} training rows of every agent have"
    note = f"{unknown_rows} {which}: all its one-hot features are 0"
    return CollectedData(made, aim.task, aim.classes, tuple(fitted.values()), (note,) if unknown_rows else ())


def goal_of(all_tables: Sequence[Table], options: ReadOptions) -> tuple[str, tuple[str, ...]]:
    """Return the target column and the categorical columns; UCI Heart Disease files have defaults."""
    heart = all(UCI_HEART.fullmatch(table.path.name) for table in all_tables)
    return options.target or (HEART_TARGET if heart else ""), options.categorical or (
        HEART_CATEGORICAL if heart else ()
    )


def divided(own: Sequence[Table], aim: Preprocessing, options: ReadOptions) -> RowSplit:
    """Return an agent's training, validation and test rows."""
    labels = _targets(aim, own) if aim.task == "classification" else None
    return divide(_split_keys(own), labels, len(own[0]) if len(own) == 2 else None, options)


def parts_of(own: Sequence[Table], fitted: Preprocessing, rows: RowSplit) -> AgentData:
    """Return an agent's tables as arrays."""
    x = np.concatenate([fitted.transform(table, "ignore") for table in own])
    return AgentData(x, _targets(fitted, own), *rows)


def _keys(own: Sequence[Table]) -> list[bytes]:
    return [key for table in own for key in table.row_keys()]


def _split_keys(own: Sequence[Table]) -> list[bytes]:
    """Return the key that decides the split of each row: its text, or the smallest text among rows of equal content."""
    keys, texts = _keys(own), [text for table in own for text in table.row_texts()]
    least: dict[bytes, bytes] = {}
    for key, text in zip(keys, texts, strict=True):
        least[key] = min(text, least.get(key, text))
    return [least[key] for key in keys]


def _targets(prepared: Preprocessing, own: Sequence[Table]) -> Array:
    return np.concatenate([found for table in own if (found := prepared.targets(table)) is not None])


def check_columns(all_tables: Sequence[Table], target: str, categorical: Sequence[str]) -> None:
    first = all_tables[0]
    if not target:
        raise WaffleError(f"which column is to be predicted? set target to one of {', '.join(first.columns)}")
    for column, setting in ((target, "target"), *((name, "categorical") for name in categorical)):
        if column not in first.columns:
            raise WaffleError(f"{setting}: {first.path} has no column {column!r}{suggest(column, first.columns)}")
    for table in all_tables[1:]:
        lacking, more = first.columns.keys() - table.columns, table.columns.keys() - first.columns
        if lacking or more:
            odd = f"lacks {sorted(lacking)[0]!r}" if lacking else f"adds {sorted(more)[0]!r}"
            raise WaffleError(f"all agents need the same columns: {table.path} {odd}, compared with {first.path}")


def _from_npz(paths: Mapping[str, Path], options: ReadOptions) -> CollectedData:
    found = gather([(name, read_npz(path)) for name, path in paths.items()], options)
    present = sorted({int(k) for part in found.agents.values() for k in np.unique(part.y)} if found.class_names else ())
    check_classes(found.task, [found.class_names[k] for k in present])
    return found


def _from_images(paths: Mapping[str, Path], options: ReadOptions) -> CollectedData:
    if options.task == "regression":
        raise WaffleError("images in one folder per class are for classification: leave task at auto")
    folders = {n: [p / "train", p / "test"] if (p / "train").is_dir() else [p] for n, p in paths.items()}
    for folder in (folder for parts in folders.values() for folder in parts):
        if not folder.is_dir():
            raise WaffleError(f"there is no {folder}: expected `train` and `test`, or one folder per class")
    classes = sorted({c for parts in folders.values() for folder in parts for c in images.classes_of(folder)})
    check_classes("classification", classes)
    arrays = [(n, [a for folder in parts for a in images.read_images(folder, classes)]) for n, parts in folders.items()]
    return gather(arrays, options, classes)
