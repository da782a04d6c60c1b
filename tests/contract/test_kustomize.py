"""The manifests for a cluster, as kubectl builds them: rights, privileges, roll-outs, deletion."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from services.node_agent.diagnosis.node_checks import gets_agent_pod
from shared.model.names import AGENTS_NAMESPACE, DISCOVERED_LABELS, SYSTEM_NAMESPACE
from simcluster.apimachinery.node_selection import node_selected
from tests.support.kubernetes.schemas import faults
from tests.support.packaging import (
    COMPONENTS,
    K8S,
    OVERLAYS,
    WORKLOADS,
    Json,
    built,
    kustomize_overlay,
    needs_kubectl,
    objects,
    one,
    part,
)
from tools.generate import security
from tools.generate.manifests import WEBHOOK

pytestmark = needs_kubectl

WRITTEN = [
    it
    for folder in (K8S, WEBHOOK)
    for path in sorted(folder.rglob("*.yaml"))
    if "chart" not in path.parts
    for it in objects(path.read_text())
    if "kind" in it
]
"""Every object of the sources."""


def kinds(directory: str, *wanted: str) -> list[Json]:
    return [found for found in built(directory) if found["kind"] in wanted]


def pods(directory: str) -> list[Json]:
    return [w["spec"]["template"]["spec"] for w in kinds(directory, *WORKLOADS)]


@pytest.mark.parametrize("name", [*OVERLAYS, *COMPONENTS])
def test_every_object_is_valid_in_the_oldest_and_the_newest_version_of_kubernetes(
    name: str,
) -> None:
    assert faults(part(name)) == []


# Rights and privileges

SECRETS_OF = {
    "api": ["api-certificate"],
    "timekeeper": ["gpu-timekeeper-certificate"],
    "webhook": ["webhook-certificate"],
    "auth": [
        *("auth", "auth-nats", "auth-redis"),
        *("redis-placer", "redis-planner", "redis-binder", "redis-timekeeper"),
        *("redis-api", "redis-operator"),
        *("redis-extender", "auth-extender", "auth-kube-scheduler", "auth-api"),
    ],
}


def test_no_role_has_wildcards_or_reads_secrets_of_others_and_only_the_binder_binds() -> None:
    binding = []
    for role in kinds("base", "ClusterRole", "Role"):
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            if "secrets" in rule["resources"]:
                assert role["kind"] == "Role"
                assert rule["resourceNames"] == SECRETS_OF[role["metadata"]["name"]]
                assert rule["verbs"] == ["get", "patch"]
            if {"pods/binding", "pods/eviction"} & {*rule["resources"]}:
                binding.append(role["metadata"]["name"])
            if role["metadata"]["name"] == "leasehold-planner":
                assert {*rule["verbs"]} <= {"get", "list", "watch"}

    assert binding == ["leasehold-binder"]


def test_exactly_the_pods_with_a_token_have_a_role() -> None:
    bound = {s["name"] for b in kinds("base", "ClusterRoleBinding") for s in b["subjects"]}
    tokens = {
        pod.get("serviceAccountName", "")
        for pod in pods("base")
        if pod.get("automountServiceAccountToken", True)
    }

    assert tokens == bound - {"system:authenticated"}


def test_what_an_admission_policy_cannot_evaluate_is_denied() -> None:
    kind = "ValidatingAdmissionPolicy"
    policies = {it["metadata"]["name"]: it["spec"] for it in WRITTEN if it["kind"] == kind}
    bindings = {
        it["spec"]["policyName"]: it["spec"]["validationActions"]
        for it in WRITTEN
        if it["kind"] == f"{kind}Binding"
    }

    warning = policies.pop("leasehold-late-annotations")
    assert (warning["failurePolicy"], bindings.pop("leasehold-late-annotations")) == (
        "Ignore",
        ["Warn"],
    )
    assert len(policies) > 5
    assert {spec.get("failurePolicy", "Fail") for spec in policies.values()} == {"Fail"}
    assert bindings == {name: ["Deny"] for name in policies}


def test_only_the_node_agent_is_root_and_mounts_host_paths() -> None:
    for pod in pods("base"):
        agent = pod.get("serviceAccountName") == "node-agent"
        host = any("hostPath" in volume for volume in pod.get("volumes", ()))
        assert (host, pod.get("hostPID", False)) == (agent, agent)
        for container in pod["containers"]:
            inside = container["securityContext"]
            assert inside["readOnlyRootFilesystem"] is True
            assert inside["allowPrivilegeEscalation"] is False
            own = {"add": ["DAC_OVERRIDE", "FOWNER"]} if agent else {}
            assert inside["capabilities"] == {"drop": ["ALL"], **own}
            assert inside.get("runAsUser", 65532) == (0 if agent else 65532)


def test_no_container_of_any_component_is_privileged_and_capabilities_are_few() -> None:
    able = {(name, security.capabilities(it)) for name, it, _ in security.containers()}

    assert {(name, found) for name, found in able if found not in {"", "none"}} == {
        ("node-agent", "DAC_OVERRIDE, FOWNER"),
        ("partitioner", "SYS_ADMIN"),
        ("partitioner", "DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SYS_ADMIN, SYS_PTRACE"),
    }


RESTRICTED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}


@pytest.mark.parametrize("directory", ["base", *(f"overlays/{name}" for name in OVERLAYS)])
def test_all_pods_but_the_agents_comply_with_the_restricted_profile(directory: str) -> None:
    """By the controls of https://kubernetes.io/docs/concepts/security/pod-security-standards."""
    found = {it["metadata"]["name"]: it for it in kinds(directory, *WORKLOADS)}
    labels = {it["metadata"]["name"]: it["metadata"]["labels"] for it in built("persistent")}
    assert found.pop("node-agent")["metadata"]["namespace"] == AGENTS_NAMESPACE
    assert labels[AGENTS_NAMESPACE]["pod-security.kubernetes.io/enforce"] == "privileged"
    assert labels[SYSTEM_NAMESPACE]["pod-security.kubernetes.io/enforce"] == "restricted"

    for workload in found.values():
        pod = workload["spec"]["template"]["spec"]
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert {
            key for it in pod.get("volumes", ()) for key in it.keys() - {"name"}
        } <= RESTRICTED_VOLUMES
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            own = container["securityContext"]
            known = {"allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"}
            assert own.keys() == known
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not any("hostPort" in port for port in container.get("ports", ()))


def test_control_plane_and_agents_have_a_priority_that_the_cluster_has() -> None:
    classes = {it["metadata"]["name"]: it["value"] for it in kinds("base", "PriorityClass")}
    given = {
        it["metadata"]["name"]: it["spec"]["template"]["spec"]["priorityClassName"]
        for it in kinds("base", *WORKLOADS)
    }

    assert given.pop("node-agent") == "system-node-critical"
    assert set(given.values()) == {"leasehold-control-plane"}
    assert classes["leasehold-control-plane"] == max(classes.values()) == 1_000_000_000


# Roll-outs

SETTINGS_READERS = {
    *("api", "auth", "binder", "operator", "placer", "planner", "timekeeper"),
    *("watcher", "webhook"),
}


def test_a_change_of_settings_replaces_the_pods_that_have_them() -> None:
    patch = {
        "target": {"kind": "ConfigMap", "name": "leasehold-settings"},
        "patch": "- {op: replace, path: /data/LEASEHOLD_LOG_LEVEL, value: debug}",
    }

    before, after = (objects(kustomize_overlay("base", patches=it)) for it in ([], [patch]))

    replaced = {
        (it["kind"], it["metadata"]["name"])
        for it in after
        if it["kind"] in WORKLOADS and it not in before
    }
    assert replaced == {("Deployment", name) for name in SETTINGS_READERS}


def named_by(roles: list[Json]) -> Iterator[str]:
    for role in roles:
        for rule in role.get("rules") or () if role["kind"] in {"Role", "ClusterRole"} else ():
            yield from rule.get("resourceNames", ())


@pytest.mark.parametrize("name", OVERLAYS)
def test_roles_name_their_objects_as_written(name: str) -> None:
    """Kustomize also replaces names of generated ConfigMaps in rules, whatever kind they name."""
    assert {*named_by(built(f"overlays/{name}"))} <= {*named_by(WRITTEN)}


# Deletion

WITH_USERS_OBJECTS = {"CustomResourceDefinition", "Namespace", "PersistentVolumeClaim"}
"""Kinds of objects whose deletion deletes objects or data of users."""


@pytest.mark.parametrize("name", [*OVERLAYS, *COMPONENTS])
def test_deleting_an_overlay_or_component_deletes_no_objects_of_users(name: str) -> None:
    assert WITH_USERS_OBJECTS.isdisjoint(it["kind"] for it in part(name))


def test_the_volume_of_redis_outlives_its_stateful_set_and_nats_has_none() -> None:
    volumes: dict[str, Any] = {
        it["metadata"]["name"]: "volumeClaimTemplates" in it["spec"]
        for it in kinds("base", "StatefulSet")
        if "persistentVolumeClaimRetentionPolicy" not in it["spec"]  # the default is Retain
    }

    assert volumes == {"nats": False, "redis": True}


def test_what_is_kept_has_a_directory_of_its_own_that_is_installed_first() -> None:
    kept = {(it["kind"], it["metadata"]["name"]) for it in built("persistent")}
    install = (K8S.parent / "docs" / "install.md").read_text()

    assert kept == {
        ("Namespace", "leasehold-system"),
        ("Namespace", "leasehold-agents"),
        ("CustomResourceDefinition", "gpubudgets.leasehold.dev"),
        ("CustomResourceDefinition", "gpuquotas.leasehold.dev"),
    }
    assert install.index("apply -k k8s/persistent") < install.index("apply -k k8s/overlays/dev")


LABELS = {
    "leasehold.dev/gpu": ("", "true", "false"),
    "leasehold.dev/agent": ("", "unit"),
    **dict.fromkeys(DISCOVERED_LABELS, ("", "true")),
}


@pytest.mark.parametrize(
    "labels",
    [
        {name: value for name, value in zip(LABELS, values, strict=True) if value}
        for values in product(*LABELS.values())
    ],
    ids=str,
)
def test_agents_run_on_the_nodes_that_doctor_expects_them_on(labels: dict[str, str]) -> None:
    spec = one(built("base"), "DaemonSet", "node-agent")["spec"]["template"]["spec"]

    assert node_selected(spec, "gpu-1", labels) == gets_agent_pod(labels)
