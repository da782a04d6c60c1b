"""Where kube-scheduler places pods with claims that are missing, bound, or to be bound at once,
by its documented rules: a table of cases."""

from tests.support.storage import (
    HOSTNAME,
    ZONE,
    claim,
    in_,
    storage_class,
    volume,
)
from tests.support.volume_case import (
    AFFINITY,
    BETA_REGION,
    BETA_ZONE,
    CLASS,
    DELETED,
    EVERYWHERE,
    IMMEDIATE,
    LOCAL,
    NO_ZONE,
    NOT_OWNED,
    ONLY_USER,
    OWNED,
    REGION,
    Case,
    reserved_for,
)

BOUND_CASES: dict[str, Case] = {
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
}  # fmt: skip
