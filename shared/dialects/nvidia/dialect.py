"""nvidia.com/gpu, as HAMi and NVIDIA's own device plugin read it; pure.

A number alone means whole GPUs. With `gpumem`, `gpumem-percentage` or `gpucores` beside it, each
GPU is a share. Names and formats are those of HAMi. HAMi's webhook adds a missing `nvidia.com/gpu`
(`amount_changes`). A pod without it is refused here: the kubelet would not call Allocate, and the
container would see every device.

If both an amount and a percentage of memory are given, the amount counts, as in HAMi (in Volcano
the percentage counts).
"""

from collections.abc import Mapping, Sequence

from msgspec import structs

from shared.dialects import hami_core
from shared.dialects.advertised import Advertisement, numbered_ids, unit_amounts
from shared.dialects.dialect import (
    ContainerManifest,
    ContainerSetup,
    Dialect,
    Paths,
    PodManifest,
    Rules,
)
from shared.dialects.hami_core import decode_memo, encode_memo
from shared.dialects.koordinator.amounts import NVIDIA_GPUS, reads_nvidia_gpus
from shared.dialects.nvidia.annotations import (
    ALLOCATED,
    PHASE,
    REGISTER,
    SCORES,
    TO_ALLOCATE,
    allocated_annotations,
    binding_annotations,
    cordoned_devices,
    encode_devices,
    encode_register,
    encode_scores,
    slot_count,
)
from shared.dialects.nvidia.device_choice import (
    ANNOTATIONS,
    MODE,
    NOT_TYPES,
    NOT_UUIDS,
    NUMA_BIND,
    USE_TYPES,
    USE_UUIDS,
    check_policies,
    parse_device_choice,
)
from shared.dialects.reserved import LIBRARY_DIRECTORY
from shared.dialects.strict_values import check_not_bytes, check_range
from shared.model.device import Device, DeviceMode
from shared.model.errors import RequestError
from shared.model.lease import Lease
from shared.model.names import DeviceUuid
from shared.model.request import GpuRequest, PodRequest, SharingPolicy

NAME = "nvidia"
SCHEDULER = "hami-scheduler"
COUNT = NVIDIA_GPUS
MEMORY = "nvidia.com/gpumem"
PERCENTAGE = "nvidia.com/gpumem-percentage"
CORES = "nvidia.com/gpucores"
PRIORITY = "nvidia.com/priority"

ALL = 100
"""Percent of a device's memory, or of its cores."""
DEFAULT_GPUS = 1
"""HAMi's `defaultGPUNum`: GPUs of a container that gives no number."""
REGIONS = LIBRARY_DIRECTORY
"""Directory of the region file inside HAMi's containers."""

Amounts = Mapping[str, int]


def parse(pod: PodManifest, rules: Rules) -> PodRequest | None:
    """Parse the pod's containers. Raises RequestError naming container, resource and rule."""
    if reads_nvidia_gpus(pod, rules):
        return None
    requesting = [container for container in pod.containers if any(_amounts(container).values())]
    if not requesting:
        return None
    for container in requesting:
        _check(f"container {container.name}", _amounts(container))
    most = max(_amounts(container)[COUNT] for container in requesting)
    choice, idle_only = parse_device_choice(pod.annotations, rules, gpus=most)
    mig_only = choice.selection.mode == DeviceMode.MIG
    containers = tuple(_request(each, mig_only=mig_only, idle=idle_only) for each in requesting)
    priorities = {
        container.name: _amounts(container)[PRIORITY]
        for container in requesting
        if PRIORITY in _amounts(container)
    }
    return structs.replace(
        choice,
        dialect=NAME,
        containers=containers,
        triggers=(COUNT,),
        memo=encode_memo(pod, containers, priorities),
        prefer_links=choice.prefer_links or any(request.whole for request in containers),
    )


def amount_changes(amounts: Amounts) -> dict[str, int | None]:
    """Return the number of GPUs that HAMi's webhook would add to a container's amounts."""
    if amounts.get(COUNT) or not any(amounts.get(name) for name in (MEMORY, PERCENTAGE, CORES)):
        return {}
    return {COUNT: DEFAULT_GPUS}


def _amounts(container: ContainerManifest) -> Amounts:
    amounts = {**container.requests, **container.limits}
    return {
        name: amounts[name]
        for name in (COUNT, MEMORY, PERCENTAGE, CORES, PRIORITY)
        if name in amounts
    }


def _check(where: str, amounts: Amounts) -> None:
    if amounts.get(COUNT, 0) < 1:
        named = next(name for name, amount in amounts.items() if amount)
        raise RequestError(
            f"{where}: {named} needs {COUNT} of 1 or more beside it in the limits (HAMi's webhook "
            f"would add {COUNT}: {DEFAULT_GPUS}); the kubelet would give the container no device"
        )
    check_range(where, PERCENTAGE, amounts.get(PERCENTAGE), 1, ALL)
    check_range(where, CORES, amounts.get(CORES), 0, ALL)
    check_range(where, MEMORY, amounts.get(MEMORY), 0)
    check_not_bytes(where, MEMORY, amounts.get(MEMORY, 0))


def _request(container: ContainerManifest, *, mig_only: bool, idle: bool) -> GpuRequest:
    """Parse one container that has been checked.

    All memory means the whole device, unless fewer cores are requested. A pod that accepts MIG
    instances only gets no whole device, but the largest instances.
    """
    amounts = _amounts(container)
    memory, cores = amounts.get(MEMORY, 0) or None, amounts.get(CORES, 0)
    percent = None if memory else amounts.get(PERCENTAGE)
    everything = memory is None and percent in {None, ALL}
    whole = everything and cores in {0, ALL} and not mig_only
    sharing = SharingPolicy.IDLE_DEVICE if idle else SharingPolicy.SHARED
    return GpuRequest(
        container=container.name,
        gpus=amounts[COUNT],
        memory_units=None if whole else memory,
        memory_percent=percent,
        percent_of_mib=not whole,
        cores_percent=cores,
        whole=whole,
        sharing=SharingPolicy.EXCLUSIVE if whole or (cores == ALL and not mig_only) else sharing,
        init=container.ends_first,
        mig_allowed=not whole,
    )


def container_setup(
    lease: Lease, container: str, _: Mapping[DeviceUuid, Device], paths: Paths
) -> ContainerSetup:
    """Return HAMi's variables and mounts for shares, and the devices only for whole GPUs."""
    if all(share.whole for share in hami_core.required_shares(lease, container)):
        return hami_core.whole_setup(lease, container)
    priority = decode_memo(lease).priorities.get(container)
    return hami_core.limited_setup(
        lease,
        container,
        paths,
        regions=REGIONS,
        more={} if priority is None else {hami_core.PRIORITY: str(priority)},
    )


def advertise(devices: Sequence[Device], _: str) -> Advertisement:
    """Serve slots; write the memory and cores of healthy devices into node status."""
    return Advertisement(
        served={
            COUNT: tuple(
                each for device in devices for each in numbered_ids(device, slot_count(device))
            )
        },
        node_status=unit_amounts(devices, MEMORY, CORES),
        annotations={REGISTER: encode_register(devices), SCORES: encode_scores(devices)},
    )


DIALECT = Dialect(
    name=NAME,
    resources=frozenset({COUNT, MEMORY, PERCENTAGE, CORES, PRIORITY}),
    served=frozenset({COUNT}),
    status_resources=frozenset({MEMORY, CORES}),
    node_annotations=frozenset({REGISTER, SCORES}),
    agent_annotations=frozenset({TO_ALLOCATE, PHASE}),
    request_annotations=ANNOTATIONS,
    request_fields={
        "types": (USE_TYPES,),
        "not_types": (NOT_TYPES,),
        "uuids": (USE_UUIDS,),
        "not_uuids": (NOT_UUIDS,),
        "mode": (MODE,),
        "topology_scope": (NUMA_BIND,),
    },
    parse=parse,
    limits=hami_core.limits_of(COUNT, MEMORY, PERCENTAGE, CORES),
    part="memory_units",
    binding_annotations=binding_annotations,
    allocated_annotations=allocated_annotations,
    failed_annotations=lambda _: {PHASE: "failed"},
    container_setup=container_setup,
    advertise=advertise,
    resized_annotations=lambda lease: {ALLOCATED: encode_devices(lease)},
    released_amounts=lambda share: hami_core.released_amounts(share, MEMORY, CORES),
    amount_changes=amount_changes,
    check_rules=check_policies,
    scheduler=SCHEDULER,
    cordoned_devices=cordoned_devices,
)
