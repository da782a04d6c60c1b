"""The cluster's objects: versions, watches, graceful deletion, all in one process.

Every read and write goes through `Store`, whether it comes over HTTP or from a simulated kubelet in
the same process. No method waits, so code between two `await`s is atomic. Objects are plain JSON
maps. **Returned and watched objects are shared: copy one (`objects.copied`) before you change it.**
The store copies what it is given. It refuses with `ApiError`s that carry the `code` and `reason` of
the Kubernetes Status.

`patch` is a JSON merge patch unless told otherwise (a function from object to object). `update`
replaces, and is refused with 409 when the object it carries has another `resourceVersion` than the
stored one. With `subresource="status"` only status and labels, annotations and finalizers are
taken over; without it everything but status is. A pod that is bound to a node is only marked by
`delete` (`deletionTimestamp`, grace period) and goes when deleted with `grace_s=0`; an unbound or
finished one goes at once.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from simcluster.apimachinery.errors import ApiError
from simcluster.apimachinery.merge_patches import apply_merge_patch
from simcluster.apimachinery.objects import (
    Json,
    Objects,
    decode,
    deep_copy,
    metadata,
    name_of,
    namespace_of,
    rfc3339,
)
from simcluster.apimachinery.resources import Kinds, Resource
from simcluster.apimachinery.selectors import Selection, parse_selection
from simcluster.apiserver.storage.history import ChangeHistory, WatchSubscription
from simcluster.apiserver.storage.persistence import InMemoryBackend, StorageBackend, StoredRow
from simcluster.apiserver.storage.records import (
    ObjectChange,
    ObjectPage,
    ObjectRecord,
    WriteCounter,
)
from simcluster.apiserver.storage.strategy import KindStrategy
from simcluster.apiserver.storage.write_rules import (
    Deletion,
    assign_identity,
    check_namespace,
    check_preconditions,
    decide_deletion,
    merge_update,
    normalize_type,
    refuse_invalid,
)

DEFAULT_WINDOW = 5000

Patcher = Callable[[Json], Json]
AdmissionCheck = Callable[[Resource, Json | None, Json], None]
"""Asked before a write, with the object as it was and as it would be; raises to refuse it."""


class ObjectStore:
    """All objects of the cluster, each kind with its history."""

    def __init__(
        self,
        kinds: Kinds,
        strategy_of: Callable[[Resource], KindStrategy],
        disk: StorageBackend | None = None,
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
        self._disk = InMemoryBackend() if disk is None else disk
        self._window = window
        self.version = max(self._disk.last_version(), 1)
        self._records: dict[str, dict[str, ObjectRecord]] = {}
        self._histories: dict[str, ChangeHistory] = {}
        self._unserved: dict[str, list[StoredRow]] = {}
        """What the disk holds of kinds that are not served yet, by table."""
        for row in self._disk.rows():
            self._unserved.setdefault(row.resource, []).append(row)
        for kind in self.kinds.storage_versions():
            self._make_table(kind.table)

    def _make_table(self, table: str) -> None:
        if table not in self._records:
            self._records[table] = {
                row.key: ObjectRecord(decode(row.body), row.version, row.body)
                for row in self._unserved.pop(table, ())
            }
            self._histories[table] = ChangeHistory(window=self._window, floor=self.version)

    def install(self, stored: Resource, served: Sequence[Resource]) -> None:
        """Serve a defined kind in these versions, keeping what is stored of it."""
        self.kinds.install(stored.table, stored, served)
        self._make_table(stored.table)

    def uninstall(self, table: str) -> None:
        """Serve a defined kind no longer; what is stored of it is lost, its watches end."""
        for key in self._records.pop(table, {}):
            self.version += 1
            self._disk.write(table, key, self.version, None)
        history = self._histories.pop(table, None)
        if history is not None:
            history.close()
        self.kinds.remove(table)

    def close(self) -> None:
        """Release the disk."""
        self._disk.close()

    def now(self) -> str:
        """Return the cluster's time as a `metav1.Time`."""
        return rfc3339(self.clock())

    # Reading

    def find(self, resource: str, namespace: str | None, name: str) -> ObjectRecord | None:
        """Return the current version of an object, or None."""
        return self._records[resource].get(self._key(resource, namespace, name))

    def record(self, resource: str, namespace: str | None, name: str) -> ObjectRecord:
        """Return the current version of an object; 404 if there is none."""
        found = self.find(resource, namespace, name)
        if found is None:
            raise ApiError.not_found(self.kinds[resource].qualified, name)
        return found

    def read(self, resource: str, namespace: str | None, name: str) -> Json:
        """Return an object; 404 if there is none."""
        return self.record(resource, namespace, name).obj

    def list(
        self, resource: str, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Objects:
        """Return the selected objects in the order of their names."""
        chosen = parse_selection(self.kinds[resource], namespace, labels, fields)
        return [record.obj for record in self.page(resource, chosen).records]

    def page(
        self,
        resource: str,
        chosen: Selection,
        *,
        limit: int = 0,
        start: str = "",
        version: int | None = None,
    ) -> ObjectPage:
        """Return the part of a list from key `start`, as of now or as of an earlier version.

        An earlier version is found by undoing the changes since; 410 if they are forgotten.
        """
        records = self._records[resource]
        if version is not None and version != self.version:
            records = self._histories[resource].records_at(version, records)
        prefix = f"{chosen.namespace}/" if chosen.namespace else ""
        found: list[ObjectRecord] = []
        keys = sorted(key for key in records if key >= start and key.startswith(prefix))
        for at, key in enumerate(keys):
            if limit and len(found) == limit:
                return ObjectPage(found, version or self.version, key, len(keys) - at)
            if chosen.matches(records[key].obj):
                found.append(records[key])
        return ObjectPage(found, version or self.version, None, 0)

    # Watching

    def subscribe(
        self, resource: str, chosen: Selection, since_rv: int | None = None
    ) -> WatchSubscription:
        """Watch from a version on, or from the present state (ADDED for each object) if None."""
        history = self._histories[resource]
        if since_rv is None:
            records = [
                record for record in self._records[resource].values() if chosen.matches(record.obj)
            ]
            return WatchSubscription(history, chosen, history.end_position(), records)
        return WatchSubscription(history, chosen, history.position_after(since_rv), [])

    def watch(self, resource: str, *, fields: str = "") -> WatchSubscription:
        """Watch the selected objects of all namespaces, beginning with those that exist now."""
        return self.subscribe(resource, parse_selection(self.kinds[resource], fields=fields))

    def compact(self) -> None:
        """Forget all history, so that watches from earlier versions get 410."""
        for history in self._histories.values():
            history.compact()
            history.floor = self.version

    # Writing

    def create(self, resource: str, obj: Json, *, dry_run: bool = False) -> Json:
        """Store a new object and return it, completed with defaults."""
        return self.insert(resource, self.draft(resource, obj), dry_run=dry_run)

    def draft(self, resource: str, obj: Json) -> Json:
        """Return a new object as the built-in admission leaves it: named, with its uid."""
        kind = self.kinds.in_version(resource, obj.get("apiVersion"))
        new = normalize_type(deep_copy(obj), kind)
        assign_identity(new["metadata"], now=self.now())
        self._check_namespace(kind, new)
        self.admit(kind, new)
        return new

    def admit(self, kind: Resource, draft: Json) -> None:
        """Run the built-in admission over a draft, in place."""
        self._strategy_of(kind).admit(draft, self)

    def apply_defaults(self, kind: Resource, obj: Json) -> None:
        """Fill in the defaults of a kind, in place."""
        self._strategy_of(kind).apply_defaults(obj, self)

    def insert(self, resource: str, draft: Json, *, dry_run: bool = False) -> Json:
        """Complete, check and store a draft."""
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
        if key in self._records[resource]:
            raise ApiError.already_exists(kind.qualified, name_of(new))
        for gate in self.admission_checks:
            gate(self.kinds[resource], None, new)
        return self._commit(kind, key, None, new, verb="create", dry_run=dry_run)

    def draft_update(self, resource: str, obj: Json, *, subresource: str = "") -> tuple[Json, Json]:
        """Return what an update would store, completed but not checked, and what is there.

        409 if it carries an older resourceVersion or another uid.
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
        """Replace an object; 409 if it carries an older resourceVersion or another uid."""
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
        for gate in self.admission_checks if not subresource else ():
            gate(self.kinds[resource], old.obj, new)
        main = not subresource and strategy.has_generation
        if main and strategy.changes_generation(new, old.obj):
            new["metadata"]["generation"] = int(old.obj["metadata"].get("generation") or 0) + 1
        counted = f"{verb}/{subresource}".rstrip("/")
        meta = new["metadata"]
        if meta.get("deletionTimestamp") and decide_deletion(kind, new, grace_s=None).removes:
            return self._remove(
                kind, key, ObjectRecord(new, old.version), verb=counted, dry_run=dry_run
            )
        return self._commit(kind, key, old, new, verb=counted, dry_run=dry_run)

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
        """Delete an object, or mark it where its kubelet or a finalizer has to act first.

        Returns the object as marked, or as it last was; `gone` tells which of the two happened.
        """
        kind = self.kinds[resource]
        old = self.record(resource, namespace, name)
        wanted = {"uid": uid, "resourceVersion": resource_version}
        check_preconditions(kind, old.obj, wanted)
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
                return self._commit(kind, key, old, new, verb=counted, dry_run=dry_run)

    def is_gone(self, resource: str, obj: Json) -> bool:
        """Tell whether this very object (by uid) is no longer there."""
        found = self.find(resource, namespace_of(obj), name_of(obj))
        return found is None or found.obj["metadata"]["uid"] != obj["metadata"]["uid"]

    def list_namespace(self, namespace: str) -> Iterator[tuple[Resource, Json]]:
        """Iterate over all objects of a namespace."""
        prefix = f"{namespace}/"
        for kind in list(self.kinds.storage_versions()):
            if kind.namespaced:
                for key, record in list(self._records[kind.table].items()):
                    if key.startswith(prefix):
                        yield kind, record.obj

    def _check_namespace(self, kind: Resource, new: Json) -> None:
        if kind.namespaced:
            check_namespace(kind, new, self.find("namespaces", None, namespace_of(new)))
        else:
            new["metadata"].pop("namespace", None)

    def _commit(
        self,
        kind: Resource,
        key: str,
        old: ObjectRecord | None,
        new: Json,
        *,
        verb: str,
        dry_run: bool,
    ) -> Json:
        if dry_run:
            return new
        version = self.version + 1
        new["metadata"]["resourceVersion"] = str(version)
        record = ObjectRecord(new, version)
        self._disk.write(kind.table, key, version, record.encoded)
        self.version = version
        self._records[kind.table][key] = record
        self._notify(kind, key, ObjectChange(version, key, old, record, record), verb)
        return new

    def _remove(
        self, kind: Resource, key: str, old: ObjectRecord, *, verb: str, dry_run: bool
    ) -> Json:
        if dry_run:
            return old.obj
        version = self.version + 1
        self._disk.write(kind.table, key, version, None)
        self.version = version
        before = self._records[kind.table].pop(key)
        last = old.at_version(version)
        self._notify(kind, key, ObjectChange(version, key, before, None, last), verb)
        return last.obj

    def _notify(self, kind: Resource, key: str, change: ObjectChange, verb: str) -> None:
        self.writes.count(kind.table, key, verb)
        self._histories[kind.table].append(change)
        for listener in self.listeners:
            listener(kind, change)

    def _key(self, resource: str, namespace: str | None, name: str) -> str:
        return f"{namespace}/{name}" if self.kinds[resource].namespaced else name
