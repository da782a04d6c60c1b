"""Every published layout of HAMi-core's shared region file, as one table; pure.

The file is the library's struct in little-endian order and one NUL byte behind it. Offsets are in
bytes, of fields of the region from its start, of fields of a slot from the slot's start. The table
is what the library's own headers compile to, release by release; no field is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

MAGIC = 19920718
"""The first word of a region that is ready; signed, 32 bits."""
DEVICES = 16
SLOTS = 1024
UUID_BYTES = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """One process's record."""

    size: int
    seqlock: int | None
    """u64, odd while its owner writes; None: the layout has none."""
    used: int
    """16 memory records: u64 context, module, buffer, offset, total, and room up to their size."""
    used_size: int
    monitored: int
    """16 u64: the process's use of each device by NVML."""
    utilization: int | None
    """16 records: u64 decoder, encoder, SM percent, and room up to their size."""
    utilization_size: int
    status: int
    """i32: 0 exited, 1 running, 2 suspended. The slot begins with i32 pid and i32 host pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLayout:
    """The offsets of one version of the file."""

    name: str
    size: int
    """Of the struct; the file has one byte more."""
    version: tuple[int, int] | None
    """u32 major at 4 and u32 minor at 8; None: the layout carries none."""
    sm_init: int
    owner: int
    """u64: pid, in the container, of the holder of the slot lock."""
    semaphore: int
    postinit_semaphore: int | None
    device_num: int
    uuids: int
    memory_limits: int
    """16 u64, bytes; 0 is no limit."""
    core_limits: int
    """16 u64, percent."""
    slots: int
    slot: SlotLayout
    slot_count: int
    """i32; the switch, the activity counter and the priority follow it, an i32 each."""
    last_kernel: int | None
    """u64, Unix seconds."""

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.size + 1

    @property
    def switch(self) -> int:
        """i32: 1 applies the core limits, 0 does not."""
        return self.slot_count + 4

    @property
    def recent_kernel(self) -> int:
        """i32: a counter of recent activity; -1 blocks launches."""
        return self.slot_count + 8

    @property
    def priority(self) -> int:
        """i32: a smaller number is more important."""
        return self.slot_count + 12

    def slot_at(self, index: int) -> int:
        """Return the offset of a slot."""
        return self.slots + index * self.slot.size


PRE_V0 = RegionLayout(
    name="pre-v0",
    size=804680,
    version=None,
    sm_init=4,
    owner=8,
    semaphore=16,
    postinit_semaphore=None,
    device_num=48,
    uuids=56,
    memory_limits=1592,
    core_limits=1720,
    slots=1848,
    slot=SlotLayout(
        size=784,
        seqlock=None,
        used=8,
        used_size=40,
        monitored=648,
        utilization=None,
        utilization_size=0,
        status=776,
    ),
    slot_count=804664,
    last_kernel=None,
)

V0 = replace(
    PRE_V0,
    name="v0",
    size=1197896,
    slot=replace(PRE_V0.slot, size=1168, utilization=776, utilization_size=24, status=1160),
    slot_count=1197880,
)

V1_1 = RegionLayout(
    name="1.1",
    size=2008952,
    version=(1, 1),
    sm_init=12,
    owner=16,
    semaphore=24,
    postinit_semaphore=None,
    device_num=56,
    uuids=64,
    memory_limits=1600,
    core_limits=1728,
    slots=1856,
    slot=SlotLayout(
        size=1960,
        seqlock=None,
        used=8,
        used_size=64,
        monitored=1032,
        utilization=1160,
        utilization_size=48,
        status=1928,
    ),
    slot_count=2008896,
    last_kernel=2008912,
)

V1_1_BAD = RegionLayout(
    name="1.1-bad",
    size=2008984,
    version=(1, 1),
    sm_init=12,
    owner=16,
    semaphore=24,
    postinit_semaphore=56,
    device_num=88,
    uuids=96,
    memory_limits=1632,
    core_limits=1760,
    slots=1888,
    slot=SlotLayout(
        size=1960,
        seqlock=8,
        used=16,
        used_size=64,
        monitored=1040,
        utilization=1168,
        utilization_size=48,
        status=1936,
    ),
    slot_count=2008928,
    last_kernel=2008944,
)
"""HAMi 2.8.1 only: another layout with the version of the one before, and another size."""

V1_2 = replace(
    V1_1,
    name="1.2",
    version=(1, 2),
    postinit_semaphore=2008920,
    slot=replace(V1_1.slot, seqlock=1936),
)

LAYOUTS: tuple[RegionLayout, ...] = (PRE_V0, V0, V1_1, V1_1_BAD, V1_2)

BY_FILE_SIZE: Mapping[int, tuple[RegionLayout, ...]] = {
    size: tuple(layout for layout in LAYOUTS if layout.file_size == size)
    for size in sorted({layout.file_size for layout in LAYOUTS})
}
"""Layouts by file size, since two layouts have the same version."""


def layout_of(file_size: int, magic: int, version: tuple[int, int]) -> RegionLayout | str:
    """Return the layout of a file, or why it has none. `version` is the words at 4 and 8."""
    fitting = BY_FILE_SIZE.get(file_size)
    if fitting is None:
        known = ", ".join(map(str, BY_FILE_SIZE))
        return f"it has {file_size} bytes, and a region has one of {known}"
    if magic != MAGIC:
        return f"it begins with {magic} instead of {MAGIC}"
    for layout in fitting:
        if layout.version in {None, version}:
            return layout
    return (
        f"it calls itself version {version[0]}.{version[1]}, which no file of {file_size} bytes is"
    )
