"""The controller of CustomResourceDefinitions: serves their kinds and deletes their objects."""

from simcluster.apimachinery.objects import deep_copy, metadata, name_of, namespace_of
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.crd.custom_kinds import custom_kinds
from simcluster.apiserver.crd.definition_strategy import FINALIZER, TABLE, is_established
from simcluster.apiserver.storage.records import ObjectChange
from simcluster.apiserver.storage.store import ObjectStore


def serve_definitions(store: ObjectStore) -> None:
    """Serve the kinds of all established definitions."""
    for definition in store.list(TABLE):
        if is_established(definition):
            store.install(*custom_kinds(definition))


class DefinitionController:
    """Serves a definition's kinds as soon as it is established, until it is deleted."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        store.listeners.append(self._on_change)
        for definition in store.list(TABLE):
            if metadata(definition).get("deletionTimestamp"):
                self._empty(name_of(definition))

    def _on_change(self, kind: Resource, change: ObjectChange) -> None:
        if kind.table == TABLE:
            self._on_definition(change)
        elif change.after is None and kind.stored_as:
            self._finish(kind.table)

    def _on_definition(self, change: ObjectChange) -> None:
        definition = change.latest.obj
        if change.after is None:
            self._store.uninstall(name_of(definition))
            return
        if is_established(definition):
            self._store.install(*custom_kinds(definition))
        before = {} if change.before is None else metadata(change.before.obj)
        if metadata(definition).get("deletionTimestamp") and not before.get("deletionTimestamp"):
            self._empty(name_of(definition))

    def _empty(self, name: str) -> None:
        """Delete all objects of a terminating definition."""
        for obj in self._store.list(name) if name in self._store.kinds else ():
            if not metadata(obj).get("deletionTimestamp"):
                self._store.delete(name, namespace_of(obj) or None, name_of(obj))
        self._finish(name)

    def _finish(self, name: str) -> None:
        """Remove the finalizer of a terminating definition that has no objects left."""
        record = self._store.find(TABLE, None, name)
        if record is None or not metadata(record.obj).get("deletionTimestamp"):
            return
        if name in self._store.kinds and self._store.list(name):
            return
        emptied = deep_copy(record.obj)
        finalizers = metadata(emptied).get("finalizers") or []
        if FINALIZER in finalizers:
            emptied["metadata"]["finalizers"] = [
                finalizer for finalizer in finalizers if finalizer != FINALIZER
            ]
            self._store.update(TABLE, emptied)
