"""The structure of the code: small classes with unique names, and short test files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import waffle_fl

SOURCE = Path(waffle_fl.__file__).parent
MOST_MUTABLE = 10
CONTRACT = {"Server", "Agents", "Local", "Down", "Up", "Info"}  # defined once per method, see contract.py
CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {"list", "dict", "set", "deque", "defaultdict"}


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield path.relative_to(SOURCE), node


def mutable_attributes(node: ast.ClassDef) -> set[str]:
    """Attributes assigned after construction, or initialised with a container."""
    found = set()
    for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
        at_start = method.name in ("__init__", "__post_init__")
        for part in ast.walk(method):
            if not isinstance(part, ast.Assign | ast.AnnAssign | ast.AugAssign):
                continue
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            for target in (leaf for one in targets for leaf in ast.walk(one)):
                own = isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"
                if own and (not at_start or _is_container(part.value)):
                    found.add(target.attr)
    return found


def _is_container(value: ast.expr | None) -> bool:
    made = isinstance(value, ast.Call) and getattr(value.func, "id", "") in MAKERS
    return made or isinstance(value, CONTAINERS)


def test_no_class_has_more_than_ten_mutable_attributes() -> None:
    """No class has more than ten mutable attributes."""
    many = {f"{path}:{node.name}": sorted(mutable_attributes(node)) for path, node in classes()}
    assert {name: names for name, names in many.items() if len(names) > MOST_MUTABLE} == {}


def test_public_class_names_are_unique() -> None:
    """Public class names are unique, except the states that every method's file defines."""
    places: dict[str, list[str]] = {}
    for path, node in classes():
        if not node.name.startswith("_") and not (path.parts[0] == "algorithms" and node.name in CONTRACT):
            places.setdefault(node.name, []).append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_test_files_are_short() -> None:
    """A test file covers one subject in at most 700 lines."""
    lengths = {path.name: len(path.read_text().splitlines()) for path in Path(__file__).parent.glob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 700} == {}
