"""CustomResourceDefinitions in force: their kinds are served, and go with all their objects."""

from simcluster.apimachinery.objects import copied, metadata, name_of, namespace_of
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.crd.custom_kinds import kinds_of
from simcluster.apiserver.crd.definition_strategy import FINALIZER, TABLE, is_established
from simcluster.apiserver.storage.records import Change
from simcluster.apiserver.storage.store import Store


def serve_definitions(store: Store) -> None:
    """Serve the kinds of all definitions that are established."""
    for definition in store.list(TABLE):
        if is_established(definition):
            store.install(*kinds_of(definition))


class DefinedKinds:
    """Watches the store: a definition's kinds come with it and go when it is deleted."""

    def __init__(self, store: Store) -> None:
        self._store = store
        store.listeners.append(self._on_change)
        for definition in store.list(TABLE):
            if metadata(definition).get("deletionTimestamp"):
                self._empty(name_of(definition))

    def _on_change(self, kind: Resource, change: Change) -> None:
        if kind.table == TABLE:
            self._on_definition(change)
        elif change.after is None and kind.stored_as:
            self._finish(kind.table)

    def _on_definition(self, change: Change) -> None:
        definition = change.last.obj
        if change.after is None:
            self._store.withdraw(name_of(definition))
            return
        if is_established(definition):
            self._store.install(*kinds_of(definition))
        before = {} if change.before is None else metadata(change.before.obj)
        if metadata(definition).get("deletionTimestamp") and not before.get("deletionTimestamp"):
            self._empty(name_of(definition))

    def _empty(self, name: str) -> None:
        """Delete the objects of a definition that is going; it follows the last of them."""
        for obj in self._store.list(name) if name in self._store.kinds else ():
            if not metadata(obj).get("deletionTimestamp"):
                self._store.delete(name, namespace_of(obj) or None, name_of(obj))
        self._finish(name)

    def _finish(self, name: str) -> None:
        """Let a definition go that is being deleted and has no objects left."""
        found = self._store.find(TABLE, None, name)
        if found is None or not metadata(found.obj).get("deletionTimestamp"):
            return
        if name in self._store.kinds and self._store.list(name):
            return
        emptied = copied(found.obj)
        finalizers = metadata(emptied).get("finalizers") or []
        if FINALIZER in finalizers:
            emptied["metadata"]["finalizers"] = [each for each in finalizers if each != FINALIZER]
            self._store.update(TABLE, emptied)
