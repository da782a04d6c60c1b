"""Claims, volumes and what belongs to them, as the API server has them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shared.kubernetes.storage_objects import (
    ApiCsiDriver,
    ApiCsiNode,
    ApiStorageCapacity,
    ApiStorageClass,
    ApiVolume,
    ApiVolumeClaim,
)
from shared.pods.storage import (
    Storage,
    parse_capacity,
    parse_claim,
    parse_class,
    parse_driver,
    parse_limits,
    parse_volume,
)

Manifest = dict[str, Any]
ZONE = "topology.kubernetes.io/zone"
HOSTNAME = "kubernetes.io/hostname"
NAMESPACE = "team"


def _object(kind: str, name: str, **fields: Any) -> Manifest:
    metadata = {"name": name, **fields.pop("metadata", {})}
    return {"kind": kind, "metadata": metadata, **fields}


def claim(
    name: str,
    volume: str = "",
    *,
    phase: str = "",
    modes: str = "ReadWriteOnce",
    size: str = "1Gi",
    storage_class: str | None = "standard",
    metadata: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Manifest:
    """Return a claim; with a volume it is bound, if no other phase is given."""
    return _object(
        "PersistentVolumeClaim",
        name,
        metadata={"namespace": NAMESPACE, "uid": f"uid-{name}", **(metadata or {})},
        spec={
            "accessModes": modes.split(),
            "resources": {"requests": {"storage": size}},
            **({"storageClassName": storage_class} if storage_class is not None else {}),
            **({"volumeName": volume} if volume else {}),
            **spec,
        },
        status={"phase": phase or ("Bound" if volume else "Pending")},
    )


def in_(key: str, *values: str) -> Manifest:
    return {"key": key, "operator": "In", "values": list(values)}


def required(*terms: Any) -> Manifest:
    """Return node affinity with terms, each the requirements of one."""
    listed = [{"matchExpressions": term if isinstance(term, list) else [term]} for term in terms]
    return {"required": {"nodeSelectorTerms": listed}}


def volume(
    name: str,
    *terms: Any,
    phase: str = "Available",
    modes: str = "ReadWriteOnce",
    size: str = "1Gi",
    storage_class: str = "standard",
    driver: str = "ebs.csi.aws.com",
    metadata: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Manifest:
    source = {"csi": {"driver": driver, "volumeHandle": name}} if driver else {}
    return _object(
        "PersistentVolume",
        name,
        metadata=metadata or {},
        spec={
            "accessModes": modes.split(),
            "capacity": {"storage": size},
            "storageClassName": storage_class,
            **source,
            **({"nodeAffinity": required(*terms)} if terms else {}),
            **spec,
        },
        status={"phase": phase},
    )


def storage_class(
    name: str = "standard",
    provisioner: str = "ebs.csi.aws.com",
    *topologies: list[tuple[str, list[str]]],
    waits: bool = True,
) -> Manifest:
    terms = [
        {"matchLabelExpressions": [{"key": key, "values": values} for key, values in term]}
        for term in topologies
    ]
    return _object(
        "StorageClass",
        name,
        provisioner=provisioner,
        volumeBindingMode="WaitForFirstConsumer" if waits else "Immediate",
        **({"allowedTopologies": terms} if terms else {}),
    )


def driver(name: str = "ebs.csi.aws.com", **spec: bool) -> Manifest:
    return _object("CSIDriver", name, spec=spec)


def capacity(
    name: str,
    amount: str | None,
    labels: Mapping[str, str] | None,
    *,
    storage_class: str = "standard",
    largest: str | None = None,
    expressions: list[Manifest] | None = None,
) -> Manifest:
    """Return free storage; without labels (None), no node reaches it."""
    topology = {"matchLabels": dict(labels or {}), "matchExpressions": expressions or []}
    return _object(
        "CSIStorageCapacity",
        name,
        metadata={"namespace": "kube-system"},
        storageClassName=storage_class,
        **({"capacity": amount} if amount is not None else {}),
        **({"maximumVolumeSize": largest} if largest is not None else {}),
        **({"nodeTopology": topology} if labels is not None or expressions else {}),
    )


def csi_node(name: str, count: int, driver: str = "ebs.csi.aws.com") -> Manifest:
    drivers = [{"name": driver, "nodeID": name, "allocatable": {"count": count}}]
    return _object("CSINode", name, spec={"drivers": drivers})


def storage_of(*objects: Manifest) -> Storage:
    """Return what the watcher keeps of the objects."""
    storage = Storage()
    for manifest in objects:
        name = manifest["metadata"]["name"]
        match manifest["kind"]:
            case "PersistentVolumeClaim":
                key = manifest["metadata"]["namespace"], name
                storage.claims[key] = parse_claim(msgspec.convert(manifest, ApiVolumeClaim))
            case "PersistentVolume":
                storage.put_volume(name, parse_volume(msgspec.convert(manifest, ApiVolume)))
            case "StorageClass":
                storage.classes[name] = parse_class(msgspec.convert(manifest, ApiStorageClass))
            case "CSIDriver":
                storage.drivers[name] = parse_driver(msgspec.convert(manifest, ApiCsiDriver))
            case "CSINode":
                storage.limits[name] = parse_limits(msgspec.convert(manifest, ApiCsiNode))
            case _:
                parsed = parse_capacity(msgspec.convert(manifest, ApiStorageCapacity))
                if parsed is not None:
                    storage.put_capacity(("kube-system", name), parsed)
    return storage
