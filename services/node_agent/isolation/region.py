"""The content of a region file, decoded from any bytes; pure.

A container may write anything into its region: the result is a value, never an exception.

A killed process leaves its slot. The library fills a gap by moving the last slot down; the old
place, above the slots that it counts, keeps its content. A process of a library with sequence locks
(1.1-bad, 1.2) goes on writing to the old place. So the records of a region are of processes that
live, and of two records of a process the last written counts.
"""

import re
import struct
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from services.node_agent.isolation.region_layouts import DEVICES, SLOTS, UUID_BYTES, RegionLayout
from shared.dialects.metrics import MemoryUsage
from shared.model.bounds import MOST_MIB
from shared.model.leases.lease import MIB

EXITED = 0
RUNNING = 1
WRAPPED = 1 << 63
_SEMAPHORE_VALUE = 0xFFFFFFFF
"""The lower half of glibc's `sem_t`; the upper one counts waiters."""
_UUID = re.compile(rb"(?:GPU|MIG)-[0-9A-Fa-f-]{1,91}")
_WORDS = struct.Struct(f"<{DEVICES}Q")
_I32 = struct.Struct("<i")
_PIDS = struct.Struct("<ii")
_NOTHING = (0,) * DEVICES


@dataclass(frozen=True, slots=True)
class InvalidRegion:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    index: int
    pid: int
    """In the container's PID namespace."""
    host_pid: int
    """As the library detected, or 0; not reliable."""
    status: int
    context: tuple[int, ...]
    module: tuple[int, ...]
    buffer: tuple[int, ...]
    offset: tuple[int, ...]
    total: tuple[int, ...]
    sm_percent: tuple[int, ...]
    writes: int = 0
    torn: bool = False
    """Its amounts may belong to different moments."""

    @property
    def ended(self) -> bool:
        return self.status == EXITED or self.pid == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    layout: RegionLayout
    uuids: tuple[str, ...]
    """By position; empty where there is no valid one."""
    memory_limits: tuple[int, ...]
    core_limits: tuple[int, ...]
    slots: tuple[Slot, ...]
    """Those of ended processes, too."""
    orphans: tuple[Slot, ...]
    """Above these; their processes have not marked themselves as ended."""
    lock_owner: int
    """PID in the container, or 0."""
    locked: bool
    """A process that is killed does not release the lock."""
    utilization_switch: int
    last_kernel_at: int | None
    """Unix seconds, or None if no kernel has run or the layout has no such field."""

    def processes(self, living: Set[int] | None) -> tuple[Slot, ...]:
        """`living` has the PIDs of the container's namespace.

        Without it, processes that have not marked themselves as ended count, and no orphans.
        """
        marked = [slot for slot in self.slots if not slot.ended]
        if living is None:
            return tuple(marked)
        latest = {slot.pid: slot for slot in marked}
        for orphan in self.orphans:
            counted = latest.get(orphan.pid)
            if counted is None or 0 < orphan.writes >= counted.writes:
                latest[orphan.pid] = orphan
        return tuple(slot for pid, slot in latest.items() if pid in living)

    def holders(self) -> frozenset[int]:
        slots = (*self.slots, *self.orphans)
        return frozenset(slot.pid for slot in slots if not slot.ended and any(slot.total))

    def lost(self, living: Set[int] | None) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.processes(living) if slot.index >= len(self.slots))

    @property
    def torn(self) -> int:
        return sum(slot.torn for slot in self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSums(MemoryUsage):
    enforced: int = 0
    """What the library compares with the limit; includes ended processes until cleared."""
    wrapped: int = 0
    """They were counted down below zero."""


def sums(region: Region, position: int, living: Set[int] | None = None) -> DeviceSums:
    """No sum is above what a device can have, whatever the container has written."""
    live = region.processes(living)
    return DeviceSums(
        context=_sum(slot.context[position] for slot in live),
        module=_sum(slot.module[position] for slot in live),
        buffer=_sum(slot.buffer[position] for slot in live),
        offset=_sum(slot.offset[position] for slot in live),
        total=_sum(slot.total[position] for slot in live),
        sm_percent=min(sum(slot.sm_percent[position] for slot in live), 100),
        enforced=_sum(slot.total[position] for slot in region.slots),
        wrapped=sum(slot.total[position] >= WRAPPED for slot in region.slots),
    )


def _sum(amounts: Iterable[int]) -> int:
    return min(sum(amount for amount in amounts if amount < WRAPPED), MOST_MIB * MIB)


def decode(layout: RegionLayout, data: bytes | bytearray, torn: Set[int] = frozenset()) -> Region:
    count = slot_count(layout, data)
    read = _slot_reader(layout, data, torn)
    slots = tuple(read(index) for index in range(count))
    last = _word(data, layout.last_kernel) if layout.has_last_kernel else 0
    return Region(
        layout=layout,
        uuids=tuple(_uuid(data, layout.uuids + UUID_BYTES * n) for n in range(DEVICES)),
        memory_limits=_WORDS.unpack_from(data, layout.memory_limits),
        core_limits=_WORDS.unpack_from(data, layout.core_limits),
        slots=slots,
        orphans=tuple(
            read(index)
            for index in _slots_with_pids(layout, data, count)
            if _is_orphan(layout, data, layout.slot_at(index))
        ),
        lock_owner=_word(data, layout.owner),
        locked=_word(data, layout.semaphore) & _SEMAPHORE_VALUE == 0,
        utilization_switch=_I32.unpack_from(data, layout.switch)[0],
        last_kernel_at=last if 0 < last < WRAPPED else None,
    )


def slot_count(layout: RegionLayout, data: bytes | bytearray) -> int:
    return min(max(int(_I32.unpack_from(data, layout.slot_count)[0]), 0), SLOTS)


def _slots_with_pids(layout: RegionLayout, data: bytes | bytearray, first: int) -> Iterable[int]:
    start, end = layout.slot_at(first), layout.slot_at(SLOTS)
    has_pids = any(any(data[start + byte : end : layout.slot.size]) for byte in range(_I32.size))
    return range(first, SLOTS) if has_pids else ()


def _is_orphan(layout: RegionLayout, data: bytes | bytearray, at: int) -> bool:
    (pid,) = _I32.unpack_from(data, at)
    return bool(pid and _I32.unpack_from(data, at + layout.slot.status)[0] == RUNNING)


def _slot_reader(
    layout: RegionLayout, data: bytes | bytearray, torn: Set[int]
) -> Callable[[int], Slot]:
    slot = layout.slot
    used = struct.Struct("<" + f"5Q{slot.used_size - 40}x" * DEVICES)
    utilization = struct.Struct("<" + f"16xQ{max(slot.utilization_size - 24, 0)}x" * DEVICES)

    def read(index: int) -> Slot:
        at = layout.slot_at(index)
        pid, host_pid = _PIDS.unpack_from(data, at)
        amounts = used.unpack_from(data, at + slot.used)
        return Slot(
            index=index,
            pid=pid,
            host_pid=host_pid,
            status=_I32.unpack_from(data, at + slot.status)[0],
            context=amounts[0::5],
            module=amounts[1::5],
            buffer=amounts[2::5],
            offset=amounts[3::5],
            total=amounts[4::5],
            sm_percent=utilization.unpack_from(data, at + slot.utilization)
            if slot.utilization_size
            else _NOTHING,
            writes=0 if slot.seqlock is None else _word(data, at + slot.seqlock),
            torn=index in torn,
        )

    return read


def _word(data: bytes | bytearray, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _uuid(data: bytes | bytearray, at: int) -> str:
    text, end, _ = bytes(data[at : at + UUID_BYTES]).partition(b"\0")
    return text.decode("ascii") if end and _UUID.fullmatch(text) else ""
