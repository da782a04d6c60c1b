"""Binds claims to volumes, and releases the volumes of claims that are gone."""

from simcluster.apimachinery.objects import (
    Json,
    annotations_of,
    at_path,
    metadata,
    name_of,
    namespace_of,
)
from simcluster.apimachinery.volumes import (
    BIND_COMPLETED,
    BOUND_BY_CONTROLLER,
    CLAIMS,
    CLASSES,
    NO_PROVISIONER,
    VOLUMES,
    WAIT_FOR_CONSUMER,
    best_volume,
    is_bound,
    reference_to,
    refers_to,
    selected_node,
)
from simcluster.events import EventRecorder
from simcluster.ports import ClusterStore

STORAGE_PROVISIONER = "volume.kubernetes.io/storage-provisioner"
"""Annotation of a claim: the provisioner that shall make its volume."""
PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
CLAIM = "PersistentVolumeClaim"


class VolumeBinder:
    """Plays the part of the PersistentVolume controller."""

    def __init__(self, store: ClusterStore, events: EventRecorder) -> None:
        self._store = store
        self._events = events
        self._announced: dict[str, str] = {}
        """The message of the latest Event, by UID of the claim."""

    def sync(self) -> None:
        claims = self._store.list(CLAIMS)
        by_name = {(namespace_of(claim), name_of(claim)): claim for claim in claims}
        for volume in self._store.list(VOLUMES):
            reference = at_path(volume, "spec.claimRef") or {}
            key = (str(reference.get("namespace")), str(reference.get("name")))
            self._sync_volume(volume, reference, by_name.get(key))
        for claim in claims:
            self._sync_claim(claim)

    # Volumes

    def _sync_volume(self, volume: Json, reference: Json, claim: Json | None) -> None:
        if not reference.get("uid"):
            self._set_phase(volume, "Available")
        elif claim is None or not refers_to(reference, claim):
            self._set_phase(volume, "Released")
            self._reclaim(volume)
        elif at_path(claim, "spec.volumeName") == name_of(volume):
            self._set_phase(volume, "Bound")
        elif at_path(claim, "spec.volumeName"):
            self._unbind(volume)

    def _set_phase(self, volume: Json, phase: str) -> None:
        if at_path(volume, "status.phase") != phase:
            status = {"status": {"phase": phase}}
            self._store.patch(VOLUMES, None, name_of(volume), status, subresource="status")

    def _reclaim(self, volume: Json) -> None:
        """Delete a provisioned volume, unless its policy retains it."""
        policy = at_path(volume, "spec.persistentVolumeReclaimPolicy")
        is_marked = "deletionTimestamp" in metadata(volume)
        if policy == "Delete" and PROVISIONED_BY in annotations_of(volume) and not is_marked:
            self._store.delete(VOLUMES, None, name_of(volume))

    def _unbind(self, volume: Json) -> None:
        """Release a volume whose claim has another one."""
        if PROVISIONED_BY in annotations_of(volume):
            self._reclaim(volume)
        elif BOUND_BY_CONTROLLER in annotations_of(volume):
            patch = {
                "metadata": {"annotations": {BOUND_BY_CONTROLLER: None}},
                "spec": {"claimRef": None},
            }
            self._store.patch(VOLUMES, None, name_of(volume), patch)

    # Claims

    def _sync_claim(self, claim: Json) -> None:
        if is_bound(claim):
            volume = self._store.find(VOLUMES, None, str(at_path(claim, "spec.volumeName")))
            if volume is None:
                self._set_lost(claim)
        elif "deletionTimestamp" not in metadata(claim) and (found := self._volume(claim)):
            self._bind(claim, found)

    def _volume(self, claim: Json) -> Json | None:
        """Return the volume that a claim gets now, or None if it waits."""
        named = at_path(claim, "spec.volumeName")
        if named:
            record = self._store.find(VOLUMES, None, str(named))
            reference = at_path(record.obj, "spec.claimRef") if record else None
            is_free = reference is None or refers_to(reference, claim)
            return record.obj if record and is_free else None
        class_name = at_path(claim, "spec.storageClassName")
        record = self._store.find(CLASSES, None, str(class_name)) if class_name else None
        storage_class = record.obj if record else {}
        delayed = storage_class.get("volumeBindingMode") == WAIT_FOR_CONSUMER
        volume = best_volume(claim, self._store.list(VOLUMES), delayed=delayed)
        if volume is None:
            self._explain(claim, storage_class, delayed=delayed)
        return volume

    def _explain(self, claim: Json, storage_class: Json, *, delayed: bool) -> None:
        """Have a volume provisioned, or write an Event with why none is."""
        class_name = at_path(claim, "spec.storageClassName")
        provisioner = storage_class.get("provisioner")
        if delayed and not selected_node(claim):
            text = "waiting for first consumer to be created before binding"
            self._announce(claim, "Normal", "WaitForFirstConsumer", text)
        elif class_name and not storage_class:
            text = f'storageclass.storage.k8s.io "{class_name}" not found'
            self._announce(claim, "Warning", "ProvisioningFailed", text)
        elif not class_name or provisioner == NO_PROVISIONER:
            text = "no persistent volumes available for this claim and no storage class is set"
            self._announce(claim, "Normal", "FailedBinding", text)
        elif annotations_of(claim).get(STORAGE_PROVISIONER) != provisioner:
            self._patch_claim(
                claim, {"metadata": {"annotations": {STORAGE_PROVISIONER: provisioner}}}
            )
            text = (
                "Waiting for a volume to be created either by the external provisioner "
                f"'{provisioner}' or manually by the system administrator."
            )
            self._announce(claim, "Normal", "ExternalProvisioning", text)

    def _bind(self, claim: Json, volume: Json) -> None:
        name = name_of(volume)
        spec = volume["spec"]
        reference = spec.get("claimRef")
        if reference is None or not reference.get("uid"):
            patch: Json = {"spec": {"claimRef": reference_to(claim)}}
            if reference is None:
                patch["metadata"] = {"annotations": {BOUND_BY_CONTROLLER: "yes"}}
            self._store.patch(VOLUMES, None, name, patch)
        self._set_phase(volume, "Bound")
        annotations = {BIND_COMPLETED: "yes"}
        if not at_path(claim, "spec.volumeName"):
            annotations[BOUND_BY_CONTROLLER] = "yes"
        self._patch_claim(
            claim, {"metadata": {"annotations": annotations}, "spec": {"volumeName": name}}
        )
        status = {key: spec[key] for key in ("accessModes", "capacity") if key in spec}
        self._patch_claim(claim, {"status": status | {"phase": "Bound"}}, subresource="status")
        self._announced.pop(claim["metadata"]["uid"], None)

    def _set_lost(self, claim: Json) -> None:
        self._patch_claim(claim, {"status": {"phase": "Lost"}}, subresource="status")
        text = "Bound claim has lost its PersistentVolume. Data on the volume is lost!"
        self._announce(claim, "Warning", "ClaimLost", text)

    def _patch_claim(self, claim: Json, patch: Json, *, subresource: str = "") -> None:
        self._store.patch(
            CLAIMS, namespace_of(claim), name_of(claim), patch, subresource=subresource
        )

    def _announce(self, claim: Json, level: str, reason: str, text: str) -> None:
        uid = claim["metadata"]["uid"]
        if self._announced.get(uid) != text:
            self._announced[uid] = text
            self._events.write(claim, CLAIM, level, reason, text)
