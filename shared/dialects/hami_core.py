"""What a container gets that HAMi-core holds to its shares: the library's variables and mounts."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shared.dialects.dialect import ContainerSetup, Mount, Paths
from shared.dialects.reserved import LIBRARY_DIRECTORY, VISIBLE
from shared.model.errors import RequestError
from shared.model.lease import MIB, Lease, Share

LIBRARY_NAME = "libvgpu.so"
LIBRARY = f"{LIBRARY_DIRECTORY}/{LIBRARY_NAME}"
"""Where the library lies inside containers, and by default on the host."""
MEMORY_LIMIT = "CUDA_DEVICE_MEMORY_LIMIT"
"""The limit of every device; of one device, followed by `_` and its number in the container."""
CORES_LIMIT = "CUDA_DEVICE_SM_LIMIT"
PRIORITY = "CUDA_TASK_PRIORITY"
CACHE = "CUDA_DEVICE_MEMORY_SHARED_CACHE"
"""Path of the container's region file."""
LOG_LEVEL = "LIBCUDA_LOG_LEVEL"
ALL_CORES = 100
REGIONS = "/tmp/vgpu"  # noqa: S108 - inside the container
"""Where the container sees the directory of its region file, in Volcano's plugin and ours."""
UNTOLD = "/tmp/cudevshr.cache"  # noqa: S108 - inside the container
"""Where the library looks for its region in a process that has lost its environment."""
LOCKS = "/tmp/vgpulock"  # noqa: S108 - inside the container
"""Where the library locks out other processes while it finds out their numbers on the host."""
_CACHES = uuid.UUID("6d0e1f2a-5b3c-4f58-9a39-6f1f0a7f5c11")


def limited(
    lease: Lease,
    container: str,
    paths: Paths,
    *,
    regions: str = REGIONS,
    more: Mapping[str, str] | None = None,
) -> ContainerSetup:
    """Return the container's devices, their limits, and what makes the library hold to them.

    `regions` is where the container sees the directory of its region file, `more` are further
    variables of the dialect. HAMi-core counts devices as CUDA does, by PCI address, whatever the
    order of the variable: so both the devices and their limits come in the order of their index.
    Nothing that the container can write to is anybody else's, and its region also lies where a
    process without environment looks, which the preload file makes load the library all the same.
    A cap on cores holds whatever the region's switch says.
    Raises RequestError for a share without memory, which the library would take for one without
    limit.
    """
    shares = held(lease, container)
    if any(share.limit_bytes <= 0 for share in shares):
        raise RequestError(f"container {container} of pod {lease.pod} has no memory leased")
    cache = f"{uuid.uuid5(_CACHES, f'{lease.pod}/{container}')}.cache"
    own = f"{paths.containers}/{lease.pod}_{container}"
    capped = any(0 < share.cores_percent < ALL_CORES for share in shares)
    setup = visible(lease, container)
    return replace(
        setup,
        environment={
            **setup.environment,
            **{f"{MEMORY_LIMIT}_{i}": _size(share) for i, share in enumerate(shares)},
            CORES_LIMIT: str(shares[0].cores_percent),
            CACHE: f"{regions}/{cache}",
            **({"GPU_CORE_UTILIZATION_POLICY": "force"} if capped else {}),
            **(more or {}),
        },
        mounts=(
            *_library_and_region(paths, regions, own),
            Mount(
                container_path=UNTOLD,
                host_path=f"{own}/{cache}",
                read_only=False,
                directory=False,
            ),
            lock_mount(own),
            _mount("/etc/ld.so.preload", paths.preload, read_only=True),
        ),
    )


def lock_mount(own: str) -> Mount:
    """Return the mount of a container's own lock; `own` is its directory on the host.

    One lock for a node would let any container stop all others.
    """
    return _mount(LOCKS, f"{own}.lock")


def holds(setup: ContainerSetup) -> bool:
    """Say whether HAMi-core holds a container with this setup to its limits."""
    return CACHE in setup.environment


def visible(lease: Lease, container: str) -> ContainerSetup:
    """Return the container's devices and no limits: it has them whole.

    Raises RequestError if it holds none.
    """
    return ContainerSetup(
        environment={VISIBLE: ",".join(share.device for share in held(lease, container))}
    )


def held(lease: Lease, container: str) -> Sequence[Share]:
    """Return a container's shares by device index. Raises RequestError if there are none."""
    shares = sorted(lease.shares_of(container), key=lambda share: share.index)
    if not shares:
        raise RequestError(f"container {container} of pod {lease.pod} has no memory leased")
    return shares


def _size(share: Share) -> str:
    """Write a limit as the library reads sizes: in MiB, or where that is not exact in bytes."""
    mib, rest = divmod(share.limit_bytes, MIB)
    return str(share.limit_bytes) if rest else f"{mib}m"


def _library_and_region(paths: Paths, regions: str, directory: str) -> tuple[Mount, Mount]:
    """Return both mounts; one that lies inside the other comes after it."""
    library = _mount(LIBRARY, paths.library, read_only=True)
    region = _mount(regions, directory)
    return (region, library) if LIBRARY.startswith(f"{regions}/") else (library, region)


def _mount(container_path: str, host_path: str, *, read_only: bool = False) -> Mount:
    return Mount(
        container_path=container_path,
        host_path=host_path,
        read_only=read_only,
        directory=not read_only,
    )
