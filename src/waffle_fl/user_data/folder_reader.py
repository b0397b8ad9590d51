"""read_folder(folder) -> CollectedData: detect the layout, read one file or folder per agent, split and preprocess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from waffle_fl.errors import WaffleError, suggest
from waffle_fl.user_data import images
from waffle_fl.user_data.agent_data import AgentData, Array, CollectedData, ReadOptions, RowSplit, check_classes, divide
from waffle_fl.user_data.arrays import gather, read_npz
from waffle_fl.user_data.cleaning import all_columns, check_drop, check_missing, cleaned, filled
from waffle_fl.user_data.duplicates import AgentRows, dropped_note, settle, unrepeated
from waffle_fl.user_data.preprocessing import Preprocessing, aim_of, fit, table_scope
from waffle_fl.user_data.row_digests import Digests, digests_of, groups_of
from waffle_fl.user_data.suspicions import suspicions_of
from waffle_fl.user_data.tables import HEART_CATEGORICAL, HEART_TARGET, UCI_HEART, Table, is_table, read_raw

LAYOUTS = (
    "one file per agent (.csv, .tsv, .parquet, .xlsx, .npz), or one folder per agent that contains one folder of "
    "images per class, or `train` and `test`"
)
TABLE_SETTINGS = ("target", "categorical", "drop", "missing", "decimal", "fold_case", "fill_absent")
DATA_SUFFIXES = (
    *(".arrow", ".dat", ".data", ".dta", ".feather", ".gz", ".h5", ".hdf5", ".json", ".jsonl", ".mat", ".npy"),
    *(".ods", ".pkl", ".rds", ".sas7bdat", ".sav", ".txt", ".xls", ".xlsm", ".xml", ".zip"),
)  # of files that may hold data and are passed over


def read_folder(folder: Path, options: ReadOptions) -> CollectedData:
    """Return the data of all agents in a folder, or of one agent's tables; raise WaffleError for any error."""
    found = agents_in(folder)
    kinds = {kind for kind, _ in found.values()}
    if len(kinds) > 1:
        raise WaffleError(f"{folder} mixes {' and '.join(sorted(kinds))}: expected all agents in one layout")
    paths = {name: path for name, (_, path) in found.items()}
    readers: dict[str, Callable[[], CollectedData]] = {
        "tables": lambda: _from_tables({n: raw_tables_at(p, options) for n, p in paths.items()}, options),
        "arrays": lambda: _from_npz(paths, options),
        "images": lambda: _from_images(paths, options),
    }
    kind = kinds.pop()
    if kind != "tables":
        check_no_table_settings(options, f"{folder} holds {kind}")
    read = readers[kind]()
    return read._replace(notes=(*passed_over_note(folder), *read.notes))


def check_no_table_settings(options: ReadOptions, what: str) -> None:
    """Raise WaffleError for settings that apply to tables only."""
    if options.target or options.categorical:
        raise WaffleError(f"target and categorical are for tables, {what}: leave them out")
    odd = next((name for name in TABLE_SETTINGS if getattr(options, name) != getattr(ReadOptions(), name)), None)
    if odd:
        raise WaffleError(f"{odd} is for tables, {what}: leave it out")


def passed_over(folder: Path) -> list[Path]:
    """Return the entries of a folder that are no agent's data, without hidden files."""
    if is_one_agent(folder):
        return []
    return [path for path in sorted(folder.iterdir()) if not is_hidden(path) and not layout_of(path)]


def is_one_agent(path: Path) -> bool:
    """Return whether the path is a table, or a folder with a training and a test table."""
    return path.exists() and layout_of(path) == "tables"


def passed_over_note(folder: Path) -> tuple[str, ...]:
    """Return a note on files of the folder that may hold data and are not read."""
    names = [path.name for path in passed_over(folder) if path.suffix.lower() in DATA_SUFFIXES]
    they = "it is" if len(names) == 1 else "they are"
    return (f"passed over {', '.join(names)}: if {they} an agent's data, save it as .csv",) if names else ()


def is_hidden(path: Path) -> bool:
    """Return whether a file is hidden, or the lock that Excel leaves beside an open file."""
    return path.name.startswith((".", "~$"))


def agents_in(folder: Path) -> dict[str, tuple[str, Path]]:
    """Return name -> (layout, path), sorted by name; entries of no known layout are skipped."""
    try:
        if not folder.is_dir() and not is_one_agent(folder):
            raise WaffleError(f"there is no folder {folder}: expected {LAYOUTS}")
        inside = [folder] if is_one_agent(folder) else sorted(folder.iterdir())
        entries = [(layout_of(path), path) for path in inside if not is_hidden(path)]
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
        inside = [p for p in sorted(path.iterdir()) if not is_hidden(p)]
        if any(p.stem == "train" and is_table(p) for p in inside):
            return "tables"
        return "images" if images.classes_of(path) or (path / "train").is_dir() else ""
    return "arrays" if path.suffix.lower() == ".npz" else "tables" if is_table(path) else ""


def raw_tables_at(path: Path, options: ReadOptions) -> list[Table]:
    """Return one table, which is split later, or a training and a test table, with the cells of the files."""
    return [read_raw(file, options.max_expansion) for file in table_files(path)]


def table_files(path: Path) -> list[Path]:
    """Return the file of one table, or the files of a training and a test table."""
    if not path.is_dir():
        return [path]
    files = {p.stem: p for p in sorted(path.iterdir()) if not p.is_dir() and not is_hidden(p) and is_table(p)}
    if "test" not in files:
        raise WaffleError(f"{path} has {files['train'].name} but no test table: add one, or use one file per agent")
    return [files["train"], files["test"]]


def tables_at(path: Path, options: ReadOptions) -> list[Table]:
    """Return an agent's one or two tables as the options read them."""
    return [cleaned(table, options.rules) for table in raw_tables_at(path, options)]


def _from_tables(raw: Mapping[str, Sequence[Table]], options: ReadOptions) -> CollectedData:
    """Return the data of agents that have one table, which is split, or a training and a test table."""
    scope = table_scope(options.preprocessing)
    target, categorical = goal_of([table for own in raw.values() for table in own], options)
    columns = all_columns([table for own in raw.values() for table in own])
    check_drop(columns, target, options.rules)
    check_missing(columns, options.rules)
    agents = {name: [cleaned(table, options.rules) for table in own] for name, own in raw.items()}
    all_tables = [table for own in agents.values() for table in own]
    check_columns(all_tables, target, categorical, options.fill_absent)
    agents, dropped = _without_repeats(agents) if options.duplicates == "drop" else (agents, {})
    all_tables = [table for own in agents.values() for table in own]
    aim = aim_of(target, all_tables, options.task, target in categorical)
    check_classes(aim.task, aim.classes)
    rows = {name: divided(own, aim, options) for name, own in agents.items()}
    if options.fill_absent:  # after the split, which is then the same at a site that knows its own columns only
        columns = all_columns(all_tables)
        agents = {name: [filled(table, columns) for table in own] for name, own in agents.items()}
    given = any(len(own) == 2 for own in agents.values())
    settled = settle({n: agent_rows(agents[n], r) for n, r in rows.items()}, given, options.duplicates)
    rows = {name: split._replace(test=settled.test[name]) for name, split in rows.items()}
    training = {n: own[0].select(rows[n].train) for n, own in agents.items()}
    aim = replace(aim, rules=options.rules)
    fitted = fit(aim, training, categorical, scope, options.min_category)
    made = {name: parts_of(own, fitted[name], rows[name]) for name, own in agents.items()}
    unknown_rows = sum(fitted[name].count_unknown(table) for name, own in agents.items() for table in own)
    which = "held-out rows have a category that is in no agent's training rows"
    if options.min_category > 1:
        which = f"rows have a category that fewer than {options.min_category} training rows of every agent have"
    notes = [f"{unknown_rows} {which}: all its one-hot features are 0"] if unknown_rows else []
    notes += [*dropped_note(dropped), *settled.notes]
    notes += suspicions_of(agents, next(iter(fitted.values())), categorical)
    return CollectedData(made, aim.task, aim.classes, tuple(fitted.values()), tuple(notes))


def _without_repeats(agents: Mapping[str, Sequence[Table]]) -> tuple[dict[str, list[Table]], dict[str, int]]:
    """Return each agent's tables with one of equal rows, and the number of rows dropped."""
    kept = {n: [table.select(unrepeated(row_digests([table]))) for table in own] for n, own in agents.items()}
    return kept, {name: sum(map(len, own)) - sum(map(len, kept[name])) for name, own in agents.items()}


def agent_rows(own: Sequence[Table], rows: RowSplit) -> AgentRows:
    """Return the digests of an agent's rows, for the search for duplicates."""
    return AgentRows(row_digests(own), np.concatenate([rows.train, rows.validation]), rows.test)


def row_digests(own: Sequence[Table]) -> Digests:
    return digests_of(key for table in own for key in table.row_keys())


def goal_of(all_tables: Sequence[Table], options: ReadOptions) -> tuple[str, tuple[str, ...]]:
    """Return the target column and the categorical columns; UCI Heart Disease files have defaults."""
    heart = all(UCI_HEART.fullmatch(table.path.name) for table in all_tables)
    return options.target or (HEART_TARGET if heart else ""), options.categorical or (
        HEART_CATEGORICAL if heart else ()
    )


def divided(own: Sequence[Table], aim: Preprocessing, options: ReadOptions) -> RowSplit:
    """Return an agent's training, validation and test rows."""
    labels = _targets(aim, own) if aim.task == "classification" else None
    return divide(SplitKeys(own), labels, len(own[0]) if len(own) == 2 else None, options)


def parts_of(own: Sequence[Table], fitted: Preprocessing, rows: RowSplit) -> AgentData:
    """Return an agent's tables as arrays."""
    x = np.concatenate([fitted.transform(table, "ignore") for table in own])
    return AgentData(x, _targets(fitted, own), *rows)


class SplitKeys(Sequence[bytes]):
    """The key that decides the split of each row: its text, or the smallest text among rows of equal content."""

    def __init__(self, own: Sequence[Table]) -> None:
        self._tables, self._edges = own, np.cumsum([0, *map(len, own)])
        (self._group,) = groups_of([row_digests(own)])
        self._least: dict[int, bytes] = {}
        repeated = np.bincount(self._group, minlength=1) > 1
        for row in np.flatnonzero(repeated[self._group]).tolist():
            group, text = int(self._group[row]), self._text(row)
            self._least[group] = min(text, self._least.get(group, text))

    def __len__(self) -> int:
        return len(self._group)

    def __getitem__(self, row: int) -> bytes:  # type: ignore[override]
        least = self._least.get(int(self._group[row])) if self._least else None
        return self._text(row) if least is None else least

    def _text(self, row: int) -> bytes:
        k = int(np.searchsorted(self._edges, row, "right")) - 1
        return self._tables[k].row_text(row - int(self._edges[k]))


def _targets(prepared: Preprocessing, own: Sequence[Table]) -> Array:
    return np.concatenate([found for table in own if (found := prepared.targets(table)) is not None])


def check_columns(
    all_tables: Sequence[Table], target: str, categorical: Sequence[str], fill_absent: bool = False
) -> None:
    problems = column_problems(all_tables, target, categorical, fill_absent)
    if problems:
        raise WaffleError(problems[0])


def column_problems(
    all_tables: Sequence[Table], target: str, categorical: Sequence[str], fill_absent: bool = False
) -> list[str]:
    """Return one line per setting that names no column, and per column that some tables lack."""
    first, columns = all_tables[0], all_columns(all_tables) if fill_absent else list(all_tables[0].columns)
    if not target:
        return [f"which column is to be predicted? set target to one of {', '.join(columns)}"]
    problems = [
        f"{setting}: {first.path} has no column {column!r}{suggest(column, columns)}"
        for column, setting in ((target, "target"), *((name, "categorical") for name in categorical))
        if column not in columns
    ]
    problems += [] if fill_absent else _differing_columns(all_tables)
    lacks_target = [table for table in all_tables if target in columns and target not in table.columns]
    if fill_absent and lacks_target:
        problems.append(f"{lacks_target[0].path} lacks the target {target!r}: only other columns may be absent")
    return problems


def _differing_columns(all_tables: Sequence[Table]) -> list[str]:
    """Return one line per table that lacks columns of most tables, or has columns that most tables lack."""
    having = {name: [name in table.columns for table in all_tables] for name in all_columns(all_tables)}
    usual = {name: 2 * sum(has) + has[0] > len(all_tables) for name, has in having.items()}  # a tie: as in the first
    problems = []
    for i, table in enumerate(all_tables):
        lacking = [name for name, has in having.items() if usual[name] and not has[i]]
        more = [name for name, has in having.items() if not usual[name] and has[i]]
        odd = [f"lacks {_listed(lacking)}"] * bool(lacking) + [f"adds {_listed(more)}"] * bool(more)
        if odd:
            problems.append(
                f"all agents need the same columns: {table.path} {' and '.join(odd)}, compared with the others; rename "
                f"{'it' if len(lacking + more) == 1 else 'them'}, set --drop {' '.join([*lacking, *more])}, or set "
                "--fill-absent to read an absent column as missing"
            )
    return problems


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _from_npz(paths: Mapping[str, Path], options: ReadOptions) -> CollectedData:
    found = gather([(name, read_npz(path, options.max_expansion)) for name, path in paths.items()], options)
    present = sorted({int(k) for part in found.agents.values() for k in np.unique(part.y)} if found.class_names else ())
    check_classes(found.task, [found.class_names[k] for k in present])
    return found


def _from_images(paths: Mapping[str, Path], options: ReadOptions) -> CollectedData:
    if options.task == "regression":
        raise WaffleError("images in one folder per class are for classification: leave task at auto")
    folders = {n: [p / "train", p / "test"] if (p / "train").is_dir() else [p] for n, p in paths.items()}
    for folder in (folder for parts in folders.values() for folder in parts):
        if not folder.is_dir() and not is_one_agent(folder):
            raise WaffleError(f"there is no {folder}: expected `train` and `test`, or one folder per class")
    classes = sorted({c for parts in folders.values() for folder in parts for c in images.classes_of(folder)})
    check_classes("classification", classes)
    arrays = [(n, _images(parts, classes, options)) for n, parts in folders.items()]
    return gather(arrays, options, classes)


def _images(folders: Sequence[Path], classes: Sequence[str], options: ReadOptions) -> list[Array]:
    return [array for folder in folders for array in images.read_images(folder, classes, options.max_expansion)]
