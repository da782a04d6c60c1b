"""The tables of the store: the records of each kind, their history and their persistence."""

from collections.abc import Mapping

from simcluster.apimachinery.objects import Json, decode
from simcluster.apimachinery.selectors import Selection
from simcluster.apiserver.storage.history import ChangeHistory, WatchSubscription
from simcluster.apiserver.storage.persistence import StorageBackend, StoredRow
from simcluster.apiserver.storage.records import ObjectChange, ObjectPage, ObjectRecord


class ObjectTables:
    """All tables by name; `version` is the latest resourceVersion of the cluster."""

    def __init__(self, backend: StorageBackend, *, window: int) -> None:
        self.version = max(backend.last_version(), 1)
        self._backend = backend
        self._window = window
        self._records: dict[str, dict[str, ObjectRecord]] = {}
        self._histories: dict[str, ChangeHistory] = {}
        self._unserved: dict[str, list[StoredRow]] = {}
        """Persisted rows of tables that are not open yet, by table."""
        for row in backend.rows():
            self._unserved.setdefault(row.resource, []).append(row)

    def open(self, table: str) -> None:
        """Open a table with its persisted rows; an open table stays as it is."""
        if table not in self._records:
            self._records[table] = {
                row.key: ObjectRecord(decode(row.body), row.version, row.body)
                for row in self._unserved.pop(table, ())
            }
            self._histories[table] = ChangeHistory(window=self._window, floor=self.version)

    def drop(self, table: str) -> None:
        """Remove a table: its rows are lost and its watches end."""
        for key in self._records.pop(table, {}):
            self.version += 1
            self._backend.write(table, key, self.version, None)
        history = self._histories.pop(table, None)
        if history is not None:
            history.close()

    def close(self) -> None:
        """Close the storage backend."""
        self._backend.close()

    def records(self, table: str) -> Mapping[str, ObjectRecord]:
        """Return the present records by key."""
        return self._records[table]

    def page(
        self, table: str, selection: Selection, *, limit: int, start: str, version: int | None
    ) -> ObjectPage:
        """Return the selected records from key `start` on, as of now or of an earlier version.

        An earlier version is read by undoing the later changes; 410 if they are dropped.
        """
        records: Mapping[str, ObjectRecord] = self._records[table]
        if version is not None and version != self.version:
            records = self._histories[table].records_at(version, records)
        as_of = version or self.version
        prefix = f"{selection.namespace}/" if selection.namespace else ""
        keys = sorted(key for key in records if key >= start and key.startswith(prefix))
        selected: list[ObjectRecord] = []
        for at, key in enumerate(keys):
            if limit and len(selected) == limit:
                return ObjectPage(selected, as_of, key, len(keys) - at)
            if selection.matches(records[key].obj):
                selected.append(records[key])
        return ObjectPage(selected, as_of, None, 0)

    def subscribe(self, table: str, selection: Selection, since: int | None) -> WatchSubscription:
        """Watch from a version on; from the present records if it is None."""
        history = self._histories[table]
        if since is None:
            records = [
                record for record in self._records[table].values() if selection.matches(record.obj)
            ]
            return WatchSubscription(history, selection, history.end_position(), records)
        return WatchSubscription(history, selection, history.position_after(since), [])

    def compact(self) -> None:
        """Drop all history, so that watches from earlier versions get 410."""
        for history in self._histories.values():
            history.compact()
            history.floor = self.version

    def write(self, table: str, key: str, new: Json) -> ObjectChange:
        """Write an object as the next version, which becomes its resourceVersion."""
        version = self.version + 1
        new["metadata"]["resourceVersion"] = str(version)
        record = ObjectRecord(new, version)
        self._backend.write(table, key, version, record.encoded)
        before = self._records[table].get(key)
        self._records[table][key] = record
        return self._append(table, ObjectChange(version, key, before, record, record))

    def remove(self, table: str, key: str, last: ObjectRecord) -> ObjectChange:
        """Remove an object; watches get `last` at the version of the removal."""
        version = self.version + 1
        self._backend.write(table, key, version, None)
        before = self._records[table].pop(key)
        change = ObjectChange(version, key, before, None, last.at_version(version))
        return self._append(table, change)

    def _append(self, table: str, change: ObjectChange) -> ObjectChange:
        self.version = change.version
        self._histories[table].append(change)
        return change
