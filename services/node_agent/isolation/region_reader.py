"""Reads a region that its container may be writing, shrinking or replacing at the same moment.

Nothing is opened before it is known to be an ordinary file: a device or a pipe that a tenant put
there is never touched. Nothing is mapped, since a mapping of a file that shrinks kills its reader;
no lock of the file is taken, and none of its semaphores.
"""

import os
import stat
import struct
import time
from collections.abc import Iterable

from services.node_agent.isolation.region import Region, RegionPath, Tampered, decode, slot_count
from services.node_agent.isolation.region_layouts import BY_FILE_SIZE, RegionLayout, layout_of

ROUNDS = 5
"""How often slots that are being written are read again."""
PAUSE_S = 0.001
_HEAD = struct.Struct("<iII")


def read_region(place: RegionPath) -> Region | Tampered | None:
    """Return what the region says, or what is wrong with it; None if there is no such file.

    Slots that are being written are read again a few times, all of them together, for at most some
    milliseconds.
    """
    descriptor = open_region(place, os.O_RDONLY)
    if not isinstance(descriptor, int):
        return descriptor
    try:
        return _read(descriptor)
    except OSError as error:
        return Tampered(f"it cannot be read: {error.strerror}")
    finally:
        os.close(descriptor)


def open_region(place: RegionPath, flags: int) -> int | Tampered | None:
    """Open a file that could be a region, by its type, links and size; the caller closes it."""
    handles: list[int] = []
    try:
        handles.append(os.open(place.directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW))
        handles.append(os.open(place.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=handles[0]))
        wrong = _wrong_with(os.fstat(handles[1]))
        if wrong is None:
            inode = f"/proc/self/fd/{handles[1]}"
            return os.open(inode, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Tampered(f"it cannot be opened: {error.strerror}")
    else:
        return Tampered(wrong)
    finally:
        for handle in handles:
            os.close(handle)


def _wrong_with(status: os.stat_result) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "it is no ordinary file"
    if status.st_nlink != 1:
        return f"it has {status.st_nlink} names"
    if status.st_size not in BY_FILE_SIZE:
        known = ", ".join(map(str, BY_FILE_SIZE))
        return f"it has {status.st_size} bytes, and a region has one of {known}"
    return None


def _read(descriptor: int) -> Region | Tampered:
    size = os.fstat(descriptor).st_size
    data = bytearray(os.pread(descriptor, size, 0) if size in BY_FILE_SIZE else b"")
    if len(data) != size or size == 0:
        return Tampered(f"it changed its size while it was read: {len(data)} of {size} bytes")
    magic, major, minor = _HEAD.unpack_from(data)
    layout = layout_of(size, magic, (major, minor))
    if isinstance(layout, str):
        return Tampered(layout)
    return decode(layout, data, _settle(descriptor, layout, data))


def _settle(descriptor: int, layout: RegionLayout, data: bytearray) -> set[int]:
    """Read slots again that were being written; return those that were each time."""
    if layout.slot.seqlock is None:
        return set()
    torn = _moving(descriptor, layout, data, range(slot_count(layout, data)))
    for _ in range(ROUNDS):
        if not torn:
            break
        time.sleep(PAUSE_S)
        for index in torn:
            at = layout.slot_at(index)
            again = os.pread(descriptor, layout.slot.size, at)
            data[at : at + len(again)] = again
        torn = _moving(descriptor, layout, data, torn)
    return torn


def _moving(
    descriptor: int, layout: RegionLayout, data: bytearray, indices: Iterable[int]
) -> set[int]:
    """Return the slots whose counter is odd, or has moved on since they were read."""
    moving = set()
    for index in indices:
        at = layout.slot_at(index) + (layout.slot.seqlock or 0)
        read = bytes(data[at : at + 8])
        if read[0] & 1 or os.pread(descriptor, 8, at) != read:
            moving.add(index)
    return moving
