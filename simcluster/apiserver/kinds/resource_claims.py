"""The strategies of ResourceClaims and ResourceSlices; pure.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/resource-claim-v1/
"""

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, list_at, metadata, name_of, namespace_of
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup

ADMIN_ACCESS = "resource.kubernetes.io/admin-access"
"""The label of namespaces whose claims may have access to devices that others use."""
_IMMUTABLE = "Invalid value: field is immutable"
DeviceKey = tuple[str, str, str, str]


def device_key(device: Json) -> DeviceKey:
    """Return what identifies a device in an allocation and in `status.devices`."""
    return (
        str(device.get("driver", "")),
        str(device.get("pool", "")),
        str(device.get("device", "")),
        str(device.get("shareID", "")),
    )


class ResourceClaimStrategy(KindStrategy):
    """A claim's spec is immutable; `status.devices` lists allocated devices only."""

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the defaults of requests, and drop the status."""
        obj.pop("status", None)
        set_request_defaults(obj.get("spec") or {})
        refuse_admin_access("ResourceClaim", obj, obj.get("spec") or {}, cluster)

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Drop the devices' status together with the allocation."""
        status = obj.get("status")
        if isinstance(status, dict) and not status.get("allocation"):
            status.pop("devices", None)

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse a change of the spec."""
        if new.get("spec") != old.get("spec"):
            return [Cause("FieldValueInvalid", _IMMUTABLE, "spec")]
        return []

    def validate_subresource_update(self, new: Json, old: Json) -> list[Cause]:
        """Refuse another allocation, and the status of devices that are not allocated."""
        causes = metadata_causes(new)
        before, after = (claim.get("status") or {} for claim in (old, new))
        if before.get("allocation") and after.get("allocation") not in (
            None,
            before["allocation"],
        ):
            causes.append(Cause("FieldValueInvalid", _IMMUTABLE, "status.allocation"))
        allocated = set(map(device_key, list_at(after, "allocation.devices.results")))
        causes += [
            Cause(
                "FieldValueInvalid",
                "Invalid value: must be an allocated device in the claim",
                f"status.devices[{index}]",
            )
            for index, device in enumerate(after.get("devices") or ())
            if device_key(device) not in allocated
        ]
        if len(after.get("reservedFor") or ()) > 256:
            text = "Too many: must have at most 256 items"
            causes.append(Cause("FieldValueTooMany", text, "status.reservedFor"))
        return causes


class ResourceClaimTemplateStrategy(KindStrategy):
    """The spec of a template is immutable."""

    def prepare_for_create(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set the defaults of requests."""
        spec = (obj.get("spec") or {}).get("spec") or {}
        set_request_defaults(spec)
        refuse_admin_access("ResourceClaimTemplate", obj, spec, cluster)

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse a change of the spec."""
        if new.get("spec") != old.get("spec"):
            return [Cause("FieldValueInvalid", _IMMUTABLE, "spec")]
        return []


class ResourceSliceStrategy(KindStrategy):
    """The driver, the node and the pool of a slice are immutable."""

    has_generation = True

    def validate(self, obj: Json) -> list[Cause]:
        """Require a driver and a pool, and devices with distinct names."""
        spec = obj.get("spec") or {}
        causes = metadata_causes(obj)
        for name in ("driver", "pool"):
            if not spec.get(name):
                causes.append(Cause("FieldValueRequired", "Required value", f"spec.{name}"))
        names = [device.get("name") for device in spec.get("devices") or ()]
        for index, name in enumerate(names):
            if name in names[:index]:
                text = f'Duplicate value: "{name}"'
                field = f"spec.devices[{index}].name"
                causes.append(Cause("FieldValueDuplicate", text, field))
        return causes

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse a change of driver or node."""
        return [
            Cause("FieldValueInvalid", _IMMUTABLE, f"spec.{name}")
            for name in ("driver", "nodeName")
            if new["spec"].get(name) != old["spec"].get(name)
        ]


def refuse_admin_access(kind: str, obj: Json, spec: Json, cluster: ObjectLookup) -> None:
    """Raise 422 for requests with `adminAccess` in a namespace without the label for it."""
    requests = list_at(spec, "devices.requests")
    if not any((request.get("exactly") or {}).get("adminAccess") for request in requests):
        return
    record = cluster.find("namespaces", None, namespace_of(obj))
    labels = {} if record is None else metadata(record.obj).get("labels") or {}
    if labels.get(ADMIN_ACCESS) != "true":
        text = (
            f"Forbidden: admin access to devices requires the `{ADMIN_ACCESS}: true` label on the "
            "containing namespace"
        )
        cause = Cause("FieldValueForbidden", text, "")
        raise ApiError.invalid(kind, "resource.k8s.io", name_of(obj), [cause])


def set_request_defaults(spec: Json) -> None:
    """Set the API's defaults of the requests of a claim's spec."""
    for request in list_at(spec, "devices.requests"):
        wanted = [request["exactly"]] if request.get("exactly") else []
        for subrequest in [*wanted, *(request.get("firstAvailable") or ())]:
            subrequest.setdefault("allocationMode", "ExactCount")
            if subrequest["allocationMode"] == "ExactCount":
                subrequest.setdefault("count", 1)
