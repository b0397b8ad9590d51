"""Python code that a run's config refers to as `module:name`, and the check that it may be imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from waffle_fl.errors import WaffleError


def imports_in(content: Any, model: bool = True) -> dict[str, str]:
    """Return the `module:name` references of an unchecked config: method, options and, if `model`, its model."""
    method = content.get("method") if isinstance(content, dict) else None
    found = {"method": method, **_table(content, "options")}
    found |= {"model": _table(content, "settings").get("model")} if model else {}
    return {name: text for name, text in found.items() if isinstance(text, str) and ":" in text}


def check_trusted(content: Any, path: Path, trust: bool, model: bool = True) -> bool:
    """Return whether the config at this path refers to code to import; raise an error if so without `trust`."""
    found = imports_in(content, model)
    if found and not trust:
        named = ", ".join(f"{name} = {text!r}" for name, text in found.items())
        raise WaffleError(
            f"{path} names code to import ({named}): if you trust that code and this file, pass --trust "
            "(in Python trust=True)"
        )
    return bool(found)


def _table(content: Any, name: str) -> dict[str, Any]:
    table = content.get(name) if isinstance(content, dict) else None
    return table if isinstance(table, dict) else {}
