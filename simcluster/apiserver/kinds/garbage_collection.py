"""Garbage collection: objects whose owners are gone are deleted.

This includes an object that is created after its owner was deleted, as a controller does whose
write overtakes the news. An owner of a kind that is not served may exist.
A foreground deletion is carried out as a background one.
https://kubernetes.io/docs/concepts/architecture/garbage-collection/
"""

from collections import defaultdict

from simcluster.apimachinery.objects import Json, Objects, metadata, name_of, namespace_of
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.storage.records import ObjectChange, ObjectRecord
from simcluster.apiserver.storage.store import ObjectStore

_Key = tuple[str, str, str]
"""Table, namespace and name."""


class GarbageCollector:
    """The dependents of each owner, by the owner's uid."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._dependents: defaultdict[str, set[_Key]] = defaultdict(set)
        store.listeners.append(self._on_change)
        for kind in store.kinds.storage_versions():
            for obj in store.list(kind.table):
                self._add(kind.table, obj)

    def orphan(self, owner: Json) -> None:
        """Remove the references to an owner, so that its dependents stay when it is deleted."""
        uid = metadata(owner)["uid"]
        for table, namespace, name in list(self._dependents.get(uid, ())):

            def without_owner(obj: Json) -> Json:
                meta = metadata(obj)
                left = [
                    reference
                    for reference in meta.get("ownerReferences") or ()
                    if reference["uid"] != uid
                ]
                return {**obj, "metadata": {**meta, "ownerReferences": left}}

            self._store.patch(table, namespace, name, without_owner)

    def _on_change(self, kind: Resource, change: ObjectChange) -> None:
        if _owners(change.before) != _owners(change.after):
            if change.before is not None:
                self._remove(kind.table, change.before.obj)
            if change.after is not None:
                self._add(kind.table, change.after.obj)
        if change.before is None and change.after is not None:
            self._collect(kind.table, namespace_of(change.after.obj), name_of(change.after.obj))
        if change.after is None:
            uid = str(metadata(change.latest.obj).get("uid"))
            for table, namespace, name in sorted(self._dependents.pop(uid, ())):
                self._collect(table, namespace, name)

    def _collect(self, table: str, namespace: str, name: str) -> None:
        record = self._store.find(table, namespace, name)
        references = [] if record is None else _references(record.obj)
        if (
            record is not None
            and references
            and not any(self._exists(reference, namespace) for reference in references)
        ):
            self._store.delete(table, namespace, name, uid=record.obj["metadata"]["uid"])

    def _exists(self, reference: Json, namespace: str) -> bool:
        """Return whether an owner, of the dependent's namespace or of none, may exist."""
        wanted = (reference["apiVersion"], reference["kind"])
        for kind in self._store.kinds:
            if (kind.api_version, kind.kind) == wanted:
                owner = self._store.find(kind.table, namespace, reference["name"])
                return owner is not None and owner.obj["metadata"]["uid"] == reference["uid"]
        return True

    def _add(self, table: str, obj: Json) -> None:
        for uid in _uids(obj):
            self._dependents[uid].add((table, namespace_of(obj), name_of(obj)))

    def _remove(self, table: str, obj: Json) -> None:
        for uid in _uids(obj):
            dependents = self._dependents.get(uid)
            if dependents is not None:
                dependents.discard((table, namespace_of(obj), name_of(obj)))
                if not dependents:
                    del self._dependents[uid]


def _owners(record: ObjectRecord | None) -> list[str]:
    return [] if record is None else _uids(record.obj)


def _uids(obj: Json) -> list[str]:
    return [str(reference.get("uid")) for reference in _references(obj)]


def _references(obj: Json) -> Objects:
    return metadata(obj).get("ownerReferences") or []
