"""Where the node keeps what containers mount, and what must exist before they start; pure.

Every file that is mounted keeps its inode for as long as a container may have it open: the library
lives in a directory named after its version and is never written again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from shared.dialects.dialect import ContainerSetup, Paths
from shared.model.names import PodUid

LIBRARY_IN_CONTAINER = "/usr/local/vgpu/libvgpu.so"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The agent's directories on the host."""

    state_dir: PurePosixPath
    library: PurePosixPath

    @property
    def paths(self) -> Paths:
        """Return them as dialects want them."""
        return Paths(
            library=str(self.library),
            preload=str(self.state_dir / "ld.so.preload"),
            containers=str(self.containers),
            locks=str(self.state_dir / "lock"),
        )

    @property
    def containers(self) -> PurePosixPath:
        """Return the directory that holds one directory per pod and container."""
        return self.state_dir / "containers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """What must exist on the host before a container starts."""

    directories: tuple[str, ...] = ()
    """Made if missing, writable by any user, never emptied."""
    files: tuple[str, ...] = ()


def needed_for(setup: ContainerSetup) -> Needed:
    """Return what a container's mounts need."""
    return Needed(
        directories=tuple(mount.host_path for mount in setup.mounts if mount.directory),
        files=tuple(mount.host_path for mount in setup.mounts if not mount.directory),
    )


def owner_of(directory: str) -> PodUid | None:
    """Return the pod whose container a directory below `containers` is for, or None."""
    pod, separator, container = PurePosixPath(directory).name.partition("_")
    return PodUid(pod) if separator and container else None


def deserted(directories: Iterable[str], keep: Iterable[PodUid]) -> list[str]:
    """Return the directories whose pods are none of those to keep."""
    kept = set(keep)
    return [
        directory
        for directory in directories
        if (pod := owner_of(directory)) is not None and pod not in kept
    ]
