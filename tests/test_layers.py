"""Imports point one way: data -> partition -> federation -> algorithms x engines -> records -> report -> cli."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import waffle_fl

ROOT = Path(waffle_fl.__file__).parent
LAYERS = [
    {
        "constraints",
        "data_folder",
        "delta_encoding",
        "errors",
        "importing",
        "out_of_memory",
        "metrics",
        "call_syntax",
        "process_options",
        "randomness",
        "spreadsheet",
        "atomic_files",
        "versions",
    },
    {"augment", "data", "manifest", "models", "privacy", "round_log", "shifts", "tensorfile", "user_key"},
    {"user_data", "partition"},
    {"federation", "update_encoding"},
    {"batches", "poisson_batches"},
    {"algorithms", "attacks", "guard"},
    {"config", "engines", "folder_federation"},
    {"records"},
    {"experiment", "ray_cluster", "results"},
    {"claims", "deploy", "inference", "loggers"},
    {"report", "tournament"},
    {"decision"},
    {"tuning"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
BARE = (
    "data",
    "user_data",
    "partition",
    "shifts",
    "federation",
    "models",
    "algorithms",
    "engines.simulate",
    "experiment",
    "results",
    "claims.record_files",
    "decision.study",
    "tournament.running",
)


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("waffle_fl."):
            names.add(node.module.split(".")[1])
        if isinstance(node, ast.ImportFrom) and node.module == "waffle_fl":
            names |= {alias.name for alias in node.names if alias.name in LEVEL}
    return names


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    """A module imports only from its own layer or an earlier one."""
    name = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if name in LEVEL:
        assert all(LEVEL[other] <= LEVEL[name] for other in imports(path))
    else:
        assert name in ("__init__", "__main__")


def test_only_the_command_line_prints() -> None:
    """Only the modules of cli and `__main__.py` call print."""
    for path in ROOT.rglob("*.py"):
        if "cli" not in path.parts and path.name != "__main__.py":
            calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
            assert not any(isinstance(c.func, ast.Name) and c.func.id == "print" for c in calls), path


def test_the_core_needs_torch_and_numpy_alone() -> None:
    """A bare GPU machine needs none of these packages, and commands import chart packages only when they draw."""
    code = f"""
import sys
for name in {BARE!r}:
    __import__("waffle_fl." + name)
front = ("tyro", "altair", "rich", "sklearn", "vl_convert", "pandas", "pyarrow", "PIL", "optuna", "ray")
heavy = [m for m in front if m in sys.modules]
import waffle_fl.cli.commands, waffle_fl.cli.decide, waffle_fl.cli.tune
waffle_fl.load("digits")
heavy += [m for m in ("altair", "sklearn", "vl_convert", "ray") if m in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_one_package_uses_ray() -> None:
    """Ray is named as a module only in `ray_cluster`, and `experiment` imports that package only when asked to."""
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert not {name.split(".")[0] for name in imports_of(text)} & {"ray"}, path
        assert 'import_module("ray' not in text or path.parent.name == "ray_cluster", path


def test_nothing_is_unpickled() -> None:
    """Only the reader of CIFAR's python version imports pickle, and no module uses torch.load."""
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert "torch.load" not in text
        if path.name != "cifar.py":
            assert "pickle" not in imports_of(text), path


def imports_of(text: str) -> set[str]:
    tree = ast.parse(text)
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return names | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


def test_no_module_has_an_empty_name() -> None:
    """No module is called utils, common or helpers."""
    assert not {p.stem for p in ROOT.rglob("*.py")} & {"utils", "common", "helpers", "misc"}
