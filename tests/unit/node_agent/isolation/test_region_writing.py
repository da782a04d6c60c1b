"""Seeding regions, and changing the limits of those in use."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node_agent.isolation.region import Region, decode
from services.node_agent.isolation.region_control import (
    RegionChanges,
    restore_limits,
    write_changes,
)
from services.node_agent.isolation.region_image import (
    RegionSeed,
    altered_limits,
    image_of,
    region_path_of,
    seed_of,
)
from services.node_agent.isolation.region_layouts import LAYOUTS, V1_2, RegionLayout
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.isolation.region_seed import seed_region
from shared.dialects.dialect import ContainerSetup, Mount
from shared.model.errors import RequestError, UnavailableError
from tests.support.node_agent.regions import SEED, at, fresh, path_of, process, write

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
    assert (region.utilization_switch, region.recent_kernel) == (1, 2)
    assert (region.priority, region.device_num, region.slots) == (seed.priority, 0, ())
    assert altered_limits(region, seed) == ()


# From the variables of a container


def test_limits_come_from_the_environment_of_the_container() -> None:
    variables = {
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "5g",
        "CUDA_DEVICE_SM_LIMIT": "50",
        "CUDA_DEVICE_SM_LIMIT_1": "20",
        "CUDA_TASK_PRIORITY": "0",
    }

    assert seed_of(variables) == RegionSeed(
        memory_bytes=(3000 << 20, 5 << 30),
        cores_percent=(50, 20),
        other_cores_percent=50,
        priority=0,
    )
    assert seed_of({"CUDA_DEVICE_MEMORY_LIMIT_0": "7"}).core_limits == (100,) * 16
    assert seed_of({"CUDA_DEVICE_MEMORY_LIMIT": "7g"}).memory_limits == (7 << 30,) * 16


@pytest.mark.parametrize("text", ["0", "", "0m", "010m", "0x10m", "1.5g", "1Gi", "-1", "9" * 20])
def test_hami_core_25_values_that_the_library_parses_differently_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="CUDA_DEVICE_MEMORY_LIMIT_0"):
        seed_of({"CUDA_DEVICE_MEMORY_LIMIT_0": text})


def test_no_limit_and_17_limits_are_refused() -> None:
    for count in (0, 17):
        with pytest.raises(RequestError, match=f"set for {count} devices"):
            seed_of({f"CUDA_DEVICE_MEMORY_LIMIT_{n}": "1m" for n in range(count)})


def test_the_region_path_follows_the_mounts_of_the_container() -> None:
    environment = {"CUDA_DEVICE_MEMORY_SHARED_CACHE": "/tmp/vgpu/a.cache"}
    directory = ContainerSetup(environment=environment, mounts=(mount("/tmp/vgpu", "/c/u1_main"),))
    file = ContainerSetup(
        environment=environment, mounts=(mount("/tmp/vgpu/a.cache", "/c/u1/b", directory=False),)
    )
    elsewhere = ContainerSetup(environment=environment, mounts=(mount("/tmp", "/c/u1"),))

    for setup, wanted in ((directory, ("/c/u1_main", "a.cache")), (file, ("/c/u1", "b"))):
        place = region_path_of(setup)
        assert place is not None
        assert (place.directory, place.name) == wanted
    assert region_path_of(ContainerSetup(environment={})) is None
    with pytest.raises(RequestError, match="is in none of the container's mounts"):
        region_path_of(elsewhere)


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

    found = path_of(place).stat()
    assert (found.st_size, found.st_mode & 0o7777) == (2008953, 0o666)
    assert path_of(place).read_bytes() == image_of(SEED)
    assert found.st_blocks * 512 < 200_000
    assert [entry.name for entry in tmp_path.rglob("*")] == ["u1_main", "r.cache"]


def test_a_seed_repeated_keeps_the_file(tmp_path: Path) -> None:
    place = at(tmp_path / "u1_main")
    seed_region(place, SEED, starting=False)
    inode = path_of(place).stat().st_ino

    seed_region(place, SEED, starting=False)
    seed_region(place, SEED, starting=True)

    assert path_of(place).stat().st_ino == inode


def test_a_region_in_use_keeps_its_file_and_processes_and_its_limits_are_restored(
    tmp_path: Path,
) -> None:
    place = at(tmp_path / "u1_main")
    image = fresh(RegionSeed(memory_bytes=(80 * GIB,), cores_percent=(0,)))
    process(image, 0, 10, totals=(9 * GIB,))
    write(place, image)
    inode = path_of(place).stat().st_ino

    seed_region(place, SEED, starting=False)

    region = read_region(place)
    assert isinstance(region, Region)
    assert path_of(place).stat().st_ino == inode
    assert [slot.pid for slot in region.slots] == [10]
    assert altered_limits(region, SEED) == ()


def test_hami_core_28_a_start_clears_the_region_of_the_previous_container(tmp_path: Path) -> None:
    place = at(tmp_path / "u1_main")
    image = fresh()
    process(image, 0, 1, totals=(GIB,))
    write(place, image)
    inode = path_of(place).stat().st_ino

    seed_region(place, SEED, starting=True)

    assert path_of(place).read_bytes() == image_of(SEED)
    assert path_of(place).stat().st_ino != inode, "a process that has it open keeps the old file"


@pytest.mark.parametrize("starting", [False, True])
@pytest.mark.parametrize("obstacle", ["link", "noise", "second name", "mode", "draft"])
def test_a_tenants_file_at_the_path_is_replaced_and_never_written_through(
    tmp_path: Path, obstacle: str, starting: bool
) -> None:
    place, victim = at(tmp_path / "u1_main"), tmp_path / "victim"
    victim.write_bytes(b"mine")
    if obstacle == "link":
        path_of(place).symlink_to(victim)
    elif obstacle == "noise":
        path_of(place).write_bytes(b"\xff" * 2008953)
    elif obstacle == "second name":
        os.link(victim, path_of(place))
    elif obstacle == "draft":
        (tmp_path / ".u1_main.seed").symlink_to(victim)
    else:
        write(place, fresh())
        path_of(place).chmod(0o600)
        starting = True

    seed_region(place, SEED, starting=starting)

    assert path_of(place).read_bytes() == image_of(SEED)
    assert not path_of(place).is_symlink()
    assert path_of(place).stat().st_mode & 0o777 == 0o666
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("obstacle", ["no directory", "link", "directory in its place"])
def test_a_region_that_cannot_be_seeded_is_refused_with_its_name(
    tmp_path: Path, obstacle: str
) -> None:
    place = at(tmp_path / "u1_main")
    if obstacle == "directory in its place":
        (path_of(place) / "full").mkdir(parents=True)
    else:
        Path(place.directory).rmdir()
    if obstacle == "link":
        Path(place.directory).symlink_to(tmp_path)

    with pytest.raises(UnavailableError, match=r"cannot be set: .*u1_main/r\.cache"):
        seed_region(place, SEED, starting=True)


# Changing


def used(place_at: Path, layout: RegionLayout = V1_2) -> bytearray:
    image = bytearray(image_of(SEED, layout))
    process(image, 0, 10, totals=(2 * GIB, GIB), layout=layout)
    (place_at / "r.cache").write_bytes(bytes(image))
    return image


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_hami_core_14_a_change_touches_the_bytes_of_its_fields_alone(
    tmp_path: Path, layout: RegionLayout
) -> None:
    place = at(tmp_path)
    before = used(tmp_path, layout)
    changes = RegionChanges(
        memory_limits=(6 * GIB, *SEED.memory_limits[1:]),
        core_limits=(40, 41, *SEED.core_limits[2:]),
        utilization_switch=0,
        recent_kernel=-1,
    )

    write_changes(place, changes)

    after = path_of(place).read_bytes()
    touched = {at for at in range(len(after)) if after[at] != before[at]}
    allowed = {*range(layout.memory_limits, layout.memory_limits + 8)}
    allowed |= {*range(layout.core_limits + 8, layout.core_limits + 16)}
    allowed |= {*range(layout.switch, layout.switch + 8)}
    assert touched
    assert touched <= allowed
    region = decode(layout, after)
    assert (region.memory_limits[0], region.core_limits[1]) == (6 * GIB, 41)
    assert (region.utilization_switch, region.recent_kernel) == (0, -1)


def test_without_a_core_limit_the_seed_has_what_the_library_writes() -> None:
    unlimited = seed_of({"CUDA_DEVICE_MEMORY_LIMIT_0": "1g", "CUDA_DEVICE_SM_LIMIT": "0"})

    region = decode(V1_2, image_of(unlimited))

    assert region.core_limits == (100,) * 16


def test_a_region_of_an_earlier_version_without_core_limits_is_not_altered(tmp_path: Path) -> None:
    unlimited = seed_of({"CUDA_DEVICE_MEMORY_LIMIT_0": "1g"})
    image = bytearray(image_of(unlimited))
    image[V1_2.core_limits : V1_2.core_limits + 128] = bytes(128)

    assert altered_limits(decode(V1_2, image), unlimited) == ()


def test_altered_limits_are_named_and_restored_in_place(tmp_path: Path) -> None:
    place = at(tmp_path)
    image = used(tmp_path)
    struct.pack_into("<Q", image, V1_2.memory_limits, 80 * GIB)
    struct.pack_into("<Q", image, V1_2.core_limits + 8, 0)
    struct.pack_into("<i", image, V1_2.switch, 0)
    write(place, image)
    inode = path_of(place).stat().st_ino
    before = read_region(place)
    assert isinstance(before, Region)

    restore_limits(place, SEED)

    after = read_region(place)
    assert isinstance(after, Region)
    assert altered_limits(before, SEED) == (
        f"the memory limit of device 0 is {80 * GIB} bytes instead of {5 * GIB}",
        "the core limit of device 1 is 0 % instead of 40",
        "the switch of its core limits is 0",
    )
    assert altered_limits(after, SEED) == ()
    assert path_of(place).stat().st_ino == inode
    assert [slot.pid for slot in after.slots] == [10]


def test_a_change_without_a_region_is_refused(tmp_path: Path) -> None:
    place = at(tmp_path)

    with pytest.raises(UnavailableError, match="it does not exist"):
        write_changes(place, RegionChanges(utilization_switch=1))
    path_of(place).write_bytes(b"?")
    with pytest.raises(UnavailableError, match="it has 1 bytes"):
        restore_limits(place, SEED)


def test_hami_core_15_locks_held_by_the_library_do_not_block(tmp_path: Path) -> None:
    place = at(tmp_path)
    image = used(tmp_path)
    image[V1_2.semaphore : V1_2.semaphore + 8] = bytes(8)
    write(place, image)
    holding = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", holding, str(path_of(place))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"

        write_changes(place, RegionChanges(utilization_switch=0))

        region = read_region(place)
        after = path_of(place).read_bytes()
        holder.kill()
    assert isinstance(region, Region)
    assert region.utilization_switch == 0
    assert after[V1_2.semaphore : V1_2.semaphore + 32] == bytes(image[24:56])
