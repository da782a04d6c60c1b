"""The Helm chart makes the same objects as kustomize, for every choice of parts, by helm itself."""

import json
import shutil
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.node_agent.settings import AgentSettings
from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from tests.support.packaging import (
    CHART,
    EXCLUSIVE,
    HELM,
    HIGHLY_AVAILABLE,
    K8S,
    KOORDINATOR,
    KUBE_SCHEDULER,
    Json,
    Key,
    built,
    by_key,
    charted,
    components,
    kustomized,
)

PARTS = (HIGHLY_AVAILABLE, *components(), KOORDINATOR)
HELMS_LABELS = (
    *(f"app.kubernetes.io/{name}" for name in ("component", "instance", "managed-by", "version")),
    "helm.sh/chart",
)
SETTINGS = {"settings": "leasehold-settings", "agentSettings": "node-agent-settings"}
DEFAULTS: Json = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Json = json.loads((CHART / "values.schema.json").read_text())

pytestmark = [pytest.mark.kubectl]
with_helm = pytest.mark.skipif(
    HELM is None or shutil.which("kubectl") is None, reason="helm or kubectl is not installed"
)


def checksum(workload: Json) -> str:
    """Take the checksum of its settings, by which Helm replaces pods, out of a workload."""
    metadata = workload["spec"]["template"]["metadata"]
    found = metadata.get("annotations", {}).pop("checksum/config", "")
    if not metadata.get("annotations", {"": ""}):
        del metadata["annotations"]
    return str(found)


def without_helms_labels(it: Json) -> None:
    """Take out the labels that Helm's users expect, which kustomize does not add."""
    labels = it["metadata"].get("labels", {})
    if "template" in it.get("spec", {}) or "app.kubernetes.io/version" in labels:
        labels.pop("app.kubernetes.io/name", None)
    for name in HELMS_LABELS:
        labels.pop(name, None)
    if not labels:
        it["metadata"].pop("labels", None)


def comparable(made: dict[Key, Json]) -> dict[Key, Any]:
    """The objects without what only one of the two adds, and with named items in one order."""
    made.pop(("Namespace", "", SYSTEM_NAMESPACE), None)
    for (kind, *_), it in made.items():
        without_helms_labels(it)
        if "template" in it.get("spec", {}):
            checksum(it)
            without_helms_labels(it["spec"]["template"])
        if kind == "CustomResourceDefinition":
            it["metadata"].setdefault("annotations", {})["helm.sh/resource-policy"] = "keep"
    return {key: in_order(it) for key, it in made.items()}


def in_order(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: in_order(it) for key, it in found.items()}
    if isinstance(found, list):
        items = [in_order(it) for it in found]
        named = all(isinstance(it, dict) and "name" in it for it in items)
        return sorted(items, key=lambda it: (it["name"], str(it))) if named else items
    return found


def templates(found: dict[Key, Json]) -> dict[str, Json]:
    """The pod templates of workloads by their names."""
    return {
        name: it["spec"]["template"]
        for (*_, name), it in found.items()
        if "template" in it.get("spec", {})
    }


def on(parts: Collection[str]) -> Json:
    """Return the values for exactly these parts: kube-scheduler is there by default."""
    return {KUBE_SCHEDULER: False, **dict.fromkeys(parts, True)}


@with_helm
@pytest.mark.parametrize(
    "chosen",
    [
        frozenset(),
        *({part} for part in PARTS),
        {HIGHLY_AVAILABLE, KUBE_SCHEDULER},
        *(set(PARTS) - {it} for it in sorted(EXCLUSIVE)),
    ],
    ids=lambda chosen: "+".join(sorted(chosen)) or "base",
)
def test_helm_makes_what_kustomize_makes(chosen: Collection[str]) -> None:
    assert comparable(charted(on(chosen))) == comparable(kustomized(chosen))


@with_helm
def test_the_dev_overlay_equals_the_chart_with_other_values() -> None:
    dev = yaml.safe_load((CHART / "values-dev.yaml").read_text())
    persistent = built("persistent")

    found = comparable(charted(dev))
    overlay = comparable(by_key(built("overlays/dev")))
    assert {key: it for key, it in found.items() if key in overlay} == overlay
    assert found.keys() - overlay.keys() == comparable(by_key(persistent)).keys()


@with_helm
@pytest.mark.parametrize("value", SETTINGS)
def test_pods_are_replaced_when_their_settings_change(value: str) -> None:
    before, after = charted({}), charted({value: {"LEASEHOLD_LOG_LEVEL": "debug"}})

    of = {
        key: {
            it["configMapRef"]["name"]
            for container in found["spec"]["template"]["spec"]["containers"]
            for it in container.get("envFrom", ())
        }
        for key, found in before.items()
        if "template" in found.get("spec", {})
    }
    replaced = {key for key in of if checksum(before[key]) != checksum(after[key])}
    assert replaced
    assert replaced == {key for key, names in of.items() if names == {SETTINGS[value]}}


@with_helm
def test_other_namespaces_replace_the_defaults_everywhere() -> None:
    found = charted({"agentsNamespace": "gpu-nodes", **on(set(PARTS) - {"keda"})}, "gpus")

    assert SYSTEM_NAMESPACE not in json.dumps(list(found.values()))
    assert AGENTS_NAMESPACE not in json.dumps(list(found.values()))
    assert [key for key in found if key[0] == "Namespace"] == [("Namespace", "", "gpu-nodes")]


@with_helm
def test_the_image_its_pull_secrets_and_other_values_are_set_in_their_fields() -> None:
    found = charted(
        {
            **on([HIGHLY_AVAILABLE, "mig", "hamiCore"]),
            "image": {"repository": "registry.example.org/leasehold-system/it", "tag": "1"},
            "imagePullSecrets": [{"name": "registry"}],
            "hamiCoreImage": "hami:1",
            "components": {"binder": {"replicas": 5}},
            "placers": {"min": 4, "max": 9},
            "redis": {"image": "valkey:8", "storage": "3Gi", "storageClass": "fast"},
        },
        "gpus",
    )

    pods = {name: it["spec"] for name, it in templates(found).items()}
    images = {
        container["image"]
        for name in pods.keys() - {"nats", "redis", "kube-scheduler"}
        for container in pods[name]["containers"]
    }
    assert images == {"registry.example.org/leasehold-system/it:1"}
    assert pods["node-agent"]["initContainers"][0]["image"] == "hami:1"
    assert pods["redis"]["containers"][0]["image"] == "valkey:8"
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pods.values())
    assert found["Deployment", "gpus", "binder"]["spec"]["replicas"] == 5
    claim = found["StatefulSet", "gpus", "redis"]["spec"]["volumeClaimTemplates"][0]["spec"]
    assert claim["storageClassName"] == "fast"
    assert claim["resources"]["requests"]["storage"] == "3Gi"
    scaler = found["HorizontalPodAutoscaler", "gpus", "placer"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (4, 9)


@with_helm
def test_beside_the_gpu_operator_one_device_plugin_and_one_changer_of_mig_layouts_run() -> None:
    ours = yaml.safe_load((CHART / "values-gpu-operator.yaml").read_text())
    theirs = yaml.safe_load((CHART / "gpu-operator.yaml").read_text())

    pod = charted(ours)["DaemonSet", "leasehold-agents", "node-agent"]["spec"]["template"]["spec"]

    enabled = {part for part, values in theirs.items() if values["enabled"]}
    assert enabled == theirs.keys() - {"devicePlugin"}
    assert ours["mig"] is not theirs["migManager"]["enabled"]
    assert [each["name"] for each in pod["containers"]] == ["node-agent"]
    assert pod["runtimeClassName"] == "nvidia", "the operator's, for the agent to see the driver"
    host = Path(
        next(it["value"] for it in pod["containers"][0]["env"] if "HOST_ROOT" in it["name"])
    )
    places = AgentSettings(host_root=host).driver_places
    mounts = {Path(it["mountPath"]) for it in pod["containers"][0]["volumeMounts"]}
    assert places is not None
    for path in ("/run/nvidia/driver", "/usr/local/nvidia/toolkit"):  # its driver and toolkit
        assert not mounts.isdisjoint(places.seen(path).parents)


@with_helm
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"components": {"placer": {"replicas": 0}}}, "placer"),
        ({"components": {"placers": {}}}, "placers"),
        ({"image": {"repository": "x", "tag": "1", "pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"resources": {"limit": {}}}, "limit"),
        ({"highAvailability": True, "placers": {"min": 9, "max": 3}}, "must not be larger"),
        ({"agentsNamespace": SYSTEM_NAMESPACE}, "need one of their own"),
        ({"agentsNamespace": "Agents"}, "agentsNamespace"),
        ({"image": {"repository": ""}}, "repository"),
        ({"mig": "yes"}, "mig"),
        ({"replica": 3}, "replica"),
        (on(sorted(EXCLUSIVE)), "combinedScheduler and keda exclude each other"),
    ],
    ids=str,
)
def test_helm_refuses_invalid_values(wrong: Json, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        charted(wrong)


@with_helm
def test_values_for_all_pods_and_for_one_workload_are_set_in_its_pods() -> None:
    spread = {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    taint = {"key": "nvidia.com/gpu", "operator": "Exists"}
    found = charted(
        {
            "image": {"repository": "leasehold", "tag": "1", "pullPolicy": "Always"},
            "nodeSelector": {"pool": "system"},
            "tolerations": [taint],
            "affinity": {"nodeAffinity": {}},
            "topologySpreadConstraints": [spread],
            "priorityClassName": "important",
            "resources": {"requests": {"cpu": "2"}},
            "podAnnotations": {"note": "all"},
            "podLabels": {"team": "platform", "app.kubernetes.io/name": "theirs"},
            "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
            "components": {
                "binder": {"nodeSelector": {"pool": "fast"}, "podAnnotations": {"note": "one"}},
                "node-agent": {"resources": {"limits": {"memory": "1Gi"}}},
            },
        }
    )

    pods = templates(found)
    agent = pods.pop("node-agent")
    for name, pod in pods.items():
        spec = pod["spec"]
        first = pod["spec"]["containers"][0]
        assert spec["nodeSelector"]["pool"] == ("fast" if name == "binder" else "system")
        assert taint in spec["tolerations"]
        assert spec["affinity"] == {"nodeAffinity": {}}
        assert spec["topologySpreadConstraints"] == [spread]
        assert spec["priorityClassName"] == "important"
        assert first["resources"]["requests"]["cpu"] == "2"
        assert "memory" in first["resources"]["limits"]
        assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == name
    assert "nodeSelector" not in agent["spec"]
    assert "leasehold.dev/gpu" in json.dumps(agent["spec"]["affinity"])
    assert agent["spec"]["priorityClassName"] == "system-node-critical"
    assert agent["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1Gi"
    for name, pod in (*pods.items(), ("node-agent", agent)):
        assert pod["metadata"]["annotations"]["note"] == ("one" if name == "binder" else "all")
        assert pod["metadata"]["labels"]["team"] == "platform"
        for container in pod["spec"]["containers"]:
            if container["image"] == "leasehold:1":
                assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
                assert container["imagePullPolicy"] == "Always"


@with_helm
def test_objects_have_the_recommended_labels_and_monitors_those_that_their_operator_selects() -> (
    None
):
    found = charted(
        {
            **on([HIGHLY_AVAILABLE, "prometheusOperator"]),
            "nameOverride": "gpus",
            "prometheusOperatorLabels": {"release": "monitoring"},
        }
    )

    for (kind, _, name), it in found.items():
        labels = it["metadata"]["labels"]
        assert labels.keys() >= {*HELMS_LABELS, "app.kubernetes.io/name"} - {
            "app.kubernetes.io/component"
        }
        assert labels["app.kubernetes.io/name"] == "gpus"
        assert labels["helm.sh/chart"].startswith("leasehold-")
        if "template" in it.get("spec", {}):
            assert labels["app.kubernetes.io/component"] == name
        if kind in {"PodMonitor", "PrometheusRule"}:
            assert labels["release"] == "monitoring"


@with_helm
def test_helm_test_runs_doctor_as_the_operator_does() -> None:
    made = charted({"image": {"repository": "registry.example.org/it", "tag": "2"}}, tests=True)
    test = made["Pod", SYSTEM_NAMESPACE, "leasehold-doctor"]
    operator = made["Deployment", SYSTEM_NAMESPACE, "operator"]["spec"]["template"]

    container = test["spec"]["containers"][0]
    usual = operator["spec"]["containers"][0]
    assert container == {**usual, "command": ["leasehold", "doctor"]}
    assert test["metadata"]["labels"].items() >= operator["metadata"]["labels"].items()
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_the_schema_and_the_documentation_list_exactly_the_values() -> None:
    page = (CHART / "README.md").read_text()

    def check(schema: Json, described: Json, path: str = "") -> None:
        assert schema["additionalProperties"] is False
        assert set(schema["properties"]) == set(described)
        for name, it in described.items():
            if isinstance(it, dict) and it and name not in SETTINGS:
                check(schema["properties"][name], it, f"{path}{name}.")
            else:
                assert f"`{path}{name}" in page

    check(SCHEMA, DEFAULTS)


def test_the_version_of_the_chart_is_that_of_the_program() -> None:
    project = tomllib.loads((K8S.parent / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert (chart["version"], chart["appVersion"]) == (project["version"],) * 2


@with_helm
@pytest.mark.parametrize(
    ("values", "version", "image"),
    [
        ({}, "1.34.1", "registry.k8s.io/kube-scheduler:v1.34.1"),
        ({}, "v1.35.3-gke.1200", "registry.k8s.io/kube-scheduler:v1.35.3"),
        ({}, "v1.36.0+k3s1", "registry.k8s.io/kube-scheduler:v1.36.0"),
        ({"kubeSchedulerImage": "mirror/kube-scheduler:v1.34.1"}, "1.34.2",
         "mirror/kube-scheduler:v1.34.1"),
    ],
)  # fmt: skip
def test_kube_scheduler_has_the_version_of_the_cluster(
    values: Json, version: str, image: str
) -> None:
    found = charted(values, version=version)

    pod = found["Deployment", SYSTEM_NAMESPACE, "kube-scheduler"]["spec"]["template"]["spec"]
    assert [container["image"] for container in pod["containers"]] == [image]


@with_helm
def test_one_value_leaves_kube_scheduler_and_the_extender_out() -> None:
    found = charted({KUBE_SCHEDULER: False})

    names = {name for kind, _, name in found if kind in {"Deployment", "ConfigMap"}}
    assert not names & {"kube-scheduler", "extender"}
    webhook = json.dumps(found["Deployment", SYSTEM_NAMESPACE, "webhook"])
    assert "LEASEHOLD_KUBE_SCHEDULER" not in webhook
