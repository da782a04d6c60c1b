"""Containers whose cores are held by GPU time: variables, and the order of libraries."""

from typing import Any

import pytest

from shared.dialects import DIALECTS
from shared.dialects.compute_time import (
    LIBRARY,
    LIMITS,
    PRELOAD,
    USE_DIRECTORY,
    mounted_at,
    with_compute_time,
)
from shared.dialects.dialect import ContainerSetup, Paths
from shared.dialects.protected_paths import lease_conflict
from shared.dialects.reserved import is_reserved
from tests.support.build import lease, share

PATHS = Paths(
    library="/l/libvgpu.so",
    preload="/l/hami",
    containers="/c",
    time_library="/l/libleasehold-time.so",
    time_preload="/l/time",
    joint_preload="/l/joint",
)


def setup_of(dialect: str, **held: Any) -> ContainerSetup:
    part = share(memory_mib=1000, cores_percent=30, **held)
    held_lease = lease("uid-1", "node-0", part, dialect=dialect)
    plain = DIALECTS[dialect].container_setup(held_lease, "main", {}, PATHS)
    return with_compute_time(plain, held_lease.shares, "/c/uid-1_main", PATHS)


def preload_of(setup: ContainerSetup) -> str:
    mount = mounted_at(setup, PRELOAD)
    return "" if mount is None else mount.host_path


@pytest.mark.parametrize("dialect", ["volcano-vgpu", "nvidia", "tencent"])
def test_beside_hami_core_the_library_comes_first_and_its_limit_of_cores_is_off(
    dialect: str,
) -> None:
    setup = setup_of(dialect, memory="hami-core", compute="time", mode="time")

    assert preload_of(setup) == PATHS.joint_preload
    assert setup.environment["GPU_CORE_UTILIZATION_POLICY"] == "disable"
    assert setup.environment["CUDA_DEVICE_SM_LIMIT"] == "0"
    assert setup.environment["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1000m"
    mounts = {mount.container_path: mount for mount in setup.mounts}
    assert mounts[LIBRARY].host_path == PATHS.time_library
    assert (mounts[LIMITS].host_path, mounts[LIMITS].read_only) == (
        "/c/uid-1_main.time-limits",
        True,
    )
    assert (mounts[USE_DIRECTORY].host_path, mounts[USE_DIRECTORY].directory) == (
        "/c/uid-1_main.time",
        True,
    )
    assert len(mounts) == len(setup.mounts)


def test_a_dialect_that_preloads_by_a_variable_names_both_there() -> None:
    setup = setup_of("koordinator", memory="hami-core", compute="time", mode="time")

    assert setup.environment["LD_PRELOAD"] == f"{LIBRARY} /usr/local/vgpu/libvgpu.so"
    assert not preload_of(setup)


def test_without_hami_core_it_is_loaded_alone() -> None:
    setup = setup_of("volcano-vgpu", memory="driver", compute="time", mode="time")

    assert preload_of(setup) == PATHS.time_preload
    assert "GPU_CORE_UTILIZATION_POLICY" not in setup.environment


def test_a_container_that_another_enforcer_holds_gets_nothing_of_it() -> None:
    setup = setup_of("volcano-vgpu", memory="hami-core", compute="hami-core", mode="hami-core")

    assert preload_of(setup) == PATHS.preload
    assert setup.environment["GPU_CORE_UTILIZATION_POLICY"] == "force"
    assert mounted_at(setup, LIMITS) is None


def test_pods_may_neither_mount_over_its_files_nor_set_its_variables() -> None:
    assert lease_conflict("/usr/local/leasehold/time-limits")
    assert lease_conflict("/tmp/leasehold-time")
    assert is_reserved("LEASEHOLD_TIME_LIMITS")
