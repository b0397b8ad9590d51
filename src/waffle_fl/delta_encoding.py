"""Tables told by what changed since the line before, so that a record of a thousand runs stays small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Tables: TypeAlias = Mapping[str, Mapping[str, Any]]


def since(before: Tables, now: Tables) -> dict[str, Any]:
    """What of each table is new or other than before, and under "gone" what it no longer has."""
    changed = {
        name: {k: v for k, v in table.items() if k not in before[name] or before[name][k] != v}
        for name, table in now.items()
    }
    gone = {name: [k for k in before[name] if k not in table] for name, table in now.items()}
    delta = {name: table for name, table in changed.items() if table}
    lost = {name: keys for name, keys in gone.items() if keys}
    return {**delta, **({"gone": lost} if lost else {})}


def after(before: Tables, delta: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables that `since` told of."""
    gone = delta.get("gone", {})
    return {
        name: {**{k: v for k, v in table.items() if k not in gone.get(name, ())}, **delta.get(name, {})}
        for name, table in before.items()
    }
