"""Where kube-scheduler places pods with claims, by its documented rules: a table of cases."""

from tests.support.bound_volume_cases import BOUND_CASES
from tests.support.storage import (
    HOSTNAME,
    ZONE,
    capacity,
    claim,
    driver,
    in_,
    required,
    storage_class,
    volume,
)
from tests.support.volume_case import (
    AFFINITY,
    CLASS,
    DELETED,
    EVERYWHERE,
    IN_USE,
    LOCAL_CLASS,
    NO_STORAGE,
    NO_VOLUME,
    SELECTED,
    WITH_CAPACITY,
    Case,
    for_local,
    local,
    reserved_for,
)

CASES: dict[str, Case] = {
    **BOUND_CASES,
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
