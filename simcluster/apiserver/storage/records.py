"""Values of the store: versions of objects, changes, pages, events, write counts; pure."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from simcluster.apimachinery.objects import Json, deep_copy, encode


class ObjectRecord:
    """One version of one object and its encoding; never changed."""

    __slots__ = ("encoded", "obj", "version")

    def __init__(self, obj: Json, version: int, encoded: bytes | None = None) -> None:
        self.obj = obj
        self.version = version
        self.encoded = encode(obj) if encoded is None else encoded

    def at_version(self, version: int) -> "ObjectRecord":
        """Return the same object with another resourceVersion."""
        obj = deep_copy(self.obj)
        obj["metadata"]["resourceVersion"] = str(version)
        return ObjectRecord(obj, version)


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """One write: `before` is None for a creation, `after` for a deletion."""

    version: int
    key: str
    before: ObjectRecord | None
    after: ObjectRecord | None
    latest: ObjectRecord  # what watches show: `after`, or `before` at the version of the deletion


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """Part of a list as of one version; `rest` is the start of the next part, None at the end."""

    records: list[ObjectRecord]
    version: int
    rest: str | None
    remaining: int


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """One event of a watch: ADDED, MODIFIED or DELETED, and the object at that version."""

    type: str
    record: ObjectRecord

    @property
    def object(self) -> Json:
        """The object; shared, so copy it before you change it."""
        return self.record.obj


class WriteCounter:
    """Counts accepted writes per object and verb, such as `create/binding` or `patch/status`.

    Refused HTTP requests are counted as `create/binding refused 409`.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)

    def count(self, resource: str, key: str, verb: str) -> None:
        """Count one write; `key` is `namespace/name`, or the name alone."""
        self._counts[f"{resource}/{key}"][verb] += 1

    def counts(self, resource: str, key: str) -> dict[str, int]:
        """Return the writes of one object by verb."""
        return dict(self._counts.get(f"{resource}/{key}", {}))

    def all_counts(self, prefix: str = "") -> Json:
        """Return the writes of all objects whose path starts with `prefix`."""
        return {
            path: dict(counts) for path, counts in self._counts.items() if path.startswith(prefix)
        }
