"""Directories and files that containers mount."""

import os
import time
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.host_paths import HostLayout, orphaned_directories
from services.node_agent.isolation.region_image import RegionSeed, image_of
from shared.dialects.dialect import ContainerSetup, Mount
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import PodUid
from tests.support.node_agent.regions import process


def host(tmp_path: Path, *, simulated: bool = True) -> ContainerFiles:
    layout = HostLayout(
        state_dir=PurePosixPath(tmp_path / "state"),
        library=PurePosixPath(tmp_path / "library" / "libvgpu.so"),
    )
    return ContainerFiles(layout, simulated=simulated)


def setup_for(preparing: ContainerFiles) -> ContainerSetup:
    paths = preparing.layout.paths
    return ContainerSetup(
        environment={},
        mounts=(
            Mount(container_path="/l", host_path=paths.library, read_only=True, directory=False),
            Mount(
                container_path="/tmp/vgpu",
                host_path=f"{paths.containers}/u1_main",
                read_only=False,
                directory=True,
            ),
        ),
    )


async def test_everything_mounted_is_there_and_open_to_any_user(tmp_path: Path) -> None:
    preparing = host(tmp_path)

    await preparing.prepare(setup_for(preparing))

    assert (tmp_path / "state/containers/u1_main").stat().st_mode & 0o777 == 0o777
    assert (tmp_path / "state/ld.so.preload").is_file()
    assert (tmp_path / "library/libvgpu.so").is_file()


async def test_the_library_is_preloaded_only_where_it_is_a_real_one(tmp_path: Path) -> None:
    simulated, real = host(tmp_path), host(tmp_path, simulated=False)

    await simulated.create_shared_files()
    assert (tmp_path / "state/ld.so.preload").read_text() == ""
    await real.create_shared_files()
    assert (tmp_path / "state/ld.so.preload").read_text() == "/usr/local/vgpu/libvgpu.so"


async def test_41_a_file_that_is_mounted_keeps_its_inode(tmp_path: Path) -> None:
    preparing = host(tmp_path)
    await preparing.prepare(setup_for(preparing))
    before = (tmp_path / "state/ld.so.preload").stat().st_ino
    (tmp_path / "state/containers/u1_main/region").write_text("used")

    await preparing.prepare(setup_for(preparing))

    assert (tmp_path / "state/ld.so.preload").stat().st_ino == before
    assert (tmp_path / "state/containers/u1_main/region").read_text() == "used"


async def test_a_missing_library_is_named_and_never_made_up(tmp_path: Path) -> None:
    preparing = host(tmp_path, simulated=False)

    with pytest.raises(UnavailableError, match=r"libvgpu\.so does not exist"):
        await preparing.prepare(setup_for(preparing))


async def test_directories_of_pods_that_are_gone_are_removed_once_they_are_five_minutes_old(
    tmp_path: Path,
) -> None:
    preparing = host(tmp_path)
    await preparing.prepare(setup_for(preparing))
    containers = tmp_path / "state/containers"
    (containers / ".u2_main.seed").write_bytes(b"left by a crash")
    (containers / "u3_main").symlink_to(tmp_path)

    def age(seconds: float) -> None:
        for name in ("u1_main", ".u2_main.seed", "u3_main"):
            at = time.time() - seconds
            os.utime(containers / name, (at, at), follow_symlinks=False)

    age(299)
    await preparing.remove_unused(set(), None)
    young = sorted(entry.name for entry in containers.iterdir())
    age(310)
    await preparing.remove_unused({PodUid("u1")}, None)
    kept = [entry.name for entry in containers.iterdir()]
    await preparing.remove_unused(set(), None)

    assert young == [".u2_main.seed", "u1_main", "u3_main"]
    assert kept == ["u1_main"]
    assert not list(containers.iterdir())
    assert tmp_path.is_dir()
    assert orphaned_directories(["stranger", "u1_main"], []) == ["u1_main"]


def limited(preparing: ContainerFiles, **changes: str) -> ContainerSetup:
    told = {
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/tmp/vgpu/r.cache",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "50",
    }
    return replace(setup_for(preparing), environment=told | changes)


async def test_the_limits_of_a_container_lie_where_it_looks_before_it_starts(
    tmp_path: Path,
) -> None:
    preparing = host(tmp_path)

    await preparing.prepare(limited(preparing))

    seeded = RegionSeed(memory_bytes=(3000 << 20,), cores_percent=(50,), other_cores_percent=50)
    assert (tmp_path / "state/containers/u1_main/r.cache").read_bytes() == image_of(seeded)


@pytest.mark.parametrize("limit", ["0", "3000MB"])
async def test_a_container_whose_limits_cannot_be_set_is_refused(
    tmp_path: Path, limit: str
) -> None:
    preparing = host(tmp_path)

    with pytest.raises(RequestError, match="CUDA_DEVICE_MEMORY_LIMIT_0"):
        await preparing.prepare(limited(preparing, CUDA_DEVICE_MEMORY_LIMIT_0=limit))
    (tmp_path / "state/containers/u1_main/r.cache/full").mkdir(parents=True)
    with pytest.raises(
        UnavailableError, match=r"limits of the container cannot be set: .*r\.cache"
    ):
        await preparing.prepare(limited(preparing))


async def test_hami_core_27_what_a_container_left_is_replaced_only_when_it_starts(
    tmp_path: Path,
) -> None:
    preparing = host(tmp_path)
    setup = limited(preparing)
    await preparing.prepare(setup)
    region = tmp_path / "state/containers/u1_main/r.cache"
    image = bytearray(region.read_bytes())
    process(image, 0, 7, totals=(5,))
    region.write_bytes(image)

    await preparing.prepare(setup)
    again = region.read_bytes()
    await preparing.prepare(setup, starting=True)

    assert again == image
    assert region.read_bytes() == image_of(
        RegionSeed(memory_bytes=(3000 << 20,), cores_percent=(50,), other_cores_percent=50)
    )
