"""Variables and mounts with which HAMi-core limits a container to its shares; pure."""

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from shared.dialects.dialect import ContainerSetup, Mount, Paths, PodManifest
from shared.dialects.reserved import DEVICE_ORDER, LIBRARY_DIRECTORY, VISIBLE
from shared.dialects.strict_values import check_gpus, check_not_bytes, check_range
from shared.model.change import Hint, limit
from shared.model.devices.device import Device
from shared.model.errors import UNDECODABLE, RequestError
from shared.model.leases.lease import MIB, Lease, Share
from shared.model.requests.request import GpuRequest, PodRequest


class PodMemo(msgspec.Struct, frozen=True, omit_defaults=True):
    init: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    priorities: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Within a device, by container."""


def encode_memo(
    pod: PodManifest, requests: tuple[GpuRequest, ...], priorities: Mapping[str, int] | None = None
) -> str:
    """Return "" if the shares say the same."""
    init = tuple(container.name for container in pod.containers if container.init)
    containers = tuple(container.name for container in pod.containers if not container.init)
    if (
        not priorities
        and not init
        and containers == tuple(request.container for request in requests)
    ):
        return ""
    return msgspec.json.encode(PodMemo(init, containers, priorities or {})).decode()


def decode_memo(lease: Lease) -> PodMemo:
    """Raise RequestError if the memo is malformed."""
    if not lease.memo:
        return PodMemo(containers=lease.containers)
    try:
        return msgspec.json.decode(lease.memo, type=PodMemo)
    except UNDECODABLE as error:
        raise RequestError(
            f"the lease of {lease.namespace}/{lease.name} was restored, and what it kept of the "
            f"pod's spec cannot be read: delete the pod: {error}"
        ) from error


LIBRARY_NAME = "libvgpu.so"
LIBRARY = f"{LIBRARY_DIRECTORY}/{LIBRARY_NAME}"
"""In containers, and by default on the host."""
MEMORY_LIMIT = "CUDA_DEVICE_MEMORY_LIMIT"
"""With `_` and a number, of that device in the container."""
CORES_LIMIT = "CUDA_DEVICE_SM_LIMIT"
PRIORITY = "CUDA_TASK_PRIORITY"
CACHE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
"""The path of the container's region file."""
POLICY = "GPU_CORE_UTILIZATION_POLICY"
LOG_LEVEL = "LIBCUDA_LOG_LEVEL"
ERRORS_ONLY = "1"
"""Other levels write to standard error, which breaks programs that parse it."""
ALL_CORES = 100
REGIONS = "/tmp/vgpu"  # noqa: S108 - inside the container
"""The region file's directory, as in Volcano's plugin."""
FALLBACK_REGION = "/tmp/cudevshr.cache"  # noqa: S108 - inside the container
"""For processes without environment."""
LOCKS = "/tmp/vgpulock"  # noqa: S108 - inside the container
"""Held by the library while it looks up its process ID on the host."""
OVERRIDES = "/overrideEnv"
"""The library sets variables from this file, whatever the environment is."""
_OVERRIDDEN = ("CUDA_", POLICY)
"""Prefixes of variables that set limits."""
_CACHES = uuid.UUID("6d0e1f2a-5b3c-4f58-9a39-6f1f0a7f5c11")


def limited_setup(
    lease: Lease,
    container: str,
    paths: Paths,
    *,
    regions: str = REGIONS,
    more: Mapping[str, str] | None = None,
) -> ContainerSetup:
    """Return a container's devices, their limits, and the mounts that enforce them.

    HAMi-core numbers devices as CUDA does, by PCI address, so devices and limits are sorted by
    index. The region is also mounted where a process without environment looks for it; the preload
    file makes such a process load the library. No other container can read what this one can write.

    Raises RequestError for a share without memory, which would have no limit.
    """
    shares = required_shares(lease, container)
    if any(share.limit_bytes <= 0 for share in shares):
        raise RequestError(f"container {container} of pod {lease.pod} has no memory leased")
    if not any("hami-core" in (share.memory, share.compute) for share in shares):
        return whole_setup(lease, container)
    cache = f"{uuid.uuid5(_CACHES, f'{lease.pod}/{container}')}.cache"
    own = f"{paths.containers}/{lease.pod}_{container}"
    setup = whole_setup(lease, container)
    return replace(
        setup,
        environment={
            **setup.environment,
            **{f"{MEMORY_LIMIT}_{i}": _size(share) for i, share in enumerate(shares)},
            CORES_LIMIT: str(limited_cores(shares)),
            CACHE: f"{regions}/{cache}",
            **({POLICY: "force"} if 0 < limited_cores(shares) < ALL_CORES else {}),
            LOG_LEVEL: ERRORS_ONLY,
            **DEVICE_ORDER,
            **(more or {}),
        },
        mounts=(
            *_library_and_region(paths, regions, own),
            Mount(
                container_path=FALLBACK_REGION,
                host_path=f"{own}/{cache}",
                read_only=False,
                directory=False,
            ),
            lock_mount(own),
            override_mount(own),
            mount("/etc/ld.so.preload", paths.preload, read_only=True),
        ),
    )


def lock_mount(own: str) -> Mount:
    """A lock per node would let any container block all others."""
    return mount(LOCKS, f"{own}.lock")


def override_mount(own: str) -> Mount:
    """Hide the image's `/overrideEnv`, whose variables the library sets in each process.

    They could lift a limit of cores, or give child processes a region without limits.
    """
    return mount(OVERRIDES, f"{own}.env", read_only=True)


def overrides(environment: Mapping[str, str]) -> str:
    """The library reads lines `NAME=VALUE` up to the first without `=`."""
    lines = (
        f"{name}={value}\n"
        for name, value in sorted(environment.items())
        if name.startswith(_OVERRIDDEN)
    )
    return "".join(lines)


def limited_cores(shares: Sequence[Share]) -> int:
    """Return the percent of the cores to which the library holds a container, or 0.

    The library has one limit for all GPUs. It must not limit cores that nothing, or another
    enforcer, holds: programs could not use what is idle.
    """
    held = [share.cores_percent for share in shares if share.compute == "hami-core"]
    return held[0] if held else 0


def is_limited(setup: ContainerSetup) -> bool:
    return CACHE in setup.environment


def whole_setup(lease: Lease, container: str) -> ContainerSetup:
    """Raise RequestError if the container has no device."""
    return ContainerSetup(
        environment={VISIBLE: ",".join(share.device for share in required_shares(lease, container))}
    )


def shares_by_index(lease: Lease, container: str) -> list[Share]:
    return sorted(lease.shares_of(container), key=lambda share: share.index)


def required_shares(lease: Lease, container: str) -> Sequence[Share]:
    """Raise RequestError if there are none."""
    shares = shares_by_index(lease, container)
    if not shares:
        raise RequestError(f"container {container} of pod {lease.pod} has no memory leased")
    return shares


def encode_share(share: Share, memory: int) -> str:
    """Encode `id,NVIDIA,memory,cores:`, as HAMi and Volcano write it.

    The id is the UUID, or `uuid[layout-position]` for a MIG instance.
    """
    place = f"[{share.mig.layout}-{share.mig.position}]" if share.mig else ""
    return f"{share.device}{place},NVIDIA,{memory},{share.cores_percent}:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareResources:
    """A vendor's resource names."""

    count: str
    memory: str
    """In units of the node."""
    percentage: str
    cores: str

    def check(self, container: str, amounts: Mapping[str, int]) -> None:
        """Raise RequestError for an amount out of range, and for memory in bytes."""
        check_gpus(container, self.count, amounts.get(self.count, 0))
        check_range(container, self.percentage, amounts.get(self.percentage), 1, 100)
        check_range(container, self.cores, amounts.get(self.cores), 0, ALL_CORES)
        check_range(container, self.memory, amounts.get(self.memory), 0)
        check_not_bytes(container, self.memory, amounts.get(self.memory, 0))

    def limits(self, container: GpuRequest, _: PodRequest) -> dict[str, int]:
        amounts = {
            self.count: container.gpus,
            self.memory: container.memory_units or 0,
            self.percentage: container.memory_percent or 0,
            self.cores: container.cores_percent,
        }
        return {name: amount for name, amount in amounts.items() if amount}

    def one_memory(self, pod: PodManifest, counted: str, unused: str) -> Iterator[Hint]:
        """Yield the memory that has no effect beside `counted`."""
        for container in pod.containers:
            amounts = container.amounts
            if amounts.get(counted) and amounts.get(unused):
                yield Hint(
                    f"container {container.name}: {unused}: {amounts[unused]} has no effect beside "
                    f"{counted}: {amounts[counted]}: remove {unused}",
                    (limit(container.name, unused),),
                )

    def of_node(self, devices: Iterable[Device]) -> dict[str, int]:
        healthy = [device for device in devices if device.healthy]
        return {
            self.memory: sum(device.memory_mib // device.unit_mib for device in healthy),
            self.cores: ALL_CORES * len(healthy),
        }

    def released(self, share: Share) -> dict[str, int]:
        """In units of memory, and cores."""
        if share.requested_size is None:
            return {}
        return {
            self.memory: (share.requested_size.memory_mib - share.memory_mib) // share.unit_mib,
            self.cores: share.requested_size.cores_percent - share.cores_percent,
        }


def _size(share: Share) -> str:
    """In MiB if it is a whole number of these, else in bytes."""
    mib, rest = divmod(share.limit_bytes, MIB)
    return str(share.limit_bytes) if rest else f"{mib}m"


def _library_and_region(paths: Paths, regions: str, directory: str) -> tuple[Mount, Mount]:
    """A mount inside the other one comes second."""
    library = mount(LIBRARY, paths.library, read_only=True)
    region = mount(regions, directory)
    return (region, library) if LIBRARY.startswith(f"{regions}/") else (library, region)


def mount(container_path: str, host_path: str, *, read_only: bool = False) -> Mount:
    """Directories are writable, files read-only."""
    return Mount(
        container_path=container_path,
        host_path=host_path,
        read_only=read_only,
        directory=not read_only,
    )
