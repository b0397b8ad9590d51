"""Every package that a deployment installs is locked with its hash, the lock installs, and the SBOM lists it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import waffle_fl

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "requirements"
HASHED = ("deploy.txt", "dev.txt", "torch-cpu.txt")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "macos")
CUDA = re.compile(r"(nvidia|cuda)-.*|triton")  # dependencies of the CUDA build of torch; the lock is for CPUs
Pins = dict[str, tuple[Requirement, list[str]]]


def locked(name: str) -> Pins:
    """Return the requirement and hashes of each package in a lock file whose marker applies here."""
    text = (LOCKS / name).read_text(encoding="utf-8")
    found: Pins = {}
    for line in re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines():
        requirement = Requirement(line.split("--hash")[0].strip())
        if requirement.marker is None or requirement.marker.evaluate():
            found[canonicalize_name(requirement.name)] = requirement, re.findall(r"--hash=sha256:(\S+)", line)
    return found


def pin(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"{requirement} is no pin"
    return specifier.version


def closure(name: str, extras: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return the installed versions of everything that a package requires, without the package itself."""
    found: dict[str, str] = {}
    pending, seen = [(name, extras)], set()
    while pending:
        package, requested = pending.pop()
        if (package, requested) in seen:
            continue
        seen.add((package, requested))
        for text in distribution(package).requires or []:
            requirement = Requirement(text)
            chosen = [{"extra": extra} for extra in requested] or [{"extra": ""}]
            if requirement.marker is not None and not any(requirement.marker.evaluate(extra) for extra in chosen):
                continue
            other = canonicalize_name(requirement.name)
            if not CUDA.fullmatch(other) and other != name:
                found[other] = version(other)
                pending.append((other, frozenset(requirement.extras)))
    return found


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"no {name} in this environment: make setup")
    return found


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)


def fetch(*command: str | Path) -> None:
    """Run a command that needs the package index; skip the test if it fails and the index cannot be reached."""
    done = run(*command)
    if done.returncode and not reachable():
        pytest.skip("the package index cannot be reached from this machine")
    assert done.returncode == 0, done.stderr


@cache
def reachable() -> bool:
    """Return whether the index answers a minimal request."""
    command = [tool("uv"), "pip", "compile", "--quiet", "--no-cache", "--no-deps", "-"]
    return not subprocess.run(command, input=b"iniconfig", capture_output=True, check=False).returncode


# --- content of the locks ---


@pytest.mark.parametrize("name", HASHED)
def test_every_requirement_is_a_pin_with_a_hash(name: str) -> None:
    for requirement, hashes in locked(name).values():
        assert pin(requirement)
        assert hashes
        assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in hashes)


def test_no_lock_file_names_an_index() -> None:
    """The installing machine chooses the package index, and hashes make any index safe."""
    for file in LOCKS.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"(?i)https?:|file:|--(extra-)?index|--find-links|trusted-host| @ ", text), file.name
        assert str(ROOT) not in text


def test_a_deployment_is_locked_completely() -> None:
    """The closure of waffle-fl[flower,parquet,private] is locked and installed at the locked versions."""
    pins = locked("deploy.txt") | locked("torch-cpu.txt")
    found = closure("waffle-fl", frozenset({"flower", "parquet", "private"}))
    assert {"flwr", "cryptography", "torch", "numpy", "grpcio", "pyarrow"} <= set(found)
    assert not set(found) - set(pins), "run make lock"
    differing = {
        name: (installed, pin(pins[name][0]))
        for name, installed in found.items()
        if Version(installed).public != Version(pin(pins[name][0])).public
    }
    assert not differing, "run make setup"
    assert set(pins) == set(found), "locked, and required by nothing"


def test_all_development_dependencies_are_locked() -> None:
    found = closure("waffle-fl", frozenset({"dev"}))
    assert not set(found) - set(locked("dev.txt")) - {"torch"}, "run make lock"


def test_development_and_deployment_lock_the_same_versions() -> None:
    """Developers test the versions that are deployed."""
    development = locked("dev.txt")
    assert all(pin(development[name][0]) == pin(requirement) for name, (requirement, _) in locked("deploy.txt").items())


def test_torch_has_one_version_and_the_dependencies_of_its_cpu_build() -> None:
    release = pin(locked("torch.txt")["torch"][0])
    text = (LOCKS / "torch-cpu.txt").read_text(encoding="utf-8")
    assert {Version(found).public for found in re.findall(r"^torch==(\S+)", text, re.MULTILINE)} == {release}
    settings = tomllib.loads((LOCKS / "uv.toml").read_text(encoding="utf-8"))["dependency-metadata"]
    (declared,) = [entry for entry in settings if entry["name"] == "torch"]
    assert declared["version"] == release
    if version("torch") == f"{release}+cpu":
        actual = {str(Requirement(text)) for text in distribution("torch").requires or [] if "extra ==" not in text}
        assert {str(Requirement(text)) for text in declared["requires-dist"]} == actual


# --- the lock fits pyproject.toml, and installs ---


def compile_commands() -> list[list[str]]:
    """Return the commands of `make lock` without the path before uv."""
    done = subprocess.run(["make", "--dry-run", "lock"], cwd=ROOT, capture_output=True, text=True, check=True)
    text = done.stdout.replace("\\\n", " ")
    return [line.split("bin/uv ", 1)[1].split() for line in text.splitlines() if "bin/uv pip compile" in line]


@pytest.mark.release
def test_make_lock_changes_no_pin(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(LOCKS, tmp_path / "requirements")
    package = tmp_path / "src" / "waffle_fl"
    package.mkdir(parents=True)
    shutil.copy(Path(waffle_fl.__file__), package / "__init__.py")
    commands = compile_commands()
    assert len(commands) == 2
    for command in commands:
        arguments = [argument.strip('"') for argument in command if argument not in ('"make', 'lock"')]
        arguments.remove("--custom-compile-command")
        fetch(tool("uv"), "--directory", tmp_path, *arguments)
    for name in ("dev.txt", "deploy.txt"):
        before, after = (
            re.findall(r"^\S+==.*?(?= *\\?$)", (folder / name).read_text(encoding="utf-8"), re.MULTILINE)
            for folder in (LOCKS, tmp_path / "requirements")
        )
        assert before == after, f"requirements/{name} is not that of pyproject.toml: run make lock"


@pytest.mark.release
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_every_package_has_a_wheel_for_each_python(python: str, platform: str, tmp_path: Path) -> None:
    fetch(
        *(tool("uv"), "pip", "install", "--dry-run", "--target", tmp_path, "--python-version", python),
        *("--python-platform", platform, "--only-binary", ":all:", "--require-hashes", "--no-deps"),
        *("--requirement", LOCKS / "deploy.txt"),
    )


@pytest.mark.release
def test_the_lock_installs(tmp_path: Path) -> None:
    """The lock installs into a new environment, and Flower starts there."""
    venv.create(tmp_path / "new")
    python = tmp_path / "new" / "bin" / "python"
    fetch(
        *(tool("uv"), "pip", "install", "--python", python, "--only-binary", ":all:", "--link-mode", "copy"),
        *("--require-hashes", "--no-deps", "--requirement", LOCKS / "deploy.txt"),
    )
    listed = json.loads(run(tool("uv"), "pip", "list", "--python", python, "--format", "json").stdout)
    assert {canonicalize_name(package["name"]): package["version"] for package in listed} == {
        name: pin(requirement) for name, (requirement, _) in locked("deploy.txt").items()
    }
    started = run(tmp_path / "new" / "bin" / "flower-superlink", "--help")
    assert started.returncode == 0, started.stderr


@pytest.mark.release
@pytest.mark.parametrize("name", HASHED)
def test_pip_accepts_the_lock_and_finds_it_installed(name: str) -> None:
    """pip would install no package that this environment lacks; nothing is downloaded."""
    done = run(
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--require-hashes", "--no-deps"),
        *("--requirement", LOCKS / name, "--no-index"),
    )
    if name == "torch-cpu.txt" and not version("torch").endswith("+cpu"):
        pytest.skip("torch is not the CPU build here")
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout


@pytest.mark.release
def test_a_changed_file_is_rejected(tmp_path: Path) -> None:
    """pip downloads a file whose hash differs from the lock and rejects it."""
    requirement, hashes = locked("dev.txt")["iniconfig"]
    right, wrong = tmp_path / "right.txt", tmp_path / "wrong.txt"
    right.write_text(f"{requirement} {' '.join(f'--hash=sha256:{value}' for value in hashes)}\n")
    wrong.write_text(f"{requirement} --hash=sha256:{'0' * 64}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--retries", "0", "--dest"]
    fetch(*command, tmp_path / "files", "--require-hashes", "--requirement", right)
    done = run(*command, tmp_path / "files", "--require-hashes", "--requirement", wrong)
    assert done.returncode
    assert "DO NOT MATCH THE HASHES" in done.stderr


# --- SBOM ---


@pytest.mark.release
def test_the_sbom_lists_what_a_deployment_installs(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx")
    done = subprocess.run(
        [sys.executable, ROOT / "packaging" / "sbom.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    assert file.name == f"waffle_fl-{version('waffle-fl')}.cdx.json"
    bom: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    pins = locked("deploy.txt") | locked("torch-cpu.txt")
    components = {canonicalize_name(component["name"]): component for component in bom["components"]}
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert {name: component["version"] for name, component in components.items()} == {
        name: pin(requirement) for name, (requirement, _) in pins.items()
    }
    assert all(
        {p["value"] for p in component["properties"]} == set(pins[name][1]) for name, component in components.items()
    )
    assert bom["metadata"]["component"]["version"] == version("waffle-fl")
    (root_node,) = [node for node in bom["dependencies"] if node["ref"] == bom["metadata"]["component"]["bom-ref"]]
    assert len(root_node["dependsOn"]) == 15  # 8 dependencies, 5 of the extra `flower`, pyarrow, dp-accounting
    assert str(ROOT) not in file.read_text(encoding="utf-8")


def test_the_sbom_and_the_lock_cover_the_same_extras() -> None:
    source = (ROOT / "packaging" / "sbom.py").read_text(encoding="utf-8")
    extras = re.findall(r"--extra (\w+)", " ".join(compile_commands()[1]))
    assert f"EXTRAS = {json.dumps(extras).replace('[', '(').replace(']', ')')}" in source
