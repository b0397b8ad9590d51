"""A site's data: what it tells of it before the first round, and the federation of one that it makes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from waffle_fl.config import EVERYONE, Settings
from waffle_fl.data import NAMES
from waffle_fl.deploy.policy import Refused
from waffle_fl.experiment import federation_of
from waffle_fl.federation import Federation
from waffle_fl.own import Gathered, Preprocessing, Reading, gather
from waffle_fl.own.arrays import read_npz
from waffle_fl.own.checks import check_duplicates
from waffle_fl.own.folder import check_columns, divided, goal_of, layout_of, parts_of, tables_at
from waffle_fl.own.preprocessing import (
    MOST_CATEGORIES,
    at_home,
    check_target,
    count_cells,
    may_be_classes,
    target_names,
    tell_categories,
    tell_moments,
)
from waffle_fl.own.tables import Table, numbers

FEWEST = 5  # rows of which a summary or a score may leave


@dataclass(frozen=True)
class Holdings:
    """Where a site's data lies: a file or folder of its own, or for trials its share of a data set by name."""

    name: str
    source: str
    data_dir: str = ""

    @property
    def by_name(self) -> bool:
        return self.source in NAMES

    def tell(self, s: Settings, agent: int, stage: str, known: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one question of the survey: summaries, never a row."""
        self._check(s)
        if self.by_name:
            return {"kind": "data set", **_facts(self.federation(s, agent, known))}
        layout = layout_of(Path(self.source))
        if layout == "arrays":
            return {"kind": "arrays", **_facts(self._from_arrays(s, agent, ()))}
        if layout != "tables":
            raise Refused("this site's data is neither a table nor a .npz file")
        own = tables_at(Path(self.source))
        stages: dict[str, Callable[[Sequence[Table], Reading, Mapping[str, Any]], dict[str, Any]]] = {
            "hello": _tell_target,
            "counts": _tell_counts,
            "columns": _tell_columns,
        }
        return stages[stage](own, _reading(s), known)

    def questions(self, s: Settings, stage: str = "", known: Any = None) -> dict[str, str]:
        """What a request wants to know of the data, each question by a hash: how it is read, and what else decides.

        Of a data set by name nothing is to be kept.
        """
        if self.by_name:
            return {}
        reading = asdict(_reading(s))
        return {"reading": _hash(reading)} | ({stage: _hash([reading, known])} if stage else {})

    def digest(self, s: Settings, agent: int, salt: str) -> str:
        """A hash of the data that means nothing to whoever does not hold it, and nothing in another run."""
        if self.by_name:
            content = self.federation(s, agent, {}).digest().encode()
        elif layout_of(Path(self.source)) == "arrays":
            content = Path(self.source).read_bytes()
        else:
            content = b"\n".join(key for table in tables_at(Path(self.source)) for key in table.row_keys())
        return hashlib.blake2b(content, key=salt.encode()[:64], digest_size=16).hexdigest()

    def federation(self, s: Settings, agent: int, known: Mapping[str, Any]) -> Federation:
        """What this site sees of the federation: itself."""
        self._check(s)
        if self.by_name:
            alice = "0" if s.alice == EVERYONE else s.alice
            return federation_of(replace(s, alice=alice), self.data_dir).only(agent)
        if layout_of(Path(self.source)) == "arrays":
            return self._from_arrays(s, agent, tuple(map(str, known["classes"])))
        return self._from_tables(s, agent, Preprocessing.from_json(known["prepared"]))

    def _check(self, s: Settings) -> None:
        if self.by_name != (not s.is_own) or (self.by_name and self.source != s.data):
            raise Refused(f"this site holds {self.source if self.by_name else 'data of its own'}, not {s.data}")

    def _from_arrays(self, s: Settings, agent: int, classes: tuple[str, ...]) -> Federation:
        found = gather([(self.name, read_npz(Path(self.source)))], _reading(s), classes)
        return replace(Federation.from_gathered(found, 0), ids=(agent,))

    def _from_tables(self, s: Settings, agent: int, common: Preprocessing) -> Federation:
        own, how = tables_at(Path(self.source)), _reading(s)
        _check_prepared(common, own, how)
        rows = divided(own, common, how)
        keys = [key for table in own for key in table.row_keys()]
        check_duplicates({self.name: (keys, np.concatenate([rows.train, rows.validation]), rows.test)}, len(own) == 2)
        fitted = at_home(common, own[0].taken(rows.train))
        made = Gathered({self.name: parts_of(own, fitted, rows)}, common.task, common.classes, (fitted,))
        return replace(Federation.from_gathered(made, 0), ids=(agent,))


def _reading(s: Settings) -> Reading:
    return Reading(**{f.name: getattr(s, f.name) for f in fields(Reading)})


def _hash(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _check_prepared(common: Preprocessing, own: Sequence[Table], how: Reading) -> None:
    """Refuse a preparation of other columns than this site's, or of more texts than may be categories."""
    columns = [*(column.name for column in common.columns), common.target]
    if common.target != goal_of(own, how)[0] or sorted(columns) != sorted(own[0].columns):
        raise Refused("the server's preparation of the columns is not of this site's columns and this run's target")
    for column in common.columns:
        _check_texts(column.name, column.categories)


def _check_texts(name: str, texts: Sequence[str], cells: int = 0) -> None:
    """Refuse before they leave: so many different texts, or one for each of the cells, are those of an identifier."""
    if len(texts) > MOST_CATEGORIES:
        raise Refused(f"column {name!r} has more than {MOST_CATEGORIES} different texts, which stay here")
    if FEWEST < len(texts) == cells:
        raise Refused(f"column {name!r} has another text in every row: they stay here")


def _facts(f: Federation) -> dict[str, Any]:
    """What everyone must know of one agent's samples: how many, and of which shape."""
    return {
        "samples": len(f.train[0]),
        "test": len(f.test[0]),
        "validation": len(f.validation[0]),
        "shape": list(f.shape),
        "classes": list(f.class_names),
        "task": f.task,
    }


def _tell_target(own: Sequence[Table], how: Reading, known: Mapping[str, Any]) -> dict[str, Any]:
    target, categorical = goal_of(own, how)
    check_columns(own, target, categorical)
    values = sorted({name for table in own for name in target_names(table, target)})
    check_target(target, own, how.task)
    classes = may_be_classes(values, how.task)
    if classes:
        _check_texts(target, values, sum(map(len, own)))
    return {
        "kind": "tables",
        "columns": list(own[0].columns),
        "target": target,
        "categorical": list(categorical),
        "values": values if classes else None,
        "numeric": bool(np.isfinite(numbers(np.array(values))).all()),
    }


def _training(own: Sequence[Table], how: Reading, known: Mapping[str, Any]) -> tuple[Table, dict[str, int]]:
    aim = Preprocessing.from_json(known["aim"])
    if aim.target != goal_of(own, how)[0]:
        raise Refused("the server asks for another target than this run's")
    rows = divided(own, aim, how)
    if 0 < len(rows.train) < FEWEST:
        raise Refused(f"fewer than {FEWEST} training rows are not summarised")
    counts = {"samples": len(rows.train), "test": len(rows.test), "validation": len(rows.validation)}
    return own[0].taken(rows.train), counts


def _tell_counts(own: Sequence[Table], how: Reading, known: Mapping[str, Any]) -> dict[str, Any]:
    table, samples = _training(own, how, known)
    return {**samples, "counts": {name: list(count_cells(cells)) for name, cells in table.columns.items()}}


def _tell_columns(own: Sequence[Table], how: Reading, known: Mapping[str, Any]) -> dict[str, Any]:
    """Moments and categories of the training rows; with local preprocessing the moments stay."""
    table, _ = _training(own, how, known)
    kinds: Mapping[str, str] = known["kinds"]
    numeric = [name for name, kind in kinds.items() if kind == "numeric"]
    stays = how.preprocessing == "local"
    told = [name for name in numeric if not stays or name == known["aim"]["target"]]
    categories = {name: tell_categories(table, name) for name, kind in kinds.items() if kind == "categorical"}
    for name, texts in categories.items():
        _check_texts(name, texts, int((table.columns[name] != "").sum()))
    return {"moments": {name: list(tell_moments(table, name)) for name in told}, "categories": categories}
