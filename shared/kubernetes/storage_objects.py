"""Claims, volumes and what decides where they can be: the fields that we read; pure.

https://kubernetes.io/docs/reference/kubernetes-api/config-and-storage-resources/
"""

from msgspec import Struct

from shared.kubernetes.types import (
    LabelSelector,
    NodeSelector,
    ObjectMeta,
    Quantities,
    Resources,
)


class ClaimSpec(Struct, frozen=True, rename="camel", gc=False):
    access_modes: tuple[str, ...] = ()
    resources: Resources = Resources()
    selector: LabelSelector | None = None
    storage_class_name: str | None = None
    volume_attributes_class_name: str | None = None
    volume_mode: str | None = None
    volume_name: str = ""


class ClaimStatus(Struct, frozen=True, gc=False):
    phase: str = ""


class ApiVolumeClaim(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()


class ClaimReference(Struct, frozen=True, gc=False):
    """If a volume is reserved for the claim, perhaps without its UID."""

    namespace: str = ""
    name: str = ""
    uid: str = ""


class CsiSource(Struct, frozen=True, gc=False):
    driver: str = ""


class VolumeNodeAffinity(Struct, frozen=True, gc=False):
    required: NodeSelector | None = None


class VolumeSpec(Struct, frozen=True, rename="camel", gc=False):
    """Of the sources, those that are attached to a node."""

    access_modes: tuple[str, ...] = ()
    capacity: Quantities = {}
    claim_ref: ClaimReference | None = None
    node_affinity: VolumeNodeAffinity | None = None
    storage_class_name: str = ""
    volume_attributes_class_name: str | None = None
    volume_mode: str | None = None
    csi: CsiSource | None = None
    aws_elastic_block_store: dict[str, object] | None = None
    azure_disk: dict[str, object] | None = None
    cinder: dict[str, object] | None = None
    gce_persistent_disk: dict[str, object] | None = None
    vsphere_volume: dict[str, object] | None = None


class VolumeStatus(Struct, frozen=True, gc=False):
    phase: str = ""


class ApiVolume(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: VolumeSpec = VolumeSpec()
    status: VolumeStatus = VolumeStatus()


class TopologyRequirement(Struct, frozen=True, gc=False):
    key: str = ""
    values: tuple[str, ...] = ()


class TopologyTerm(Struct, frozen=True, rename="camel", gc=False):
    match_label_expressions: tuple[TopologyRequirement, ...] = ()


class ApiStorageClass(Struct, frozen=True, rename="camel", gc=False):
    metadata: ObjectMeta = ObjectMeta()
    provisioner: str = ""
    volume_binding_mode: str = "Immediate"
    allowed_topologies: tuple[TopologyTerm, ...] = ()


class DriverSpec(Struct, frozen=True, rename="camel", gc=False):
    attach_required: bool | None = None
    storage_capacity: bool | None = None


class ApiCsiDriver(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: DriverSpec = DriverSpec()


class ApiStorageCapacity(Struct, frozen=True, rename="camel", gc=False):
    metadata: ObjectMeta = ObjectMeta()
    storage_class_name: str = ""
    capacity: str | int | None = None
    maximum_volume_size: str | int | None = None
    node_topology: LabelSelector | None = None


class DriverLimit(Struct, frozen=True, gc=False):
    count: int | None = None


class NodeDriver(Struct, frozen=True, gc=False):
    name: str = ""
    allocatable: DriverLimit | None = None


class CsiNodeSpec(Struct, frozen=True, gc=False):
    drivers: tuple[NodeDriver, ...] | None = ()
    """None from a kubelet without a driver."""


class ApiCsiNode(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    spec: CsiNodeSpec = CsiNodeSpec()
