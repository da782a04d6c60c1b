"""The strategies of the built-in kinds: defaults, validation, immutable fields."""

import base64
from collections.abc import Mapping

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, name_of
from simcluster.apiserver.kinds.disruption_budgets import budget_causes
from simcluster.apiserver.kinds.pod_defaults import admit_pod, begin_pod, complete_pod
from simcluster.apiserver.kinds.pod_validation import (
    new_pod_causes,
    pod_causes,
    pod_update_causes,
    resize_causes,
)
from simcluster.apiserver.kinds.resource_quotas import quota_causes
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup


class PodStrategy(KindStrategy):
    """Pods begin as Pending; most of their spec is immutable."""

    has_generation = True

    def admit(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set priority, tolerations and the service account."""
        admit_pod(obj, cluster.list("priorityclasses"))

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the initial status."""
        begin_pod(obj)

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the API's defaults."""
        complete_pod(obj)

    def validate(self, obj: Json) -> list[Cause]:
        """Validate metadata and spec."""
        return [
            *metadata_causes(obj),
            *pod_causes(obj),
            *new_pod_causes(obj),
        ]

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse changes of immutable fields."""
        return pod_update_causes(new, old)

    def validate_subresource_update(self, new: Json, old: Json) -> list[Cause]:
        """Refuse resources that a container cannot get while it runs."""
        return [*super().validate_subresource_update(new, old), *resize_causes(new, old)]


class NamespaceStrategy(KindStrategy):
    """A deleted namespace stays, Terminating, until it is empty."""

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Begin as Active, with the finalizer that waits for the content."""
        obj["spec"] = {"finalizers": ["kubernetes"]}
        obj["status"] = {"phase": "Active"}
        labels = obj["metadata"].setdefault("labels", {})
        labels["kubernetes.io/metadata.name"] = name_of(obj)

    def validate_delete(self, obj: Json, cluster: ObjectLookup) -> None:
        """Refuse to delete the namespaces that each cluster has."""
        if name_of(obj) in {"default", "kube-system", "kube-public"}:
            raise ApiError.forbidden(
                "namespaces", name_of(obj), "this namespace may not be deleted"
            )

    def prepare_for_delete(self, obj: Json) -> None:
        """Set the phase Terminating."""
        obj["status"] = {**(obj.get("status") or {}), "phase": "Terminating"}


class SecretStrategy(KindStrategy):
    """Secrets contain base64; `stringData` accepts text."""

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Encode `stringData` into `data`."""
        encode_secret(obj)


class ServiceStrategy(KindStrategy):
    """Services are only stored; they carry no traffic."""

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set type, session affinity and target ports."""
        spec = obj.setdefault("spec", {})
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        for port in spec.get("ports") or ():
            port.setdefault("protocol", "TCP")
            port.setdefault("targetPort", port.get("port"))


SYSTEM_PRIORITIES: Mapping[str, int] = {
    "system-cluster-critical": 2_000_000_000,
    "system-node-critical": 2_000_001_000,
}


class PriorityClassStrategy(KindStrategy):
    """The value of a priority class is immutable."""

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Preempt lower priorities by default; 403 for a second global default."""
        obj.setdefault("preemptionPolicy", "PreemptLowerPriority")
        others = [
            priority_class
            for priority_class in cluster.list("priorityclasses")
            if priority_class.get("globalDefault")
        ]
        if obj.get("globalDefault") and any(
            name_of(priority_class) != name_of(obj) for priority_class in others
        ):
            detail = (
                f"PriorityClass {name_of(others[0])} is already marked as default. "
                "Only one default can exist"
            )
            raise ApiError.forbidden("priorityclasses.scheduling.k8s.io", name_of(obj), detail)

    def validate(self, obj: Json) -> list[Cause]:
        """Require a value; the highest ones are reserved for the system."""
        causes = metadata_causes(obj)
        value = obj.get("value")
        if not isinstance(value, int):
            causes.append(Cause("FieldValueRequired", "Required value", "value"))
        elif SYSTEM_PRIORITIES.get(name_of(obj)) == value:
            return causes
        elif value > 1_000_000_000:
            text = "Forbidden: maximum allowed value of a user defined priority is 1000000000"
            causes.append(Cause("FieldValueForbidden", text, "value"))
        if name_of(obj).startswith("system-"):
            text = (
                "Forbidden: priority class names with 'system-' prefix are reserved for system "
                "use only"
            )
            causes.append(Cause("FieldValueForbidden", text, "metadata.name"))
        return causes

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse a change of the value."""
        if new.get("value") != old.get("value"):
            text = "Forbidden: may not be changed in an update."
            return [Cause("FieldValueForbidden", text, "value")]
        return []


class ResourceQuotaStrategy(KindStrategy):
    """Quotas are validated, because every write in their namespace reads them."""

    def validate(self, obj: Json) -> list[Cause]:
        """Validate names, amounts and scopes."""
        return [*metadata_causes(obj), *quota_causes(obj)]


class DisruptionBudgetStrategy(KindStrategy):
    """Budgets are validated, because every eviction reads them."""

    has_generation = True

    def validate(self, obj: Json) -> list[Cause]:
        """Validate the amounts and the selector."""
        return [*metadata_causes(obj), *budget_causes(obj)]


def encode_secret(secret: Json) -> None:
    """Move `stringData` into `data` as base64; the type defaults to Opaque."""
    secret.setdefault("type", "Opaque")
    for key, text in (secret.pop("stringData", None) or {}).items():
        data = secret.setdefault("data", {})
        data[key] = base64.b64encode(str(text).encode()).decode()
