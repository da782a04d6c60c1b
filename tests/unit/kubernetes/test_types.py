"""Pods and Nodes as an API server writes them, read into the fields we declare."""

from datetime import UTC, datetime
from operator import attrgetter

import msgspec
import pytest

from shared.kubernetes.full_pods import EnvFromSource, EnvVar, decode_pod
from shared.kubernetes.types import (
    ApiNode,
    ApiPod,
    ApiTaint,
    ApiToleration,
    ContainerPort,
    NamedReference,
    NodeSelectorTerm,
    OwnerReference,
    PreferredTerm,
    SelectorRequirement,
)

POD = b"""{
  "kind": "Pod", "apiVersion": "v1",
  "metadata": {
    "name": "gpu-pod1", "namespace": "team", "uid": "u-1", "resourceVersion": "42",
    "generateName": "gpu-", "labels": {"app": "x"}, "annotations": {"a/b": "c"},
    "creationTimestamp": "2026-01-02T03:04:05Z", "deletionTimestamp": null,
    "ownerReferences": [
      {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "j-1", "controller": true}
    ],
    "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}]
  },
  "spec": {
    "nodeName": "node-1", "schedulerName": "volcano", "priority": -5, "priorityClassName": "low",
    "nodeSelector": {"disk": "ssd"}, "hostNetwork": true, "overhead": {"cpu": "250m"},
    "affinity": {
      "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
          {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}],
           "matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n"]}]}
        ]},
        "preferredDuringSchedulingIgnoredDuringExecution": [
          {"weight": 10, "preference": {"matchExpressions": [{"key": "k", "operator": "Exists"}]}}
        ]
      },
      "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "h"}]}
    },
    "tolerations": [{"key": "k", "operator": "Exists", "effect": "NoExecute",
                     "tolerationSeconds": 300}],
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}],
    "initContainers": [{"name": "side", "image": "s:1", "restartPolicy": "Always"}],
    "containers": [{
      "name": "main", "image": "m:1",
      "resources": {"limits": {"volcano.sh/vgpu-number": "1", "memory": 1024},
                    "requests": {"cpu": 0.5}},
      "env": [{"name": "A", "value": "1"},
              {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
      "envFrom": [{"configMapRef": {"name": "settings"}}],
      "ports": [{"containerPort": 80, "hostPort": 8080, "hostIP": "10.0.0.1", "protocol": "UDP"}],
      "volumeMounts": [{"name": "v", "mountPath": "/v"}]
    }],
    "volumes": [{"name": "v", "emptyDir": {}}]
  },
  "status": {"phase": "Failed", "reason": "Evicted", "podIP": "10.1.1.1",
             "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                             "message": "0/3 nodes"}]}
}"""


def test_the_fields_of_a_pod_are_read() -> None:
    pod = msgspec.json.decode(POD, type=ApiPod)
    terms = (
        NodeSelectorTerm(
            match_expressions=(SelectorRequirement("zone", "In", ("a", "b")),),
            match_fields=(SelectorRequirement("metadata.name", "NotIn", ("n",)),),
        ),
    )
    exists = NodeSelectorTerm((SelectorRequirement("k", "Exists"),))
    expected: dict[str, object] = {
        "metadata.namespace": "team",
        "metadata.name": "gpu-pod1",
        "metadata.uid": "u-1",
        "metadata.resource_version": "42",
        "metadata.creation_timestamp": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "metadata.deletion_timestamp": None,
        "metadata.owner_references": (
            OwnerReference(kind="Job", name="train", uid="j-1", controller=True),
        ),
        "spec.affinity.node_affinity.required.node_selector_terms": terms,
        "spec.affinity.node_affinity.preferred": (PreferredTerm(10, exists),),
        "spec.affinity.pod_affinity": None,
        "spec.tolerations": (ApiToleration("k", "Exists", "", "NoExecute", 300),),
        "spec.topology_spread_constraints": ({"maxSkew": 1, "topologyKey": "zone"},),
        "spec.node_selector": {"disk": "ssd"},
        "spec.host_network": True,
        "spec.priority": -5,
        "spec.priority_class_name": "low",
        "spec.scheduler_name": "volcano",
        "spec.node_name": "node-1",
        "spec.overhead": {"cpu": "250m"},
        "status.phase": "Failed",
        "status.reason": "Evicted",
    }

    assert {path: attrgetter(path)(pod) for path in expected} == expected
    assert pod.spec.affinity is not None
    assert pod.spec.affinity.pod_anti_affinity is not None
    (main,), (side,) = pod.spec.containers, pod.spec.init_containers
    assert main.resources.limits == {"volcano.sh/vgpu-number": "1", "memory": 1024}
    assert main.resources.requests == {"cpu": 0.5}
    assert main.ports == (ContainerPort(80, 8080, "UDP", "10.0.0.1"),)
    assert (side.name, side.restart_policy) == ("side", "Always")
    (condition,) = pod.status.conditions
    assert (condition.type, condition.reason) == ("PodScheduled", "Unschedulable")


def test_the_variables_of_containers_are_read() -> None:
    (main,) = decode_pod(POD).spec.containers

    source: dict[str, object] = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert main.env == (EnvVar("A", "1"), EnvVar("B", value_from=source))
    assert main.env_from == (EnvFromSource(config_map_ref=NamedReference("settings")),)
    assert (main.image, main.resources.requests) == ("m:1", {"cpu": 0.5})
    assert [mount.name for mount in main.volume_mounts] == ["v"]


def test_a_node_is_read() -> None:
    node = msgspec.json.decode(
        b"""{"metadata": {"name": "n"},
        "spec": {"unschedulable": true, "taints": [{"key": "k", "effect": "NoSchedule"}]},
        "status": {"allocatable": {"cpu": "8"}, "capacity": {"cpu": "9"},
          "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
          "addresses": [{"type": "InternalIP", "address": "10.0.0.2"}],
          "images": [{"names": []}]}}""",
        type=ApiNode,
    )

    assert (node.spec.unschedulable, node.spec.taints) == (True, (ApiTaint("k", "", "NoSchedule"),))
    assert (node.status.allocatable, node.status.capacity) == ({"cpu": "8"}, {"cpu": "9"})
    assert node.status.conditions[0].type == "Ready"
    assert node.status.addresses[0].address == "10.0.0.2"


@pytest.mark.parametrize("kind", [ApiPod, ApiNode])
def test_every_field_may_be_missing(kind: type[ApiPod | ApiNode]) -> None:
    assert msgspec.json.decode(b"{}", type=kind) == kind()
    assert msgspec.json.decode(b'{"metadata":{},"spec":{},"status":{}}', type=kind) == kind()
