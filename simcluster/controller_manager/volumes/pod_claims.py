"""Claims of pods: those of their ephemeral volumes, and those that are deleted while in use."""

from collections.abc import Iterable

from simcluster.apimachinery.objects import Json, at_path, metadata, name_of, namespace_of
from simcluster.apimachinery.pods import has_finished
from simcluster.apimachinery.volumes import CLAIMS, VOLUMES, PodClaim, pod_claims
from simcluster.events import EventRecorder
from simcluster.ports import ClusterStore

CLAIM_PROTECTION = "kubernetes.io/pvc-protection"
VOLUME_PROTECTION = "kubernetes.io/pv-protection"


class EphemeralClaims:
    """Makes the claims of generic ephemeral volumes; the garbage collector deletes them.

    https://kubernetes.io/docs/concepts/storage/ephemeral-volumes/#generic-ephemeral-volumes
    """

    def __init__(self, store: ClusterStore, events: EventRecorder) -> None:
        self._store = store
        self._events = events

    def sync(self) -> None:
        for pod in self._store.list("pods"):
            if "deletionTimestamp" in metadata(pod) or has_finished(pod):
                continue
            for claim in pod_claims(pod):
                if claim.template is not None:
                    self._ensure(pod, claim)

    def _ensure(self, pod: Json, claim: PodClaim) -> None:
        record = self._store.find(CLAIMS, namespace_of(pod), claim.name)
        if record is None:
            self._store.create(CLAIMS, _claim_for(pod, claim))
        elif not _is_owned(record.obj, pod):
            text = f'PVC "{claim.name}" was not created for pod "{name_of(pod)}"'
            self._events.write(pod, "Pod", "Warning", "FailedBinding", text)


def _claim_for(pod: Json, claim: PodClaim) -> Json:
    template = claim.template or {}
    owner = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": name_of(pod),
        "uid": metadata(pod)["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    copied = {key: metadata(template).get(key) or {} for key in ("labels", "annotations")}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            **copied,
            "name": claim.name,
            "namespace": namespace_of(pod),
            "ownerReferences": [owner],
        },
        "spec": template.get("spec") or {},
    }


def _is_owned(claim: Json, pod: Json) -> bool:
    uid = metadata(pod)["uid"]
    return any(owner.get("uid") == uid for owner in metadata(claim).get("ownerReferences") or ())


class StorageProtection:
    """Keeps deleted claims while pods on nodes use them, and deleted volumes while they are bound.

    https://kubernetes.io/docs/concepts/storage/persistent-volumes/#storage-object-in-use-protection
    """

    def __init__(self, store: ClusterStore) -> None:
        self._store = store

    def sync(self) -> None:
        deleted = [claim for claim in self._store.list(CLAIMS) if _is_held(claim, CLAIM_PROTECTION)]
        used = _used_claims(self._store.list("pods")) if deleted else set()
        for claim in deleted:
            if (namespace_of(claim), name_of(claim)) not in used:
                self._let_go(CLAIMS, claim, CLAIM_PROTECTION)
        for volume in self._store.list(VOLUMES):
            if _is_held(volume, VOLUME_PROTECTION) and at_path(volume, "status.phase") != "Bound":
                self._let_go(VOLUMES, volume, VOLUME_PROTECTION)

    def _let_go(self, table: str, obj: Json, finalizer: str) -> None:
        others = [other for other in metadata(obj)["finalizers"] if other != finalizer]
        patch = {"metadata": {"finalizers": others or None}}
        self._store.patch(table, namespace_of(obj) or None, name_of(obj), patch)


def _is_held(obj: Json, finalizer: str) -> bool:
    return "deletionTimestamp" in metadata(obj) and finalizer in metadata(obj).get("finalizers", ())


def _used_claims(pods: Iterable[Json]) -> set[tuple[str, str]]:
    """Return namespace and name of the claims of pods on nodes, whether or not they have ended."""
    return {
        (namespace_of(pod), claim.name)
        for pod in pods
        if at_path(pod, "spec.nodeName")
        for claim in pod_claims(pod)
    }
