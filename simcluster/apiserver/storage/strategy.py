"""The strategy of a kind: the hooks that the store calls when its objects are written; pure."""

from typing import Protocol

from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, Objects
from simcluster.apiserver.storage.records import ObjectRecord


class ObjectLookup(Protocol):
    """The part of the store that a strategy reads."""

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
    """The default strategy, for kinds without behaviour of their own."""

    has_generation = False

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the initial state of a new object."""

    def admit(self, obj: Json, cluster: ObjectLookup) -> None:
        """Run the built-in admission on a new object; raises `ApiError` to refuse it."""

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set defaults, on each create and update."""

    def validate(self, obj: Json) -> list[Cause]:
        """Return the causes for which an object is invalid."""
        return metadata_causes(obj)

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Return the causes for which the change itself is invalid."""
        return []

    def validate_update(self, new: Json, old: Json) -> list[Cause]:
        """Return the causes for which an update is invalid: the new object, or the change."""
        return [*self.validate(new), *self.validate_transition(new, old)]

    def validate_subresource_update(self, new: Json, old: Json) -> list[Cause]:
        """Return the causes for which an update through a subresource is invalid."""
        return metadata_causes(new) if new["metadata"] != old["metadata"] else []

    def changes_generation(self, new: Json, old: Json) -> bool:
        """Return whether an update changes the desired state, not only the status."""
        return bool(new.get("spec") != old.get("spec"))

    def validate_delete(self, obj: Json, cluster: ObjectLookup) -> None:
        """Raise `ApiError` if the object may not be deleted."""

    def prepare_for_delete(self, obj: Json) -> None:
        """Change an object that is marked for deletion."""
