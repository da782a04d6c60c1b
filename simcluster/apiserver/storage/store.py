"""The store of the cluster's objects: versions, watches, graceful deletion.

Every read and write goes through `ObjectStore`, whether it comes over HTTP or from a simulated
kubelet in the same process. No method waits, so code between two `await`s is atomic. Objects are
plain JSON maps. **Returned and watched objects are shared: copy one (`objects.deep_copy`) before
you change it.** The store copies what it is given. Refusals are `ApiError`s with the `code` and
`reason` of the Kubernetes Status.

`patch` takes a JSON merge patch, or a function from object to object. `update` replaces an object,
and refuses with 409 if the given object has another `resourceVersion` than the stored one. With
`subresource="status"`, a write changes status, labels, annotations and finalizers only; without it,
everything but the status. `delete` only marks a pod that is bound to a node (`deletionTimestamp`,
grace period); a delete with `grace_s=0` removes it. It removes unbound and finished pods at once.
"""

import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.merge_patches import apply_merge_patch
from simcluster.apimachinery.objects import (
    Json,
    Objects,
    deep_copy,
    metadata,
    name_of,
    namespace_of,
    rfc3339,
)
from simcluster.apimachinery.resources import Kinds, Resource
from simcluster.apimachinery.selectors import Selection, parse_selection
from simcluster.apiserver.storage.history import WatchSubscription
from simcluster.apiserver.storage.persistence import InMemoryBackend, StorageBackend
from simcluster.apiserver.storage.records import (
    ObjectChange,
    ObjectPage,
    ObjectRecord,
    WriteCounter,
)
from simcluster.apiserver.storage.strategy import KindStrategy
from simcluster.apiserver.storage.tables import ObjectTables
from simcluster.apiserver.storage.write_rules import (
    Deletion,
    check_namespace,
    check_preconditions,
    decide_deletion,
    merge_update,
    normalize_type,
    refuse_invalid,
)

DEFAULT_WINDOW = 5000
_NAME_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"

Patcher = Callable[[Json], Json]
AdmissionCheck = Callable[[Resource, Json | None, Json], None]
"""Called before a write with the old and the new object; raises to refuse the write."""


class ObjectStore:
    """All objects of the cluster, and the history of each kind."""

    def __init__(
        self,
        kinds: Kinds,
        strategy_of: Callable[[Resource], KindStrategy],
        backend: StorageBackend | None = None,
        *,
        window: int = DEFAULT_WINDOW,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.writes = WriteCounter()
        self.listeners: list[Callable[[Resource, ObjectChange], None]] = []
        self.admission_checks: list[AdmissionCheck] = []
        self.kinds = kinds
        self._strategy_of = strategy_of
        self._tables = ObjectTables(
            InMemoryBackend() if backend is None else backend, window=window
        )
        for kind in self.kinds.storage_versions():
            self._tables.open(kind.table)

    @property
    def version(self) -> int:
        """The latest resourceVersion of the cluster."""
        return self._tables.version

    def install(self, stored: Resource, served: Sequence[Resource]) -> None:
        """Serve a defined kind in these versions, with its persisted objects."""
        self.kinds.install(stored.table, stored, served)
        self._tables.open(stored.table)

    def uninstall(self, table: str) -> None:
        """Stop serving a defined kind: its objects are lost and its watches end."""
        self._tables.drop(table)
        self.kinds.remove(table)

    def close(self) -> None:
        """Close the storage backend."""
        self._tables.close()

    def now(self) -> str:
        """Return the cluster's time as a `metav1.Time`."""
        return rfc3339(self.clock())

    # Reads

    def find(self, resource: str, namespace: str | None, name: str) -> ObjectRecord | None:
        """Return the current version of an object, or None."""
        return self._tables.records(resource).get(self._key(resource, namespace, name))

    def record(self, resource: str, namespace: str | None, name: str) -> ObjectRecord:
        """Return the current version of an object; 404 if there is none."""
        record = self.find(resource, namespace, name)
        if record is None:
            raise ApiError.not_found(self.kinds[resource].qualified, name)
        return record

    def read(self, resource: str, namespace: str | None, name: str) -> Json:
        """Return an object; 404 if there is none."""
        return self.record(resource, namespace, name).obj

    def list(
        self, resource: str, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Objects:
        """Return the selected objects in the order of their names."""
        selection = parse_selection(self.kinds[resource], namespace, labels, fields)
        return [record.obj for record in self.page(resource, selection).records]

    def page(
        self,
        resource: str,
        selection: Selection,
        *,
        limit: int = 0,
        start: str = "",
        version: int | None = None,
    ) -> ObjectPage:
        """Return the part of a list from key `start` on, as of now or of an earlier version.

        An earlier version is read by undoing the later changes; 410 if they are dropped.
        """
        return self._tables.page(resource, selection, limit=limit, start=start, version=version)

    # Watches

    def subscribe(
        self, resource: str, selection: Selection, since_rv: int | None = None
    ) -> WatchSubscription:
        """Watch from a version on; from the present objects (an ADDED event each) if it is None."""
        return self._tables.subscribe(resource, selection, since_rv)

    def watch(self, resource: str, *, fields: str = "") -> WatchSubscription:
        """Watch the selected objects of all namespaces, starting with the present ones."""
        return self.subscribe(resource, parse_selection(self.kinds[resource], fields=fields))

    def compact(self) -> None:
        """Drop all history, so that watches from earlier versions get 410."""
        self._tables.compact()

    # Writes

    def create(self, resource: str, obj: Json, *, dry_run: bool = False) -> Json:
        """Store a new object and return it with its defaults."""
        return self.insert(resource, self.draft(resource, obj), dry_run=dry_run)

    def draft(self, resource: str, obj: Json) -> Json:
        """Return a new object after built-in admission, with its name and uid."""
        kind = self.kinds.in_version(resource, obj.get("apiVersion"))
        new = normalize_type(deep_copy(obj), kind)
        _assign_identity(new["metadata"], now=self.now())
        self._check_namespace(kind, new)
        self.admit(kind, new)
        return new

    def admit(self, kind: Resource, draft: Json) -> None:
        """Run the built-in admission on a draft, in place."""
        self._strategy_of(kind).admit(draft, self)

    def apply_defaults(self, kind: Resource, obj: Json) -> None:
        """Set the defaults of a kind, in place."""
        self._strategy_of(kind).apply_defaults(obj, self)

    def insert(self, resource: str, draft: Json, *, dry_run: bool = False) -> Json:
        """Set defaults, validate and store a draft."""
        kind = self.kinds.in_version(resource, draft.get("apiVersion"))
        new = deep_copy(draft) if dry_run else draft
        self._check_namespace(kind, new)
        strategy = self._strategy_of(kind)
        if strategy.has_generation:
            new["metadata"]["generation"] = 1
        strategy.prepare_for_create(new, self)
        strategy.apply_defaults(new, self)
        refuse_invalid(kind, new, strategy.validate(new))
        new["apiVersion"] = self.kinds[resource].api_version
        key = self._key(resource, namespace_of(new), name_of(new))
        if key in self._tables.records(resource):
            raise ApiError.already_exists(kind.qualified, name_of(new))
        for check in self.admission_checks:
            check(self.kinds[resource], None, new)
        return self._commit(kind, key, new, verb="create", dry_run=dry_run)

    def draft_update(self, resource: str, obj: Json, *, subresource: str = "") -> tuple[Json, Json]:
        """Return the object that an update would store, before validation, and the present one.

        409 if the given object has another resourceVersion or uid.
        """
        kind = self.kinds.in_version(resource, obj.get("apiVersion"))
        new = normalize_type(deep_copy(obj), kind)
        old = self.read(resource, namespace_of(new), name_of(new))
        check_preconditions(kind, old, metadata(new))
        new = merge_update(kind, new, old, subresource)
        if not subresource:
            self.apply_defaults(kind, new)
        return new, old

    def update(
        self, resource: str, obj: Json, *, subresource: str = "", dry_run: bool = False,
        verb: str = "update",
    ) -> Json:  # fmt: skip
        """Replace an object; 409 if the given one has another resourceVersion or uid."""
        new, _ = self.draft_update(resource, obj, subresource=subresource)
        kind = self.kinds.in_version(resource, new.get("apiVersion"))
        old = self.record(resource, namespace_of(new), name_of(new))
        strategy = self._strategy_of(kind)
        validate = strategy.validate_subresource_update if subresource else strategy.validate_update
        refuse_invalid(kind, new, validate(new, old.obj))
        new["apiVersion"] = self.kinds[resource].api_version
        key = self._key(resource, namespace_of(new), name_of(new))
        if new == old.obj:
            if not dry_run:
                self.writes.count(resource, key, f"{verb}/{subresource}".rstrip("/"))
            return old.obj
        for check in self.admission_checks if subresource in {"", "resize"} else ():
            check(self.kinds[resource], old.obj, new)
        has_generation = subresource != "status" and strategy.has_generation
        if has_generation and strategy.changes_generation(new, old.obj):
            new["metadata"]["generation"] = int(old.obj["metadata"].get("generation") or 0) + 1
        counted = f"{verb}/{subresource}".rstrip("/")
        meta = new["metadata"]
        if meta.get("deletionTimestamp") and decide_deletion(kind, new, grace_s=None).removes:
            return self._remove(
                kind, key, ObjectRecord(new, old.version), verb=counted, dry_run=dry_run
            )
        return self._commit(kind, key, new, verb=counted, dry_run=dry_run)

    def patch(
        self, resource: str, namespace: str | None, name: str, patch: Json | Patcher, *,
        subresource: str = "", dry_run: bool = False,
    ) -> Json:  # fmt: skip
        """Apply a JSON merge patch, or a function from object to object."""
        old = deep_copy(self.read(resource, namespace, name))
        new = patch(old) if callable(patch) else apply_merge_patch(old, patch)
        return self.update(resource, new, subresource=subresource, dry_run=dry_run, verb="patch")

    def delete(
        self, resource: str, namespace: str | None, name: str, *, grace_s: int | None = None,
        uid: str | None = None, resource_version: str | None = None, dry_run: bool = False,
        subresource: str = "",
    ) -> Json:  # fmt: skip
        """Delete an object, or mark it if its kubelet or a finalizer must act first.

        Returns the marked object, or the last state of the deleted one; see `is_gone`.
        """
        kind = self.kinds[resource]
        old = self.record(resource, namespace, name)
        preconditions = {"uid": uid, "resourceVersion": resource_version}
        check_preconditions(kind, old.obj, preconditions)
        key = self._key(resource, namespace, name)
        counted = f"delete/{subresource}".rstrip("/")
        self._strategy_of(kind).validate_delete(old.obj, self)
        match decide_deletion(kind, old.obj, grace_s=grace_s):
            case Deletion(removes=True):
                return self._remove(kind, key, old, verb=counted, dry_run=dry_run)
            case Deletion(changes=False):
                return old.obj
            case Deletion(grace_s=seconds):
                new = deep_copy(old.obj)
                new["metadata"]["deletionTimestamp"] = rfc3339(self.clock() + seconds)
                new["metadata"]["deletionGracePeriodSeconds"] = seconds
                self._strategy_of(kind).prepare_for_delete(new)
                return self._commit(kind, key, new, verb=counted, dry_run=dry_run)

    def is_gone(self, resource: str, obj: Json) -> bool:
        """Return whether this object, by its uid, no longer exists."""
        record = self.find(resource, namespace_of(obj), name_of(obj))
        return record is None or record.obj["metadata"]["uid"] != obj["metadata"]["uid"]

    def list_namespace(self, namespace: str) -> Iterator[tuple[Resource, Json]]:
        """Iterate over all objects of a namespace."""
        prefix = f"{namespace}/"
        for kind in list(self.kinds.storage_versions()):
            if kind.namespaced:
                for key, record in list(self._tables.records(kind.table).items()):
                    if key.startswith(prefix):
                        yield kind, record.obj

    def _check_namespace(self, kind: Resource, new: Json) -> None:
        if kind.namespaced:
            check_namespace(kind, new, self.find("namespaces", None, namespace_of(new)))
        else:
            new["metadata"].pop("namespace", None)

    def _commit(self, kind: Resource, key: str, new: Json, *, verb: str, dry_run: bool) -> Json:
        if not dry_run:
            self._notify(kind, self._tables.write(kind.table, key, new), verb)
        return new

    def _remove(
        self, kind: Resource, key: str, last: ObjectRecord, *, verb: str, dry_run: bool
    ) -> Json:
        if dry_run:
            return last.obj
        change = self._tables.remove(kind.table, key, last)
        self._notify(kind, change, verb)
        return change.latest.obj

    def _notify(self, kind: Resource, change: ObjectChange, verb: str) -> None:
        self.writes.count(kind.table, change.key, verb)
        for listener in self.listeners:
            listener(kind, change)

    def _key(self, resource: str, namespace: str | None, name: str) -> str:
        return f"{namespace}/{name}" if self.kinds[resource].namespaced else name


def _generated_name(prefix: str) -> str:
    """Return the prefix with five random letters, cut to at most 63 characters."""
    return prefix[:58] + "".join(secrets.choice(_NAME_ALPHABET) for _ in range(5))


def _assign_identity(meta: Json, *, now: str) -> None:
    """Set the name, the uid and the creation time of a new object."""
    if "name" not in meta and meta.get("generateName"):
        meta["name"] = _generated_name(meta["generateName"])
    meta.update(uid=str(uuid.uuid4()), creationTimestamp=now)
    for absent in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds",
                   "selfLink", "managedFields"):  # fmt: skip
        meta.pop(absent, None)
