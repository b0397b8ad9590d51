"""The image, the Compose files, the systemd units and the Helm chart match their schemas and are restricted.

None of them is started here: there is no container runtime, no systemd and no cluster. Helm renders the chart, the
schemas of Compose and of the Kubernetes API validate the results, and systemd-analyze and hadolint check the rest.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import waffle_fl

ROOT = Path(__file__).parent.parent
PACKAGING = ROOT / "packaging"
CHART = PACKAGING / "helm" / "waffle-fl"
DOCKERFILE = PACKAGING / "docker" / "Dockerfile"
UNITS = {"waffle-server": "server /var/lib/waffle/federation", "waffle-site@": "site /var/lib/waffle/sites/%i"}
SERVICES = {"server": [9443], "site": []}  # published ports
USER = 10001
KUBERNETES = "1.33"
FULL = {
    "settings": 'schema = 1\nname = "north"\n',
    "keys": {"existingSecret": "the-keys"},
    "persistence": {"existingClaim": "the-folder"},
    "data": {"existingClaim": "the-data"},
    "image": {"digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "networkPolicy": {"sources": ["192.0.2.0/24", "2001:db8::/32"], "destinations": ["198.51.100.7/32"]},
    "metrics": {"enabled": True},
    "podAnnotations": {"c": "d"},
    "podLabels": {"e": "f"},
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
}
RELEASES = [(role, values) for role in ("server", "site") for values in ({}, FULL)]
NAMES = [f"{role}-{'full' if values else 'default'}" for role, values in RELEASES]


def tool(name: str) -> str:
    """Return a command of this environment or machine; skip the test if there is none."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)


def rendered(role: str, values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the objects that `helm template` creates from these values."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump({"role": role, **values}))
    done = run(tool("helm"), "template", "north", CHART, "--namespace", "hospital", "--values", file)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def by_kind(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({o["kind"] for o in objects}) == len(objects)
    return {o["kind"]: o for o in objects}


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile with their arguments, in order."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


# --- image ---


def test_hadolint_accepts_the_dockerfile() -> None:
    done = run(tool("hadolint"), "--no-color", DOCKERFILE)
    assert done.returncode == 0, done.stdout
    assert not done.stdout.strip()


def test_the_image_is_pinned_unprivileged_and_without_secrets() -> None:
    found = list(instructions(DOCKERFILE.read_text()))
    names = [name for name, _ in found]
    last = dict(found)
    assert re.fullmatch(r"BASE=python:3\.\d+-slim-\w+", dict([found[0]])["ARG"])  # a tag, never latest
    assert [rest for name, rest in found if name == "FROM"] == ["${BASE} AS build", "${BASE}"]
    assert "ADD" not in names
    assert last["USER"] == f"{USER}:{USER}"
    assert names.index("USER") > max(i for i, name in enumerate(names) if name in ("RUN", "COPY"))
    assert json.loads(last["ENTRYPOINT"]) == ["waffle"]
    assert 'CMD ["waffle", "deploy", "check", "/var/lib/waffle"]' in last["HEALTHCHECK"]
    installs = [rest for name, rest in found if name == "RUN" and "pip install" in rest and "--requirement" in rest]
    assert len(installs) == 2
    assert all("--require-hashes" in rest and "--no-deps" in rest for rest in installs)
    assert not re.search(r"(?i)(secret|password|token|\.key)\b", DOCKERFILE.read_text())


def test_the_build_context_holds_only_what_is_copied() -> None:
    """The build context contains only the paths that COPY names, and those exist."""
    lines = (PACKAGING / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    admitted = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = {
        source
        for name, rest in instructions(DOCKERFILE.read_text())
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert rules[0] == "*"
    assert admitted == copied
    assert all((ROOT / path).exists() for path in copied)


# --- Compose ---


@pytest.mark.parametrize("role", SERVICES)
def test_a_compose_file_follows_the_specification(role: str) -> None:
    schema = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    content = yaml.safe_load((PACKAGING / "compose" / f"{role}.yaml").read_text())
    jsonschema.validate(content, json.loads(schema.read_text(encoding="utf-8")))
    with pytest.raises(jsonschema.ValidationError, match="reed_only"):
        jsonschema.validate({"services": {"a": {"reed_only": True}}}, json.loads(schema.read_text(encoding="utf-8")))


@pytest.mark.parametrize("role", SERVICES)
def test_a_compose_service_is_restricted(role: str) -> None:
    (service,) = yaml.safe_load((PACKAGING / "compose" / f"{role}.yaml").read_text())["services"].values()
    assert service["command"] == ["deploy", role, "/var/lib/waffle"]
    assert [int(port.split(":")[-1]) for port in service.get("ports", [])] == SERVICES[role]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == f"{USER}:{USER}"
    assert service["restart"] == "unless-stopped"
    assert {"tmpfs", "mem_limit", "pids_limit"} <= set(service)
    assert not {"privileged", "cap_add", "environment", "secrets", "network_mode"} & set(service)
    assert service["image"] == f"${{WAFFLE_IMAGE:-waffle-fl:{waffle_fl.__version__}}}"
    targets = {volume["target"]: volume.get("read_only", False) for volume in service["volumes"]}
    assert targets == {"/var/lib/waffle": False} | ({"/var/lib/waffle/data": True} if role == "site" else {})


# --- systemd ---


def unit(name: str) -> dict[str, list[str]]:
    """Return the settings of a unit file; a key may occur more than once."""
    found: dict[str, list[str]] = {}
    for line in (PACKAGING / "systemd" / f"{name}.service").read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    """`systemd-analyze verify` reports nothing, and the computed exposure is low."""
    analyze = tool("systemd-analyze")
    text = (PACKAGING / "systemd" / f"{name}.service").read_text()
    file = tmp_path / f"{name}{'north' if name.endswith('@') else ''}.service"
    file.write_text(text.replace("/opt/waffle/bin/waffle", shutil.which("true") or "/bin/true"))
    verified = run(analyze, "verify", "--man=no", file)
    if "Failed to initialize manager" in verified.stderr:
        pytest.skip(f"systemd-analyze does not run here: {verified.stderr.strip()}")
    assert (verified.returncode, verified.stderr) == (0, "")
    exposure = run(analyze, "security", "--offline=true", "--no-pager", "--threshold=25", file)
    assert exposure.returncode == 0, exposure.stdout + exposure.stderr


def test_systemd_analyze_finds_a_mistake(tmp_path: Path) -> None:
    """systemd-analyze reports a misspelt setting and a missing command."""
    file = tmp_path / "wrong.service"
    file.write_text("[Service]\nProtectSytem=strict\nExecStart=/nowhere/waffle\n")
    done = run(tool("systemd-analyze"), "verify", "--man=no", file)
    assert "ProtectSytem" in done.stderr
    assert "/nowhere/waffle" in done.stderr


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_restricted(name: str) -> None:
    found = {key: value[-1] for key, value in unit(name).items()}
    folder = UNITS[name].split()[1]
    assert found["ExecStart"] == f"/opt/waffle/bin/waffle deploy {UNITS[name]}"
    assert found["ReadWritePaths"] == folder
    assert found["User"] == "waffle"
    assert found["ProtectSystem"] == "strict"
    assert found["RestrictAddressFamilies"] == "AF_INET AF_INET6 AF_UNIX"
    assert found["UMask"] == "0077"
    assert found["Restart"] == "on-failure"
    assert found["CapabilityBoundingSet"] == ""
    assert {found[key] for key in ("NoNewPrivileges", "PrivateTmp", "ProtectHome")} == {"yes"}
    assert f"WAFFLE_STATE_DIR={folder}/.user" in found["Environment"].split()
    assert "u waffle " in (PACKAGING / "systemd" / "waffle.sysusers").read_text()


# --- Helm ---


def test_the_chart_s_values_follow_its_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)
    assert set(values) | {"global"} == set(schema["properties"])
    wrong: list[dict[str, Any]] = [
        {"role": "client"},
        {"image": {"repository": "waffle-fl", "tag": "latest"}},
        {"networkPolicy": {"sources": ["hospital"]}},
        {"keys": {"node.key": "-----BEGIN"}},
        {"replicas": 2},
    ]
    for change in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values | change, schema)


def test_the_chart_has_the_package_s_version() -> None:
    """The chart and the Dockerfile's example use the package version as image tag."""
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == waffle_fl.__version__
    assert f"waffle-fl:{waffle_fl.__version__} " in DOCKERFILE.read_text()


def test_helm_lint_accepts_the_chart() -> None:
    for role in SERVICES:
        done = run(tool("helm"), "lint", "--strict", CHART, "--set", f"role={role}")
        assert done.returncode == 0, done.stdout + done.stderr


def test_helm_rejects_values_outside_of_the_schema() -> None:
    done = run(tool("helm"), "template", "north", CHART, "--set", "role=client")
    assert done.returncode
    assert "role" in done.stderr


@pytest.mark.parametrize(("role", "values"), RELEASES, ids=NAMES)
def test_the_kubernetes_schema_accepts_every_field(role: str, values: dict[str, Any], tmp_path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    validate = kubernetes_validate.validate
    for document in rendered(role, values, tmp_path):
        validate(document, KUBERNETES, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            validate({**document, "spce": {}}, KUBERNETES, strict=True)


@pytest.mark.parametrize(("role", "values"), RELEASES, ids=NAMES)
def test_the_chart_s_objects_fit_together(role: str, values: dict[str, Any], tmp_path: Path) -> None:
    objects = by_kind(rendered(role, values, tmp_path))
    expected = {"StatefulSet", "NetworkPolicy"}
    expected |= {"Service"} if role == "server" else set()
    expected |= {"ConfigMap"} if values else set()
    assert set(objects) == expected
    spec = objects["StatefulSet"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    selectors = [spec["selector"]["matchLabels"], objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    selectors += [objects["Service"]["spec"]["selector"]] if role == "server" else []
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    assert spec["replicas"] == 1
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == ["deploy", role, "/var/lib/waffle"]
    available = {v["name"] for v in pod["volumes"]}
    available |= {c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", [])}
    mounts = [m for c in [container, *pod.get("initContainers", [])] for m in c["volumeMounts"]]
    assert {m["name"] for m in mounts} == available
    paths = [m["mountPath"] for m in container["volumeMounts"]]
    assert len(set(paths)) == len(paths)
    assert {"/var/lib/waffle", "/tmp"} <= set(paths)
    if role == "server":
        assert spec["serviceName"] == objects["Service"]["metadata"]["name"]
        (port,) = objects["Service"]["spec"]["ports"]
        (named,) = container["ports"]
        assert (port["targetPort"], port["port"]) == (named["name"], named["containerPort"])
        assert container["readinessProbe"]["tcpSocket"]["port"] == named["name"]
    else:
        assert "ports" not in container
    if values:
        config = objects["ConfigMap"]
        volume = next(v for v in pod["volumes"] if v["name"] == "settings")
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        assert tomllib.loads(config["data"][f"{role}.toml"]) == {"schema": 1, "name": "north"}


@pytest.mark.parametrize(("role", "values"), RELEASES, ids=NAMES)
def test_a_pod_is_restricted(role: str, values: dict[str, Any], tmp_path: Path) -> None:
    """Pods meet the `restricted` Pod Security Standard and have a read-only root, no API token and no key."""
    objects = rendered(role, values, tmp_path)
    pod = by_kind(objects)["StatefulSet"]["spec"]["template"]["spec"]
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == USER
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
    assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"])
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert "env" not in container
    assert "Secret" not in {o["kind"] for o in objects}


def test_network_policies_allow_one_connection(tmp_path: Path) -> None:
    """Only connections from the sites to the server's port, and DNS lookups of the sites, are allowed."""
    server = by_kind(rendered("server", {}, tmp_path))["NetworkPolicy"]["spec"]
    site = by_kind(rendered("site", {}, tmp_path))["NetworkPolicy"]["spec"]
    assert server["policyTypes"] == site["policyTypes"] == ["Ingress", "Egress"]
    assert server["ingress"] == [{"ports": [{"port": 9443, "protocol": "TCP"}]}]
    assert server["egress"] == site["ingress"] == []
    assert [port["port"] for rule in site["egress"] for port in rule["ports"]] == [9443, 53, 53]
    chosen = by_kind(rendered("server", FULL, tmp_path))["NetworkPolicy"]["spec"]["ingress"]
    assert [block["ipBlock"]["cidr"] for block in chosen[0]["from"]] == FULL["networkPolicy"]["sources"]  # type: ignore[index]
    assert chosen[1]["ports"] == [{"port": 9464, "protocol": "TCP"}]


def test_metrics_are_off_by_default(tmp_path: Path) -> None:
    default, chosen = (
        by_kind(rendered("server", values, tmp_path))["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
        for values in ({}, FULL)
    )
    assert not [key for key in default if key.startswith("prometheus.io")]
    assert chosen["prometheus.io/port"] == "9464"


# --- page ---


def test_the_page_states_what_was_not_run() -> None:
    page = (ROOT / "docs" / "install-server.md").read_text()
    assert "have not been run" in page
    mentioned = set(re.findall(r"packaging/[\w./@-]+\w", page))
    assert mentioned
    assert all((ROOT / path).exists() for path in mentioned)
