"""Per kind: what is filled in, what is checked, what an update may not touch."""

import base64
from collections.abc import Mapping

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, name_of
from simcluster.apiserver.kinds.disruption_budgets import budget_causes
from simcluster.apiserver.kinds.pod_defaults import admit_pod, begin_pod, complete_pod
from simcluster.apiserver.kinds.pod_validation import new_pod_causes, pod_causes, pod_update_causes
from simcluster.apiserver.kinds.resource_quotas import quota_causes
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup


class PodStrategy(KindStrategy):
    """Pods begin as Pending; most of their spec is settled at creation."""

    has_generation = True

    def admit(self, obj: Json, cluster: ObjectLookup) -> None:
        """Fill in priority, tolerations and the service account."""
        admit_pod(obj, cluster.list("priorityclasses"))

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Begin as Pending."""
        begin_pod(obj)

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Fill in the defaults of the API."""
        complete_pod(obj)

    def validate(self, obj: Json) -> list[Cause]:
        """Check metadata and spec."""
        return [
            *metadata_causes(obj),
            *pod_causes(obj),
            *new_pod_causes(obj),
        ]

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse changes to what is settled."""
        return pod_update_causes(new, old)


class NamespaceStrategy(KindStrategy):
    """Namespaces stay, Terminating, until all in them is gone."""

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Begin as Active, with the finalizer that waits for the contents."""
        obj["spec"] = {"finalizers": ["kubernetes"]}
        obj["status"] = {"phase": "Active"}
        labels = obj["metadata"].setdefault("labels", {})
        labels["kubernetes.io/metadata.name"] = name_of(obj)

    def validate_delete(self, obj: Json, cluster: ObjectLookup) -> None:
        """Keep the namespaces without which a cluster is none."""
        if name_of(obj) in {"default", "kube-system", "kube-public"}:
            raise ApiError.forbidden(
                "namespaces", name_of(obj), "this namespace may not be deleted"
            )

    def prepare_for_delete(self, obj: Json) -> None:
        """Show that it is on its way out."""
        obj["status"] = {**(obj.get("status") or {}), "phase": "Terminating"}


class SecretStrategy(KindStrategy):
    """Secrets hold base64; `stringData` is how text gets in."""

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Encode `stringData` into `data`."""
        encode_secret(obj)


class ServiceStrategy(KindStrategy):
    """Services are stored; no traffic flows."""

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Fill in type, affinity and target ports."""
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
    """A priority class is its value."""

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Preempt lower priorities unless told otherwise; 403 for a second default."""
        obj.setdefault("preemptionPolicy", "PreemptLowerPriority")
        others = [each for each in cluster.list("priorityclasses") if each.get("globalDefault")]
        if obj.get("globalDefault") and any(name_of(each) != name_of(obj) for each in others):
            why = (
                f"PriorityClass {name_of(others[0])} is already marked as default. "
                "Only one default can exist"
            )
            raise ApiError.forbidden("priorityclasses.scheduling.k8s.io", name_of(obj), why)

    def validate(self, obj: Json) -> list[Cause]:
        """A value must be there, and leave the highest ones to the system."""
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
        """The value never changes."""
        if new.get("value") != old.get("value"):
            text = "Forbidden: may not be changed in an update."
            return [Cause("FieldValueForbidden", text, "value")]
        return []


class ResourceQuotaStrategy(KindStrategy):
    """Quotas must be readable, for every write in their namespace reads them."""

    def validate(self, obj: Json) -> list[Cause]:
        """Check names, amounts and scopes."""
        return [*metadata_causes(obj), *quota_causes(obj)]


class DisruptionBudgetStrategy(KindStrategy):
    """Budgets must be readable, for every eviction reads them."""

    has_generation = True

    def validate(self, obj: Json) -> list[Cause]:
        """Check the amounts and the selector."""
        return [*metadata_causes(obj), *budget_causes(obj)]


def encode_secret(secret: Json) -> None:
    """Move `stringData` into `data` as base64; the type defaults to Opaque."""
    secret.setdefault("type", "Opaque")
    for key, text in (secret.pop("stringData", None) or {}).items():
        data = secret.setdefault("data", {})
        data[key] = base64.b64encode(str(text).encode()).decode()
