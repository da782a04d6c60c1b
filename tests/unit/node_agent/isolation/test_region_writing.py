"""Seeding regions, and changing the limits of those in use."""

import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node_agent.isolation.region import Region, decode
from services.node_agent.isolation.region_image import (
    RegionSeed,
    altered_limits,
    image_of,
    region_path_of,
    seed_of,
)
from services.node_agent.isolation.region_layouts import LAYOUTS, V1_2, RegionLayout
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_writer import identify, seed_region, write_limits
from shared.dialects.dialect import ContainerSetup, Mount
from shared.model.errors import RequestError, UnavailableError
from tests.support.node_agent.regions import MIB, SEED, at, fresh, process, write

GIB = 1 << 30
amounts = st.integers(1, (1 << 63) - 1)
seeds = st.integers(1, 16).flatmap(
    lambda n: st.builds(
        RegionSeed,
        memory_bytes=st.lists(amounts, min_size=n, max_size=n).map(tuple),
        cores_percent=st.lists(st.integers(0, 100), min_size=n, max_size=n).map(tuple),
        other_cores_percent=st.integers(0, 100),
        priority=st.integers(0, 999),
    )
)


def mount(container_path: str, host_path: str, *, directory: bool = True) -> Mount:
    return Mount(
        container_path=container_path, host_path=host_path, read_only=False, directory=directory
    )


@given(seeds, st.sampled_from(LAYOUTS))
def test_a_seed_reads_back_as_it_was_given(seed: RegionSeed, layout: RegionLayout) -> None:
    region = decode(layout, image_of(seed, layout))

    assert region.memory_limits[: len(seed.memory_bytes)] == seed.memory_bytes
    assert set(region.memory_limits[len(seed.memory_bytes) :]) <= {0}
    assert region.core_limits == seed.core_limits
    assert region.utilization_switch == 1
    assert region.slots == ()
    assert altered_limits(region, seed) == ()


# From the variables of a container


@pytest.mark.parametrize(
    ("variables", "memory", "cores"),
    [
        ({"MEMORY_LIMIT_0": "7"}, (7, *[0] * 15), (100,) * 16),
        ({"MEMORY_LIMIT": "7g"}, (7 << 30,) * 16, (100,) * 16),
        ({"MEMORY_LIMIT_0": "1g", "SM_LIMIT": "0"}, (1 << 30, *[0] * 15), (100,) * 16),
        (
            {
                "MEMORY_LIMIT_0": "3000m",
                "MEMORY_LIMIT_1": "5g",
                "SM_LIMIT": "50",
                "SM_LIMIT_1": "20",
            },
            (3000 << 20, 5 << 30, *[0] * 14),
            (50, 20, *[50] * 14),
        ),
    ],
)
def test_limits_come_from_the_environment_of_the_container(
    variables: dict[str, str], memory: tuple[int, ...], cores: tuple[int, ...]
) -> None:
    given = {f"CUDA_DEVICE_{name}": text for name, text in variables.items()}

    seed = seed_of({**given, "CUDA_TASK_PRIORITY": "0"})

    region = decode(V1_2, image_of(seed))
    assert (region.memory_limits, region.core_limits, seed.priority) == (memory, cores, 0)


@pytest.mark.parametrize("text", ["0", "", "0m", "010m", "0x10m", "1.5g", "1Gi", "-1", "9" * 20])
def test_hami_core_25_values_that_the_library_parses_differently_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="CUDA_DEVICE_MEMORY_LIMIT_0"):
        seed_of({"CUDA_DEVICE_MEMORY_LIMIT_0": text})


def test_no_limit_and_17_limits_are_refused() -> None:
    for count in (0, 17):
        with pytest.raises(RequestError, match=f"set for {count} devices"):
            seed_of({f"CUDA_DEVICE_MEMORY_LIMIT_{n}": "1m" for n in range(count)})


@pytest.mark.parametrize(
    ("mounts", "path"),
    [
        ((mount("/tmp/vgpu", "/c/u1_main"),), "/c/u1_main/a.cache"),
        ((mount("/tmp/vgpu/a.cache", "/c/u1/b", directory=False),), "/c/u1/b"),
        ((mount("/tmp", "/c/u1"),), None),
    ],
)
def test_the_region_path_follows_the_mounts_of_the_container(
    mounts: tuple[Mount, ...], path: str | None
) -> None:
    environment = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": "/tmp/vgpu/a.cache"}
    setup = ContainerSetup(environment=environment, mounts=mounts)

    if path is None:
        with pytest.raises(RequestError, match="is in none of the container's mounts"):
            region_path_of(setup)
    else:
        assert str(region_path_of(setup)) == path
    assert region_path_of(ContainerSetup(environment={})) is None


# Seeding


@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_hami_core_11_a_seed_is_complete_world_writable_and_leaves_no_temporary_file(
    tmp_path: Path, umask: int
) -> None:
    place = at(tmp_path / "u1_main")
    before = os.umask(umask)
    try:
        seed_region(place, SEED, starting=True)
    finally:
        os.umask(before)

    found = place.stat()
    assert (found.st_size, found.st_mode & 0o7777) == (2008953, 0o666)
    assert place.read_bytes() == image_of(SEED)
    assert found.st_blocks * 512 < 200_000
    assert [entry.name for entry in tmp_path.rglob("*")] == ["u1_main", "r.cache"]


def test_a_seed_repeated_keeps_the_file(tmp_path: Path) -> None:
    place = at(tmp_path / "u1_main")
    seed_region(place, SEED, starting=False)
    inode = place.stat().st_ino

    seed_region(place, SEED, starting=False)
    seed_region(place, SEED, starting=True)

    assert place.stat().st_ino == inode


def test_hami_core_28_a_start_clears_the_region_of_the_previous_container(tmp_path: Path) -> None:
    place = at(tmp_path / "u1_main")
    write(place, used())
    inode = place.stat().st_ino

    seed_region(place, SEED, starting=True)

    assert place.read_bytes() == image_of(SEED)
    assert place.stat().st_ino != inode, "a process that has it open keeps the old file"


@pytest.mark.parametrize("starting", [False, True])
@pytest.mark.parametrize("obstacle", ["link", "noise", "second name", "mode", "draft"])
def test_a_tenants_file_at_the_path_is_replaced_and_never_written_through(
    tmp_path: Path, obstacle: str, starting: bool
) -> None:
    place = at(tmp_path / "u1_main")
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    if obstacle == "link":
        place.symlink_to(victim)
    elif obstacle == "noise":
        place.write_bytes(b"\xff" * 2008953)
    elif obstacle == "second name":
        os.link(victim, place)
    elif obstacle == "draft":
        (tmp_path / ".u1_main.seed").symlink_to(victim)
    else:
        write(place, fresh())
        place.chmod(0o600)
        starting = True

    seed_region(place, SEED, starting=starting)

    assert place.read_bytes() == image_of(SEED)
    assert not place.is_symlink()
    assert place.stat().st_mode & 0o777 == 0o666
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("obstacle", ["no directory", "link", "directory in its place"])
def test_a_region_that_cannot_be_seeded_is_refused_with_its_name(
    tmp_path: Path, obstacle: str
) -> None:
    place = at(tmp_path / "u1_main")
    if obstacle == "directory in its place":
        (place / "full").mkdir(parents=True)
    else:
        place.parent.rmdir()
    if obstacle == "link":
        place.parent.symlink_to(tmp_path)

    with pytest.raises(UnavailableError, match=r"cannot be set: .*u1_main/r\.cache"):
        seed_region(place, SEED, starting=True)


# Changing


def used(layout: RegionLayout = V1_2) -> bytearray:
    image = bytearray(image_of(SEED, layout))
    process(image, 0, 10, totals=(2 * GIB, GIB), layout=layout)
    return image


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_hami_core_14_a_change_touches_the_bytes_of_its_fields_alone(
    tmp_path: Path, layout: RegionLayout
) -> None:
    place = at(tmp_path)
    before = used(layout)
    write(place, before)
    seed = replace(SEED, memory_bytes=(6 * GIB, 3 * GIB), cores_percent=(40, 41))

    write_limits(place, seed)

    after = place.read_bytes()
    touched = {at for at in range(len(after)) if after[at] != before[at]}
    allowed = {*range(layout.memory_limits, layout.memory_limits + 8)}
    assert touched
    assert touched <= allowed | {*range(layout.core_limits + 8, layout.core_limits + 16)}
    assert altered_limits(decode(layout, after), seed) == ()


def test_a_change_without_a_region_is_refused(tmp_path: Path) -> None:
    place = at(tmp_path)

    with pytest.raises(UnavailableError, match="it does not exist"):
        write_limits(place, SEED)
    place.write_bytes(b"?")
    with pytest.raises(UnavailableError, match="it has 1 bytes"):
        write_limits(place, SEED)


def test_hami_core_15_locks_held_by_the_library_do_not_block(tmp_path: Path) -> None:
    place = at(tmp_path)
    image = used()
    image[V1_2.semaphore : V1_2.semaphore + 8] = bytes(8)
    write(place, image)
    holding = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", holding, str(place)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"

        write_limits(place, replace(SEED, memory_bytes=(GIB, GIB)))

        region = read_region(place)
        holder.kill()
    assert isinstance(region, Region)
    assert region.memory_limits[0] == GIB
    assert region.locked


def test_a_context_is_counted_beside_what_the_process_allocates_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = at(tmp_path / "c")
    write_at = os.pwrite
    image = fresh()
    process(image, 0, 7, totals=(200 * MIB, 100 * MIB))
    write(place, image)
    others = iter((10, 20, 30))

    def allocating(descriptor: int, data: bytes, offset: int) -> int:
        total = V1_2.slot_at(0) + V1_2.slot.used + 32
        more = next(others, 0) * MIB if offset == total else 0
        for at_byte in (total - 16, total):
            (known,) = struct.unpack("<Q", os.pread(descriptor, 8, at_byte))
            write_at(descriptor, struct.pack("<Q", known + more), at_byte)
        return write_at(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", allocating)
    region = read_region(place)
    assert isinstance(region, Region)
    identify(place, region.layout, region.slots[0], 70, {0: 518 * MIB})

    found = read_region(place)
    assert isinstance(found, Region)
    (slot,) = found.slots
    assert (slot.host_pid, slot.context[0], slot.buffer[0]) == (70, 518 * MIB, 260 * MIB)
    assert slot.total[:2] == (778 * MIB, 100 * MIB)


def test_a_record_that_another_process_has_by_now_is_not_changed(tmp_path: Path) -> None:
    place = at(tmp_path / "c")
    image = fresh()
    process(image, 0, 7, totals=(200 * MIB,))
    write(place, image)
    region = read_region(place)
    assert isinstance(region, Region)
    process(image, 0, 8, totals=(100 * MIB,), host_pid=80)
    write(place, image)

    identify(place, region.layout, region.slots[0], 70, {0: 518 * MIB})

    assert place.read_bytes() == bytes(image)


def test_a_region_that_its_container_cuts_while_it_is_written_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = at(tmp_path / "c")
    image = fresh()
    process(image, 0, 7, totals=(200 * MIB,))
    write(place, image)
    region = read_region(place)
    assert isinstance(region, Region)
    pread = os.pread

    def cut_after(descriptor: int, size: int, position: int) -> bytes:
        content = pread(descriptor, size, position)
        os.truncate(place, 0)
        return content

    monkeypatch.setattr(os, "pread", cut_after)

    with pytest.raises(UnavailableError, match="its container has made it shorter"):
        identify(place, region.layout, region.slots[0], 70, {0: 518 * MIB})
