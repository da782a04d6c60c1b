"""Strategies of claims, volumes and StorageClasses: defaults, finalizers, fixed fields; pure."""

from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.objects import Json, annotations_of, at_path, metadata, name_of
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_CHANGEABLE = ("resources", "volumeName", "volumeAttributesClassName", "storageClassName")
"""Fields of a claim's spec: the last two only while they have no value."""


def _add_finalizer(obj: Json, name: str) -> None:
    finalizers = obj["metadata"].setdefault("finalizers", [])
    if name not in finalizers:
        finalizers.append(name)


class ClaimStrategy(KindStrategy):
    """A claim begins as Pending, with the default StorageClass if it names none."""

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the initial status, and the finalizer of the admission plugin."""
        obj["status"] = {"phase": "Pending"}
        _add_finalizer(obj, "kubernetes.io/pvc-protection")

    def admit(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the newest default StorageClass; a claim for no class has an empty name."""
        if at_path(obj, "spec.storageClassName") is not None:
            return
        defaults = [
            storage_class
            for storage_class in cluster.list("storageclasses")
            if annotations_of(storage_class).get(DEFAULT_CLASS) == "true"
        ]
        if defaults:
            newest = max(defaults, key=lambda each: metadata(each)["creationTimestamp"])
            obj["spec"]["storageClassName"] = name_of(newest)

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the API's defaults."""
        obj.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse changes of the spec, except of its size and of a volume or class it lacked."""
        before = old["spec"]
        after = new["spec"]
        immutable = (before.keys() | after.keys()) - set(_CHANGEABLE)
        immutable |= {key for key in ("volumeName", "storageClassName") if before.get(key)}
        if all(before.get(key) == after.get(key) for key in immutable):
            return []
        text = (
            "Forbidden: spec is immutable after creation except resources.requests and "
            "volumeAttributesClassName for bound claims"
        )
        return [Cause("FieldValueForbidden", text, "spec")]


class VolumeStrategy(KindStrategy):
    """A volume begins as Pending, until its controller has seen it."""

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the initial status, and the finalizer of the admission plugin."""
        obj["status"] = {"phase": "Pending"}
        _add_finalizer(obj, "kubernetes.io/pv-protection")

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the API's defaults."""
        spec = obj.setdefault("spec", {})
        spec.setdefault("volumeMode", "Filesystem")
        spec.setdefault("persistentVolumeReclaimPolicy", "Retain")


class StorageClassStrategy(KindStrategy):
    """Volumes of a class are deleted with their claims, and bound at once, by default."""

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the API's defaults."""
        obj.setdefault("reclaimPolicy", "Delete")
        obj.setdefault("volumeBindingMode", "Immediate")
