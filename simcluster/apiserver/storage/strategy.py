"""What a kind may do of its own when its objects are written; most kinds do nothing special."""

from typing import Protocol

from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, Objects
from simcluster.apiserver.storage.records import ObjectRecord


class ObjectLookup(Protocol):
    """What a strategy may ask of the cluster."""

    def now(self) -> str:
        """Return the cluster's time as a `metav1.Time`."""
        ...

    def find(self, resource: str, namespace: str | None, name: str) -> ObjectRecord | None:
        """Return the current version of an object, or None."""
        ...

    def list(
        self, resource: str, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Objects:
        """Return the selected objects."""
        ...


class KindStrategy:
    """The behaviour of a kind that has nothing special about it."""

    has_generation = False

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Bring a new object to its initial state."""

    def admit(self, obj: Json, cluster: ObjectLookup) -> None:
        """Do to a new object what the built-in admission does; raises `ApiError` to refuse it."""

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Fill in defaults, at creation and at every update."""

    def validate(self, obj: Json) -> list[Cause]:
        """Say what is wrong with the object as it is."""
        return metadata_causes(obj)

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Say what is wrong with the change from `old` to `new`, beyond what `check` says."""
        return []

    def validate_update(self, new: Json, old: Json) -> list[Cause]:
        """Say what is wrong with an update: with its outcome, and with the change itself."""
        return [*self.validate(new), *self.validate_transition(new, old)]

    def validate_subresource_update(self, new: Json, old: Json) -> list[Cause]:
        """Say what is wrong with an update through a subresource, which leaves the spec alone."""
        return metadata_causes(new) if new["metadata"] != old["metadata"] else []

    def changes_generation(self, new: Json, old: Json) -> bool:
        """Tell whether an update changes what its author wants, not only what is seen of it."""
        return bool(new.get("spec") != old.get("spec"))

    def validate_delete(self, obj: Json, cluster: ObjectLookup) -> None:
        """Raise `ApiError` where the object may not be deleted."""

    def prepare_for_delete(self, obj: Json) -> None:
        """Change what else changes when the object is marked as being deleted."""
