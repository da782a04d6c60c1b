"""What kubectl makes of the manifests, and helm of the chart, for any choice of parts."""

import os
import pickle
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.model.names import SYSTEM_NAMESPACE
from tests.support.kubernetes.schemas import faults
from tests.support.kubernetes.short_lived import NO_GARBAGE

K8S = Path(__file__).parents[2] / "k8s"
CHART = K8S / "chart"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
WORKLOADS = ("Deployment", "DaemonSet", "StatefulSet")
HELM = shutil.which("helm")
needs_kubectl = [
    pytest.mark.kubectl,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
]
HIGHLY_AVAILABLE = "highAvailability"
KUBE_SCHEDULER = "kubeScheduler"
KOORDINATOR = "koordinatorDevice"
EXCLUSIVE = frozenset({"combinedScheduler", "keda"})
"""Components of which at most one may be chosen: kustomize fails with both, and so does Helm."""
_HASHED = re.compile(r"(leasehold-settings|node-agent-settings|kube-scheduler)-[a-z0-9]{10}")
"""The names of ConfigMaps that end with a hash of their content."""

_SEPARATOR = re.compile(r"^---$", re.MULTILINE)

Json = dict[str, Any]
Key = tuple[str, str, str]


def objects(text: str) -> list[Json]:
    """Return all objects in the text; a document that other texts have, too, is parsed once."""
    parsed = (pickle.loads(_parsed(document)) for document in _SEPARATOR.split(text))  # noqa: S301 - its own
    return [it for it in parsed if it]


@cache
def _parsed(document: str) -> bytes:
    """Return what the fast C loader makes of it, of which each caller gets a copy of its own."""
    return pickle.dumps(yaml.load(document, yaml.CSafeLoader))


def by_key(manifests: Collection[Json]) -> dict[Key, Json]:
    """Return objects by kind, namespace and name."""
    for it in manifests:
        if it["kind"].startswith("ValidatingAdmissionPolicy"):
            it["metadata"].pop("namespace", None)  # kubectl does not know yet that it has none
    made = {
        (it["kind"], it["metadata"].get("namespace", ""), it["metadata"]["name"]): it
        for it in manifests
    }
    assert len(made) == len(manifests)
    return made


def without_hashes(text: str) -> str:
    """Return kustomize's output with the plain names of ConfigMaps."""
    names = [it["metadata"]["name"] for it in objects(text) if it["kind"] == "ConfigMap"]
    for name in filter(_HASHED.fullmatch, names):
        text = re.sub(rf"\b{name}\b", name.rpartition("-")[0], text)
    return text


def components() -> dict[str, str]:
    """Return each component's directory by the value of the chart that enables it."""
    return {re.sub("-(.)", lambda match: match[1].upper(), name): name for name in COMPONENTS}


def kustomize(directory: Path) -> str:
    """Return the text that kubectl makes of a directory."""
    return subprocess.run(
        ["kubectl", "kustomize", str(directory)],
        env=os.environ | NO_GARBAGE,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def kustomize_overlay(root: str, names: Collection[str] = (), **more: Any) -> str:
    """Return what kubectl makes of an overlay with components, as an operator would write it."""
    with tempfile.TemporaryDirectory() as made:
        parts = {
            "resources": [os.path.relpath(K8S / root, made)],
            "components": [os.path.relpath(K8S / "components" / name, made) for name in names],
            **more,
        }
        (Path(made) / "kustomization.yaml").write_text(yaml.safe_dump(parts))
        return kustomize(Path(made))


@cache
def built(root: str, *names: str) -> list[Json]:
    """Return a directory's objects with components, with the plain names of ConfigMaps."""
    text = kustomize_overlay(root, names) if names else kustomize(K8S / root)
    return objects(without_hashes(text))


def part(name: str) -> list[Json]:
    """Return the objects of an overlay, or of the base with a component."""
    return built(f"overlays/{name}") if name in OVERLAYS else built("base", name)


def one(manifests: Collection[Json], kind: str, name: str) -> Json:
    """Return the only object of this kind and name."""
    (it,) = (o for o in manifests if (o["kind"], o["metadata"]["name"]) == (kind, name))
    return it


def without_kube_scheduler(overlay: str, made: Path) -> str:
    """Copy an overlay that names the base, as an operator would change it; return its path."""
    copy = made / overlay
    shutil.copytree(K8S / "overlays" / overlay, copy)
    file = copy / "kustomization.yaml"
    text = file.read_text()
    assert text.count("../../default") == 1
    file.write_text(text.replace("../../default", os.path.relpath(K8S / "base", copy)))
    return str(copy)


def kustomized(parts: Collection[str]) -> dict[Key, Json]:
    """Return the objects that kubectl makes with these parts, named as the values of the chart."""
    is_on = {value: component for value, component in components().items() if value in parts}
    if HIGHLY_AVAILABLE not in parts:
        text = kustomize_overlay("base", is_on.values())
    elif KUBE_SCHEDULER in parts:  # the overlay has it
        del is_on[KUBE_SCHEDULER]
        text = kustomize_overlay("overlays/ha", is_on.values())
    else:
        with tempfile.TemporaryDirectory() as made:
            text = kustomize_overlay(without_kube_scheduler("ha", Path(made)), is_on.values())
    rendered = objects(without_hashes(text))
    added = [K8S / "persistent" / "namespaces.yaml"]
    if KOORDINATOR in parts:
        added.append(K8S / "base" / "crds" / "koordinator-device.yaml")
    rendered += [*built("base/crds"), *(it for path in added for it in objects(path.read_text()))]
    return by_key(rendered)


def charted(
    values: Mapping[str, Any],
    namespace: str = SYSTEM_NAMESPACE,
    *,
    tests: bool = False,
    version: str = "1.36.2",
) -> dict[Key, Json]:
    """Return what helm makes of the chart with these values, which Kubernetes' schemas allow."""
    assert HELM is not None
    given = yaml.safe_dump(dict(values))
    options = ["--namespace", namespace, "--kube-version", version, "--values", "-"]
    options += [] if tests else ["--skip-tests"]
    command = [HELM, "template", "leasehold", str(CHART), *options]
    done = subprocess.run(
        command,
        input=given,
        env=os.environ | NO_GARBAGE,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    made = objects(done.stdout)
    assert faults(made) == []
    return by_key(made)
