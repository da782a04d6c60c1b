"""What a pod with GPUs may mount; pure.

A mount at, above or below a path of the lease conflicts: a link in a volume above it can redirect
the lease's own mount.
"""

import posixpath
from collections.abc import Iterable

from shared.dialects import compute_time, hami_core, mps
from shared.dialects.reserved import LIBRARY_DIRECTORY

PRELOAD = "/etc/ld.so.preload"
LEASE_PATHS = (
    PRELOAD,
    LIBRARY_DIRECTORY,
    hami_core.REGIONS,
    hami_core.LOCKS,
    hami_core.FALLBACK_REGION,
    hami_core.OVERRIDES,
    compute_time.DIRECTORY,
    compute_time.USE_DIRECTORY,
    mps.PIPES,
)
"""Inside containers."""
_LIBRARIES = (hami_core.LIBRARY, compute_time.LIBRARY)
_LEASE_NAMES = frozenset(path.rpartition("/")[2] for path in (*LEASE_PATHS, *_LIBRARIES))
"""A link in the image can lead a directory above them anywhere."""
HOST_PATHS = ("/data", "/media", "/mnt", "/scratch", "/srv")
"""Directories of nodes with only data, unless an administrator names others."""
MPS_PATHS = ("/tmp/nvidia-mps", "/run/nvidia-mps", "/run/nvidia/mps")  # noqa: S108 - of the node
"""Pipes to servers of MPS on a node: by default, for root from R615 on, and with NVIDIA's plugin.
"""
HARMLESS_PATHS = (
    "/dev/infiniband",
    "/dev/shm",  # noqa: S108 - of the node
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
"""Programs commonly mount these, too. Other paths may lead to devices, memory, the container
runtime, the kubelet or the node agent.
"""


def lease_conflict(mount_path: str) -> str:
    """Return the path with which a container's mount conflicts, or "".

    >>> lease_conflict("/usr/local")
    '/usr/local/vgpu'
    """
    path = normalized(mount_path)
    name = path.rpartition("/")[2]
    touched = next((lease_path for lease_path in LEASE_PATHS if _touches(path, lease_path)), "")
    return touched or (name if name in _LEASE_NAMES else "")


def is_driver_path(host_path: str) -> bool:
    """Return whether a `hostPath` has NVIDIA's driver or devices.

    >>> is_driver_path("/dev/nvidia0"), is_driver_path("/home/kubernetes/bin/nvidia")
    (True, True)
    """
    path = normalized(host_path)
    return path.startswith("/dev/nvidia") or path.endswith("/nvidia")


def is_data_path(host_path: str, directories: Iterable[str] = HOST_PATHS) -> bool:
    """Return whether a `hostPath` is a directory with data, or below one.

    >>> is_data_path("/data/sets"), is_data_path("/data/../dev")
    (True, False)
    """
    path = normalized(host_path)
    allowed = map(normalized, (*HARMLESS_PATHS, *directories))
    return any(
        path == allowed_path or path.startswith(f"{allowed_path}/") for allowed_path in allowed
    )


def is_mps_path(host_path: str) -> bool:
    """Return whether a `hostPath` leads to a server of MPS, which would serve pods without a lease.

    >>> is_mps_path("/tmp/nvidia-mps")
    True
    """
    path = normalized(host_path)
    return any(path == pipes or path.startswith(f"{pipes}/") for pipes in MPS_PATHS)


def host_path_advice(directories: Iterable[str]) -> str:
    return (
        f"use a path below {', '.join(directories)}, or have an administrator add it with "
        "--host-paths"
    )


def normalized(path: str) -> str:
    """Resolve `.`, `..` and empty parts, as a container runtime does.

    >>> normalized("/usr/./lib//../local")
    '/usr/local'
    """
    return "/" + posixpath.normpath(f"/{path}").lstrip("/")


def _touches(path: str, protected: str) -> bool:
    return (
        path in {"/", protected}
        or protected.startswith(f"{path}/")
        or path.startswith(f"{protected}/")
    )
