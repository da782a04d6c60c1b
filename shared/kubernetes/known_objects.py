"""The objects that a reflector knows: derives changes from lists and watch events; pure.

Repeated events and lists without deleted objects become a sequence with every change once, in
order.
"""

from typing import Generic, NamedTuple, TypeVar

from shared.kubernetes.types import ObjectMeta
from shared.kubernetes.watch_events import KubernetesObject, ObjectIdentity
from shared.model.quantity import parse_decimal

R = TypeVar("R", bound=KubernetesObject)
Key = tuple[str, str]
Named = ObjectMeta | ObjectIdentity
Change = tuple[Named, R | None]
"""None if the object no longer exists or matches; the resource version is then that of the deletion
or of the list."""
TOMBSTONES = 4096


def newer(version: str, known_version: str) -> bool:
    """Decimal versions compare as integers (KEP-5504); of others, all but an equal one are newer.

    >>> newer("1000", "999"), newer("999", "1000")
    (True, False)
    """
    number = parse_decimal(version)
    known_number = parse_decimal(known_version)
    if number is not None and known_number is not None:
        return number > known_number
    return version != known_version


def as_number(version: str) -> int:
    """Return 0 for an opaque version."""
    return parse_decimal(version) or 0


def is_older(version: str, known_version: str) -> bool:
    """Both must be numbers."""
    return 0 < as_number(version) < as_number(known_version)


class _Known(NamedTuple):
    uid: str
    resource_version: str


class KnownObjects(Generic[R]):
    def __init__(self) -> None:
        self.resource_version = ""
        self._objects: dict[Key, _Known] = {}
        self._missing: dict[Key, None] = {}
        self._listed_at = ""
        self._tombstones: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def begin_list(self) -> None:
        """Known objects count as missing until the list contains them."""
        self._missing = dict.fromkeys(self._objects)

    def list_item(self, item: R) -> tuple[Change[R], ...]:
        """Apply the item even if its version is lower than the known one."""
        metadata = item.metadata
        self._missing.pop(_key(metadata), None)
        if self._objects.get(_key(metadata)) == (metadata.uid, metadata.resource_version):
            return ()
        return self._store(item)

    def list_undecodable(self, named: ObjectIdentity) -> None:
        """Keep the known state."""
        latest = self._objects.get(_key(named))
        if latest is not None and latest.uid == named.uid:
            self._missing.pop(_key(named), None)

    def end_list(self, resource_version: str) -> tuple[Change[R], ...]:
        gone = tuple(self._delete(key, resource_version) for key in self._missing)
        self._missing = {}
        self._tombstones.clear()
        self.resource_version = resource_version
        self._listed_at = self.resource_version
        return gone

    def upsert(self, item: R) -> tuple[Change[R], ...]:
        metadata = item.metadata
        if self._is_old(metadata):
            return ()
        self.advance(metadata.resource_version)
        return self._store(item)

    def remove(self, named: Named) -> tuple[Change[R], ...]:
        if self._is_old(named):
            return ()
        self.advance(named.resource_version)
        self._record_deletion(named)
        latest = self._objects.get(_key(named))
        if latest is None or latest.uid != named.uid:
            return ()
        return (self._delete(_key(named), named.resource_version),)

    def skip(self, named: ObjectIdentity) -> tuple[Change[R], ...]:
        """Keep the known state of what cannot be decoded."""
        if self._is_old(named):
            return ()
        self.advance(named.resource_version)
        latest = self._objects.get(_key(named))
        if latest is None or latest.uid == named.uid:
            return ()
        return (self._delete(_key(named), named.resource_version),)

    def advance(self, resource_version: str) -> None:
        if newer(resource_version, self.resource_version):
            self.resource_version = resource_version

    def _is_old(self, named: Named) -> bool:
        """Return whether it is a repetition, or older than the known state."""
        latest = self._objects.get(_key(named))
        if latest is not None:
            floor = latest.resource_version
        else:
            floor = self._tombstones.get(named.uid, self._listed_at)
        return not newer(named.resource_version, floor)

    def _store(self, item: R) -> tuple[Change[R], ...]:
        metadata = item.metadata
        key = _key(metadata)
        version = metadata.resource_version
        latest = self._objects.get(key)
        is_replaced = latest is not None and latest.uid != metadata.uid
        deleted = (self._delete(key, version),) if is_replaced else ()
        self._objects[key] = _Known(metadata.uid, version)
        return (*deleted, (metadata, item))

    def _delete(self, key: Key, resource_version: str) -> Change[R]:
        namespace, name = key
        uid = self._objects.pop(key).uid
        return ObjectIdentity(name, namespace, uid, resource_version), None

    def _record_deletion(self, named: Named) -> None:
        """A late event must not add the object again."""
        self._tombstones[named.uid] = named.resource_version
        if len(self._tombstones) > TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]


def _key(named: Named) -> Key:
    return (named.namespace, named.name)
