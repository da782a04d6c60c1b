"""tencent.com/vcuda-*: hundredths of a GPU and blocks of 256 MiB, as gpu-manager counts; pure.

`vcuda-core` below 100 is a share of one GPU and needs `vcuda-memory`; multiples are whole GPUs.
Memory beside these is ignored, but the node must have it, as the kubelet checks. HAMi-core cannot
let a share use idle cores up to `tencent.com/vcuda-core-limit`, which is only checked to be a
number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shared.dialects import hami_core
from shared.dialects.advertised import Advertisement, numbered_ids, shared_devices
from shared.dialects.dialect import (
    ContainerManifest,
    ContainerSetup,
    Dialect,
    Paths,
    PodManifest,
    Rules,
    assigned_when_done,
)
from shared.dialects.hami_core import decode_memo, encode_memo
from shared.dialects.strict_values import check_gpus, check_not_bytes, parse_whole_number
from shared.model.change import Change, Hint, Place, limit
from shared.model.denial import Denial
from shared.model.devices.device import Device
from shared.model.errors import RequestError
from shared.model.leases.lease import MIB, Lease
from shared.model.names import DeviceUuid
from shared.model.requests.request import DeviceOrder, GpuRequest, PodRequest

NAME = "tencent"
CORE = "tencent.com/vcuda-core"
MEMORY = "tencent.com/vcuda-memory"

CORE_LIMIT = "tencent.com/vcuda-core-limit"
GPU_INDEX = "tencent.com/predicate-gpu-idx-"
"""The container's index in `spec.containers` follows."""
TIME = "tencent.com/predicate-time"
NODE = "tencent.com/predicate-node"
ASSIGNED = "tencent.com/gpu-assigned"
DEVICES = "tencent.com/vcuda-device"
"""Of containers in their runtime, beside `CORE` and, in bytes, `MEMORY`."""

WHOLE = 100
"""`vcuda-core` of one GPU."""
BLOCK_MIB = 256
BLOCK_BYTES = BLOCK_MIB * MIB
BLOCKS_OF_4_GIB = 4096 // BLOCK_MIB
HALF = WHOLE // 2
DENIAL = f"Must supply both {CORE} AND {MEMORY}"
"""By GPUSharing's webhook; its clients compare this text."""


def parse(pod: PodManifest, _: Rules) -> PodRequest | None:
    """Parse a pod's request. Raises RequestError naming container, resource and rule.

    >>> from shared.dialects.dialect import ContainerManifest
    >>> container = ContainerManifest(name="train", limits={CORE: 20, MEMORY: 12})
    >>> request = parse(PodManifest(namespace="ml", containers=(container,)), Rules())
    >>> request.containers[0].cores_percent, request.containers[0].memory_bytes >> 20
    (20, 3072)
    """
    requesting = [
        container
        for container in pod.containers
        if container.amounts.get(CORE) or container.amounts.get(MEMORY)
    ]
    if not requesting:
        return None
    _check_core_limit(pod.annotations)
    containers = tuple(_parse_container(container) for container in requesting)
    return PodRequest(
        dialect=NAME,
        containers=containers,
        triggers=(CORE,),
        memo=encode_memo(pod, containers),
        device_order=DeviceOrder.TIGHTEST,
    )


def _parse_container(container: ContainerManifest) -> GpuRequest:
    core, memory = (container.amounts.get(name, 0) for name in (CORE, MEMORY))
    where = f'container "{container.name}"'
    check_not_bytes(container.name, MEMORY, memory, unit_mib=BLOCK_MIB)
    if core < 1:
        raise RequestError(
            f"{where}: {MEMORY}={memory} needs {CORE} beside it: 1..99 for a share of a GPU, such "
            f"as {HALF} for half of its cores, or a multiple of 100 for whole GPUs",
            limit(container.name, CORE, HALF),
        )
    check_gpus(container.name, CORE, core // WHOLE, unit=WHOLE)
    if core > WHOLE and core % WHOLE:
        gpus = -(-core // WHOLE)
        raise RequestError(
            f"{where}: {CORE}={core} must be 1..99 or a multiple of 100: write {gpus * WHOLE} for "
            f"{gpus} whole GPUs",
            limit(container.name, CORE, gpus * WHOLE),
        )
    if core >= WHOLE:
        return GpuRequest(
            container=container.name,
            gpus=core // WHOLE,
            whole=True,
            slotted=False,
            init=container.ends_first,
        )
    if memory < 1:
        raise RequestError(
            f"{where}: {CORE}={core} is less than a GPU and needs {MEMORY} of 1 or more beside "
            f"it, in blocks of 256 MiB: such as {BLOCKS_OF_4_GIB} for 4 GiB",
            limit(container.name, MEMORY, BLOCKS_OF_4_GIB),
        )
    return GpuRequest(
        container=container.name,
        gpus=1,
        memory_bytes=memory * BLOCK_BYTES,
        cores_percent=core,
        slotted=False,
        init=container.ends_first,
    )


def limits(container: GpuRequest, _: PodRequest) -> dict[str, int]:
    """Memory beside whole GPUs has no effect."""
    if container.whole:
        return {CORE: WHOLE * container.gpus}
    return {CORE: container.cores_percent, MEMORY: (container.memory_bytes or 0) // BLOCK_BYTES}


def _check_core_limit(annotations: Mapping[str, str]) -> None:
    limit = annotations.get(CORE_LIMIT)
    if limit is not None:
        parse_whole_number(f"annotation {CORE_LIMIT}", limit.strip(), least=0, most=WHOLE * WHOLE)


def added_annotations(pod: PodManifest) -> dict[str, str]:
    cores = max((container.limits.get(CORE, 0) for container in pod.containers), default=0)
    return {CORE_LIMIT: str(cores)} if 0 < cores < WHOLE else {}


def warnings(pod: PodManifest) -> Iterable[Hint]:
    """Yield a limit of cores that is not what the shares get."""
    written = pod.annotations.get(CORE_LIMIT, "").strip()
    cores = max(container.amounts.get(CORE, 0) for container in pod.containers)
    if written and int(written) != cores:
        yield Hint(
            f"annotation {CORE_LIMIT} is {written} and has no effect: a share gets exactly its "
            f"{CORE}, no more and no less: write {cores}, or request as much as it needs",
            (Change(Place.ANNOTATION, CORE_LIMIT, str(cores)),),
        )


def vendor_denial(pod: PodManifest, refused: bool) -> Denial | None:
    """GPUSharing's webhook denies a pod with only one of the two resources."""
    one_of_two = any(
        (CORE in container.limits) != (MEMORY in container.limits) for container in pod.containers
    )
    return Denial("BadRequest", DENIAL) if refused and one_of_two else None


def binding_annotations(lease: Lease, now_s: float) -> dict[str, str]:
    """By minor number; times are in ns."""
    gpus = {
        f"{GPU_INDEX}{n}": ",".join(str(share.index) for share in shares)
        for n, container in enumerate(decode_memo(lease).containers)
        if (shares := hami_core.shares_by_index(lease, container))
    }
    return {**gpus, NODE: lease.node, TIME: str(int(now_s * 1e9)), ASSIGNED: "false"}


def container_setup(
    lease: Lease, container: str, _: Mapping[DeviceUuid, Device], paths: Paths
) -> ContainerSetup:
    """gpu-manager's driver directory and `LD_LIBRARY_PATH` are left out.

    NVIDIA's runtime mounts the driver, and the variable would replace the image's own.
    """
    shares = hami_core.required_shares(lease, container)
    whole = all(share.whole for share in shares)
    setup = (
        hami_core.whole_setup(lease, container)
        if whole
        else hami_core.limited_setup(lease, container, paths)
    )
    return replace(
        setup,
        annotations={
            CORE: str(sum(share.cores_percent for share in shares)),
            MEMORY: str(sum(share.limit_bytes for share in shares)),
            DEVICES: ",".join(f"/dev/nvidia{share.index}" for share in shares),
        },
    )


def advertise(devices: Sequence[Device], _: str) -> Advertisement:
    """As gpu-manager does, count blocks over the node's memory as a whole."""
    gpus = shared_devices(devices)
    return Advertisement(
        served={CORE: numbered_ids(gpus, lambda _: WHOLE)},
        node_status={
            MEMORY: sum(device.memory_mib for device in gpus if device.healthy) // BLOCK_MIB
        },
    )


DIALECT = Dialect(
    name=NAME,
    resources=frozenset({CORE, MEMORY}),
    served=frozenset({CORE}),
    status_resources=frozenset({MEMORY}),
    node_wide=frozenset({MEMORY}),
    agent_annotations=frozenset({ASSIGNED}),
    request_annotations=frozenset({CORE_LIMIT}),
    parse=parse,
    limits=limits,
    part="memory_bytes",
    memory_step=BLOCK_BYTES,
    binding_annotations=binding_annotations,
    allocated_annotations=assigned_when_done(ASSIGNED),
    container_setup=container_setup,
    advertise=advertise,
    id_count=lambda share, _: share.cores_percent,
    added_annotations=added_annotations,
    vendor_denial=vendor_denial,
    warnings=warnings,
)
