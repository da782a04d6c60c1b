"""Every published layout of HAMi-core's shared region file, as one table; pure.

The file is the library's struct in little-endian order and one NUL byte behind it. Offsets are in
bytes, of fields of a slot from the slot's start, as the library's own headers compile.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

MAGIC = 19920718
"""The first word of a region that is ready; signed, 32 bits."""
DEVICES = 16
SLOTS = 1024
UUID_BYTES = 96
_SEMAPHORE_USES = 3
"""Builds of layout 1.2 use the offset of their second semaphore four times or more, builds of 1.1
contain the number once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """Begins with i32 PID and i32 host PID."""

    size: int
    used: int = 8
    """16 memory records: u64 context, module, buffer, offset, total, and room up to their size."""
    used_size: int
    utilization_size: int
    """Of 16 records: u64 decoder, encoder, SM percent, and room; 0 if the layout has none."""
    seqlock: int | None = None
    """u64, odd while its owner writes."""

    @property
    def utilization(self) -> int:
        """After 16 u64 of what NVML shows of the process's memory."""
        return self.used + DEVICES * (self.used_size + 8)

    @property
    def status(self) -> int:
        """i32: 0 exited, 1 running, 2 suspended."""
        return self.utilization + DEVICES * self.utilization_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLayout:
    name: str
    size: int
    """Of the struct; the file has one byte more."""
    version: tuple[int, int] | None = None
    """u32 major at 4 and u32 minor at 8, or None if the layout carries none."""
    semaphore: int
    postinit_semaphore: int | None = None
    device_num: int
    slot: SlotLayout
    has_last_kernel: bool = True

    @property
    def file_size(self) -> int:
        return self.size + 1

    @property
    def owner(self) -> int:
        """u64: PID, in the container, of the holder of the slot lock."""
        return self.semaphore - 8

    @property
    def uuids(self) -> int:
        """16 texts."""
        return self.device_num + 8

    @property
    def memory_limits(self) -> int:
        """16 u64, bytes; 0 is no limit."""
        return self.uuids + DEVICES * UUID_BYTES

    @property
    def core_limits(self) -> int:
        """16 u64, percent."""
        return self.memory_limits + DEVICES * 8

    @property
    def slot_count(self) -> int:
        """i32; the switch, the activity counter and the priority follow it, an i32 each."""
        return self.slot_at(SLOTS)

    @property
    def switch(self) -> int:
        """i32: 1 applies the core limits, 0 does not."""
        return self.slot_count + 4

    @property
    def last_kernel(self) -> int:
        """u64, Unix seconds, if the layout has it."""
        return self.slot_count + 16

    def slot_at(self, index: int) -> int:
        return self.core_limits + DEVICES * 8 + index * self.slot.size


PRE_V0 = RegionLayout(
    name="pre-v0",
    size=804680,
    semaphore=16,
    device_num=48,
    slot=SlotLayout(size=784, used_size=40, utilization_size=0),
    has_last_kernel=False,
)
V0 = replace(
    PRE_V0, name="v0", size=1197896, slot=replace(PRE_V0.slot, size=1168, utilization_size=24)
)
V1_1 = RegionLayout(
    name="1.1",
    size=2008952,
    version=(1, 1),
    semaphore=24,
    device_num=56,
    slot=SlotLayout(size=1960, used_size=64, utilization_size=48),
)
V1_1_BAD = replace(
    V1_1,
    name="1.1-bad",
    size=2008984,
    postinit_semaphore=56,
    device_num=88,
    slot=replace(V1_1.slot, used=16, seqlock=8),
)
"""HAMi 2.8.1 only: another layout and size with the version of the one before."""
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


def layout_of(file_size: int, magic: int, version: tuple[int, int]) -> RegionLayout | str:
    """`version` is what the file has at 4 and 8."""
    if magic != MAGIC:
        return f"it begins with {magic} instead of {MAGIC}"
    for layout in BY_FILE_SIZE[file_size]:
        if layout.version in {None, version}:
            return layout
    return (
        f"it calls itself version {version[0]}.{version[1]}, which no file of {file_size} bytes is"
    )


def region_layout_of(library: bytes) -> RegionLayout | None:
    """Return the layout of a library's regions, or None if unknown, as on processors but x86.

    Its version cannot be read without a GPU, but the size of its layout is a number in its code.
    Another size may be there by chance, so the most frequent one counts.
    """
    counts = {layout: library.count(struct.pack("<I", layout.size)) for layout in LAYOUTS}
    likeliest = max(LAYOUTS, key=lambda layout: (counts[layout], layout.size == V1_2.size))
    if counts[likeliest] == 0:
        return None
    if likeliest.size != V1_2.size:
        return likeliest
    semaphore = struct.pack("<I", V1_2.postinit_semaphore or 0)
    return V1_2 if library.count(semaphore) >= _SEMAPHORE_USES else V1_1


def incompatible_region_layout(library: bytes) -> str:
    layout = region_layout_of(library)
    if layout is None or layout.size == V1_2.size:
        return ""
    return (
        f"its limits files have layout {layout.name} ({layout.size} bytes), and the agent writes "
        f"files of {V1_2.size} bytes, which it would not read: install HAMi-core of HAMi 2.8.2 or "
        "newer"
    )
