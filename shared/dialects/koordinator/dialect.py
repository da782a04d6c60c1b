"""koordinator.sh/gpu*: percent of a GPU's compute, and percent or bytes of its memory; pure.

Leasehold is stricter than Koordinator:

* Requests are per container: containers of a pod never share a GPU, and each sees its own only.
* Memory is reserved in bytes even if requested as a ratio, so that both together never overcommit
  a GPU. A ratio is in whole MiB, rounded down.
* HAMi-core limits containers with less than a GPU, also in compute beside all of the memory, with
  or without the label `koordinator.sh/gpu-isolation-provider`.
* A container gets UUIDs of devices instead of minor numbers.

The kubelet calls Allocate for `koordinator.sh/gpu.shared` only, so a container without it is
refused with the value to add; admission adds it, as Koordinator's webhook does.

Koordinator writes `bind-timestamp`, `gpu-minors` and the label `hami.io/vgpu-node` only for device
plugins that cannot run beside our agent. So they are not written.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shared.dialects import hami_core
from shared.dialects.advertised import (
    Advertisement,
    NodeObject,
    NodeSoftware,
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
)
from shared.dialects.koordinator.annotation import (
    ALLOCATED,
    binary_text,
    decimal_text,
    difference,
    encode_allocated,
)
from shared.dialects.koordinator.requests import (
    ANNOTATIONS,
    CORE,
    DEPRECATED,
    FULL,
    GPU,
    HINT,
    MEMORY,
    MODEL_LABEL,
    NAME,
    NVIDIA_GPUS,
    PREFIX,
    RATIO,
    RESOURCES,
    SCHEDULER,
    SHARED,
    VENDOR,
    VENDOR_LABEL,
    amount_changes,
    parse_hints,
    parse_part,
    reads_nvidia_gpus,
)
from shared.dialects.reserved import DEVICE_ORDER, LIBRARY_DIRECTORY, VISIBLE
from shared.dialects.strict_values import check_choice
from shared.model.denial import Denial
from shared.model.devices.device import LABEL_LENGTH, Device, model_label
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB, Lease, Share
from shared.model.names import DeviceUuid
from shared.model.requests.request import (
    DeviceOrder,
    GpuRequest,
    NodeOrder,
    NodeRequirements,
    PodRequest,
)

ISOLATION_LABEL = "koordinator.sh/gpu-isolation-provider"
HAMI_CORE = "HAMi-core"
DRIVER_LABEL = "node.koordinator.sh/gpu-driver-version"
NODE_LABELS = frozenset({ISOLATION_LABEL, DRIVER_LABEL, VENDOR_LABEL, MODEL_LABEL})

COLLECTION = "/apis/scheduling.koordinator.sh/v1alpha1/devices"
KIND = "Device"
UNHEALTHY = "DeviceUnhealthy"


def describe_node(devices: Sequence[Device], software: NodeSoftware) -> Advertisement:
    """The isolation label, which pods with a part of a GPU require, is set while it works."""
    gpus = shared_devices(devices)
    labels = labels_of(gpus, software)
    return Advertisement(
        labels=labels
        | {ISOLATION_LABEL: HAMI_CORE if gpus and software.isolation_available else None},
        objects=(
            NodeObject(
                collection=COLLECTION,
                kind=KIND,
                labels=labels,
                devices=tuple(_entry(device) for device in gpus),
            ),
        ),
    )


def labels_of(devices: Sequence[Device], software: NodeSoftware) -> dict[str, str | None]:
    """As upstream, the model is that of the first device."""
    if not devices:
        return dict.fromkeys((VENDOR_LABEL, MODEL_LABEL, DRIVER_LABEL))
    return {
        VENDOR_LABEL: VENDOR,
        MODEL_LABEL: model_label(devices[0].model),
        DRIVER_LABEL: software.driver_version[:LABEL_LENGTH] or None,
    }


def device_resources(device: Device) -> dict[str, int]:
    """In bytes and percent."""
    return {
        PREFIX + CORE: FULL,
        PREFIX + MEMORY: device.memory_mib * MIB,
        PREFIX + RATIO: FULL,
    }


def _entry(device: Device) -> dict[str, Any]:
    amounts = device_resources(device)
    return {
        "type": "gpu",
        "id": device.uuid,
        "minor": device.index,
        "health": device.healthy,
        "labels": {VENDOR_LABEL: VENDOR, MODEL_LABEL: model_label(device.model)},
        "resources": {
            name: binary_text(amount) if name == PREFIX + MEMORY else decimal_text(amount)
            for name, amount in amounts.items()
        },
        **_topology(device),
        **({} if device.healthy else {"conditions": [_condition(device)]}),
    }


def _topology(device: Device) -> Mapping[str, Any]:
    if not device.pcie:
        return {}
    place = {"socketID": -1, "nodeID": max(device.numa or 0, 0), "pcieID": device.pcie}
    return {"topology": place | ({"busID": device.bus} if device.bus else {})}


def _condition(device: Device) -> dict[str, str]:
    return {
        "type": "Healthy",
        "status": "False",
        "reason": UNHEALTHY,
        "message": f"GPU {device.index} is {device.fault or 'not healthy'}: see `leasehold gpus`, "
        "nvidia-smi and the kernel's log of the node",
    }


FIELD = "pod.spec.containers[*].resources.requests"
NPU_CORE = "huawei.com/npu-core"
_NAMES = (GPU, SHARED, CORE, MEMORY, RATIO)


def vendor_denial(pod: PodManifest, _: bool) -> Denial | None:
    return denial_of(
        {**container.limits, **container.requests}
        for container in pod.containers
        if not container.init
    )


def denial_of(containers: Iterable[Mapping[str, int]]) -> Denial | None:
    """`containers` are maps per app container.

    Several errors are joined as Kubernetes joins them: `[first, second]`.
    """
    errors = [f"{FIELD}: {error}" for amounts in containers for error in _errors(amounts)]
    if not errors:
        return None
    return Denial("BadRequest", f"[{', '.join(errors)}]" if len(errors) > 1 else errors[0])


def _errors(amounts: Mapping[str, int]) -> Iterable[str]:
    requested = {
        name: amounts[prefix + name]
        for prefix in (DEPRECATED, PREFIX)
        for name in _NAMES
        if prefix + name in amounts
    }
    if not requested:
        return
    if GPU in requested:
        yield from _of_whole_gpus(requested)
    else:
        yield from _of_parts(requested, has_npu=NPU_CORE in amounts)


def _of_whole_gpus(requested: Mapping[str, int]) -> Iterable[str]:
    if SHARED in requested:
        yield "Forbidden: Forbidden declare GPU and GPU share at same time"
    if requested[GPU] == 0:
        yield _invalid(requested[GPU], "the requested GPU must be greater than zero")
    elif requested[GPU] > FULL and requested[GPU] % FULL:
        yield _invalid(requested[GPU], "the requested GPU must be percentage of 100")


def _of_parts(requested: Mapping[str, int], *, has_npu: bool) -> Iterable[str]:
    shared = requested.get(SHARED, 1)
    if shared == 0:
        yield _invalid(shared, "the requested GPU must be greater than zero")
    if has_npu:
        return
    memory = requested.get(MEMORY, 0)
    ratio = requested.get(RATIO, 0)
    if not memory and not ratio:
        yield "Forbidden: GPU memory and GPU memory ratio all is zero"
    if memory and ratio:
        yield "Forbidden: declare GPU memory and GPU memory ratio at same time"
    for name, word in ((CORE, "gpuCore"), (RATIO, "gpuMemoryRatio")):
        amount = requested.get(name, 0)
        if shared and amount % shared:
            yield _invalid(amount, f"the requested {word} must multiple of shared")


def _invalid(value: int, rule: str) -> str:
    return f'Invalid value: "{value}": {rule}'


TRIGGER = PREFIX + SHARED

ORDERS: Mapping[str, tuple[DeviceOrder, NodeOrder]] = {
    "LeastAllocated": (DeviceOrder.LEAST_ALLOCATED, NodeOrder.SPREAD),
    "MostAllocated": (DeviceOrder.MOST_ALLOCATED, NodeOrder.BINPACK),
}
"""By `Rules.scoring_strategy`."""
BY_MEMORY = (0, 0, 1)
"""Upstream has equal weights for bytes and ratio, which are the same memory."""


def parse(pod: PodManifest, rules: Rules) -> PodRequest | None:
    """Parse a pod's request. Raises RequestError naming container, resource, value and rule.

    >>> from shared.dialects.dialect import ContainerManifest
    >>> limits = {"koordinator.sh/gpu.shared": 1, "koordinator.sh/gpu-core": 50}
    >>> limits["koordinator.sh/gpu-memory-ratio"] = 40
    >>> container = ContainerManifest(name="train", limits=limits)
    >>> request = parse(PodManifest(namespace="ml", containers=(container,)), Rules())
    >>> request.containers[0].cores_percent, request.containers[0].memory_percent
    (50, 40)
    """
    whole_gpus = reads_nvidia_gpus(pod, rules)
    asking = {
        container.name: (container, part)
        for container in pod.containers
        if (part := _parse_container(container, whole_gpus=whole_gpus))
    }
    if not asking:
        return None
    parts = tuple(part for _, part in asking.values())
    _check_units(parts)
    device_order, node_order = ORDERS[rules.scoring_strategy]
    selection, scope = parse_hints(
        pod.annotations,
        resources={
            name for container in pod.containers for name, n in container.limits.items() if n
        },
        shared=any(not _is_all_memory(part) for part in parts),
    )
    by_nvidias_name = _check_names([container for container, _ in asking.values()])
    return PodRequest(
        dialect=NAME,
        containers=parts,
        distinct_devices=True,
        triggers=(NVIDIA_GPUS if by_nvidias_name else TRIGGER,),
        selection=selection,
        topology_scope=scope,
        allocation_weights=BY_MEMORY,
        device_order=device_order,
        node_order=node_order,
        node_requirements=NodeRequirements(selector=_isolation_selector(pod.labels, parts)),
    )


def limits(container: GpuRequest, pod: PodRequest) -> dict[str, int]:
    if NVIDIA_GPUS in pod.triggers:
        return {NVIDIA_GPUS: container.gpus} if container.whole else {}
    full = FULL * container.whole
    values = {
        CORE: full or container.cores_percent,
        RATIO: full or container.memory_percent or 0,
        MEMORY: container.memory_bytes or 0,
    }
    amounts = {PREFIX + name: amount * container.gpus for name, amount in values.items() if amount}
    return {TRIGGER: container.gpus, **amounts}


def _is_all_memory(part: GpuRequest) -> bool:
    return part.whole or part.memory_percent == FULL


def _parse_container(container: ContainerManifest, *, whole_gpus: bool) -> GpuRequest | None:
    amounts = container.amounts
    part = parse_part(
        container.name,
        amounts if whole_gpus else {**amounts, NVIDIA_GPUS: 0},
        init=container.ends_first,
    )
    if part is None or TRIGGER in _named(container) or NVIDIA_GPUS in _named(container):
        return part
    missing = amount_changes(amounts)
    count = missing.get(TRIGGER, part.gpus)
    shorthand = f", and replace {PREFIX}{GPU} by what it stands for" if len(missing) > 1 else ""
    raise RequestError(
        f"container {container.name}: {TRIGGER} is missing, and without it the kubelet would start "
        f"the container without a device: add {TRIGGER}: {count}{shorthand}, or install the "
        "webhook, which adds it"
    )


def _named(container: ContainerManifest) -> set[str]:
    return {name for name, amount in container.limits.items() if amount > 0}


def _check_units(parts: Iterable[GpuRequest]) -> None:
    names: dict[bool, str] = {}
    for part in parts:
        names.setdefault(part.memory_bytes is not None, part.container)
    if len(names) > 1:
        raise RequestError(
            f"container {names[False]} requests memory as a ratio and container {names[True]} in "
            "bytes: Koordinator accepts one of the two for all containers of a pod"
        )


def _check_names(containers: Sequence[ContainerManifest]) -> bool:
    vendor = [container.name for container in containers if NVIDIA_GPUS in _named(container)]
    others = [container.name for container in containers if NVIDIA_GPUS not in _named(container)]
    if vendor and others:
        raise RequestError(
            f"container {vendor[0]} requests {NVIDIA_GPUS} and container {others[0]} {PREFIX}*: "
            "Koordinator accepts one of the two for all containers of a pod"
        )
    return bool(vendor)


def _isolation_selector(
    labels: Mapping[str, str], parts: Iterable[GpuRequest]
) -> tuple[tuple[str, str], ...]:
    provider = labels.get(ISOLATION_LABEL, "")
    if provider and provider.lower() != HAMI_CORE.lower():
        raise RequestError(
            f"label {ISOLATION_LABEL} must be {HAMI_CORE}, got {provider!r}: there is no other "
            "isolation provider here"
        )
    limited = any(not _is_all_memory(part) or 0 < part.cores_percent < FULL for part in parts)
    return ((ISOLATION_LABEL, HAMI_CORE),) if limited else ()


def binding_annotations(lease: Lease, _: float) -> dict[str, str]:
    """The allocation replaces one that the pod's author wrote."""
    return {ALLOCATED: encode_allocated(lease)}


def released_amounts(share: Share) -> dict[str, int]:
    if share.requested_size is None or share.requested_units is None:
        return {}
    less_mib = share.requested_size.memory_mib - share.memory_mib
    return {
        PREFIX + CORE: share.requested_size.cores_percent - share.cores_percent,
        PREFIX + MEMORY: less_mib * MIB,
        PREFIX + RATIO: -(-100 * less_mib // share.device_mib),
    }


def container_setup(
    lease: Lease, container: str, _: Mapping[DeviceUuid, Device], paths: Paths
) -> ContainerSetup:
    """Return a container's devices and, for parts of GPUs, HAMi-core's variables and mounts.

    Other than with Koordinator's node agent, the library is read-only and logs errors only, and the
    file of overrides and the lock's directory are the container's own: libraries up to HAMi 2.8
    hold the lock while they look up their process ID, so any container could block all others.

    All GPUs of a container have one memory limit, the smallest. Raises RequestError without one.
    """
    shares = lease.shares_of(container)
    if not shares or any(share.limit_bytes <= 0 for share in shares):
        raise RequestError(f"container {container} of pod {lease.pod} has no memory leased")
    visible = {VISIBLE: ",".join(share.device for share in shares)}
    if not any(_is_limited(share) for share in shares):
        return ContainerSetup(environment=visible)
    cores = hami_core.limited_cores(shares)
    own = f"{lease.pod}_{container}"
    return ContainerSetup(
        environment={
            **visible,
            hami_core.MEMORY_LIMIT: str(min(share.limit_bytes for share in shares)),
            **({hami_core.CORES_LIMIT: str(cores)} if cores else {}),
            "LD_PRELOAD": hami_core.LIBRARY,
            hami_core.CACHE: f"{LIBRARY_DIRECTORY}/{own}.cache",
            hami_core.LOG_LEVEL: hami_core.ERRORS_ONLY,
            **DEVICE_ORDER,
        },
        mounts=(
            hami_core.mount(LIBRARY_DIRECTORY, f"{paths.containers}/{own}"),
            hami_core.mount(hami_core.LIBRARY, paths.library, read_only=True),
            hami_core.lock_mount(f"{paths.containers}/{own}"),
            hami_core.override_mount(f"{paths.containers}/{own}"),
        ),
    )


def _is_limited(share: Share) -> bool:
    if share.whole or "hami-core" not in (share.memory, share.compute):
        return False
    terms = share.requested_units
    everything = terms is not None and share.limit_bytes >= share.device_mib * MIB
    return not everything or 0 < share.cores_percent < FULL


def advertise(devices: Sequence[Device], _: str) -> Advertisement:
    usable = shared_devices(devices)
    healthy = [device for device in usable if device.healthy]
    patched = dict.fromkeys(sorted(PATCHED), 0)
    for device in healthy:
        for name, amount in device_resources(device).items():
            patched[name] += amount
    patched[PREFIX + GPU] = patched[PREFIX + CORE]
    return Advertisement(
        served={TRIGGER: trigger_ids(usable)},
        node_status=patched,
    )


PATCHED = frozenset(PREFIX + name for name in (GPU, CORE, MEMORY, RATIO))

DIALECT = Dialect(
    name=NAME,
    resources=RESOURCES | {NVIDIA_GPUS},
    served=frozenset({TRIGGER}),
    status_resources=PATCHED,
    node_labels=NODE_LABELS,
    node_objects=frozenset({COLLECTION}),
    request_annotations=ANNOTATIONS,
    request_labels=frozenset({ISOLATION_LABEL}),
    request_fields={
        "models": (HINT,),
        "not_models": (HINT,),
        "topology_scope": (HINT,),
    },
    parse=parse,
    limits=limits,
    part="memory_percent",
    binding_annotations=binding_annotations,
    container_setup=container_setup,
    advertise=advertise,
    describe_node=describe_node,
    annotation_difference=difference,
    resized_annotations=lambda lease: binding_annotations(lease, 0.0),
    released_amounts=released_amounts,
    amount_changes=amount_changes,
    vendor_denial=vendor_denial,
    check_rules=lambda rules: check_choice("--koordinator-scoring", rules.scoring_strategy, ORDERS),
    scheduler=SCHEDULER,
)
