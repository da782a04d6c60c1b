"""What a kind may do of its own when its objects are written; most kinds do nothing special."""

from typing import Protocol

from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, Objects
from simcluster.apiserver.storage.records import Record


class Lookup(Protocol):
    """What a strategy may ask of the cluster."""

    def now(self) -> str:
        """Return the cluster's time as a `metav1.Time`."""
        ...

    def find(self, resource: str, namespace: str | None, name: str) -> Record | None:
        """Return the current version of an object, or None."""
        ...

    def list(
        self, resource: str, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Objects:
        """Return the selected objects."""
        ...


class Strategy:
    """The behaviour of a kind that has nothing special about it."""

    counts_generations = False

    def begin(self, obj: Json, cluster: Lookup) -> None:
        """Bring a new object to its initial state."""

    def admit(self, obj: Json, cluster: Lookup) -> None:
        """Do to a new object what the built-in admission does; raises `ApiError` to refuse it."""

    def complete(self, obj: Json, cluster: Lookup) -> None:
        """Fill in defaults, at creation and at every update."""

    def check(self, obj: Json) -> list[Cause]:
        """Say what is wrong with the object as it is."""
        return metadata_causes(obj)

    def check_update(self, new: Json, old: Json) -> list[Cause]:
        """Say what is wrong with the change from `old` to `new`, beyond what `check` says."""
        return []

    def check_change(self, new: Json, old: Json) -> list[Cause]:
        """Say what is wrong with an update: with its outcome, and with the change itself."""
        return [*self.check(new), *self.check_update(new, old)]

    def check_part(self, new: Json, old: Json) -> list[Cause]:
        """Say what is wrong with an update through a subresource, which leaves the spec alone."""
        return metadata_causes(new) if new["metadata"] != old["metadata"] else []

    def is_new_generation(self, new: Json, old: Json) -> bool:
        """Tell whether an update changes what its author wants, not only what is seen of it."""
        return bool(new.get("spec") != old.get("spec"))

    def check_delete(self, obj: Json, cluster: Lookup) -> None:
        """Raise `ApiError` where the object may not be deleted."""

    def mark_deleted(self, obj: Json) -> None:
        """Change what else changes when the object is marked as being deleted."""
