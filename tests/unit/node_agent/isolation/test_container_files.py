"""Directories and files that containers mount."""

import os
import time
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.library import NodeLibrary
from services.node_agent.isolation.region_image import RegionSeed, image_of
from shared.dialects.dialect import ContainerSetup, Mount
from shared.dialects.hami_core import override_mount
from shared.model.errors import UnavailableError
from shared.model.names import PodUid
from tests.support.node_agent.regions import process


def host(tmp_path: Path, *, source: Path | None = None) -> ContainerFiles:
    library = NodeLibrary(tmp_path / "library", source)
    return ContainerFiles(PurePosixPath(tmp_path / "state"), library)


def setup_for(files: ContainerFiles) -> ContainerSetup:
    paths = files.paths
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


async def test_mounted_paths_exist_and_are_accessible_to_any_user(tmp_path: Path) -> None:
    files = host(tmp_path)

    await files.prepare(setup_for(files))

    assert (tmp_path / "state/containers/u1_main").stat().st_mode & 0o777 == 0o777
    assert (tmp_path / "state/ld.so.preload").is_file()
    assert (tmp_path / "library/simulated/libvgpu.so").is_file()


async def test_only_a_real_library_is_preloaded(tmp_path: Path) -> None:
    simulated = host(tmp_path)
    real = host(tmp_path, source=tmp_path / "none")

    await simulated.create_shared_files()
    assert (tmp_path / "state/ld.so.preload").read_text() == ""
    await real.create_shared_files()
    assert (tmp_path / "state/ld.so.preload").read_text() == "/usr/local/vgpu/libvgpu.so"


async def test_41_a_mounted_file_keeps_its_inode(tmp_path: Path) -> None:
    files = host(tmp_path)
    await files.prepare(setup_for(files))
    before = (tmp_path / "state/ld.so.preload").stat().st_ino
    (tmp_path / "state/containers/u1_main/region").write_text("used")

    await files.prepare(setup_for(files))

    assert (tmp_path / "state/ld.so.preload").stat().st_ino == before
    assert (tmp_path / "state/containers/u1_main/region").read_text() == "used"


async def test_the_node_is_closed_until_a_new_container_that_failed_is_prepared(
    tmp_path: Path,
) -> None:
    files = host(tmp_path)
    files.min_free_bytes = 0
    await files.create_shared_files()
    directory = tmp_path / "state/containers/u1_main"
    directory.write_text("in the way")

    with pytest.raises(UnavailableError):
        await files.prepare(setup_for(files), starting=True)
    assert not files.unwritable_reason, "a container may have changed its own files"

    with pytest.raises(UnavailableError):
        await files.prepare(setup_for(files), new=True)
    assert "u1_main" in files.unwritable_reason
    await files.probe_disk()
    assert "u1_main" in files.unwritable_reason
    directory.unlink()
    await files.probe_disk()
    assert (files.unwritable_reason, directory.is_dir()) == ("", True)


@pytest.mark.parametrize("then", ["another", "unusable"])
async def test_a_container_is_tried_again_with_the_library_that_new_ones_mount(
    tmp_path: Path, then: str
) -> None:
    files = host(tmp_path, source=tmp_path / "none")
    files.min_free_bytes = 0
    with pytest.raises(UnavailableError):
        await files.prepare(setup_for(files), new=True)
    await files.probe_disk()
    assert "libvgpu.so does not exist" in files.unwritable_reason

    if then == "another":
        path = tmp_path / "library/newer/libvgpu.so"
        path.parent.mkdir(parents=True)
        path.touch()
        files.library.current = replace(files.library.current, path=path)
    else:  # no shares are served then, and whole GPUs are
        files.library.unusable_reason = "it does not load"
    await files.probe_disk()

    assert not files.unwritable_reason


async def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    files = host(tmp_path)
    await files.create_shared_files()
    (tmp_path / "state/containers/u1_main").write_text("in the way")

    with pytest.raises(UnavailableError, match=r"state/containers/u1_main: File exists"):
        await files.prepare(setup_for(files))


@pytest.mark.parametrize("old_s", [310, -4e9])
async def test_directories_of_deleted_pods_are_removed_after_five_minutes(
    tmp_path: Path, old_s: float
) -> None:
    files = host(tmp_path)
    await files.prepare(setup_for(files))
    containers = tmp_path / "state/containers"
    (containers / ".u2_main.seed").write_bytes(b"left by a crash")
    (containers / "u3_main").symlink_to(tmp_path)
    (containers / "stranger").mkdir()

    async def left(age_s: float, *live: str) -> set[str]:
        at = time.time() - age_s
        for path in containers.iterdir():
            os.utime(path, (at, at), follow_symlinks=False)
        await files.remove_unused({PodUid(pod) for pod in live}, None)
        return {path.name for path in containers.iterdir()}

    assert await left(299) == {".u2_main.seed", "u1_main", "u3_main", "stranger"}
    assert await left(old_s, "u1") == {"u1_main", "stranger"}
    assert await left(old_s) == {"stranger"}
    assert tmp_path.is_dir()


def limited(files: ContainerFiles, **changes: str) -> ContainerSetup:
    variables = {
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/tmp/vgpu/r.cache",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "50",
    }
    return replace(setup_for(files), environment=variables | changes)


async def test_the_overrides_have_the_limits_and_follow_them_in_the_mounted_file(
    tmp_path: Path,
) -> None:
    files = host(tmp_path)
    own = f"{files.paths.containers}/u1_main"
    setup = limited(files, NVIDIA_VISIBLE_DEVICES="GPU-a", LIBCUDA_LOG_LEVEL="1")
    setup = replace(setup, mounts=(*setup.mounts, override_mount(own)))

    await files.prepare(setup)
    written = Path(f"{own}.env").read_text()
    inode = Path(f"{own}.env").stat().st_ino
    changed = {**setup.environment, "CUDA_DEVICE_MEMORY_LIMIT_0": "9m"}
    await files.prepare(replace(setup, environment=changed))

    assert written.splitlines() == [
        "CUDA_DEVICE_MEMORY_LIMIT_0=3000m",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE=/tmp/vgpu/r.cache",
        "CUDA_DEVICE_SM_LIMIT=50",
    ]
    assert Path(f"{own}.env").read_text().splitlines()[0] == "CUDA_DEVICE_MEMORY_LIMIT_0=9m"
    assert Path(f"{own}.env").stat().st_ino == inode
    assert not Path(f"{own}.env").stat().st_mode & 0o022


async def test_hami_core_27_a_used_region_is_replaced_only_at_a_container_start(
    tmp_path: Path,
) -> None:
    files = host(tmp_path)
    region = tmp_path / "state/containers/u1_main/r.cache"
    seed = RegionSeed(memory_bytes=(3000 << 20,), cores_percent=(50,), other_cores_percent=50)
    used = bytearray(image_of(seed))
    process(used, 0, 7, totals=(5,))
    found = []
    for starting in (False, False, True):
        await files.prepare(limited(files), starting=starting)
        found.append(region.read_bytes())
        region.write_bytes(used)

    assert found == [image_of(seed), used, image_of(seed)]
