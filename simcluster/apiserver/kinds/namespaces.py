"""The controller of namespaces, and the objects that each cluster and namespace begins with."""

from simcluster.apimachinery.objects import (
    Json,
    at_path,
    deep_copy,
    metadata,
    name_of,
    namespace_of,
)
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.kinds.default_roles import default_roles
from simcluster.apiserver.kinds.strategies import SYSTEM_PRIORITIES
from simcluster.apiserver.storage.records import ObjectChange
from simcluster.apiserver.storage.store import ObjectStore

INITIAL = ("default", "kube-system", "kube-public", "kube-node-lease")


def create_system_objects(store: ObjectStore) -> None:
    """Create the namespaces, priority classes and roles of every cluster, if they are missing."""
    for name in INITIAL:
        if store.find("namespaces", None, name) is None:
            store.create("namespaces", {"metadata": {"name": name}})
    for name, value in SYSTEM_PRIORITIES.items():
        if store.find("priorityclasses", None, name) is None:
            store.create("priorityclasses", {"metadata": {"name": name}, "value": value})
    for table, obj in default_roles():
        if store.find(table, namespace_of(obj), name_of(obj)) is None:
            store.create(table, obj)


class NamespaceController:
    """Empties a terminating namespace, then removes it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        store.listeners.append(self._on_change)
        for namespace in store.list("namespaces"):
            if metadata(namespace).get("deletionTimestamp"):
                self._empty(name_of(namespace))

    def _on_change(self, kind: Resource, change: ObjectChange) -> None:
        if kind.table == "namespaces":
            self._on_namespace(change)
        elif change.after is None and kind.namespaced:
            self._finish(namespace_of(change.latest.obj))

    def _on_namespace(self, change: ObjectChange) -> None:
        if change.after is None:
            return
        name = name_of(change.after.obj)
        if change.before is None:
            account = {"metadata": {"name": "default", "namespace": name}}
            self._store.create("serviceaccounts", account)
        elif metadata(change.after.obj).get("deletionTimestamp") and not metadata(
            change.before.obj
        ).get("deletionTimestamp"):
            self._empty(name)

    def _empty(self, name: str) -> None:
        for kind, obj in self._store.list_namespace(name):
            if not self._store.is_gone(kind.table, obj):
                self._store.delete(kind.table, name, name_of(obj))
        self._finish(name)

    def _finish(self, name: str) -> None:
        """Remove the finalizer of a terminating namespace that is empty."""
        record = self._store.find("namespaces", None, name)
        if record is None or not metadata(record.obj).get("deletionTimestamp"):
            return
        if at_path(record.obj, "spec.finalizers") and not any(self._store.list_namespace(name)):
            emptied: Json = deep_copy(record.obj)
            emptied["spec"]["finalizers"] = []
            self._store.update("namespaces", emptied, subresource="finalize")
