"""Claims and volumes, as far as placement needs them; pure.

Most claims of a cluster are bound and of no pod that waits, so each takes little memory.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from operator import itemgetter
from sys import intern
from typing import TypeVar

import msgspec

from shared.kubernetes.storage_objects import (
    ApiCsiDriver,
    ApiCsiNode,
    ApiStorageCapacity,
    ApiStorageClass,
    ApiVolume,
    ApiVolumeClaim,
    ClaimReference,
)
from shared.kubernetes.types import LabelSelector, ObjectMeta, Quantities
from shared.model.devices.node import LabelRequirement
from shared.model.quantity import parse_quantity
from shared.model.requests.request import NodeTerm, VolumeTerms
from shared.pods.node_selectors import labelled_nodes, selected_nodes
from shared.pods.pod_anti_affinity import requirements_of

SELECTED_NODE = "volume.kubernetes.io/selected-node"
BETA_CLASS = "volume.beta.kubernetes.io/storage-class"
"""Annotation that takes precedence over `spec.storageClassName`."""
NO_PROVISIONER = "kubernetes.io/no-provisioner"
ZONE = "topology.kubernetes.io/zone"
REGION = "topology.kubernetes.io/region"
BETA_ZONE = "failure-domain.beta.kubernetes.io/zone"
BETA_REGION = "failure-domain.beta.kubernetes.io/region"
TOPOLOGY_LABELS = {ZONE: ZONE, REGION: REGION, BETA_ZONE: ZONE, BETA_REGION: REGION}
"""Labels of volumes and nodes, and their names since Kubernetes 1.17.
https://kubernetes.io/docs/reference/labels-annotations-taints/#topologykubernetesiozone
"""
ZONES_SEPARATOR = "__"
MIGRATED_PROVISIONERS = {
    "kubernetes.io/aws-ebs": "ebs.csi.aws.com",
    "kubernetes.io/azure-disk": "disk.csi.azure.com",
    "kubernetes.io/azure-file": "file.csi.azure.com",
    "kubernetes.io/cinder": "cinder.csi.openstack.org",
    "kubernetes.io/gce-pd": "pd.csi.storage.gke.io",
    "kubernetes.io/portworx-volume": "pxd.portworx.com",
    "kubernetes.io/vsphere-volume": "csi.vsphere.vmware.com",
}
"""CSI drivers that have replaced the volume plugins that were part of Kubernetes.
https://kubernetes.io/docs/concepts/storage/volumes/#csi-migration
"""
FILESYSTEM = "Filesystem"
SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})
ONE_POD = "ReadWriteOncePod"

ClaimKey = tuple[str, str]
"""Namespace and name."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    name: str
    uid: str = ""
    owner: str = ""
    """The UID of its controller."""
    bound: bool = False
    lost: bool = False
    deleting: bool = False
    volume: str = ""
    storage_class: str = ""
    access_modes: tuple[str, ...] = ()
    size: int = 0
    """Bytes, rounded up."""
    volume_mode: str = FILESYSTEM
    attributes_class: str = ""
    selector: tuple[LabelRequirement, ...] = ()
    selected_node: str = ""
    """Its volume is being provisioned there."""
    error: str = ""
    """Only the name is known then."""


class Volume(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    name: str
    terms: VolumeTerms = ()
    """Its required node affinity; without any, every node reaches it."""
    zones: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Labels of topology, and the values of each."""
    driver: str = ""
    """Also one that has replaced the volume plugin."""
    in_tree_disk: bool = False
    """A CSI driver has replaced its plugin; it is attached to one node."""
    available: bool = False
    deleting: bool = False
    reserved_for: ClaimReference | None = None
    labels: dict[str, str] = {}
    storage_class: str = ""
    access_modes: tuple[str, ...] = ()
    size: int = 0
    volume_mode: str = FILESYSTEM
    attributes_class: str = ""
    error: str = ""
    """Only the name is known then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageClass:
    name: str
    provisioner: str = ""
    waits_for_consumer: bool = False
    topologies: VolumeTerms = ()
    """Where volumes may be provisioned; without any, everywhere."""

    @property
    def provisions(self) -> bool:
        return self.provisioner not in {"", NO_PROVISIONER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    attaches: bool = True
    has_capacities: bool = False
    """Its free storage decides where a volume can be provisioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Free storage of a class, which the nodes with these labels reach."""

    storage_class: str
    largest: int
    """Bytes of the largest volume."""
    nodes: tuple[NodeTerm, ...] = ()
    """() means all nodes."""


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """How many volumes of each CSI driver can be attached to a node; others have no limit."""

    by_driver: Mapping[str, int]


NO_DRIVER = Driver()
"""A driver without a CSIDriver object."""


def parse_claim(claim: ApiVolumeClaim) -> Claim:
    """Raise RequestError for an invalid quantity."""
    meta = claim.metadata
    spec = claim.spec
    phase = claim.status.phase
    return Claim(
        name=meta.name,
        uid=meta.uid,
        owner=next((owner.uid for owner in meta.owner_references if owner.controller), ""),
        bound=phase == "Bound" and bool(spec.volume_name),
        lost=phase == "Lost",
        deleting=meta.deletion_timestamp is not None,
        volume=spec.volume_name,
        storage_class=_class(meta, spec.storage_class_name),
        access_modes=_shared(spec.access_modes),
        size=_size(spec.resources.requests),
        volume_mode=intern(spec.volume_mode or FILESYSTEM),
        attributes_class=intern(spec.volume_attributes_class_name or ""),
        selector=requirements_of(spec.selector) if spec.selector else (),
        selected_node=meta.annotations.get(SELECTED_NODE, ""),
    )


def parse_volume(volume: ApiVolume) -> Volume:
    """Raise RequestError for an invalid quantity."""
    meta = volume.metadata
    spec = volume.spec
    available = volume.status.phase == "Available"
    required = spec.node_affinity.required if spec.node_affinity else None
    disks = {
        "kubernetes.io/aws-ebs": spec.aws_elastic_block_store,
        "kubernetes.io/azure-disk": spec.azure_disk,
        "kubernetes.io/cinder": spec.cinder,
        "kubernetes.io/gce-pd": spec.gce_persistent_disk,
        "kubernetes.io/vsphere-volume": spec.vsphere_volume,
    }
    plugin = next((name for name, disk in disks.items() if disk), "")
    return Volume(
        name=meta.name,
        terms=_shared(selected_nodes(required)) if required else (),
        zones=_shared(tuple(_zones(meta.labels))),
        driver=intern(spec.csi.driver) if spec.csi else MIGRATED_PROVISIONERS.get(plugin, ""),
        in_tree_disk=bool(plugin),
        available=available,
        deleting=meta.deletion_timestamp is not None,
        reserved_for=spec.claim_ref,
        labels=meta.labels if available else {},
        storage_class=_class(meta, spec.storage_class_name),
        access_modes=_shared(spec.access_modes),
        size=_size(spec.capacity),
        volume_mode=intern(spec.volume_mode or FILESYSTEM),
        attributes_class=intern(spec.volume_attributes_class_name or ""),
    )


def parse_class(storage_class: ApiStorageClass) -> StorageClass:
    topologies = tuple(
        tuple(
            NodeTerm(key=requirement.key, operator="In", values=requirement.values)
            for requirement in term.match_label_expressions
        )
        for term in storage_class.allowed_topologies
    )
    return StorageClass(
        name=storage_class.metadata.name,
        provisioner=MIGRATED_PROVISIONERS.get(storage_class.provisioner, storage_class.provisioner),
        waits_for_consumer=storage_class.volume_binding_mode == "WaitForFirstConsumer",
        topologies=topologies,
    )


def parse_driver(driver: ApiCsiDriver) -> Driver:
    return Driver(
        attaches=driver.spec.attach_required is not False,
        has_capacities=driver.spec.storage_capacity is True,
    )


def parse_capacity(capacity: ApiStorageCapacity) -> Capacity | None:
    """Return None if no node reaches the capacity, or its size is not known.

    Raises RequestError for an invalid quantity.
    """
    largest = capacity.maximum_volume_size
    if largest is None:
        largest = capacity.capacity
    if largest is None or capacity.node_topology is None:
        return None
    return Capacity(
        storage_class=capacity.storage_class_name,
        largest=ceil(parse_quantity(largest)),
        nodes=labelled_nodes(capacity.node_topology or LabelSelector()),
    )


def parse_limits(node: ApiCsiNode) -> NodeLimits:
    return NodeLimits(
        {
            driver.name: max(driver.allocatable.count, 0)
            for driver in node.spec.drivers or ()
            if driver.allocatable is not None and driver.allocatable.count is not None
        }
    )


def _class(meta: ObjectMeta, name: str | None) -> str:
    return intern(meta.annotations.get(BETA_CLASS, name or ""))


def _size(amounts: Quantities) -> int:
    return ceil(parse_quantity(amounts.get("storage", 0)))


def _zones(labels: dict[str, str]) -> Iterable[tuple[str, tuple[str, ...]]]:
    """As by kube-scheduler, topology with an empty value is ignored."""
    for key in TOPOLOGY_LABELS:
        values = tuple(zone.strip() for zone in labels.get(key, "").split(ZONES_SEPARATOR))
        if all(values):
            yield key, values


_Tuple = TypeVar("_Tuple", bound=tuple[object, ...])


def _shared(value: _Tuple) -> _Tuple:
    """Other objects use the tuple, too."""
    return _cached(value)  # type: ignore[return-value]


@lru_cache(maxsize=4096)
def _cached(value: tuple[object, ...]) -> tuple[object, ...]:
    return value


_ALL_NODES = msgspec.msgpack.encode(())


@dataclass(slots=True)
class Storage:
    claims: dict[ClaimKey, Claim] = field(default_factory=dict)
    volumes: dict[str, Volume] = field(default_factory=dict)
    classes: dict[str, StorageClass] = field(default_factory=dict)
    drivers: dict[str, Driver] = field(default_factory=dict)
    capacities: dict[ClaimKey, Capacity] = field(default_factory=dict)
    most_free: dict[str, list[tuple[int, bytes, ClaimKey]]] = field(default_factory=dict)
    """Size, encoded nodes and key of capacities by class, the largest first."""
    limits: dict[str, NodeLimits] = field(default_factory=dict)
    """By node."""
    available: dict[str, dict[str, Volume]] = field(default_factory=dict)
    """Volumes that may be bound to any claim, by class and name."""
    reserved: dict[ClaimKey, tuple[Volume, ...]] = field(default_factory=dict)
    """For one claim, or bound to it; seldom several."""

    def put_volume(self, name: str, volume: Volume | None) -> None:
        """None removes the volume."""
        before = self.volumes.pop(name, None)
        if before is not None:
            _drop(self.available, before.storage_class, name)
            if before.reserved_for:
                key = _key_of(before.reserved_for)
                others = tuple(other for other in self.reserved.pop(key) if other.name != name)
                if others:
                    self.reserved[key] = others
        if volume is None:
            return
        self.volumes[name] = volume
        if volume.reserved_for:
            key = _key_of(volume.reserved_for)
            self.reserved[key] = (*self.reserved.get(key, ()), volume)
        elif volume.available and not volume.deleting:
            self.available.setdefault(volume.storage_class, {})[name] = volume

    def put_capacity(self, key: ClaimKey, capacity: Capacity | None) -> None:
        """None removes the capacity."""
        before = self.capacities.pop(key, None)
        if before is not None:
            places = self.most_free[before.storage_class]
            del places[bisect_left(places, _place(key, before))]
            if not places:
                del self.most_free[before.storage_class]
        if capacity is not None:
            self.capacities[key] = capacity
            insort(self.most_free.setdefault(capacity.storage_class, []), _place(key, capacity))

    def nodes_for(self, storage_class: str, size: int) -> Iterator[tuple[NodeTerm, ...]] | None:
        """Return the nodes that reach `size` bytes, the largest capacity first; None for all."""
        places = self.most_free.get(storage_class, [])
        enough = places[: bisect_right(places, -size, key=itemgetter(0))]
        if any(nodes == _ALL_NODES for _, nodes, _ in enough):
            return None
        return (self.capacities[key].nodes for *_, key in enough)

    def waits_for_consumer(self, claim: Claim) -> bool:
        storage_class = self.classes.get(claim.storage_class)
        delayed = storage_class is not None and storage_class.waits_for_consumer
        return delayed and not claim.volume


def _place(key: ClaimKey, capacity: Capacity) -> tuple[int, bytes, ClaimKey]:
    return -capacity.largest, msgspec.msgpack.encode(capacity.nodes), key


def _key_of(reference: ClaimReference) -> ClaimKey:
    return reference.namespace, reference.name


def _drop(index: dict[str, dict[str, Volume]], key: str, name: str) -> None:
    named = index.get(key)
    if named is not None:
        named.pop(name, None)
        if not named:
            del index[key]
