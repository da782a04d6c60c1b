"""Region files for tests: by the C program beside this file, and by bytes that a test changes."""

import functools
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

import pytest

from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import RegionSeed, image_of
from services.node_agent.isolation.region_layouts import V1_2, RegionLayout
from services.node_agent.isolation.region_reader import read_region

MIB = 1 << 20
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler is installed here")
SEED = RegionSeed(memory_bytes=(5 << 30, 3 << 30), cores_percent=(40, 40))


@functools.cache
def c_program() -> Path:
    """Compile it once; that its assertions hold is part of what it tests."""
    assert COMPILER is not None
    binary = Path(tempfile.mkdtemp(prefix="lh-region-")) / "region"
    source = Path(__file__).with_name("region_layouts.c")
    subprocess.run(
        [COMPILER, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-o", str(binary),
         str(source), "-lpthread"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return binary


def compile_library(path: Path, text: str, *flags: str) -> Path:
    """Compile a shared library of this machine; another file takes the place of an earlier one."""
    assert COMPILER is not None
    source = path.with_suffix(".c")
    draft = path.with_suffix(".draft")
    source.write_text(text)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", draft, source, *flags], check=True)
    return draft.replace(path)


def write_by_c(layout: RegionLayout, place: Path) -> None:
    """Have C write a region full of known numbers."""
    subprocess.run([str(c_program()), "write", layout.name, str(place)], check=True, timeout=20)


def show_by_c(layout: RegionLayout, place: Path) -> dict[str, str]:
    """Return the fields that the C program reads from a region; `sem` is 0 if it took the lock."""
    done = subprocess.run(
        [str(c_program()), "show", layout.name, str(place)],
        check=True, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def at(directory: Path, name: str = "r.cache") -> Path:
    """Return a place in a directory of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


def process(
    image: bytearray,
    index: int,
    pid: int,
    *,
    totals: tuple[int, ...] = (),
    status: int = 1,
    host_pid: int = 0,
    seqlock: int = 0,
    counted: bool = True,
    layout: RegionLayout = V1_2,
) -> None:
    """Write a slot into an image, as a process of the container would."""
    slot = layout.slot_at(index)
    struct.pack_into("<ii", image, slot, pid, host_pid)
    for device, total in enumerate(totals):
        record = slot + layout.slot.used + device * layout.slot.used_size
        struct.pack_into("<5Q", image, record, 0, 0, total, 0, total)
    struct.pack_into("<i", image, slot + layout.slot.status, status)
    if layout.slot.seqlock is not None:
        struct.pack_into("<Q", image, slot + layout.slot.seqlock, seqlock)
    if counted:
        (count,) = struct.unpack_from("<i", image, layout.slot_count)
        struct.pack_into("<i", image, layout.slot_count, max(count, index + 1))


def fresh(seed: RegionSeed = SEED) -> bytearray:
    """Return a seeded image that a test may change."""
    return bytearray(image_of(seed))


def write(place: Path, image: bytes | bytearray) -> None:
    """Put an image at its place."""
    place.write_bytes(bytes(image))


def limit_mib(place: PurePath) -> int:
    """Return the memory limit of the container's first device."""
    region = read_region(place)
    assert isinstance(region, Region)
    return region.memory_limits[0] // MIB


@contextmanager
def rewritten(place: PurePath | None) -> Iterator[bytearray]:
    """Give the content of a region's file, to be changed in place."""
    assert place is not None
    with Path(place).open("r+b") as file:
        image = bytearray(file.read())
        yield image
        file.seek(0)
        file.write(image)


def use_memory(place: PurePath | None, mib: int) -> None:
    """Use memory as process 7 of the container."""
    with rewritten(place) as image:
        process(image, 0, 7, totals=(mib * MIB,))
