"""Reads a region that its container may write, shrink or replace at the same time.

Nothing is mapped: a mapping of a file that shrinks kills its reader.
"""

import errno
import os
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from services.node_agent.files import irregular, open_checked
from services.node_agent.isolation.region import InvalidRegion, Region, decode, slot_count
from services.node_agent.isolation.region_layouts import BY_FILE_SIZE, RegionLayout, layout_of

ROUNDS = 5
PAUSE_S = 0.001
"""Pause before a region is read again that a program was changing."""
_HEAD = struct.Struct("<iII")


def read_region(path: PurePath) -> Region | InvalidRegion | None:
    """Return the region, or why it is invalid, or None if there is no such file."""
    descriptor = open_region(path, os.O_RDONLY)
    if not isinstance(descriptor, int):
        return descriptor
    try:
        return _read(descriptor)
    except OSError as error:
        return InvalidRegion(f"it cannot be read: {error.strerror}")
    finally:
        os.close(descriptor)


def open_region(path: PurePath, flags: int) -> int | InvalidRegion | None:
    """The caller closes what is returned."""
    try:
        opened = open_checked(path, flags, _problem_with)
    except FileNotFoundError:
        return None
    except OSError as error:
        return InvalidRegion(f"it cannot be opened: {error.strerror}")
    return InvalidRegion(opened) if isinstance(opened, str) else opened


def _problem_with(status: os.stat_result) -> str | None:
    if problem := irregular(status):
        return problem
    if status.st_size not in BY_FILE_SIZE:
        sizes = ", ".join(map(str, BY_FILE_SIZE))
        return f"it has {status.st_size} bytes, and a region has one of {sizes}"
    return None


def _read(descriptor: int) -> Region | InvalidRegion:
    size = os.fstat(descriptor).st_size
    data = bytearray(size if size in BY_FILE_SIZE else 0)
    for start, end in _written_ranges(descriptor, len(data)):
        os.preadv(descriptor, [memoryview(data)[start:end]], start)
    now = os.fstat(descriptor).st_size
    if size == 0 or not len(data) == size == now:
        return InvalidRegion(f"it changed its size while it was read: {now} of {size} bytes")
    magic, major, minor = _HEAD.unpack_from(data)
    layout = layout_of(size, magic, (major, minor))
    if isinstance(layout, str):
        return InvalidRegion(layout)
    return decode(layout, data, _read_torn_slots_again(descriptor, layout, data))


def _written_ranges(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Most slots of most regions were never used."""
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data from there on
                return
            if error.errno != errno.EINVAL:
                raise
            start, end = end, size  # the file system does not know
        if start < end:
            yield start, end


def _read_torn_slots_again(descriptor: int, layout: RegionLayout, data: bytearray) -> set[int]:
    if layout.slot.seqlock is None:
        return set()
    torn = _slots_being_written(descriptor, layout, data, range(slot_count(layout, data)))
    for _ in range(ROUNDS):
        if not torn:
            break
        time.sleep(PAUSE_S)
        for index in torn:
            at = layout.slot_at(index)
            again = os.pread(descriptor, layout.slot.size, at)
            data[at : at + len(again)] = again
        torn = _slots_being_written(descriptor, layout, data, torn)
    return torn


def _slots_being_written(
    descriptor: int, layout: RegionLayout, data: bytearray, indices: Iterable[int]
) -> set[int]:
    written = set()
    for index in indices:
        at = layout.slot_at(index) + (layout.slot.seqlock or 0)
        read = bytes(data[at : at + 8])
        if read[0] & 1 or os.pread(descriptor, 8, at) != read:
            written.add(index)
    return written
