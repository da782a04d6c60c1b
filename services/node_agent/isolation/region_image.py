"""The content of a fresh region; pure.

The library takes its limits from a region that exists, not from its environment.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_layouts import DEVICES, MAGIC, V1_2, RegionLayout
from shared.dialects.dialect import ContainerSetup
from shared.dialects.hami_core import CACHE, CORES_LIMIT, MEMORY_LIMIT, PRIORITY
from shared.model.errors import RequestError

NO_CORE_LIMIT = 100
SWITCH_ON = 1
ACTIVE = 2
FREE_SEMAPHORE = bytes.fromhex("0100000000000000 80000000") + bytes(20)
"""A glibc `sem_t` of 64 bits: free, and shared between processes."""
_AMOUNT = re.compile(r"([1-9][0-9]{0,18})([kmgKMG]?)")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSeed:
    memory_bytes: tuple[int, ...]
    cores_percent: tuple[int, ...]
    """0, or 100 and more, is no limit."""
    other_cores_percent: int = 100
    """For positions without a device, as the library fills them."""
    priority: int = 1

    @property
    def memory_limits(self) -> tuple[int, ...]:
        return self.memory_bytes + (0,) * (DEVICES - len(self.memory_bytes))

    @property
    def core_limits(self) -> tuple[int, ...]:
        """A process measures its own utilization only while some value is from 1 to 100."""
        rest = DEVICES - len(self.cores_percent)
        given = self.cores_percent + (self.other_cores_percent,) * rest
        return tuple(percent or NO_CORE_LIMIT for percent in given)


def region_path_of(setup: ContainerSetup) -> PurePosixPath | None:
    """Return the host's path, or None without HAMi-core.

    Raises RequestError if no mount has it: the agent could not write its limits.
    """
    inside = setup.environment.get(CACHE)
    if inside is None:
        return None
    path = PurePosixPath(inside)
    for mount in setup.mounts:
        place = PurePosixPath(mount.container_path)
        if mount.directory and place == path.parent:
            return PurePosixPath(mount.host_path) / path.name
        if not mount.directory and place == path:
            return PurePosixPath(mount.host_path)
    raise RequestError(f"{CACHE} is {inside}, which is in none of the container's mounts")


def seed_of(environment: Mapping[str, str]) -> RegionSeed:
    """Raises RequestError naming a variable that the library would read as no limit."""
    memory: list[int] = []
    while (name := f"{MEMORY_LIMIT}_{len(memory)}") in environment:
        memory.append(_amount(name, environment[name]))
    if not memory and MEMORY_LIMIT in environment:  # the library gives it to every position
        memory = [_amount(MEMORY_LIMIT, environment[MEMORY_LIMIT])] * DEVICES
    if not 1 <= len(memory) <= DEVICES:
        raise RequestError(
            f"{MEMORY_LIMIT}_<i> is set for {len(memory)} devices, not for 1 to {DEVICES}"
        )
    others = _percent(CORES_LIMIT, environment.get(CORES_LIMIT, "100"))
    cores = tuple(
        _percent(name, environment[name])
        if (name := f"{CORES_LIMIT}_{n}") in environment
        else others
        for n in range(len(memory))
    )
    return RegionSeed(
        memory_bytes=tuple(memory),
        cores_percent=cores,
        other_cores_percent=others,
        priority=_percent(PRIORITY, environment.get(PRIORITY, "1")),
    )


def _amount(name: str, text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    amount = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 0 < amount < 1 << 63:
        raise RequestError(f"{name} is {text!r}, which is not an amount of memory")
    return amount


def _percent(name: str, text: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,2}", text):
        raise RequestError(f"{name} is {text!r}, which is not a number from 0 to 999")
    return int(text)


def pieces_of(seed: RegionSeed, layout: RegionLayout = V1_2) -> dict[int, bytes]:
    """The library writes the UUIDs of devices itself."""
    words = struct.Struct(f"<{DEVICES}Q")
    tail = struct.pack("<iiii", 0, SWITCH_ON, ACTIVE, seed.priority)
    head = struct.pack("<i", MAGIC)
    if layout.version is not None:
        head += struct.pack("<II", *layout.version)
    pieces = {
        0: head,
        layout.semaphore: FREE_SEMAPHORE,
        layout.memory_limits: words.pack(*seed.memory_limits),
        layout.core_limits: words.pack(*seed.core_limits),
        layout.slot_count: tail,
    }
    if layout.postinit_semaphore is not None:
        pieces[layout.postinit_semaphore] = FREE_SEMAPHORE
    return pieces


def image_of(seed: RegionSeed, layout: RegionLayout = V1_2) -> bytes:
    image = bytearray(layout.file_size)
    for at, piece in pieces_of(seed, layout).items():
        image[at : at + len(piece)] = piece
    return bytes(image)


def corrections_of(region: Region, seed: RegionSeed) -> Iterator[tuple[int, bytes, str]]:
    layout = region.layout
    for what, unit, start, limits, seeded in (
        ("memory", "bytes", layout.memory_limits, region.memory_limits, seed.memory_limits),
        ("core", "%", layout.core_limits, region.core_limits, seed.core_limits),
    ):
        for n, (current, wanted) in enumerate(zip(limits, seeded, strict=True)):
            if current != wanted:
                text = f"the {what} limit of device {n} is {current} {unit} instead of {wanted}"
                yield start + 8 * n, struct.pack("<Q", wanted), text
    if region.utilization_switch != SWITCH_ON:
        text = f"the switch of its core limits is {region.utilization_switch}"
        yield layout.switch, struct.pack("<i", SWITCH_ON), text


def altered_limits(region: Region, seed: RegionSeed) -> tuple[str, ...]:
    return tuple(text for _, _, text in corrections_of(region, seed))
