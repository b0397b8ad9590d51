"""Write the CycloneDX SBOM of a deployment: python packaging/sbom.py FOLDER.

cyclonedx-py describes the whole environment, with licences and the graph of dependencies. This script keeps what
requirements/deploy.txt and torch-cpu.txt lock, adds the hashes of the lock, and validates the result.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = (ROOT / "requirements" / "deploy.txt", ROOT / "requirements" / "torch-cpu.txt")
EXTRAS = ("flower", "parquet", "private")  # as for deploy.txt in the Makefile
SPEC = "1.6"


def locked(*files: Path) -> dict[str, tuple[str, list[str]]]:
    """Version and SHA-256 hashes by name of every requirement whose marker holds here."""
    found: dict[str, tuple[str, list[str]]] = {}
    for file in files:
        text = re.sub(r"^\s*#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
        for line in text.splitlines():
            requirement = Requirement(line.split("--hash")[0].strip())
            if requirement.marker is None or requirement.marker.evaluate():
                (pin,) = requirement.specifier
                found[canonicalize_name(requirement.name)] = pin.version, re.findall(r"--hash=sha256:(\w+)", line)
    return found


def direct() -> set[str]:
    """The packages that waffle-fl itself requires in a deployment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(r for extra in EXTRAS for r in project["optional-dependencies"][extra])]
    return {canonicalize_name(Requirement(r).name) for r in named}


def environment() -> dict[str, Any]:
    """The SBOM of the environment of this interpreter."""
    command = [
        *(sys.executable, "-m", "cyclonedx_py", "environment", sys.executable, "--pyproject", ROOT / "pyproject.toml"),
        *("--mc-type", "application", "--spec-version", SPEC, "--output-reproducible", "--no-validate"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def deployment(bom: dict[str, Any], lock: dict[str, tuple[str, list[str]]]) -> dict[str, Any]:
    """The part of an environment's SBOM that the lock names, with its hashes."""
    kept = {canonicalize_name(c["name"]): c for c in bom["components"] if canonicalize_name(c["name"]) in lock}
    wrong = [f"{name} {pin}" for name, (pin, _) in lock.items() if kept.get(name, {}).get("version") != pin]
    if wrong:
        sys.exit(f"the environment differs from the lock files: run make setup. Missing: {', '.join(wrong)}")
    for name, component in kept.items():
        component.pop("externalReferences", None)  # project pages: the purl is enough, and validating them is slow
        component["properties"] = [{"name": "waffle-fl:lock:sha256", "value": value} for value in lock[name][1]]
    root = bom["metadata"]["component"]
    root["version"] = version("waffle-fl")
    root["purl"] = f"pkg:pypi/waffle-fl@{root['version']}"
    refs = {component["bom-ref"] for component in kept.values()}
    own = {kept[name]["bom-ref"] for name in direct() if name in kept}
    graph = [
        {
            **node,
            "dependsOn": [
                r for r in node.get("dependsOn", ()) if r in (own if node["ref"] == root["bom-ref"] else refs)
            ],
        }
        for node in bom["dependencies"]
        if node["ref"] in refs | {root["bom-ref"]}
    ]
    return {**bom, "components": [kept[name] for name in sorted(kept)], "dependencies": graph}


def main(folder: Path) -> Path:
    """Write and validate the SBOM; return its file."""
    text = json.dumps(deployment(environment(), locked(*LOCKS)), indent=2, sort_keys=True) + "\n"
    if problem := JsonStrictValidator(SchemaVersion.from_version(SPEC)).validate_str(text):
        sys.exit(f"the SBOM does not follow the CycloneDX {SPEC} schema: {problem}")
    file = folder / f"waffle_fl-{version('waffle-fl')}.cdx.json"
    file.write_text(text, encoding="utf-8")
    return file


if __name__ == "__main__":
    written = main(Path(sys.argv[1]))
    print(f"{written}: {len(json.loads(written.read_text(encoding='utf-8'))['components'])} components")
