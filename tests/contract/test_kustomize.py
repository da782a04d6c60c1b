"""The manifests for a cluster: what kubectl builds of them, and that rights are only those used."""

from typing import Any

import pytest

from shared.model.names import AGENTS_NAMESPACE, SYSTEM_NAMESPACE
from tests.support.packaging import K8S, WORKLOADS, built, needs_kubectl

pytestmark = needs_kubectl


def kinds(directory: str, *wanted: str) -> list[dict[str, Any]]:
    return [found for found in built(K8S / directory) if found["kind"] in wanted]


def pods(directory: str) -> list[dict[str, Any]]:
    return [w["spec"]["template"]["spec"] for w in kinds(directory, *WORKLOADS)]


SECRETS_OF = {
    "timekeeper": ["gpu-timekeeper-certificate"],
    "webhook": ["webhook-certificate"],
    "auth": [
        *("auth", "auth-nats", "auth-redis"),
        *("redis-placer", "redis-binder", "redis-timekeeper", "redis-api", "redis-operator"),
        *("redis-extender", "auth-extender", "auth-kube-scheduler", "auth-api"),
    ],
}


def test_no_role_has_wildcards_or_reads_secrets_of_others() -> None:
    for role in kinds("base", "ClusterRole", "Role"):
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            if "secrets" in rule["resources"]:
                assert role["kind"] == "Role"
                assert rule["resourceNames"] == SECRETS_OF[role["metadata"]["name"]]
                assert rule["verbs"] == ["get", "patch"]


FOR_USERS = {"viewer"}
"""Accounts of no pod: users may create tokens of them."""


def test_exactly_the_pods_with_a_token_have_a_role() -> None:
    bound = {s["name"] for b in kinds("base", "ClusterRoleBinding") for s in b["subjects"]}
    tokens = {
        pod.get("serviceAccountName", "")
        for pod in pods("base")
        if pod.get("automountServiceAccountToken", True)
    }

    assert tokens == bound - FOR_USERS


def test_only_the_node_agent_is_root_and_mounts_host_paths() -> None:
    for pod in pods("base"):
        agent = pod.get("serviceAccountName") == "node-agent"
        host = any("hostPath" in volume for volume in pod.get("volumes", ()))
        assert (host, pod.get("hostPID", False)) == (agent, agent)
        for container in pod["containers"]:
            inside = container["securityContext"]
            assert inside["readOnlyRootFilesystem"] is True
            assert inside["allowPrivilegeEscalation"] is False
            own = {"add": ["DAC_OVERRIDE"]} if agent else {}
            assert inside["capabilities"] == {"drop": ["ALL"], **own}
            assert inside.get("runAsUser", 65532) == (0 if agent else 65532)


RESTRICTED_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}


@pytest.mark.parametrize("directory", ["base", "overlays/dev", "overlays/ha"])
def test_all_pods_but_the_agents_comply_with_the_restricted_profile(directory: str) -> None:
    """By the controls of https://kubernetes.io/docs/concepts/security/pod-security-standards."""
    found = {it["metadata"]["name"]: it for it in kinds(directory, *WORKLOADS)}
    labels = {it["metadata"]["name"]: it["metadata"]["labels"] for it in built(K8S / "persistent")}
    assert found.pop("node-agent")["metadata"]["namespace"] == AGENTS_NAMESPACE
    assert labels[AGENTS_NAMESPACE]["pod-security.kubernetes.io/enforce"] == "privileged"
    assert labels[SYSTEM_NAMESPACE]["pod-security.kubernetes.io/enforce"] == "restricted"

    for workload in found.values():
        pod = workload["spec"]["template"]["spec"]
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        kinds_of_volumes = {key for it in pod.get("volumes", ()) for key in it.keys() - {"name"}}
        assert kinds_of_volumes <= RESTRICTED_VOLUMES
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            own = container["securityContext"]
            assert own.keys() == {
                "allowPrivilegeEscalation",
                "readOnlyRootFilesystem",
                "capabilities",
            }
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not any("hostPort" in port for port in container.get("ports", ()))


def test_the_binder_alone_may_bind() -> None:
    binding = [
        role["metadata"]["name"]
        for role in kinds("base", "ClusterRole")
        if any("pods/binding" in rule["resources"] for rule in role["rules"])
    ]

    assert binding == ["leasehold-binder"]
