"""nvidia.com/gpu, as HAMi and NVIDIA's own device plugin read it; pure.

A number alone means whole GPUs. Memory counts before a percentage (in Volcano the percentage
counts). A pod without `nvidia.com/gpu`, which admission adds, is refused: the kubelet would not
call Allocate, and the container would see every device.

In a chain of HAMi's policies such as `numa,binpack`, the first of `binpack` and `spread` orders
devices by use; `topology-aware` and `numa` prefer good links (for one GPU, `topology-aware` avoids
them); `mutex` requires idle devices. Any other is refused, which upstream ignores.
"""

from collections.abc import Mapping, Sequence

from msgspec import structs

from shared.dialects import hami_core
from shared.dialects.advertised import Advertisement, numbered_ids
from shared.dialects.dialect import (
    ContainerManifest,
    ContainerSetup,
    Dialect,
    Paths,
    PodManifest,
    Rules,
    list_entries,
)
from shared.dialects.hami_core import decode_memo, encode_memo
from shared.dialects.koordinator.requests import NVIDIA_GPUS, reads_nvidia_gpus
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
from shared.dialects.nvidia.replica_labels import LABELS, labels_of
from shared.dialects.reserved import LIBRARY_DIRECTORY
from shared.dialects.strict_values import (
    check_annotation,
    check_choice,
    check_gpus,
    parse_boolean,
    parse_decimal,
)
from shared.model.change import limit
from shared.model.devices.device import POD_MODES, Device, DeviceMode
from shared.model.errors import RequestError
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid
from shared.model.requests.request import (
    DeviceOrder,
    DeviceSelection,
    GpuRequest,
    NodeOrder,
    PodRequest,
    SharingPolicy,
    TopologyScope,
)

NAME = "nvidia"
SCHEDULER = "hami-scheduler"
COUNT = NVIDIA_GPUS
REPLICA = f"{COUNT}.shared"
"""Some nodes offer replicas under a name of their own."""
MEMORY = "nvidia.com/gpumem"
PERCENTAGE = "nvidia.com/gpumem-percentage"
CORES = "nvidia.com/gpucores"
PRIORITY = "nvidia.com/priority"
RESOURCES = hami_core.ShareResources(count=COUNT, memory=MEMORY, percentage=PERCENTAGE, cores=CORES)

ALL = 100
"""Percent of a device's memory, or of its cores."""
DEFAULT_GPUS = 1
"""HAMi's `defaultGPUNum`, for a container that gives no number."""
REGIONS = LIBRARY_DIRECTORY
"""The region file's directory in HAMi's containers."""

USE_TYPES = "nvidia.com/use-gputype"
NOT_TYPES = "nvidia.com/nouse-gputype"
USE_UUIDS = "nvidia.com/use-gpuuuid"
NOT_UUIDS = "nvidia.com/nouse-gpuuuid"
NUMA_BIND = "nvidia.com/numa-bind"
MODE = "nvidia.com/vgpu-mode"
NODE_POLICY = "hami.io/node-scheduler-policy"
GPU_POLICY = "hami.io/gpu-scheduler-policy"
WEIGHTS = "hami.io/device-scoring-weights"
ANNOTATIONS = frozenset(
    {
        *(USE_TYPES, NOT_TYPES, USE_UUIDS, NOT_UUIDS, NUMA_BIND, MODE),
        *(NODE_POLICY, GPU_POLICY, WEIGHTS),
    }
)

MUTEX = "mutex"
NUMA = "numa"
TOPOLOGY = "topology-aware"
ORDERS: Mapping[str, DeviceOrder] = {
    "binpack": DeviceOrder.MOST_ALLOCATED,
    "spread": DeviceOrder.LEAST_ALLOCATED,
}
NODE_ORDERS: Mapping[str, NodeOrder] = {order.value: order for order in NodeOrder}
POLICIES = (*ORDERS, NUMA, MUTEX, TOPOLOGY)
PARTS = ("slot", "core", "memory")

Amounts = Mapping[str, int]


def parse(pod: PodManifest, rules: Rules) -> PodRequest | None:
    """Parse a pod's request. Raises RequestError naming container, resource and rule.

    >>> container = ContainerManifest(name="train", limits={COUNT: 2, MEMORY: 3000})
    >>> request = parse(PodManifest(namespace="ml", containers=(container,)), Rules())
    >>> request.containers[0].gpus, request.containers[0].memory_units
    (2, 3000)
    """
    if reads_nvidia_gpus(pod, rules):
        return None
    requesting = [container for container in pod.containers if any(_amounts(container).values())]
    if not requesting:
        return None
    for container in requesting:
        _check(container.name, _amounts(container))
    trigger = _trigger(requesting)
    most = max(_amounts(container)[trigger] for container in requesting)
    choice, idle_only = parse_device_choice(pod.annotations, rules, gpus=most)
    mig_only = choice.selection.mode == DeviceMode.MIG
    containers = tuple(
        _request(container, mig_only=mig_only, idle=idle_only) for container in requesting
    )
    priorities = {
        container.name: _amounts(container)[PRIORITY]
        for container in requesting
        if PRIORITY in _amounts(container)
    }
    return structs.replace(
        choice,
        dialect=NAME,
        containers=containers,
        triggers=(trigger,),
        memo=encode_memo(pod, containers, priorities),
        prefer_links=choice.prefer_links or any(request.whole for request in containers),
    )


def amount_changes(amounts: Amounts) -> dict[str, int | None]:
    """Return the number of GPUs that HAMi's webhook adds.

    >>> amount_changes({"nvidia.com/gpumem": 3000})
    {'nvidia.com/gpu': 1}
    """
    if amounts.get(COUNT) or not any(amounts.get(name) for name in (MEMORY, PERCENTAGE, CORES)):
        return {}
    return {COUNT: DEFAULT_GPUS}


def _amounts(container: ContainerManifest) -> Amounts:
    amounts = container.amounts
    names = (COUNT, REPLICA, MEMORY, PERCENTAGE, CORES, PRIORITY)
    return {name: amounts[name] for name in names if name in amounts}


def _trigger(containers: Sequence[ContainerManifest]) -> str:
    """A node serves one of the two."""
    by_name = {
        name: container.name
        for container in containers
        for name in (COUNT, REPLICA)
        if _amounts(container).get(name)
    }
    if len(by_name) > 1:
        raise RequestError(
            f"container {by_name[COUNT]} requests {COUNT} and container {by_name[REPLICA]} "
            f"{REPLICA}: no node serves both; request one of them"
        )
    return next(iter(by_name))


def _check_replicas(container: str, amounts: Amounts) -> None:
    other = next((name for name, amount in amounts.items() if name != REPLICA and amount), None)
    if other is not None:
        raise RequestError(
            f"container {container}: {other} is for amounts of {COUNT}, and a replica of {REPLICA} "
            f"is always the same part of a GPU; leave out {other}, or {REPLICA}",
            limit(container, other),
        )
    check_gpus(container, REPLICA, amounts[REPLICA])


def _check(container: str, amounts: Amounts) -> None:
    if amounts.get(REPLICA):
        _check_replicas(container, amounts)
        return
    if amounts.get(COUNT, 0) < 1:
        named = next(name for name, amount in amounts.items() if amount)
        raise RequestError(
            f"container {container}: {named} needs {COUNT} of 1 or more beside it in the limits "
            f"(HAMi's webhook would add {COUNT}: {DEFAULT_GPUS}); the kubelet would give the "
            "container no device",
            limit(container, COUNT, DEFAULT_GPUS),
        )
    RESOURCES.check(container, amounts)


def _request(container: ContainerManifest, *, mig_only: bool, idle: bool) -> GpuRequest:
    """All memory means the whole device, unless fewer cores or only MIG instances are requested."""
    amounts = _amounts(container)
    memory, cores = amounts.get(MEMORY, 0) or None, amounts.get(CORES, 0)
    percent = None if memory else amounts.get(PERCENTAGE)
    everything = memory is None and percent in {None, ALL}
    whole = everything and cores in {0, ALL} and not mig_only
    exclusive = whole or (cores == ALL and not mig_only)
    sharing = SharingPolicy.IDLE_DEVICE if idle else SharingPolicy.SHARED
    name = COUNT if amounts.get(COUNT) else REPLICA
    is_number = whole and not idle and set(amounts) <= {name}
    return GpuRequest(
        container=container.name,
        gpus=amounts[name],
        number_of=name if is_number else "",
        replica_only=name == REPLICA,
        memory_units=None if whole else memory,
        memory_percent=percent,
        percent_of_mib=not whole,
        cores_percent=cores,
        whole=whole,
        sharing=SharingPolicy.EXCLUSIVE if exclusive else sharing,
        idle_parts=exclusive and idle,
        init=container.ends_first,
        mig_allowed=not whole,
    )


def parse_device_choice(
    annotations: Mapping[str, str], rules: Rules, *, gpus: int
) -> tuple[PodRequest, bool]:
    """Return a request with the choices only, and whether devices must be idle.

    `gpus` is the largest number of a container. Raises RequestError naming annotation and value.
    """
    chain = _chain(GPU_POLICY, annotations.get(GPU_POLICY, ""))
    default = _chain("--gpu-scheduler-policy", rules.gpu_scheduler_policy)
    policies = chain or default
    node_policy = annotations.get(NODE_POLICY, "").strip() or rules.node_scheduler_policy
    check_annotation(NODE_POLICY, node_policy, NODE_ORDERS)
    node_order = NODE_ORDERS[node_policy]
    orders = [ORDERS[policy] for policy in (*chain, *default, "spread") if policy in ORDERS]
    if node_order.compares and ORDERS.keys().isdisjoint(chain):
        orders = [DeviceOrder.BINPACK]
    numa = parse_boolean(NUMA_BIND, annotations.get(NUMA_BIND, ""))
    request = PodRequest(
        selection=_selection(annotations),
        node_order=node_order,
        device_order=DeviceOrder.LEAST_LINKED if TOPOLOGY in policies and gpus == 1 else orders[0],
        allocation_weights=_weights(annotations.get(WEIGHTS, "")),
        topology_scope=TopologyScope.NUMA if numa else TopologyScope.NODE,
        prefer_links=TOPOLOGY in policies or NUMA in policies,
    )
    return request, MUTEX in policies


def check_policies(rules: Rules) -> None:
    """Raise RequestError naming the watcher's flag whose value is not a policy."""
    check_choice("--node-scheduler-policy", rules.node_scheduler_policy, NODE_ORDERS)
    _chain("--gpu-scheduler-policy", rules.gpu_scheduler_policy)


def _chain(name: str, text: str) -> tuple[str, ...]:
    policies = list_entries(text)
    for policy in policies:
        check_annotation(name, policy, POLICIES, text)
    return policies


def _selection(annotations: Mapping[str, str]) -> DeviceSelection:
    """What is both allowed and denied is denied."""
    return DeviceSelection(
        types=list_entries(annotations.get(USE_TYPES, "")),
        not_types=list_entries(annotations.get(NOT_TYPES, "")),
        uuids=list_entries(annotations.get(USE_UUIDS, "")),
        not_uuids=list_entries(annotations.get(NOT_UUIDS, "")),
        mode=_mode(annotations.get(MODE, "")),
    )


def _mode(text: str) -> str | None:
    modes = set(list_entries(text))
    for mode in sorted(modes):
        check_annotation(MODE, mode, POD_MODES, text)
    return modes.pop() if len(modes) == 1 else None


def _weights(text: str) -> tuple[int, int, int]:
    """Parse `slot=1,core=1,memory=3`. The default weight is 1; only the ratio counts."""
    weights = dict.fromkeys(PARTS, 1.0)
    for entry in list_entries(text):
        part, _, amount = (piece.strip() for piece in entry.partition("="))
        if part not in weights:
            raise RequestError(f"{WEIGHTS} must look like slot=1,core=1,memory=3, got {entry!r}")
        weights[part] = parse_decimal(f"{WEIGHTS}: {part}", amount, most=1000)
    scale = 1 if all(weight.is_integer() for weight in weights.values()) else 1000
    slot, core, memory = (round(weights[part] * scale) for part in PARTS)
    return slot, core, memory


def container_setup(
    lease: Lease, container: str, _: Mapping[DeviceUuid, Device], paths: Paths
) -> ContainerSetup:
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


def limits(container: GpuRequest, pod: PodRequest) -> dict[str, int]:
    if REPLICA in pod.triggers:
        return {REPLICA: container.gpus}
    return RESOURCES.limits(container, pod)


def advertise(devices: Sequence[Device], _: str) -> Advertisement:
    of_names: dict[str, list[Device]] = {} if devices else {COUNT: []}
    for device in devices:
        name = device.replicas.resource if device.replicas is not None else COUNT
        of_names.setdefault(name, []).append(device)
    return Advertisement(
        served={name: numbered_ids(of_name, slot_count) for name, of_name in of_names.items()},
        node_status=RESOURCES.of_node(device for device in devices if device.replicas is None),
        own_labels=labels_of(devices),
        annotations={REGISTER: encode_register(devices), SCORES: encode_scores(devices)},
    )


DIALECT = Dialect(
    name=NAME,
    resources=frozenset({COUNT, REPLICA, MEMORY, PERCENTAGE, CORES, PRIORITY}),
    served=frozenset({COUNT, REPLICA}),
    status_resources=frozenset({MEMORY, CORES}),
    node_annotations=frozenset({REGISTER, SCORES}),
    node_labels=LABELS,
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
    limits=limits,
    part="memory_units",
    warnings=lambda pod: RESOURCES.one_memory(pod, counted=MEMORY, unused=PERCENTAGE),
    binding_annotations=binding_annotations,
    allocated_annotations=allocated_annotations,
    failed_annotations=lambda _: {PHASE: "failed"},
    container_setup=container_setup,
    advertise=advertise,
    resized_annotations=lambda lease: {ALLOCATED: encode_devices(lease)},
    released_amounts=RESOURCES.released,
    amount_changes=amount_changes,
    check_rules=check_policies,
    scheduler=SCHEDULER,
    cordoned_devices=cordoned_devices,
)
