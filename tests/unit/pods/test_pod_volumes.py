"""Where kube-scheduler places pods with claims, by its documented rules, in a table of cases."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from shared.model.denial import Denial
from shared.model.devices.node import NodeFacts
from shared.model.names import NodeName, PodUid
from shared.model.requests.request import NodeRequirements, PodClaim
from shared.placing.node_filters import check_volumes, reaches
from shared.pods.pod_volumes import ClaimingPod, ClaimUse, VolumeNeeds, merged, volume_needs
from shared.pods.storage import Storage
from tests.support.build import facts
from tests.support.storage import (
    HOSTNAME,
    NAMESPACE,
    ZONE,
    Manifest,
    capacity,
    claim,
    driver,
    in_,
    required,
    storage_class,
    storage_of,
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

CASES: dict[str, Case] = {
    # Claims that are not there, or cannot be used.
    "a claim that does not exist": Case(
        objects=[CLASS], waits='persistentvolumeclaim "data" not found: create it in namespace team'
    ),
    "a claim of another namespace": Case(
        objects=[CLASS, claim("data", metadata={"namespace": "other"})],
        waits='persistentvolumeclaim "data" not found',
    ),
    "the second of two claims does not exist": Case(
        objects=[CLASS, claim("data")],
        uses=("data", "home"),
        waits='persistentvolumeclaim "home" not found',
    ),
    "a claim that is being deleted": Case(
        objects=[CLASS, claim("data", "pv", metadata=DELETED), volume("pv")],
        waits='persistentvolumeclaim "data" is being deleted',
    ),
    "a claim that has lost its volume": Case(
        objects=[CLASS, claim("data", "pv", phase="Lost")],
        waits='persistentvolumeclaim "data" bound to non-existent persistentvolume "pv"',
    ),
    "a lost claim that is being deleted": Case(
        objects=[CLASS, claim("data", "pv", phase="Lost", metadata=DELETED)],
        waits='persistentvolumeclaim "data" bound to non-existent persistentvolume "pv"',
    ),
    "a bound claim whose volume is gone": Case(
        objects=[CLASS, claim("data", "pv")], waits='persistentvolume "pv" not found'
    ),
    "an ephemeral claim that is not created yet": Case(
        objects=[CLASS],
        uses=("~scratch",),
        waits="waiting for ephemeral volume controller to create the persistentvolumeclaim "
        '"train-scratch"',
    ),
    "an ephemeral claim of the pod": Case(
        objects=[CLASS, claim("train-scratch", metadata=OWNED)], uses=("~scratch",), fits=EVERYWHERE
    ),
    "an ephemeral claim of another pod": Case(
        objects=[CLASS, claim("train-scratch", metadata=NOT_OWNED)],
        uses=("~scratch",),
        waits='persistentvolumeclaim "train-scratch" was not created for pod team/train',
    ),
    "a claim without an owner in the place of an ephemeral one": Case(
        objects=[CLASS, claim("train-scratch")],
        uses=("~scratch",),
        waits='persistentvolumeclaim "train-scratch" was not created for pod team/train',
    ),
    "a claim that the pod owns, but does not control": Case(
        objects=[CLASS, claim("train-scratch", metadata=ONLY_USER)],
        uses=("~scratch",),
        waits='persistentvolumeclaim "train-scratch" was not created for pod team/train',
    ),
    "a pod that names the ephemeral claim of another pod": Case(
        objects=[CLASS, claim("x-scratch", metadata=NOT_OWNED)],
        uses=("x-scratch",),
        fits=EVERYWHERE,
    ),
    "an ephemeral claim that is bound in a zone": Case(
        objects=[CLASS, claim("train-scratch", "pv", metadata=OWNED), volume("pv", in_(ZONE, "b"))],
        uses=("~scratch",),
        fits="b1",
        reason=AFFINITY,
    ),
    # Claims that are bound at once.
    "a claim of an immediate class": Case(
        objects=[IMMEDIATE, claim("data", storage_class="now")],
        waits="pod has unbound immediate PersistentVolumeClaims: data waits for nfs.example.com",
    ),
    "a claim of a class that does not exist": Case(
        objects=[claim("data", storage_class="fast")],
        waits="pod has unbound immediate PersistentVolumeClaims: data has the StorageClass fast, "
        "which does not exist",
    ),
    "a claim without a class": Case(
        objects=[claim("data", storage_class=None)],
        waits="pod has unbound immediate PersistentVolumeClaims: data has no StorageClass",
    ),
    "a claim with an empty class": Case(
        objects=[CLASS, claim("data", storage_class="")],
        waits="pod has unbound immediate PersistentVolumeClaims: data has no StorageClass",
    ),
    "an immediate class without a provisioner": Case(
        objects=[storage_class("now", LOCAL, waits=False), claim("data", storage_class="now")],
        waits="pod has unbound immediate PersistentVolumeClaims: data waits for a PersistentVolume "
        "of StorageClass now",
    ),
    "one claim is bound, another one waits": Case(
        objects=[IMMEDIATE, CLASS, claim("home", storage_class="now"), claim("data", "pv"),
                 volume("pv")],
        uses=("data", "home"),
        waits="pod has unbound immediate PersistentVolumeClaims: home",
    ),
    "a claim that names a volume that does not exist": Case(
        objects=[CLASS, claim("data", "pv", phase="Pending")],
        waits="pod has unbound immediate PersistentVolumeClaims: data names PersistentVolume pv, "
        "which does not exist",
    ),
    "a claim that names a volume, and is not bound yet": Case(
        objects=[CLASS, claim("data", "pv", phase="Pending"), volume("pv")],
        waits="pod has unbound immediate PersistentVolumeClaims: data is being bound to",
    ),
    "a claim that names the volume of another claim": Case(
        objects=[CLASS, claim("data", "pv", phase="Pending"),
                 volume("pv", phase="Bound", claimRef=reserved_for("home"))],
        waits="pod has unbound immediate PersistentVolumeClaims: data names PersistentVolume pv, "
        "which is bound to another claim",
    ),
    "a deprecated annotation names the class": Case(
        objects=[CLASS, claim("data", storage_class=None, metadata={"annotations": {
            "volume.beta.kubernetes.io/storage-class": "standard"}})],
        fits=EVERYWHERE,
    ),
    # Bound volumes: node affinity.
    "a volume that every node reaches": Case(
        objects=[claim("data", "pv"), volume("pv")], fits=EVERYWHERE
    ),
    "a volume of one zone": Case(
        objects=[claim("data", "pv"), volume("pv", in_(ZONE, "a"))], fits="a1 a2", reason=AFFINITY
    ),
    "a volume of one node": Case(
        objects=[claim("data", "pv"), volume("pv", in_(HOSTNAME, "bare"))],
        fits="bare",
        reason=AFFINITY,
    ),
    "a volume of either zone": Case(
        objects=[claim("data", "pv"), volume("pv", in_(ZONE, "a"), in_(ZONE, "b"))],
        fits="a1 a2 b1",
        reason=AFFINITY,
    ),
    "a volume of two zones in one requirement": Case(
        objects=[claim("data", "pv"), volume("pv", in_(ZONE, "a", "b"))],
        fits="a1 a2 b1",
        reason=AFFINITY,
    ),
    "all requirements of a term": Case(
        objects=[claim("data", "pv"), volume("pv", [in_(ZONE, "a"), in_(HOSTNAME, "a2", "b1")])],
        fits="a2",
        reason=AFFINITY,
    ),
    "a requirement that excludes": Case(
        objects=[claim("data", "pv"),
                 volume("pv", {"key": ZONE, "operator": "NotIn", "values": ["a"]})],
        fits="b1 old bare",
        reason=AFFINITY,
    ),
    "a requirement that a label exists": Case(
        objects=[claim("data", "pv"), volume("pv", {"key": ZONE, "operator": "Exists"})],
        fits="a1 a2 b1",
        reason=AFFINITY,
    ),
    "a zone without nodes": Case(
        objects=[claim("data", "pv"), volume("pv", in_(ZONE, "c"))], reason=AFFINITY
    ),
    "node affinity without terms": Case(
        objects=[claim("data", "pv"),
                 volume("pv", nodeAffinity={"required": {"nodeSelectorTerms": []}})],
        reason=AFFINITY,
    ),
    "an empty term beside another": Case(
        objects=[claim("data", "pv"), volume("pv", [], in_(ZONE, "b"))],
        fits="b1",
        reason=AFFINITY,
    ),
    "two volumes of one zone": Case(
        objects=[claim("data", "pv"), volume("pv", in_(ZONE, "a")), claim("home", "pv2"),
                 volume("pv2", in_(HOSTNAME, "a1", "b1"))],
        uses=("data", "home"),
        fits="a1",
        reason=AFFINITY,
    ),
    "two volumes in different zones": Case(
        objects=[claim("data", "pv"), volume("pv", in_(ZONE, "a")), claim("home", "pv2"),
                 volume("pv2", in_(ZONE, "b"))],
        uses=("data", "home"),
        reason=AFFINITY,
    ),
    "a claim that two volumes of the pod name": Case(
        objects=[claim("data", "pv"), volume("pv", in_(ZONE, "a"))],
        uses=("data", "data"),
        fits="a1 a2",
        reason=AFFINITY,
    ),
    "a bound claim whose class does not exist any more": Case(
        objects=[claim("data", "pv", storage_class="gone"), volume("pv", in_(ZONE, "b"))],
        fits="b1",
        reason=AFFINITY,
    ),
    # Bound volumes: labels of zones.
    "a volume labelled with a zone": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {ZONE: "a"}})],
        fits="a1 a2 bare",
        reason=NO_ZONE,
    ),
    "a volume labelled with several zones": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {ZONE: "a__b"}})],
        fits="a1 a2 b1 bare",
        reason=NO_ZONE,
    ),
    "a volume labelled with a region": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {REGION: "r"}})],
        fits="a1 a2 b1 bare",
        reason=NO_ZONE,
    ),
    "a volume labelled with another region": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {REGION: "s"}})],
        fits="bare",
        reason=NO_ZONE,
    ),
    "a volume labelled with a zone and a region": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {ZONE: "b", REGION: "r"}})],
        fits="b1 bare",
        reason=NO_ZONE,
    ),
    "a deprecated label of a zone": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {BETA_ZONE: "a"}})],
        fits="a1 a2 old bare",
        reason=NO_ZONE,
    ),
    "a deprecated label of a region": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {BETA_REGION: "s"}})],
        fits="bare",
        reason=NO_ZONE,
    ),
    "a label of a zone that is empty": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {ZONE: ""}})],
        fits=EVERYWHERE,
    ),
    "several zones, one of them empty": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {ZONE: "a__"}})],
        fits=EVERYWHERE,
    ),
    "another label of a volume": Case(
        objects=[claim("data", "pv"), volume("pv", metadata={"labels": {HOSTNAME: "x"}})],
        fits=EVERYWHERE,
    ),
    # Claims that wait for their first consumer: provisioned.
    "a class without topologies": Case(objects=[CLASS, claim("data")], fits=EVERYWHERE),
    "a class of one zone": Case(
        objects=[storage_class("standard", "ebs", [(ZONE, ["a"])]), claim("data")],
        fits="a1 a2",
        reason=NO_VOLUME,
    ),
    "a class of two zones": Case(
        objects=[storage_class("standard", "ebs", [(ZONE, ["a", "b"])]), claim("data")],
        fits="a1 a2 b1",
        reason=NO_VOLUME,
    ),
    "a class with two terms": Case(
        objects=[storage_class("standard", "ebs", [(ZONE, ["b"])], [(HOSTNAME, ["bare"])]),
                 claim("data")],
        fits="b1 bare",
        reason=NO_VOLUME,
    ),
    "a term with two requirements": Case(
        objects=[storage_class("standard", "ebs", [(ZONE, ["a"]), (HOSTNAME, ["a1", "b1"])]),
                 claim("data")],
        fits="a1",
        reason=NO_VOLUME,
    ),
    "a class with an empty term": Case(
        objects=[storage_class("standard", "ebs", []), claim("data")], reason=NO_VOLUME
    ),
    "a class of a zone without nodes": Case(
        objects=[storage_class("standard", "ebs", [(ZONE, ["c"])]), claim("data")],
        reason=NO_VOLUME,
    ),
    "the node is selected": Case(
        objects=[CLASS, claim("data", metadata=SELECTED)], fits="b1", reason=NO_VOLUME
    ),
    "the node is selected, and no storage is left": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data", metadata=SELECTED)],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a volume fits elsewhere, but the node is selected": Case(
        objects=[CLASS, claim("data", metadata=SELECTED), volume("pv", in_(ZONE, "a"))],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "two claims of classes in different zones": Case(
        objects=[storage_class("a", "ebs", [(ZONE, ["a"])]),
                 storage_class("b", "ebs", [(ZONE, ["b"])]),
                 claim("data", storage_class="a"), claim("home", storage_class="b")],
        uses=("data", "home"),
        reason=NO_VOLUME,
    ),
    "a bound claim and one to be provisioned": Case(
        objects=[CLASS, claim("data", "pv"), volume("pv", in_(ZONE, "a")), claim("home")],
        uses=("data", "home"),
        fits="a1 a2",
        reason=AFFINITY,
    ),
    # Free storage.
    "storage in one zone": Case(
        objects=[CLASS, WITH_CAPACITY, capacity("a", "10Gi", {ZONE: "a"}), claim("data")],
        fits="a1 a2",
        reason=NO_STORAGE,
    ),
    "as much storage as the claim requests": Case(
        objects=[CLASS, WITH_CAPACITY, capacity("a", "1Gi", {ZONE: "a"}), claim("data")],
        fits="a1 a2",
        reason=NO_STORAGE,
    ),
    "too little storage": Case(
        objects=[CLASS, WITH_CAPACITY, capacity("a", "1023Mi", {ZONE: "a"}), claim("data")],
        reason=NO_STORAGE,
    ),
    "no storage is published": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data")], reason=NO_STORAGE
    ),
    "a largest volume below the capacity": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data"),
                 capacity("a", "10Gi", {ZONE: "a"}, largest="512Mi"),
                 capacity("b", "10Gi", {ZONE: "b"}, largest="2Gi")],
        fits="b1",
        reason=NO_STORAGE,
    ),
    "a largest volume above the capacity": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data"),
                 capacity("a", "512Mi", {ZONE: "a"}, largest="2Gi")],
        fits="a1 a2",
        reason=NO_STORAGE,
    ),
    "storage of unknown size": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data"), capacity("a", None, {ZONE: "a"})],
        reason=NO_STORAGE,
    ),
    "storage that no node reaches": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data"), capacity("a", "10Gi", None)],
        reason=NO_STORAGE,
    ),
    "storage that all nodes reach": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data"), capacity("a", "10Gi", {})], fits=EVERYWHERE
    ),
    "storage by an expression": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data"),
                 capacity("a", "10Gi", {},
                          expressions=[{"key": ZONE, "operator": "NotIn", "values": ["a"]}])],
        fits="b1 old bare",
        reason=NO_STORAGE,
    ),
    "storage of another class": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data"),
                 capacity("a", "10Gi", {ZONE: "a"}, storage_class="other")],
        reason=NO_STORAGE,
    ),
    "a driver that publishes no capacities": Case(
        objects=[CLASS, driver(storageCapacity=False), claim("data")], fits=EVERYWHERE
    ),
    "a driver that does not say": Case(objects=[CLASS, driver(), claim("data")], fits=EVERYWHERE),
    "capacities of a driver without CSIDriver": Case(
        objects=[CLASS, claim("data"), capacity("a", "1Mi", {ZONE: "a"})], fits=EVERYWHERE
    ),
    "a claim that requests no size": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data", resources={})], fits=EVERYWHERE
    ),
    "the node of the largest of two claims decides": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data"), claim("home", size="20Gi"),
                 capacity("a", "10Gi", {ZONE: "a"}), capacity("b", "30Gi", {ZONE: "b"})],
        uses=("data", "home"),
        fits="b1",
        reason=NO_STORAGE,
    ),
    "storage in a zone that the class does not allow": Case(
        objects=[storage_class("standard", "ebs.csi.aws.com", [(ZONE, ["a"])]), WITH_CAPACITY,
                 claim("data"), capacity("a", "10Gi", {HOSTNAME: "a2"}),
                 capacity("b", "10Gi", {ZONE: "b"})],
        fits="a2",
    ),
    # Existing volumes for claims that wait for their first consumer.
    "a local volume": Case(
        objects=[LOCAL_CLASS, for_local(), local("pv", "a2")], fits="a2", reason=NO_VOLUME
    ),
    "no local volume": Case(objects=[LOCAL_CLASS, for_local()], reason=NO_VOLUME),
    "local volumes of several nodes": Case(
        objects=[LOCAL_CLASS, for_local(), local("pv", "a2"), local("pv2", "b1")],
        fits="a2 b1",
        reason=NO_VOLUME,
    ),
    "a local volume that is too small": Case(
        objects=[LOCAL_CLASS, for_local(size="2Gi"), local("pv", "a2"),
                 local("pv2", "b1", size="3Gi")],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a local volume of exactly the size": Case(
        objects=[LOCAL_CLASS, for_local(size="1024Mi"), local("pv", "a2")],
        fits="a2",
        reason=NO_VOLUME,
    ),
    "a volume of another class": Case(
        objects=[LOCAL_CLASS, for_local(), volume("pv", in_(HOSTNAME, "a1"))], reason=NO_VOLUME
    ),
    "a volume with other access modes": Case(
        objects=[LOCAL_CLASS, for_local(modes="ReadWriteMany"), local("pv", "a1"),
                 local("pv2", "b1", modes="ReadWriteOnce ReadWriteMany")],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a claim of a block device": Case(
        objects=[LOCAL_CLASS, for_local(volumeMode="Block"), local("pv", "a1"),
                 local("pv2", "b1", volumeMode="Block")],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a claim of a file system, as by default": Case(
        objects=[LOCAL_CLASS, for_local(), local("pv", "a1", volumeMode="Filesystem"),
                 local("pv2", "b1", volumeMode="Block")],
        fits="a1",
        reason=NO_VOLUME,
    ),
    "a class of attributes": Case(
        objects=[LOCAL_CLASS, for_local(volumeAttributesClassName="gold"), local("pv", "a1"),
                 local("pv2", "b1", volumeAttributesClassName="gold")],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a selector of volumes": Case(
        objects=[LOCAL_CLASS, for_local(selector={"matchLabels": {"disk": "ssd"}}),
                 local("pv", "a1"), local("pv2", "b1", metadata={"labels": {"disk": "ssd"}})],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a selector with an expression": Case(
        objects=[LOCAL_CLASS, for_local(selector={"matchExpressions": [
                     {"key": "disk", "operator": "NotIn", "values": ["hdd"]}]}),
                 local("pv", "a1", metadata={"labels": {"disk": "hdd"}}), local("pv2", "b1")],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a volume that is released": Case(
        objects=[LOCAL_CLASS, for_local(), local("pv", "a1", phase="Released",
                                                 claimRef=reserved_for("home", "uid-home"))],
        reason=NO_VOLUME,
    ),
    "a volume that has failed": Case(
        objects=[LOCAL_CLASS, for_local(), local("pv", "a1", phase="Failed")], reason=NO_VOLUME
    ),
    "a volume that is not available yet": Case(
        objects=[LOCAL_CLASS, for_local(), local("pv", "a1", phase="Pending")], reason=NO_VOLUME
    ),
    "a volume that is being deleted": Case(
        objects=[LOCAL_CLASS, for_local(), local("pv", "a1", metadata=DELETED)], reason=NO_VOLUME
    ),
    "a volume that is reserved for the claim": Case(
        objects=[LOCAL_CLASS, for_local(), local("pv", "a1"),
                 local("pv2", "b1", claimRef=reserved_for("data"))],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a volume that is reserved for the claim by its UID": Case(
        objects=[LOCAL_CLASS, for_local(),
                 local("pv2", "b1", phase="Bound", claimRef=reserved_for("data", "uid-data"))],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a volume that is reserved for an earlier claim of that name": Case(
        objects=[LOCAL_CLASS, for_local(),
                 local("pv2", "b1", claimRef=reserved_for("data", "uid-before"))],
        reason=NO_VOLUME,
    ),
    "a volume that is reserved for a claim of another namespace": Case(
        objects=[LOCAL_CLASS, for_local(),
                 local("pv2", "b1", claimRef=reserved_for("data", namespace="other"))],
        reason=NO_VOLUME,
    ),
    "a volume that is reserved for the claim, without the labels of its selector": Case(
        objects=[LOCAL_CLASS, for_local(selector={"matchLabels": {"disk": "ssd"}}),
                 local("pv2", "b1", claimRef=reserved_for("data"))],
        fits="b1",
        reason=NO_VOLUME,
    ),
    "a volume that is reserved for the claim, and too small": Case(
        objects=[LOCAL_CLASS, for_local(size="2Gi"),
                 local("pv2", "b1", claimRef=reserved_for("data"))],
        reason=NO_VOLUME,
    ),
    "a volume without node affinity": Case(
        objects=[LOCAL_CLASS, for_local(), volume("pv", storage_class="local")], fits=EVERYWHERE
    ),
    "a volume that no node reaches": Case(
        objects=[LOCAL_CLASS, for_local(), volume(
            "pv", storage_class="local", nodeAffinity=required([]))],
        reason=NO_VOLUME,
    ),
    "two claims, and two volumes on one of the nodes": Case(
        objects=[LOCAL_CLASS, for_local(), for_local("home"), local("pv", "a1"),
                 local("pv2", "b1"), local("pv3", "b1")],
        uses=("data", "home"),
        fits="b1",
        reason=NO_VOLUME,
    ),
    "two claims, and a volume that every node reaches": Case(
        objects=[LOCAL_CLASS, for_local(), for_local("home"), local("pv", "a1"),
                 volume("pv2", storage_class="local")],
        uses=("data", "home"),
        fits="a1",
        reason=NO_VOLUME,
    ),
    "a large claim leaves the small volume to a small one": Case(
        objects=[LOCAL_CLASS, for_local(size="5Gi"), for_local("home", size="1Gi"),
                 local("pv", "a1", size="10Gi"), local("pv2", "a1"), local("pv3", "b1"),
                 local("pv4", "b1")],
        uses=("data", "home"),
        fits="a1",
        reason=NO_VOLUME,
    ),
    "claims of two classes do not compete": Case(
        objects=[LOCAL_CLASS, CLASS, for_local(), claim("home"), local("pv", "a1")],
        uses=("data", "home"),
        fits="a1",
        reason=NO_VOLUME,
    ),
    "a volume exists where none can be provisioned": Case(
        objects=[storage_class("standard", "ebs", [(ZONE, ["a"])]), claim("data"),
                 volume("pv", in_(HOSTNAME, "bare"))],
        fits="a1 a2 bare",
        reason=NO_VOLUME,
    ),
    "a volume exists where no storage is left": Case(
        objects=[CLASS, WITH_CAPACITY, claim("data"), volume("pv", in_(HOSTNAME, "bare")),
                 capacity("a", "10Gi", {ZONE: "a"})],
        fits="a1 a2 bare",
        reason=NO_STORAGE,
    ),
    # Claims in use.
    "a volume that is attached to a node": Case(
        objects=[claim("data", "pv"), volume("pv", in_(ZONE, "a"))],
        users={"data": {"uid-other": "a2"}},
        fits="a2",
    ),
    "a volume that the pod itself uses": Case(
        objects=[claim("data", "pv"), volume("pv")],
        users={"data": {"uid-train": "a2"}},
        fits=EVERYWHERE,
    ),
    "a volume that several nodes may attach": Case(
        objects=[claim("data", "pv"), volume("pv", modes="ReadWriteOnce ReadWriteMany")],
        users={"data": {"uid-other": "a2"}},
        fits=EVERYWHERE,
    ),
    "a volume that several nodes may read": Case(
        objects=[claim("data", "pv"), volume("pv", modes="ReadOnlyMany")],
        users={"data": {"uid-other": "a2"}},
        fits=EVERYWHERE,
    ),
    "a driver that attaches nothing": Case(
        objects=[driver(attachRequired=False), claim("data", "pv"), volume("pv")],
        users={"data": {"uid-other": "a2"}},
        fits=EVERYWHERE,
    ),
    "a file system of the network": Case(
        objects=[claim("data", "pv"), volume("pv", driver="", nfs={"server": "s", "path": "/"})],
        users={"data": {"uid-other": "a2"}},
        fits=EVERYWHERE,
    ),
    "a disk without a driver of its own": Case(
        objects=[claim("data", "pv"),
                 volume("pv", driver="", gcePersistentDisk={"pdName": "disk"})],
        users={"data": {"uid-other": "a2"}},
        fits="a2",
        reason=IN_USE,
    ),
    "a claim of one pod that is in use": Case(
        objects=[claim("data", "pv", modes="ReadWriteOncePod"),
                 volume("pv", modes="ReadWriteOncePod")],
        users={"data": {"uid-other": "a2"}},
        waits='persistentvolumeclaim "data" has the access mode ReadWriteOncePod and is already '
        "in use by another pod, on node a2",
    ),
    "a claim of one pod that is free": Case(
        objects=[claim("data", "pv", modes="ReadWriteOncePod"),
                 volume("pv", modes="ReadWriteOncePod")],
        fits=EVERYWHERE,
    ),
    "another claim is in use": Case(
        objects=[claim("data", "pv"), volume("pv")],
        users={"home": {"uid-other": "a2"}},
        fits=EVERYWHERE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pods_with_claims_are_placed_as_by_kube_scheduler(case: Case) -> None:
    needs = needs_of(storage_of(*case.objects), case)

    if isinstance(needs, Denial):
        assert case.waits
        assert needs.text.startswith(case.waits)
        return
    nodes, reasons = fitting(needs)
    assert not case.waits
    assert nodes == case.fits
    assert reasons == {case.reason} or not case.reason


def claims_of(*objects: Manifest, uses: tuple[str, ...] = ("data",)) -> tuple[PodClaim, ...]:
    needs = needs_of(storage_of(*objects), Case(objects=[], uses=uses))
    assert isinstance(needs, VolumeNeeds)
    return needs.claims


def test_a_bound_claim_needs_nothing_more() -> None:
    [bound] = claims_of(claim("data", "pv"), volume("pv"))

    assert bound == PodClaim(name="data", uid="uid-data", bound=True)


def test_a_claim_gets_the_smallest_volume_that_its_node_reaches() -> None:
    [waiting] = claims_of(
        LOCAL_CLASS,
        for_local(),
        local("large", "a1", size="9Gi"),
        local("small", "a1", size="2Gi"),
        local("other", "b1"),
    )

    first = [found.name for found in waiting.volumes if reaches(NODES["a1"], found.terms)]
    assert first == ["small"]
    assert not waiting.provisions


def test_claims_choose_volumes_in_the_order_of_their_sizes() -> None:
    claims = claims_of(
        LOCAL_CLASS,
        for_local(size="3Gi"),
        for_local("home", size="2Gi"),
        local("pv", "a1", size="4Gi"),
        local("pv2", "a1", size="2Gi"),
        uses=("data", "home"),
    )

    assert [claim.name for claim in claims] == ["home", "data"]
    assert [found.name for found in claims[0].volumes] == ["pv2", "pv"]
    assert [found.name for found in claims[1].volumes] == ["pv"]


def test_volumes_of_a_class_with_a_provisioner_are_provisioned_where_none_is_left() -> None:
    [waiting] = claims_of(CLASS, claim("data"), volume("pv", in_(ZONE, "a")))

    assert waiting.provisions
    assert [found.name for found in waiting.volumes] == ["pv"]


def test_attachments_are_counted_by_driver_and_volume() -> None:
    needs = needs_of(
        storage_of(
            CLASS,
            claim("data", "pv"),
            volume("pv"),
            claim("home", "pv2"),
            volume("pv2", driver="", nfs={"server": "s", "path": "/"}),
            claim("scratch"),
            claim("shared", "pv3"),
            volume("pv3"),
        ),
        Case(
            objects=[],
            uses=("data", "home", "scratch", "shared"),
            users={"shared": {"uid-other": "a1"}},
        ),
    )

    assert isinstance(needs, VolumeNeeds)
    assert needs.attachments == {"ebs.csi.aws.com": 2}


def test_equal_terms_of_many_nodes_become_one() -> None:
    volumes = [local(f"pv{number}", f"n{number}") for number in range(300)]

    needs = needs_of(storage_of(LOCAL_CLASS, for_local(), *volumes), Case(objects=[]))

    assert isinstance(needs, VolumeNeeds)
    [requirement] = needs.requirements
    [[term]] = requirement.terms
    assert len(term.values) == 300


def test_terms_are_bounded() -> None:
    storage = storage_of(LOCAL_CLASS, for_local(), *(local(f"pv{n}", f"n{n}") for n in range(9000)))

    needs = needs_of(storage, Case(objects=[]))

    assert isinstance(needs, VolumeNeeds)
    assert len(needs.claims[0].volumes) == 1024
    assert needs == needs_of(storage, Case(objects=[]))
    assert merged(()) == ()


def test_pods_whose_claims_are_in_one_zone_share_a_requirement() -> None:
    storage = storage_of(
        claim("data", "pv"), volume("pv", in_(ZONE, "a")),
        claim("home", "pv2"), volume("pv2", in_(ZONE, "a")),
    )  # fmt: skip

    first, second = (needs_of(storage, Case(objects=[], uses=(name,))) for name in ("data", "home"))

    assert isinstance(first, VolumeNeeds)
    assert isinstance(second, VolumeNeeds)
    assert first.requirements == second.requirements


def test_a_volume_that_changes_moves_between_claims() -> None:
    storage = storage_of(LOCAL_CLASS, for_local(), local("pv", "a1"))
    case = Case(objects=[])
    before = needs_of(storage, case)
    taken = storage_of(local("pv", "a1", phase="Bound", claimRef=reserved_for("home", "uid-home")))

    storage.put_volume("pv", taken.volumes["pv"])
    while_taken = needs_of(storage, case)
    storage.put_volume("pv", None)

    assert isinstance(before, VolumeNeeds)
    assert isinstance(while_taken, VolumeNeeds)
    assert fitting(before)[0] == "a1"
    assert fitting(while_taken)[0] == ""
    assert (storage.available, storage.reserved, storage.volumes) == ({}, {}, {})
