"""The Helm chart: it renders to what kustomize makes of the manifests, for every choice of parts.

Its templates are written anew by `python -m tools.generate.chart`. Helm itself is tried where it is
installed; without it, `tests.support.helm_template` renders the same files.
"""

import json
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from simcluster.apiserver.crd.schema_check import schema_violations
from tests.support.helm_template import rendered
from tools.generate.chart import (
    EXCLUSIVE,
    HIGHLY_AVAILABLE,
    K8S,
    TEMPLATES,
    Parts,
    agents_namespace,
    all_together,
    combinations,
    generated,
    kustomized,
    objects,
    without_hashes,
)
from tools.generate.chart_values import SETTINGS, defaults

CHART = K8S / "chart"
ROOT = K8S.parent
Json = dict[str, Any]

pytestmark = [
    pytest.mark.kubectl,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
]
with_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


def values(chosen: Parts = frozenset(), **others: Any) -> Json:
    """The defaults with some parts turned on, and these instead of theirs."""
    return defaults() | dict.fromkeys(chosen, True) | others


def charted(
    wanted: Mapping[str, Any], namespace: str = SYSTEM_NAMESPACE
) -> dict[tuple[str, str], Json]:
    """The chart's objects by kind and name."""
    found: dict[tuple[str, str], Json] = {}
    for template in sorted(TEMPLATES.glob("*.yaml")):
        text = rendered(template.read_text(), wanted, namespace)
        for it in objects(text):
            found[it["kind"], it["metadata"]["name"]] = it
    return found


def checksum(workload: Json) -> str:
    """Take the checksum of its settings out of a workload; empty: it has none."""
    metadata = workload["spec"]["template"]["metadata"]
    found = metadata.get("annotations", {}).pop("checksum/config", "")
    if not metadata.get("annotations", {"": ""}):
        del metadata["annotations"]
    return str(found)


def without_checksums(made: dict[tuple[str, str], Json]) -> dict[tuple[str, str], Json]:
    """The objects as kustomize has them, which puts a hash into names instead."""
    for it in made.values():
        if "template" in it.get("spec", {}):
            checksum(it)
    return made


def kept(made: Mapping[tuple[str, str], Json]) -> dict[tuple[str, str], Json]:
    """What kustomize makes, and the word to Helm that definitions outlive the release."""
    keep = {"helm.sh/resource-policy": "keep"}
    return {
        key: it
        if key[0] != "CustomResourceDefinition"
        else it
        | {
            "metadata": it["metadata"]
            | {"annotations": it["metadata"].get("annotations", {}) | keep}
        }
        for key, it in made.items()
    }


@cache
def schema() -> Json:
    found: Json = json.loads((CHART / "values.schema.json").read_text())
    return found


def test_the_templates_are_generated_from_the_manifests() -> None:
    written = {path: path.read_text() for path in TEMPLATES.glob("*.yaml")}

    assert written == generated(), "python -m tools.generate"


def _names(chosen: Parts) -> str:
    return "+".join(sorted(chosen)) or "base"


@pytest.mark.parametrize("chosen", combinations(), ids=_names)
def test_the_chart_renders_what_kustomize_renders(chosen: Parts) -> None:
    assert without_checksums(charted(values(chosen))) == kept(kustomized(chosen))


@pytest.mark.parametrize(
    ("value", "configmap"),
    [("settings", "leasehold-settings"), ("agentSettings", "node-agent-settings")],
)
def test_pods_are_replaced_when_their_settings_change(value: str, configmap: str) -> None:
    changed = {value: defaults()[value] | {"LEASEHOLD_LOG_LEVEL": "debug"}}

    before, after = charted(values()), charted(values(**changed))

    replaced = {
        key
        for key, it in before.items()
        if "template" in it.get("spec", {})
        if checksum(it) != checksum(after[key])
    }
    assert replaced
    assert replaced == {key for key, it in before.items() if settings_of(it) == [configmap]}


def settings_of(workload: Json) -> list[str]:
    """The ConfigMaps of settings that the pods of a workload have as variables."""
    spec = workload.get("spec", {}).get("template", {}).get("spec", {})
    sources = [it for one in spec.get("containers", ()) for it in one.get("envFrom", ())]
    return [it["configMapRef"]["name"] for it in sources]


def test_the_dev_overlay_equals_the_chart_with_other_values() -> None:
    text = subprocess.run(
        ["kubectl", "kustomize", str(K8S / "overlays" / "dev")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    overlay = {(it["kind"], it["metadata"]["name"]): it for it in objects(without_hashes(text))}
    persistent = {
        key: it
        for key, it in kustomized(frozenset()).items()
        if key[0] in {"CustomResourceDefinition", "Namespace"}
    }
    dev = yaml.safe_load((CHART / "values-dev.yaml").read_text())
    wanted = {
        name: it | dev.get(name, {}) if isinstance(it, dict) else it
        for name, it in defaults().items()
    }

    assert list(schema_violations(schema(), wanted)) == []
    assert without_checksums(charted(wanted)) == kept(overlay | persistent)


def test_other_namespaces_replace_the_defaults_everywhere() -> None:
    made = json.dumps(list(charted(values(agentsNamespace="gpu-nodes"), "gpus").values()))

    assert SYSTEM_NAMESPACE not in made
    assert AGENTS_NAMESPACE not in made


def test_the_chart_creates_the_namespace_of_the_agents_and_leaves_the_release_to_helm() -> None:
    (created,) = (it for (kind, _), it in charted(values()).items() if kind == "Namespace")

    assert [created] == agents_namespace()
    assert created["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}


def test_the_image_its_pull_secrets_and_other_values_are_set_in_their_fields() -> None:
    found = charted(
        values(
            frozenset({HIGHLY_AVAILABLE}),
            image={"repository": "registry.example.org/leasehold", "tag": "1"},
            imagePullSecrets=[{"name": "registry"}],
            replicas={"binder": 5},
            placers={"min": 4, "max": 9},
            redis={"image": "valkey:8", "storage": "3Gi", "storageClass": "fast"},
        )
    )

    pods = {
        name: it["spec"]["template"]["spec"]
        for (_, name), it in found.items()
        if "template" in it.get("spec", {})
    }
    ours = {name for name in pods if name not in {"nats", "redis"}}
    assert {pods[name]["containers"][0]["image"] for name in ours} == {
        "registry.example.org/leasehold:1"
    }
    assert pods["redis"]["containers"][0]["image"] == "valkey:8"
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pods.values())
    assert found["Deployment", "binder"]["spec"]["replicas"] == 5
    claim = found["StatefulSet", "redis"]["spec"]["volumeClaimTemplates"][0]["spec"]
    assert claim["storageClassName"] == "fast"
    assert claim["resources"]["requests"]["storage"] == "3Gi"
    scaler = found["HorizontalPodAutoscaler", "placer"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (4, 9)


def test_the_schema_lists_exactly_the_values() -> None:
    def closed(part: Json, described: Json) -> None:
        assert part["additionalProperties"] is False
        if described:
            assert set(part["properties"]) == set(described)
        for name, it in described.items():
            if isinstance(it, dict) and name not in SETTINGS.values():
                closed(part["properties"][name], it)

    closed(schema(), defaults())
    assert list(schema_violations(schema(), defaults())) == []
    deployments = {name for kind, name in charted(values()) if kind == "Deployment"}
    # For people, one of the operator's pods is enough.
    assert set(schema()["properties"]["replicas"]["properties"]) == deployments - {"operator"}


@pytest.mark.parametrize(
    "wrong",
    [{"replicas": {"placer": 0}}, {"image": {"repository": "", "tag": "x"}}, {"mig": "yes"}],
    ids=str,
)
def test_the_schema_refuses_invalid_values(wrong: Json) -> None:
    assert list(schema_violations(schema(), values(**wrong)))


def test_the_documentation_names_every_value() -> None:
    page = (CHART / "README.md").read_text()

    for name, it in defaults().items():
        within = (
            it if isinstance(it, dict) and name not in {*SETTINGS.values(), "replicas"} else [None]
        )
        for inner in within:
            path = f"{name}.{inner}" if inner else name
            assert f"`{path}" in page, path


def test_the_version_of_the_chart_is_that_of_the_program() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert (chart["version"], chart["appVersion"]) == (project["version"],) * 2


def test_parts_that_exclude_each_other_fail_with_a_reason() -> None:
    first, *_ = (TEMPLATES / "NOTES.txt").read_text().partition("{{- end -}}")

    for part in EXCLUSIVE:
        assert f".Values.{part}" in first
        assert part in first.partition("{{- fail ")[2]


@with_helm
@pytest.mark.parametrize("chosen", [frozenset(), *all_together()], ids=_names)
def test_helm_template_renders_the_same(chosen: Parts, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(dict.fromkeys(chosen, True)))
    requested = [
        "template",
        "leasehold",
        str(CHART),
        "--namespace",
        SYSTEM_NAMESPACE,
        "--kube-version",
        "1.30",
    ]
    text = subprocess.run(
        ["helm", *requested, "--values", str(tmp_path / "values.yaml")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    found = {(it["kind"], it["metadata"]["name"]): it for it in objects(text)}
    assert found == kept(kustomized(chosen))


@with_helm
def test_helm_lint_passes_and_an_unknown_value_is_refused() -> None:
    lint = ["helm", "lint", "--strict", str(CHART)]
    completed = subprocess.run(lint, capture_output=True, text=True, check=False)
    refused = subprocess.run(
        [*lint, "--set", "replica=3"], capture_output=True, text=True, check=False
    )

    assert completed.returncode == 0, completed.stdout
    assert "replica is not allowed" in refused.stdout + refused.stderr
