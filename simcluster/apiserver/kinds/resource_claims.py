"""The strategies of ResourceClaims and ResourceSlices; pure.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/resource-claim-v1/
"""

from collections.abc import Iterator

from shared.model.quantity import parse_quantity
from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import metadata_causes
from simcluster.apimachinery.objects import Json, list_at, metadata, name_of, namespace_of
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup

ADMIN_ACCESS = "resource.kubernetes.io/admin-access"
"""The label of namespaces whose claims may have access to devices that others use."""
MOST_VALID_VALUES = 10
"""CapacityRequestPolicyDiscreteMaxOptions."""
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
        """Drop the status."""
        obj.pop("status", None)
        refuse_admin_access("ResourceClaim", obj, obj.get("spec") or {}, cluster)

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set those of requests; drop the devices' status together with the allocation."""
        set_request_defaults(obj.get("spec") or {})
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
        """Refuse access to all devices where the namespace does not have it."""
        spec = (obj.get("spec") or {}).get("spec") or {}
        refuse_admin_access("ResourceClaimTemplate", obj, spec, cluster)

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set those of requests."""
        set_request_defaults((obj.get("spec") or {}).get("spec") or {})

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
        for index, device in enumerate(spec.get("devices") or ()):
            for name, capacity in (device.get("capacity") or {}).items():
                field = f"spec.devices[{index}].capacity[{name}].requestPolicy"
                causes += _policy_causes(device, capacity, field)
        return causes

    def validate_transition(self, new: Json, old: Json) -> list[Cause]:
        """Refuse a change of driver or node."""
        return [
            Cause("FieldValueInvalid", _IMMUTABLE, f"spec.{name}")
            for name in ("driver", "nodeName")
            if new["spec"].get(name) != old["spec"].get(name)
        ]


def _policy_causes(device: Json, capacity: Json, field: str) -> Iterator[Cause]:
    """Yield what is wrong with the policy of a capacity that several allocations share."""
    policy = capacity.get("requestPolicy")
    if not policy:
        return
    if not device.get("allowMultipleAllocations"):
        text = "Forbidden: allowMultipleAllocations must be true"
        yield Cause("FieldValueForbidden", text, field)
    values = [parse_quantity(value) for value in policy.get("validValues") or ()]
    if len(values) > MOST_VALID_VALUES:
        text = f"Too many: must have at most {MOST_VALID_VALUES} items"
        yield Cause("FieldValueTooMany", text, f"{field}.validValues")
    if values != sorted(values):
        text = "Invalid value: values must be sorted in ascending order"
        yield Cause("FieldValueInvalid", text, f"{field}.validValues")
    if values and values[-1] > parse_quantity(capacity["value"]):
        text = f"Invalid value: option is larger than capacity value: {capacity['value']}"
        yield Cause("FieldValueInvalid", text, f"{field}.validValues")
    if values and parse_quantity(policy.get("default", "0")) not in values:
        text = "Invalid value: default value is not valid according to the requestPolicy"
        yield Cause("FieldValueInvalid", text, f"{field}.validValues")


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
