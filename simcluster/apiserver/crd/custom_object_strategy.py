"""How objects of a custom kind are written: by the schema of the version they come in."""

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, metadata
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.crd.schema_check import ABSENT, schema_violations
from simcluster.apiserver.crd.schema_rules import rule_violations
from simcluster.apiserver.crd.schema_shape import fill_defaults, prune
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup

_UNCOUNTED = frozenset({"apiVersion", "kind", "metadata"})


class CustomObjectStrategy(KindStrategy):
    """Custom objects are pruned, completed and checked by their schema."""

    has_generation = True

    def __init__(self, kind: CustomKind) -> None:
        self.kind = kind

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Begin without a status where that is a subresource; 405 while the kind is going."""
        definition = cluster.find("customresourcedefinitions", None, self.kind.table)
        if definition is None or metadata(definition.obj).get("deletionTimestamp"):
            text = "create not allowed while custom resource definition is terminating"
            raise ApiError(405, "MethodNotAllowed", text)
        if self.kind.has_status:
            obj.pop("status", None)

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Drop what the schema does not know and fill in its defaults."""
        prune(self.kind.schema, obj)
        fill_defaults(self.kind.schema, obj)

    def validate(self, obj: Json) -> list[Cause]:
        """Check metadata and schema."""
        return [*metadata_causes(obj), *self._violations(obj, ABSENT)]

    def validate_update(self, new: Json, old: Json) -> list[Cause]:
        """Check what has changed; what was wrong before and stays as it is stays allowed."""
        return [*metadata_causes(new), *self._violations(new, old)]

    def validate_subresource_update(self, new: Json, old: Json) -> list[Cause]:
        """Check the status, which is all that a subresource changes."""
        status = (self.kind.schema.get("properties") or {}).get("status")
        if "status" not in new or not isinstance(status, dict):
            return []
        prune({"properties": {"status": status}}, {"status": new["status"]})
        fill_defaults(status, new["status"])
        return list(schema_violations(status, new["status"], "status", old.get("status", ABSENT)))

    def changes_generation(self, new: Json, old: Json) -> bool:
        """Everything counts but metadata, and the status where that is a subresource."""
        apart = _UNCOUNTED | ({"status"} if self.kind.has_status else frozenset())
        return {k: v for k, v in new.items() if k not in apart} != {
            k: v for k, v in old.items() if k not in apart
        }

    def _violations(self, obj: Json, old: Json) -> list[Cause]:
        """Check by the schema; its root's own fields are checked elsewhere."""
        schema = self.kind.schema
        own = {key: value for key, value in (schema.get("properties") or {}).items()
               if key not in _UNCOUNTED}  # fmt: skip
        causes = list(schema_violations({**schema, "properties": own}, obj, "", old))
        if self.kind.rules and not causes:
            causes = list(rule_violations(schema, obj, "", old))
        return causes
