"""Delta encoding of tables: each line of a record holds only what changed since the previous one, to keep it small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Tables: TypeAlias = Mapping[str, Mapping[str, Any]]


def since(before: Tables, now: Tables) -> dict[str, Any]:
    """Return the new and changed entries of each table, and under "gone" the keys that were removed."""
    changed = {
        name: {k: v for k, v in table.items() if k not in before[name] or before[name][k] != v}
        for name, table in now.items()
    }
    gone = {name: [k for k in before[name] if k not in table] for name, table in now.items()}
    delta = {name: table for name, table in changed.items() if table}
    lost = {name: keys for name, keys in gone.items() if keys}
    return {**delta, **({"gone": lost} if lost else {})}


def after(before: Tables, delta: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tables after applying a delta made by `since`."""
    gone = delta.get("gone", {})
    return {
        name: {**{k: v for k, v in table.items() if k not in gone.get(name, ())}, **delta.get(name, {})}
        for name, table in before.items()
    }
