"""The layouts of `files.h`: limits and use of a container's GPU time; pure."""

import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from shared.model.names import DeviceUuid

DEVICES = 16
LIMITS_MAGIC = 0x4C54494D
USE_MAGIC = 0x5554494D
EVENTS_ARE_RIGHT = 1024
_HEAD = struct.Struct("<II")
_LIMIT = struct.Struct("<16sIIIIq")
_BUCKET = struct.Struct("<qqqqqiIqqdd")
LIMITS_BYTES = _HEAD.size + DEVICES * _LIMIT.size
USE_BYTES = _HEAD.size + DEVICES * _BUCKET.size
SCALES = range(EVENTS_ARE_RIGHT // 10 - 1, 4 * EVENTS_ARE_RIGHT + 1)
"""`bucket.c`."""
LONGEST_WAIT_NS = 100 * 60 * 1_000_000_000
"""Of the longest charge, at the smallest limit: `bucket.c`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    device: DeviceUuid
    percent: int
    """Of the lease; 0 is no limit."""
    allowed: int
    """More than `percent` while others leave theirs unused."""
    measured: int = 0
    """Percent of the GPU's time, by NVML."""
    measured_at: int = 0
    """By the steady clock, in ns; 0 is never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """Moments by the steady clock, in ns."""

    ready_at: int = 0
    charged_ns: int = 0
    asked_at: int = 0
    long_at: int = 0
    shared_at: int = 0
    scale: int = 0
    compared_at: int = 0


def device_bytes(device: DeviceUuid) -> bytes:
    """Return zeros for what is no UUID, such as a simulated name."""
    try:
        return uuid.UUID(device.removeprefix("GPU-")).bytes
    except ValueError:
        return bytes(16)


def limits_image(limits: Sequence[TimeLimit]) -> bytes:
    image = bytearray(LIMITS_BYTES)
    _HEAD.pack_into(image, 0, LIMITS_MAGIC, 0)
    for place, limit in enumerate(limits[:DEVICES]):
        _LIMIT.pack_into(
            image,
            _HEAD.size + place * _LIMIT.size,
            device_bytes(limit.device),
            limit.percent,
            limit.allowed,
            limit.measured,
            0,
            limit.measured_at,
        )
    return bytes(image)


def parse_limits(image: bytes, devices: Sequence[DeviceUuid]) -> tuple[TimeLimit, ...] | None:
    if not _is_whole(image, LIMITS_BYTES, LIMITS_MAGIC):
        return None
    fields = [
        _LIMIT.unpack_from(image, _HEAD.size + place * _LIMIT.size) for place in range(DEVICES)
    ]
    return tuple(
        TimeLimit(
            device=device, percent=percent, allowed=allowed, measured=measured, measured_at=at
        )
        for device, (name, percent, allowed, measured, _, at) in zip(devices, fields, strict=False)
        if name == device_bytes(device)
    )


def unused_image(now_ns: int) -> bytes:
    bucket = _BUCKET.pack(now_ns, 0, 0, 0, 0, 0, EVENTS_ARE_RIGHT, 0, 0, 0.0, 0.0)
    return _HEAD.pack(USE_MAGIC, 0) + bucket * DEVICES


def parse_use(image: bytes, devices: int) -> tuple[TimeUse, ...] | None:
    if not _is_whole(image, USE_BYTES, USE_MAGIC):
        return None
    uses = []
    for place in range(devices):
        ready, charged, asked, long, shared, _, scale, compared, *_ = _BUCKET.unpack_from(
            image, _HEAD.size + place * _BUCKET.size
        )
        uses.append(
            TimeUse(
                ready_at=ready,
                charged_ns=charged,
                asked_at=asked,
                long_at=long,
                shared_at=shared,
                scale=scale,
                compared_at=compared,
            )
        )
    return tuple(uses)


def _is_whole(image: bytes, size: int, magic: int) -> bool:
    return len(image) == size and _HEAD.unpack_from(image)[0] == magic
