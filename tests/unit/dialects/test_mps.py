"""Containers whose shares MPS holds: variables, the directory of their daemon, and its limits."""

from pathlib import PurePosixPath
from typing import Any

import pytest

from shared.dialects import DIALECTS
from shared.dialects.compute_time import mounted_at
from shared.dialects.dialect import ContainerSetup, Paths
from shared.dialects.mps import (
    PIPES,
    daemon_name,
    shared_daemon_name,
    thread_percent,
    with_mps,
)
from shared.dialects.protected_paths import lease_conflict
from shared.model.leases.lease import Share
from shared.model.names import DeviceUuid, PodUid
from tests.support.build import lease, share

PATHS = Paths(library="/l/libvgpu.so", preload="/l/hami", containers="/c", mps="/s/mps")
OTHER = DeviceUuid("GPU-other")
HELD: dict[str, Any] = {"memory": "mps", "compute": "mps", "mode": "mps"}
SHARED: dict[str, Any] = dict.fromkeys(HELD, "mps-shared")


def setup_of(*shares: Share, dialect: str = "volcano-vgpu") -> ContainerSetup:
    held_lease = lease("uid-1", "node-0", *shares, dialect=dialect)
    plain = DIALECTS[dialect].container_setup(held_lease, "main", {}, PATHS)
    return with_mps(plain, held_lease.shares, held_lease.pod, "main", PATHS)


@pytest.mark.parametrize("dialect", ["volcano-vgpu", "nvidia", "koordinator"])
def test_a_container_gets_its_own_daemon_and_no_library(dialect: str) -> None:
    part = share(memory_mib=1000, cores_percent=30, **HELD)
    setup = setup_of(part, dialect=dialect)

    mps = {name: text for name, text in setup.environment.items() if name.startswith("CUDA_MPS_")}
    assert mps == {
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{part.device}=1000M",
    }
    assert mounted_at(setup, PIPES) is not None
    assert "CUDA_DEVICE_SM_LIMIT" not in setup.environment
    assert not any("vgpu" in mount.host_path for mount in setup.mounts)


def test_directories_of_daemons_are_disjoint_and_short() -> None:
    names = {daemon_name(PodUid(f"uid-{n}"), name) for n in range(50) for name in ("main", "side")}

    assert len(names) == 100
    assert {len(name) for name in names} == {16}


def test_containers_of_a_gpu_mount_disjoint_directories_below_that_of_its_server() -> None:
    part = share(memory_mib=1000, cores_percent=10, **SHARED)
    plain = setup_of(share(memory_mib=1000))
    setups = [
        with_mps(plain, (part,), PodUid(f"uid-{n}"), name, PATHS)
        for n in range(50)
        for name in ("main", "side")
    ]

    mounts = [mounted_at(setup, PIPES) for setup in setups]
    paths = {PurePosixPath(mount.host_path) for mount in mounts if mount is not None}
    assert len(paths) == 100
    [server] = {path.parent for path in paths}
    assert server == PurePosixPath("/s/mps") / shared_daemon_name(part.device) / "pipe" / "gpu"
    assert {len(path.name) for path in paths} == {16}


def test_memory_that_the_driver_holds_has_no_limit_by_mps() -> None:
    setup = setup_of(share(memory_mib=1000, **(HELD | {"memory": "driver"})))

    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in setup.environment
    assert setup.environment["CUDA_MPS_PIPE_DIRECTORY"] == PIPES


@pytest.mark.parametrize(
    ("percents", "percent"), [((25, 75), 25), ((0, 40), 40), ((0,), 100), ((1,), 1), ((100,), 100)]
)
def test_all_devices_have_the_percentage_of_the_smallest_share(
    percents: tuple[int, ...], percent: int
) -> None:
    shares = [share(cores_percent=cores, **HELD) for cores in percents]

    assert thread_percent(shares) == percent


def test_a_container_that_another_enforcer_holds_gets_nothing_of_it() -> None:
    setup = setup_of(share(memory_mib=1000))

    assert not any(name.startswith("CUDA_MPS_") for name in setup.environment)
    assert mounted_at(setup, PIPES) is None


def test_pods_may_not_mount_over_the_directory_of_their_daemon() -> None:
    assert lease_conflict("/tmp/nvidia-mps")
