"""volcano.sh/vgpu-*: a number of GPUs, of each an amount of memory and a percentage of cores; pure.

Names and formats are those of Volcano's plugins, in the generation without handshakes.
"""

from collections.abc import Mapping, Sequence

from shared.dialects import hami_core
from shared.dialects.advertised import Advertisement, numbered_ids
from shared.dialects.dialect import ContainerManifest, Dialect, PodManifest, Rules, list_entries
from shared.dialects.nvidia.dialect import NOT_TYPES, USE_TYPES
from shared.dialects.pod_groups import VOLCANO_GROUPS, group_name
from shared.dialects.strict_values import check_annotation
from shared.dialects.volcano.device_register import HANDSHAKE, NUMBER, REGISTER, encode_register
from shared.dialects.volcano.gpushare import SCHEDULER
from shared.model.change import limit
from shared.model.devices.device import POD_MODES, Device
from shared.model.errors import RequestError
from shared.model.leases.lease import Lease, Share
from shared.model.names import Namespace
from shared.model.requests.request import (
    DeviceOrder,
    DeviceSelection,
    GpuRequest,
    NodeOrder,
    PodRequest,
    SharingPolicy,
)

NAME = "volcano-vgpu"
MEMORY = "volcano.sh/vgpu-memory"
PERCENTAGE = "volcano.sh/vgpu-memory-percentage"
CORES = "volcano.sh/vgpu-cores"
RESOURCES = hami_core.ShareResources(
    count=NUMBER, memory=MEMORY, percentage=PERCENTAGE, cores=CORES
)

NODE = "volcano.sh/vgpu-node"
TIME = "volcano.sh/vgpu-time"
IDS = "volcano.sh/vgpu-ids-new"
TO_ALLOCATE = "volcano.sh/devices-to-allocate"
PHASE = "volcano.sh/bind-phase"
BIND_TIME = "volcano.sh/bind-time"
NEVER = str(2**64 - 1)
"""`vgpu-time` of a pod for which no Allocate is expected any more."""

MODE = "volcano.sh/vgpu-mode"
GROUP_POLICY = "volcano.sh/vgpu-podgroup-policy"
USE_UUIDS = "volcano.sh/vgpu-use-gpuuuid"
NOT_UUIDS = "volcano.sh/vgpu-nouse-gpuuuid"
SPREAD = "spread"

ORDERS: Mapping[str, DeviceOrder] = {
    "": DeviceOrder.LAST,
    "binpack": DeviceOrder.BINPACK,
    "spread": DeviceOrder.SPREAD,
}
WHOLE = 100
"""With so much of the cores, a share is exclusive."""
RUNTIME_VARIABLES: Mapping[str, str] = {
    "NVIDIA_GDRCOPY": "enabled",
    "NVIDIA_GDS": "enabled",
    "NVIDIA_MOFED": "enabled",
}
"""The container runtime adds more devices for these."""


def parse(pod: PodManifest, rules: Rules) -> PodRequest | None:
    """Parse a pod's request. Raises RequestError naming container, resource and rule.

    >>> container = ContainerManifest(name="train", limits={NUMBER: 1, MEMORY: 3000})
    >>> request = parse(PodManifest(namespace="ml", containers=(container,)), Rules())
    >>> request.containers[0].gpus, request.containers[0].memory_units
    (1, 3000)
    """
    containers = tuple(
        request
        for container in pod.containers
        if (request := _parse_container(container)) is not None
    )
    if not containers:
        return None
    return PodRequest(
        dialect=NAME,
        containers=containers,
        triggers=(NUMBER,),
        selection=_parse_selection(pod.annotations),
        anti_affinity_groups=_anti_affinity_groups(pod, rules),
        device_order=ORDERS[rules.schedule_policy],
        node_order=NodeOrder.SPREAD if rules.schedule_policy == "spread" else NodeOrder.BINPACK,
    )


def _parse_container(container: ContainerManifest) -> GpuRequest | None:
    limits = container.limits
    named = [name for name in (NUMBER, MEMORY, PERCENTAGE, CORES) if name in limits]
    if not named:
        return None
    where = f"container {container.name}"
    if container.init:
        raise RequestError(
            f"{where}: an init container may not request {named[0]}: remove {' and '.join(named)}",
            *(limit(container.name, name) for name in named),
        )
    if limits.get(NUMBER, 0) < 1:
        raise RequestError(
            f"{where}: {named[-1]} needs {NUMBER} of 1 or more beside it, got "
            f"{limits.get(NUMBER, 'none')}: write {NUMBER}: 1; without it the kubelet would give "
            "the container no device",
            limit(container.name, NUMBER, 1),
        )
    amounts = container.amounts
    RESOURCES.check(container.name, amounts)
    cores = amounts.get(CORES, 0)
    return GpuRequest(
        container=container.name,
        gpus=limits[NUMBER],
        memory_units=amounts.get(MEMORY) or None,
        memory_percent=amounts.get(PERCENTAGE),
        cores_percent=cores,
        sharing=SharingPolicy.EXCLUSIVE if cores == WHOLE else SharingPolicy.SHARED,
        mig_allowed=True,
    )


def _parse_selection(annotations: Mapping[str, str]) -> DeviceSelection:
    """Unlike upstream, empty list entries are dropped.

    With `use-gputype`, `nouse-gputype` is ignored, as upstream. Raises RequestError for values with
    which nothing would match.
    """
    for key, choices in ((MODE, POD_MODES), (GROUP_POLICY, (SPREAD,))):
        if key in annotations:
            check_annotation(key, annotations[key], choices)
    return DeviceSelection(
        types=list_entries(annotations.get(USE_TYPES, "")),
        not_types=() if USE_TYPES in annotations else list_entries(annotations.get(NOT_TYPES, "")),
        uuids=list_entries(annotations.get(USE_UUIDS, "")),
        not_uuids=list_entries(annotations.get(NOT_UUIDS, "")),
        mode=annotations.get(MODE),
    )


def _anti_affinity_groups(pod: PodManifest, rules: Rules) -> tuple[str, ...]:
    annotations = pod.annotations
    labels = pod.labels.items()
    matched = [rule for rule in rules.exclusive_labels if labels >= set(rule)]
    return (
        *_spread_group(pod.namespace, annotations),
        *("labels " + ",".join(f"{key}={value}" for key, value in rule) for rule in matched),
    )


def _spread_group(namespace: Namespace, annotations: Mapping[str, str]) -> tuple[str, ...]:
    group = group_name(namespace, VOLCANO_GROUPS, annotations)
    return (group,) if group and annotations.get(GROUP_POLICY) == SPREAD else ()


def encode_shares(shares: Sequence[Share]) -> str:
    """Encode `id,NVIDIA,units,cores:` for each device.

    The id of a MIG instance is `uuid[layout-position]`, and its units are the requested ones.
    """
    return "".join(hami_core.encode_share(share, _requested_units(share)) for share in shares)


def _requested_units(share: Share) -> int:
    requested = share.requested_units if share.mig else None
    return share.memory_units if requested is None else requested.memory_mib // share.unit_mib


def encode_ids(lease: Lease, done: frozenset[str] = frozenset()) -> str:
    return ";".join(
        "" if container in done else encode_shares(lease.shares_of(container))
        for container in lease.containers
    )


def binding_annotations(lease: Lease, now_s: float) -> dict[str, str]:
    ids = encode_ids(lease)
    seconds = str(int(now_s))
    return {
        NODE: lease.node,
        TIME: seconds,
        IDS: ids,
        TO_ALLOCATE: ids,
        PHASE: "allocating",
        BIND_TIME: seconds,
    }


def allocated_annotations(lease: Lease, done: frozenset[str]) -> dict[str, str]:
    left = {TO_ALLOCATE: encode_ids(lease, done)}
    if not done.issuperset(lease.containers):
        return left
    return {**left, PHASE: "success", TIME: NEVER}


def advertise(devices: Sequence[Device], _: str) -> Advertisement:
    devices = [device for device in devices if device.replicas is None]
    return Advertisement(
        served={NUMBER: numbered_ids(devices, lambda device: device.slots)},
        node_status=RESOURCES.of_node(devices),
        annotations={REGISTER: encode_register(devices)},
    )


DIALECT = Dialect(
    name=NAME,
    resources=frozenset({NUMBER, MEMORY, PERCENTAGE, CORES}),
    served=frozenset({NUMBER}),
    status_resources=frozenset({MEMORY, CORES}),
    node_annotations=frozenset({REGISTER, HANDSHAKE}),
    agent_annotations=frozenset({TO_ALLOCATE, PHASE, TIME}),
    request_annotations=frozenset(
        {MODE, GROUP_POLICY, *VOLCANO_GROUPS, USE_TYPES, NOT_TYPES, USE_UUIDS, NOT_UUIDS}
    ),
    request_fields={
        "types": (USE_TYPES, NOT_TYPES),
        "not_types": (NOT_TYPES,),
        "uuids": (USE_UUIDS,),
        "not_uuids": (NOT_UUIDS,),
        "mode": (MODE,),
        "anti_affinity_groups": (GROUP_POLICY,),
    },
    parse=parse,
    limits=RESOURCES.limits,
    part="memory_units",
    warnings=lambda pod: RESOURCES.one_memory(pod, counted=PERCENTAGE, unused=MEMORY),
    binding_annotations=binding_annotations,
    allocated_annotations=allocated_annotations,
    failed_annotations=lambda _: {PHASE: "failed", TIME: NEVER},
    container_setup=lambda lease, container, _, paths: hami_core.limited_setup(
        lease, container, paths, more=RUNTIME_VARIABLES
    ),
    advertise=advertise,
    resized_annotations=lambda lease: {IDS: encode_ids(lease)},
    released_amounts=RESOURCES.released,
    mig_variables=RUNTIME_VARIABLES,
    scheduler=SCHEDULER,
)
