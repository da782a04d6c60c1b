"""Host paths that containers mount, and which must exist before they start; pure.

Every file that is mounted keeps its inode for as long as a container may have it open: the library
lives in a directory named after its version and is never written again.
"""

import functools
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath

from services.node_agent.allocate.device_list_strategies import NULL_DEVICE
from services.node_agent.isolation.region_layouts import LAYOUTS, V1_1, V1_2, RegionLayout
from shared.dialects.dialect import ContainerSetup, Paths
from shared.dialects.hami_core import OVERRIDES
from shared.model.names import PodUid

ELF_HEAD = 20
"""Bytes at the start of a library that contain its machine type."""
_SEMAPHORE_USES = 3
"""The least number of uses of layout 1.2's second semaphore: builds of it have four or more, builds
of 1.1 contain the number once."""
_SHARED_OBJECT = 3
_MACHINES = {"x86_64": 62, "aarch64": 183}
"""ELF's numbers, by the machine's own name."""


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """The agent's directories on the host."""

    state_dir: PurePosixPath
    library: PurePosixPath

    @functools.cached_property
    def paths(self) -> Paths:
        """Return the paths that dialects mount."""
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
    """Paths that must exist on the host before a container starts."""

    directories: tuple[str, ...] = ()
    """Created if missing, writable by any user, never emptied."""
    files: tuple[str, ...] = ()


def required_paths(setup: ContainerSetup, region_path: PurePath | None = None) -> RequiredPaths:
    """Return what a container's mounts need besides its region, which has path `region_path`.

    The agent writes its file of overrides, as it does its region.
    """
    region = None if region_path is None else str(region_path)
    return RequiredPaths(
        directories=tuple(mount.host_path for mount in setup.mounts if mount.directory),
        files=tuple(
            mount.host_path
            for mount in setup.mounts
            if not mount.directory
            and mount.container_path != OVERRIDES
            and mount.host_path not in {region, NULL_DEVICE}
        ),
    )


def owner_of(directory: str) -> PodUid | None:
    """Return the pod whose container a directory below `containers` is for, or None."""
    pod, separator, container = PurePosixPath(directory).name.partition("_")
    return PodUid(pod) if separator and container else None


def orphaned_directories(directories: Iterable[str], live: Iterable[PodUid]) -> list[str]:
    """Return the directories of pods other than `live`."""
    pods = set(live)
    return [
        directory
        for directory in directories
        if (pod := owner_of(directory)) is not None and pod not in pods
    ]


def region_layout_of(library: bytes) -> RegionLayout | None:
    """Return the layout of a library's regions; None: unknown, as on other processors than x86.

    Its version cannot be read without a GPU; but the size of its layout is a number in its code,
    which it has wherever it maps or resizes a region. Another size may be there by chance, as an
    address in debug information, so the most frequent one counts. Two versions have one size: code
    that uses the second semaphore of the newer one contains its offset.
    """
    counts = {layout: library.count(struct.pack("<I", layout.size)) for layout in LAYOUTS}
    found = max(LAYOUTS, key=lambda layout: (counts[layout], layout.size == V1_2.size))
    if counts[found] == 0:
        return None
    if found.size != V1_2.size:
        return found
    semaphore = struct.pack("<I", V1_2.postinit_semaphore or 0)
    return V1_2 if library.count(semaphore) >= _SEMAPHORE_USES else V1_1


def incompatible_region_layout(library: bytes) -> str:
    """Return which other region layout a library uses; empty: ours, an equal one, or unknown."""
    found = region_layout_of(library)
    if found is None or found.size == V1_2.size:
        return ""
    return (
        f"it uses regions of layout {found.name} ({found.size} bytes), and limits are written "
        f"to regions of {V1_2.size} bytes, which it would not read: install HAMi-core of HAMi "
        "2.8.2 or newer"
    )


def is_loadable(head: bytes, machine: str) -> bool:
    """Return whether a file with these first bytes is a 64-bit shared library for this machine.

    Its dependencies are not checked: containers have libcuda, the agent seldom does.
    """
    if len(head) < ELF_HEAD or head[:6] != b"\x7fELF\x02\x01":
        return False
    kind, built_for = struct.unpack_from("<HH", head, 16)
    return bool(kind == _SHARED_OBJECT and built_for == _MACHINES.get(machine, built_for))
