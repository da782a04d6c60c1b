"""Paths that a pod with GPUs must not mount: those of the lease, and those of the node; pure.

A mount at a protected path, above it or below it conflicts. One above conflicts because a link
inside that volume can redirect the lease's own mount.
"""

from collections.abc import Iterable

from shared.dialects import hami_core
from shared.dialects.reserved import LIBRARY_DIRECTORY

PRELOAD = "/etc/ld.so.preload"
LEASE_PATHS = (
    PRELOAD,
    LIBRARY_DIRECTORY,
    hami_core.REGIONS,
    hami_core.LOCKS,
    hami_core.FALLBACK_REGION,
    hami_core.OVERRIDES,
)
"""Paths inside containers: what the node agent mounts, and the file with which HAMi-core replaces
its variables."""
NODE_PATHS = (
    PRELOAD,
    LIBRARY_DIRECTORY,
    "/dev/nvidia",
    "/etc/cdi",
    "/etc/nvidia-container-runtime",
    "/proc",
    "/run",
    "/sys/fs/cgroup",
    "/var/lib/containerd",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/lib/kubelet",
    "/var/lib/leasehold",
    "/var/run",
)
"""Paths of the node: devices, the library, the container runtime, the kubelet, the node agent."""
_PREFIXES = frozenset({"/dev/nvidia"})
"""Those that stand for all paths that begin with them."""


def lease_conflict(mount_path: str) -> str:
    """Return the path of the lease with which a container's mount conflicts; empty: none."""
    return _conflict(mount_path, LEASE_PATHS)


def node_conflict(host_path: str) -> str:
    """Return the path of the node with which a `hostPath` conflicts; empty: none."""
    return _conflict(host_path, NODE_PATHS)


def normalized(path: str) -> str:
    """Return an absolute path without `.`, `..` and empty parts, as a container runtime does."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in {"", "."}:
            parts.append(part)
    return "/" + "/".join(parts)


def _conflict(path: str, protected: Iterable[str]) -> str:
    found = normalized(path)
    return next((each for each in protected if _touches(found, each)), "")


def _touches(path: str, protected: str) -> bool:
    return (
        path in {"/", protected}
        or protected.startswith(f"{path}/")
        or path.startswith(protected if protected in _PREFIXES else f"{protected}/")
    )
