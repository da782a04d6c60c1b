"""Where the node keeps what containers mount, and what must exist before they start; pure.

Every file that is mounted keeps its inode for as long as a container may have it open: the library
lives in a directory named after its version and is never written again.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from services.node_agent.allocate.device_list_strategies import NULL_DEVICE
from services.node_agent.isolation.region import RegionPath
from services.node_agent.isolation.region_layouts import LAYOUTS, V1_2
from shared.dialects.dialect import ContainerSetup, Paths
from shared.model.names import PodUid

ELF_HEAD = 20
"""Bytes at the start of a library that tell for which machine it is."""
_SHARED_OBJECT = 3
_MACHINES = {"x86_64": 62, "aarch64": 183}
"""ELF's numbers, by the machine's own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
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
        )

    @property
    def containers(self) -> PurePosixPath:
        """Return the directory that holds one directory per pod and container."""
        return self.state_dir / "containers"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredPaths:
    """What must exist on the host before a container starts."""

    directories: tuple[str, ...] = ()
    """Made if missing, writable by any user, never emptied."""
    files: tuple[str, ...] = ()


def required_paths(setup: ContainerSetup, place: RegionPath | None = None) -> RequiredPaths:
    """Return what a container's mounts need besides its region, which lies at `place`."""
    region = None if place is None else f"{place.directory}/{place.name}"
    return RequiredPaths(
        directories=tuple(mount.host_path for mount in setup.mounts if mount.directory),
        files=tuple(
            mount.host_path
            for mount in setup.mounts
            if not mount.directory and mount.host_path not in {region, NULL_DEVICE}
        ),
    )


def owner_of(directory: str) -> PodUid | None:
    """Return the pod whose container a directory below `containers` is for, or None."""
    pod, separator, container = PurePosixPath(directory).name.partition("_")
    return PodUid(pod) if separator and container else None


def orphaned_directories(directories: Iterable[str], keep: Iterable[PodUid]) -> list[str]:
    """Return the directories whose pods are none of those to keep."""
    kept = set(keep)
    return [
        directory
        for directory in directories
        if (pod := owner_of(directory)) is not None and pod not in kept
    ]


def incompatible_region_layout(library: bytes) -> str:
    """Say which regions a library keeps, if not those that are made for containers; or nothing.

    No version is written in it that could be read without a GPU; but it gives its file the size of
    its layout, which stands in its code as a number. One in which no known size is found (another
    processor writes numbers in pieces) is believed.
    """
    sizes = {layout.size: layout.name for layout in LAYOUTS}
    found = [size for size in sizes if struct.pack("<I", size) in library]
    if not found or V1_2.size in found:
        return ""
    return (
        f"it keeps regions of layout {sizes[found[0]]} ({found[0]} bytes), and limits are set in "
        f"those of {V1_2.size} bytes, where it would find none: install HAMi-core of HAMi 2.8.2 "
        "or newer"
    )


def is_loadable(head: bytes, machine: str) -> bool:
    """Say whether a file that begins so is a shared library for a 64-bit machine of this name.

    What it needs besides is not asked: libcuda is there in containers, and seldom beside the agent.
    """
    if len(head) < ELF_HEAD or head[:6] != b"\x7fELF\x02\x01":
        return False
    kind, built_for = struct.unpack_from("<HH", head, 16)
    return bool(kind == _SHARED_OBJECT and built_for == _MACHINES.get(machine, built_for))
