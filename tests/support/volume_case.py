"""A pod with claims, and where it fits: what the table of cases is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.model.denial import Denial
from shared.model.devices.node import NodeFacts
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import NodeRequirements
from shared.placing.node_filters import check_volumes
from shared.pods.pod_volumes import ClaimingPod, ClaimUse, VolumeNeeds, volume_needs
from shared.pods.storage import Storage
from tests.support.build import facts
from tests.support.storage import (
    HOSTNAME,
    NAMESPACE,
    ZONE,
    Manifest,
    claim,
    driver,
    in_,
    storage_class,
    volume,
)

REGION = "topology.kubernetes.io/region"
BETA_ZONE = "failure-domain.beta.kubernetes.io/zone"
BETA_REGION = "failure-domain.beta.kubernetes.io/region"
LOCAL = "kubernetes.io/no-provisioner"
AFFINITY = "node(s) didn't match PersistentVolume's node affinity"
NO_ZONE = "node(s) had no available volume zone"
NO_VOLUME = "node(s) didn't find available persistent volumes to bind"
NO_STORAGE = "node(s) did not have enough free storage"
IN_USE = "node(s) were not where the pod's ReadWriteOnce volume is in use"
EVERYWHERE = "a1 a2 b1 old bare"


def node(name: str, **labels: str) -> NodeFacts:
    return facts(name, labels={HOSTNAME: name, **labels})


NODES = {
    "a1": node("a1", **{ZONE: "a", REGION: "r"}),
    "a2": node("a2", **{ZONE: "a", REGION: "r"}),
    "b1": node("b1", **{ZONE: "b", REGION: "r"}),
    "old": node("old", **{BETA_ZONE: "a", BETA_REGION: "r"}),
    "bare": node("bare"),
}
"""Two zones; a node with labels of before Kubernetes 1.17; and one without any."""


@dataclass(frozen=True, kw_only=True)
class Case:
    objects: list[Manifest]
    fits: str = ""
    """The nodes that the pod fits."""
    reason: str = ""
    """Of the others."""
    waits: str = ""
    """Why no node can be chosen yet: how the text begins."""
    uses: tuple[str, ...] = ("data",)
    """Claims; an ephemeral volume is written `~NAME`."""
    users: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By claim: pods, and the nodes that they run on."""


def needs_of(storage: Storage, case: Case) -> VolumeNeeds | Denial:
    uses = tuple(
        ClaimUse(f"train-{name[1:]}", ephemeral=True) if name[0] == "~" else ClaimUse(name)
        for name in case.uses
    )
    pod = ClaimingPod(pod=PodUid("uid-train"), namespace=NAMESPACE, name="train", uses=uses)
    users = {
        (NAMESPACE, name): {PodUid(user): NodeName(where) for user, where in pods.items()}
        for name, pods in case.users.items()
    }
    return volume_needs(pod, storage, users)


def fitting(needs: VolumeNeeds) -> tuple[str, set[str]]:
    """Return the nodes that fit, and the reasons of the others."""
    requirements = NodeRequirements(volumes=needs.requirements)
    failures = {name: check_volumes(requirements, where) for name, where in NODES.items()}
    reasons = {failure.message for failure in failures.values() if failure}
    return " ".join(name for name, failure in failures.items() if not failure), reasons


def local(name: str, host: str, **fields: Any) -> Manifest:
    return volume(name, in_(HOSTNAME, host), storage_class="local", driver="", **fields)


def for_local(name: str = "data", **fields: Any) -> Manifest:
    return claim(name, storage_class="local", **fields)


def reserved_for(name: str, uid: str = "", namespace: str = NAMESPACE) -> Manifest:
    return {"namespace": namespace, "name": name, **({"uid": uid} if uid else {})}


CLASS = storage_class()
LOCAL_CLASS = storage_class("local", LOCAL)
IMMEDIATE = storage_class("now", "nfs.example.com", waits=False)
WITH_CAPACITY = driver(storageCapacity=True)
OWNED = {
    "ownerReferences": [{"kind": "Pod", "name": "train", "uid": "uid-train", "controller": True}]
}
NOT_OWNED = {"ownerReferences": [{"kind": "Pod", "name": "x", "uid": "uid-x", "controller": True}]}
ONLY_USER = {"ownerReferences": [{"kind": "Pod", "name": "train", "uid": "uid-train"}]}
SELECTED = {"annotations": {"volume.kubernetes.io/selected-node": "b1"}}
DELETED = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
