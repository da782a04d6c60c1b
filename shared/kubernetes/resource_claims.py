"""ResourceClaims as the API server has them, and our driver's part of them; pure.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/resource-claim-v1/
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from msgspec import Raw, Struct, field

from shared.dialects.nvidia.dra_parameters import read_parameters
from shared.kubernetes.paths import objects_path
from shared.kubernetes.types import Condition, ObjectMeta, Quantities
from shared.model.bounds import check_bounds, cut
from shared.model.devices.time_slices import Interval
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedClaim, AllocatedDevice
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.quantity import parse_count
from shared.model.requests.claim import CORES, DRIVER, LEASED, MEMORY, REFUSED, generation_of

FROM_CLASS = "FromClass"
"""Parameters in the DeviceClass."""
CLAIMS_PATH = "/apis/resource.k8s.io/v1/resourceclaims"
CLASSES_PATH = "/apis/resource.k8s.io/v1/deviceclasses"
_OUR_DRIVER = re.compile(f"""['"]{re.escape(DRIVER)}['"]""")
MIB = 1 << 20


class DeviceRequestAllocationResult(Struct, frozen=True, rename="camel"):
    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""
    admin_access: bool | None = None
    binding_conditions: tuple[str, ...] = ()
    share_id: str | None = field(name="shareID", default=None)
    consumed_capacity: Quantities | None = None


class OpaqueDeviceConfiguration(Struct, frozen=True):
    driver: str = ""
    parameters: Raw = Raw(b"null")


class DeviceAllocationConfiguration(Struct, frozen=True):
    source: str = ""
    requests: tuple[str, ...] = ()
    opaque: OpaqueDeviceConfiguration | None = None


class RequestedCapacity(Struct, frozen=True):
    requests: Quantities = {}


class RequestedDevice(Struct, frozen=True, rename="camel"):
    name: str = ""
    device_class_name: str = ""
    capacity: RequestedCapacity | None = None


class ClaimedRequest(Struct, frozen=True, rename="camel"):
    name: str = ""
    exactly: RequestedDevice | None = None
    first_available: tuple[RequestedDevice, ...] = ()


class ClaimedDevices(Struct, frozen=True):
    requests: tuple[ClaimedRequest, ...] = ()
    config: tuple[DeviceAllocationConfiguration, ...] = ()

    def __iter__(self) -> Iterator[tuple[str, RequestedDevice]]:
        """Yield devices with the names of their requests, as an allocation has them."""
        for request in self.requests:
            if request.exactly is not None:
                yield request.name, request.exactly
            for choice in request.first_available:
                yield f"{request.name}/{choice.name}", choice


class ClaimSpec(Struct, frozen=True):
    devices: ClaimedDevices = ClaimedDevices()


class DeviceAllocationResult(Struct, frozen=True):
    results: tuple[DeviceRequestAllocationResult, ...] = ()
    config: tuple[DeviceAllocationConfiguration, ...] = ()


class AllocationResult(Struct, frozen=True, rename="camel"):
    devices: DeviceAllocationResult = DeviceAllocationResult()
    allocation_timestamp: str | None = None


class AllocatedDeviceStatus(Struct, frozen=True):
    driver: str = ""
    conditions: tuple[Condition, ...] = ()
    data: Raw = Raw(b"null")


class ConsumerReference(Struct, frozen=True):
    resource: str = ""
    name: str = ""
    uid: str = ""


class ResourceClaimStatus(Struct, frozen=True, rename="camel"):
    allocation: AllocationResult | None = None
    reserved_for: tuple[ConsumerReference, ...] = ()
    devices: tuple[AllocatedDeviceStatus, ...] = ()


class ApiResourceClaim(Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: ClaimSpec = ClaimSpec()
    status: ResourceClaimStatus = ResourceClaimStatus()


class CelSelector(Struct, frozen=True):
    expression: str = ""


class DeviceSelector(Struct, frozen=True):
    cel: CelSelector = CelSelector()


class DeviceClassSpec(Struct, frozen=True, rename="camel"):
    extended_resource_name: str = ""
    selectors: tuple[DeviceSelector, ...] = ()


class DeviceClass(Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: DeviceClassSpec = DeviceClassSpec()

    @property
    def is_ours(self) -> bool:
        """Whether one of its selectors names our driver."""
        return any(_OUR_DRIVER.search(it.cel.expression) for it in self.spec.selectors)


def claim_path(namespace: str, name: str) -> str:
    return objects_path(namespace, "resourceclaims", name, group="/apis/resource.k8s.io/v1")


def allocated_claim(claim: ApiResourceClaim) -> AllocatedClaim | None:
    """Return the claim's allocation of our devices, or None if there is none.

    Administrative access is part of it only where its pods wait for our condition. Raises
    RequestError for an allocation that our slices cannot have led to, or that is too large.
    """
    allocation = claim.status.allocation
    results = _our_results(allocation) if allocation else []
    if allocation is None or not results:
        return None
    devices, administered = (
        tuple(_device(result) for result in results if bool(result.admin_access) is admin)
        for admin in (False, True)
    )
    nodes = sorted({result.pool for result in results})
    if len(nodes) > 1:
        raise RequestError(
            f"ResourceClaim {claim.metadata.namespace}/{claim.metadata.name} has devices of "
            f"several nodes: {', '.join(nodes)}"
        )
    statuses = [status for status in claim.status.devices if status.driver == DRIVER]
    copies = (bytes(status.data).decode() for status in statuses)
    parameters = _read_parameters(allocation, devices)
    pods = (consumer for consumer in claim.status.reserved_for if consumer.resource == "pods")
    consumers = dict(sorted((PodUid(consumer.uid), consumer.name) for consumer in pods))
    given = (
        (device.request, device.device, device.share_id) for device in (*devices, *administered)
    )
    allocated = AllocatedClaim(
        claim=PodUid(claim.metadata.uid),
        namespace=Namespace(claim.metadata.namespace),
        name=claim.metadata.name,
        node=NodeName(nodes[0]),
        generation=generation_of(allocation.allocation_timestamp or "", given),
        devices=parameters.devices,
        admin_devices=administered,
        consumers=tuple(consumers),
        consumer_names=tuple(consumers.values()),
        is_of_one_pod=any(
            owner.controller and owner.kind == "Pod" for owner in claim.metadata.owner_references
        ),
        resource_version=claim.metadata.resource_version,
        answer=_answer(statuses, len(results)),
        lease=next((text for text in copies if text != "null"), ""),
        refusal=parameters.refusal,
        warning=parameters.warning,
    )
    check_bounds(allocated, f"ResourceClaim {allocated.namespace}/{allocated.name}")
    return allocated


def _our_results(allocation: AllocationResult) -> list[DeviceRequestAllocationResult]:
    results = allocation.devices.results
    return [
        result
        for result in results
        if result.driver == DRIVER
        and (not result.admin_access or LEASED in result.binding_conditions)
    ]


class _Parameters(NamedTuple):
    devices: tuple[AllocatedDevice, ...]
    refusal: str = ""
    warning: str = ""


def _read_parameters(
    allocation: AllocationResult, devices: tuple[AllocatedDevice, ...]
) -> _Parameters:
    """Of two parameters for one device, the later ones count: a claim's come after its class's."""
    warning = ""
    intervals: dict[AllocatedDevice, Interval | None] = {}
    for config in allocation.devices.config:
        if config.opaque is None or config.opaque.driver != DRIVER:
            continue
        own = [device for device in devices if is_for(config, device.request)]
        try:
            effects = read_parameters(
                bytes(config.opaque.parameters), own, of_class=config.source == FROM_CLASS
            )
        except RequestError as error:
            return _Parameters(devices, refusal=cut(str(error)))
        warning = effects.warning or warning
        intervals |= dict.fromkeys(own, effects.interval)
    asking = tuple(replace(device, interval=intervals.get(device)) for device in devices)
    return _Parameters(asking, warning=warning)


def is_for(config: DeviceAllocationConfiguration, request: str) -> bool:
    """A request of a prioritized list is named alone, or with its choice."""
    names = {request, request.partition("/")[0]}
    return not config.requests or not names.isdisjoint(config.requests)


def _device(result: DeviceRequestAllocationResult) -> AllocatedDevice:
    consumed = result.consumed_capacity or {}
    memory = consumed.get(MEMORY)
    return AllocatedDevice(
        request=result.request,
        device=result.device,
        share_id=result.share_id or "",
        memory_mib=None if memory is None else -(-parse_count(memory) // MIB),
        cores_percent=parse_count(consumed.get(CORES, 0)),
    )


def _answer(statuses: list[AllocatedDeviceStatus], devices: int) -> str:
    written = [
        {condition.type for condition in status.conditions if condition.status == "True"}
        for status in statuses
    ]
    if any(REFUSED in conditions for conditions in written):
        return REFUSED
    complete = len(written) >= devices and all(LEASED in conditions for conditions in written)
    return LEASED if complete else ""
