"""Code that a run's config names, `module:name`, and whether it may be imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from waffle_fl.errors import WaffleError


def imports_in(content: Any, model: bool = True) -> dict[str, str]:
    """The code that an unchecked config names: its method and its options, which reading it imports, and its model."""
    method = content.get("method") if isinstance(content, dict) else None
    found = {"method": method, **_table(content, "options")}
    found |= {"model": _table(content, "settings").get("model")} if model else {}
    return {name: text for name, text in found.items() if isinstance(text, str) and ":" in text}


def check_trusted(content: Any, path: Path, trust: bool, model: bool = True) -> bool:
    """Does the config at this path name code to import? That is refused unless it is trusted."""
    found = imports_in(content, model)
    if found and not trust:
        named = ", ".join(f"{name} = {text!r}" for name, text in found.items())
        raise WaffleError(
            f"{path} names code to import ({named}): if you know that code and who wrote this file, pass --trust "
            "(in Python trust=True)"
        )
    return bool(found)


def _table(content: Any, name: str) -> dict[str, Any]:
    table = content.get(name) if isinstance(content, dict) else None
    return table if isinstance(table, dict) else {}
