"""volcano.sh/gpu-memory and volcano.sh/gpu-number: memory of one GPU, or whole GPUs; pure.

Memory is counted and not enforced, as in Volcano's share plugin.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shared.dialects.advertised import (
    TRIGGER,
    Advertisement,
    PluginDeviceId,
    Strategy,
    base36,
    shared_devices,
    trigger_ids,
)
from shared.dialects.dialect import (
    ContainerManifest,
    ContainerSetup,
    Dialect,
    Paths,
    PodManifest,
    Rules,
    assigned_when_done,
)
from shared.dialects.reserved import VISIBLE
from shared.dialects.strict_values import check_gpus, check_not_bytes
from shared.model.change import limit
from shared.model.devices.device import Device
from shared.model.errors import RequestError
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid
from shared.model.quantity import parse_decimal
from shared.model.requests.request import DeviceOrder, GpuRequest, PodRequest

NAME = "volcano-gpushare"
SCHEDULER = "volcano"
MEMORY = "volcano.sh/gpu-memory"
NUMBER = "volcano.sh/gpu-number"
INDEX = "volcano.sh/gpu-index"
TIME = "volcano.sh/predicate-time"
ASSIGNED = "volcano.sh/gpu-assigned"
UNHEALTHY = "volcano.sh/gpu-unhealthy-ids"

MAX_UNITS = 2_000
"""A kubelet of 1.36 or later that restarts looks up each ID among the IDs of all its pods, under a
lock that allocations need: docs/kubelets.md.
"""


def parse(pod: PodManifest, _: Rules) -> PodRequest | None:
    """Where any container requests memory, numbers of GPUs are ignored.

    Raises RequestError naming container, resource and rule. For example, `volcano.sh/gpu-memory:
    1024` requests 1024 units of one GPU, and `volcano.sh/gpu-number: 2` two whole GPUs.
    """
    memory = [container for container in pod.containers if container.limits.get(MEMORY, 0) > 0]
    if memory:
        return _parse_memory(memory)
    number = [container for container in pod.containers if container.limits.get(NUMBER, 0) > 0]
    return _parse_number(number) if number else None


def _parse_memory(containers: Sequence[ContainerManifest]) -> PodRequest:
    for container in containers:
        check_not_bytes(container.name, MEMORY, container.limits[MEMORY])
    triggered = all(container.limits.get(TRIGGER) == 1 for container in containers)
    return PodRequest(
        dialect=NAME,
        containers=tuple(
            GpuRequest(
                container=container.name,
                gpus=1,
                memory_units=container.limits[MEMORY],
                slotted=False,
                limited=False,
                init=container.ends_first,
            )
            for container in containers
        ),
        same_device=True,
        triggers=(TRIGGER if triggered else MEMORY,),
        device_order=DeviceOrder.FIRST,
    )


def limits(container: GpuRequest, pod: PodRequest) -> dict[str, int]:
    if NUMBER in pod.triggers:
        return {NUMBER: container.gpus} if container.whole else {}
    trigger = {TRIGGER: 1} if TRIGGER in pod.triggers else {}
    return {MEMORY: container.memory_units or 0, **trigger}


def amount_changes(amounts: Mapping[str, int]) -> dict[str, int | None]:
    """Return the trigger, for which the kubelet calls Allocate.

    >>> amount_changes({"volcano.sh/gpu-memory": 1024})
    {'leasehold.dev/share': 1}
    """
    return {TRIGGER: 1} if amounts.get(MEMORY, 0) > 0 and TRIGGER not in amounts else {}


def _parse_number(containers: Sequence[ContainerManifest]) -> PodRequest:
    init = next((container for container in containers if container.init), None)
    if init is not None:
        raise RequestError(
            f"container {init.name}: an init container may not request {NUMBER}: remove it",
            limit(init.name, NUMBER),
        )
    for container in containers:
        check_gpus(container.name, NUMBER, container.limits[NUMBER])
    return PodRequest(
        dialect=NAME,
        containers=tuple(
            GpuRequest(
                container=container.name, gpus=container.limits[NUMBER], whole=True, slotted=False
            )
            for container in containers
        ),
        triggers=(NUMBER,),
        device_order=DeviceOrder.FIRST,
    )


def _indices(lease: Lease) -> str:
    return ",".join(str(index) for index in sorted({share.index for share in lease.shares}))


def binding_annotations(lease: Lease, now_s: float) -> dict[str, str]:
    """Indices are ascending; the time is in nanoseconds."""
    return {INDEX: _indices(lease), TIME: str(int(now_s * 1e9))}


def container_setup(
    lease: Lease, container: str, devices: Mapping[DeviceUuid, Device], _: Paths
) -> ContainerSetup:
    """Return the pod's GPUs, the allocated amount, and a GPU's size.

    For whole GPUs the allocated amount is their number times the unit. Raises RequestError if the
    container has no share.
    """
    shares = lease.shares_of(container)
    if not shares:
        raise RequestError(f"container {container} of pod {lease.pod} has no share leased")
    whole = shares[0].whole
    allocated = len(shares) * shares[0].unit_mib if whole else sum(s.memory_mib for s in shares)
    return ContainerSetup(
        environment={
            VISIBLE: _indices(lease),
            "VOLCANO_GPU_ALLOCATED": str(allocated),
            "VOLCANO_GPU_MEMORY_TOTAL": str(devices[shares[0].device].memory_mib),
        }
    )


def unit_id(prefix: str, number: int) -> str:
    """Short, because a list has many."""
    return f"{prefix}-{base36(number)}"


def _id_prefixes(devices: Sequence[Device]) -> dict[DeviceUuid, str]:
    """Use the index, if no other device has the same.

    A GPU that replaces a lost one has its index, and pods may still hold the lost one's IDs. From
    then on the IDs of both contain a checksum of the UUID.
    """
    numbers = Counter(device.index for device in devices)
    return {
        device.uuid: base36(device.index)
        if numbers[device.index] == 1
        else f"{base36(device.index)}_{base36(zlib.crc32(device.uuid.encode()))}"
        for device in devices
    }


def check_units(devices: Sequence[Device]) -> None:
    """Raise RequestError, naming the memory factor needed, for too many units."""
    units = _unit_count(devices)
    if units > MAX_UNITS:
        factor = max(device.unit_mib for device in devices)
        while _unit_count(replace(device, unit_mib=factor) for device in devices) > MAX_UNITS:
            factor += 1
        raise RequestError(
            f"{MEMORY}: one device ID per unit makes {units} IDs, and a kubelet that restarts "
            f"looks up each of them among those of its pods: at most {MAX_UNITS} are served; use "
            f"--memory-factor {factor} or more, or --gpu-strategy auto"
        )


def _unit_count(devices: Iterable[Device]) -> int:
    return sum(device.memory_mib // device.unit_mib for device in devices)


def advertise(devices: Sequence[Device], strategy: str) -> Advertisement:
    """Serve the trigger (`auto`), units of memory (`share`) or whole GPUs (`number`).

    Raises RequestError for `share` if there are too many units.
    """
    lists = {UNHEALTHY: _unhealthy_indices(devices)}
    devices = shared_devices(devices)
    healthy = [device for device in devices if device.healthy]
    if strategy == Strategy.NUMBER:
        ids = tuple(PluginDeviceId(id=d.uuid, healthy=d.healthy, device=d.uuid) for d in devices)
        return Advertisement(
            served={NUMBER: ids}, node_status={MEMORY: 0}, annotation_entries=lists
        )
    if strategy == Strategy.SHARE:
        check_units(devices)
        return Advertisement(
            served={MEMORY: _unit_ids(devices)},
            node_status={NUMBER: len(healthy)},
            annotation_entries=lists,
        )
    return Advertisement(
        served={TRIGGER: trigger_ids(devices)},
        node_status={MEMORY: _unit_count(healthy), NUMBER: len(healthy)},
        annotation_entries=lists,
    )


def _unhealthy_indices(devices: Sequence[Device]) -> tuple[str, ...]:
    healthy = {device.index for device in devices if device.healthy}
    return tuple(str(index) for index in sorted({device.index for device in devices} - healthy))


def unhealthy_devices(annotations: Mapping[str, str]) -> dict[int, str]:
    """Return the annotation by index.

    >>> unhealthy_devices({"volcano.sh/gpu-unhealthy-ids": "0,2"})
    {0: 'volcano.sh/gpu-unhealthy-ids', 2: 'volcano.sh/gpu-unhealthy-ids'}
    """
    listed = (parse_decimal(index.strip()) for index in annotations.get(UNHEALTHY, "").split(","))
    return {index: UNHEALTHY for index in listed if index is not None}


def _unit_ids(devices: Sequence[Device]) -> tuple[PluginDeviceId, ...]:
    prefixes = _id_prefixes(devices)
    return tuple(
        PluginDeviceId(
            id=unit_id(prefixes[device.uuid], n), healthy=device.healthy, device=device.uuid
        )
        for device in devices
        for n in range(device.memory_mib // device.unit_mib)
    )


DIALECT = Dialect(
    name=NAME,
    resources=frozenset({MEMORY, NUMBER}),
    served=frozenset({MEMORY, NUMBER, TRIGGER}),
    status_resources=frozenset({MEMORY, NUMBER}),
    node_annotations=frozenset({UNHEALTHY}),
    agent_annotations=frozenset({ASSIGNED}),
    request_annotations=frozenset(),
    parse=parse,
    limits=limits,
    binding_annotations=binding_annotations,
    allocated_annotations=assigned_when_done(ASSIGNED),
    container_setup=container_setup,
    advertise=advertise,
    id_count=lambda share, resource: share.memory_units if resource == MEMORY else 1,
    amount_changes=amount_changes,
    scheduler=SCHEDULER,
    cordoned_devices=unhealthy_devices,
)
