"""The strategy of CustomResourceDefinitions: names, conditions and stored versions."""

from collections.abc import Iterator, Mapping

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, at_path, json_text, name_of
from simcluster.apiserver.crd.definition_validation import definition_causes
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup

TABLE = "customresourcedefinitions"
FINALIZER = "customresourcecleanup.apiextensions.k8s.io"
_IMMUTABLE = ("group", "scope", "names.plural", "names.kind")


def is_established(definition: Json) -> bool:
    """Return whether the definition's kinds are served."""
    return any(
        condition.get("type") == "Established" and condition.get("status") == "True"
        for condition in at_path(definition, "status.conditions") or ()
    )


class DefinitionStrategy(KindStrategy):
    """Establishes a definition at once, unless another one uses its names."""

    has_generation = True

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Reset the status and add the finalizer that waits for the objects."""
        obj["status"] = {}
        finalizers = obj["metadata"].setdefault("finalizers", [])
        if FINALIZER not in finalizers:
            finalizers.append(FINALIZER)

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set names and versions, and write the status."""
        spec = obj.get("spec")
        if not isinstance(spec, dict) or not isinstance(spec.get("versions"), list):
            raise ApiError.bad_request("a CustomResourceDefinition must have a spec with versions")
        names = spec.setdefault("names", {})
        kind = str(names.get("kind") or "")
        names["singular"] = names.get("singular") or kind.lower()
        names["listKind"] = names.get("listKind") or (f"{kind}List" if kind else "")
        spec.setdefault("conversion", {"strategy": "None"})
        self._observe(obj, cluster)

    def validate(self, obj: Json) -> list[Cause]:
        """Validate metadata, names, versions and schemas."""
        return [*metadata_causes(obj), *definition_causes(obj)]

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """An established definition keeps its names and its stored versions."""
        return list(_immutable_causes(new, old))

    def prepare_for_delete(self, obj: Json) -> None:
        """Add the condition `Terminating`."""
        text = "CustomResource deletion is in progress"
        condition = {"type": "Terminating", "status": "True",
                     "lastTransitionTime": obj["metadata"]["deletionTimestamp"],
                     "reason": "InstanceDeletionInProgress", "message": text}  # fmt: skip
        obj["status"]["conditions"] = [*(at_path(obj, "status.conditions") or ()), condition]

    def _observe(self, obj: Json, cluster: ObjectLookup) -> None:
        status = obj.get("status") or {}
        taken = next(_taken_names(obj, cluster.list(TABLE)), "")
        names = status.get("acceptedNames") or {} if taken else dict(obj["spec"]["names"])
        obj["status"] = {
            "conditions": _conditions(status, taken, now=cluster.now()),
            "acceptedNames": names,
            "storedVersions": _stored_versions(obj["spec"], status),
        }


def _conditions(status: Json, taken_name: str, *, now: str) -> list[Json]:
    by_type = {condition["type"]: condition for condition in status.get("conditions") or ()}
    accepted = ("True", "NoConflicts", "no conflicts found")
    established = ("True", "InitialNamesAccepted", "the initial names have been accepted")
    if taken_name:
        accepted = ("False", "NamesConflict", f"{json_text(taken_name)} is already in use")
        established = ("False", "NotAccepted", "not all names are accepted")
    for name, values in (("NamesAccepted", accepted), ("Established", established)):
        by_type[name] = _condition(by_type.get(name), name, *values, now=now)
    return list(by_type.values())


def _stored_versions(spec: Json, status: Json) -> list[str]:
    """Return the versions in which objects may be stored: earlier ones and the present one."""
    before = status.get("storedVersions") or []
    stored = [v["name"] for v in spec["versions"] if v.get("storage") and v.get("name")]
    return [*before, *(name for name in stored if name not in before)]


def _condition(
    old: Mapping[str, str] | None, name: str, status: str, reason: str, message: str, *, now: str
) -> Json:
    since = old["lastTransitionTime"] if old and old["status"] == status else now
    return {"type": name, "status": status, "lastTransitionTime": since, "reason": reason,
            "message": message}  # fmt: skip


def _taken_names(definition: Json, others: list[Json]) -> Iterator[str]:
    """Iterate over the names that another definition of the group uses."""
    spec = definition["spec"]
    own_names = _names(spec["names"])
    for other in others:
        if other["spec"]["group"] == spec.get("group") and name_of(other) != name_of(definition):
            other_names = _names(at_path(other, "status.acceptedNames") or {})
            yield from sorted((own_names[0] & other_names[0]) | (own_names[1] & other_names[1]))


def _names(names: Json) -> tuple[set[str], set[str]]:
    resources = {names.get("plural"), names.get("singular"), *(names.get("shortNames") or ())}
    kinds = {names.get("kind"), names.get("listKind")}
    return {str(name) for name in resources if name}, {str(name) for name in kinds if name}


def _immutable_causes(new: Json, old: Json) -> Iterator[Cause]:
    if is_established(old):
        for path in _IMMUTABLE:
            now = at_path(new["spec"], path)
            if now != at_path(old["spec"], path):
                text = f"Invalid value: {json_text(now)}: field is immutable"
                yield Cause("FieldValueInvalid", text, f"spec.{path}")
    names = [version.get("name") for version in new["spec"]["versions"]]
    for at, version in enumerate(at_path(old, "status.storedVersions") or ()):
        if version not in names:
            text = (
                f"Invalid value: {json_text(version)}: missing from spec.versions; {version} was "
                "previously a storage version, and must remain in spec.versions until a storage "
                f"migration ensures no data remains persisted in {version} and removes {version} "
                "from status.storedVersions"
            )
            yield Cause("FieldValueInvalid", text, f"status.storedVersions[{at}]")
