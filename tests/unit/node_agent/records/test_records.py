"""What the agent remembers: leases, answers, directories."""

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pytest

from services.node_agent.allocate.pod_resolution import KubeletPod, PodResources
from services.node_agent.isolation.container_files import ContainerFiles
from services.node_agent.isolation.host_paths import HostLayout, orphaned_directories
from services.node_agent.isolation.region_image import RegionSeed, image_of
from services.node_agent.records.checkpoint import Checkpoint
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.records.checkpoint_rebuild import ended_pods
from services.node_agent.records.known_leases import KnownLeases
from shared.dialects.dialect import ContainerSetup, Mount
from shared.model.errors import RequestError, UnavailableError
from shared.model.events.node_events import Allocation
from shared.model.lease import LeaseState
from shared.model.names import Namespace, NodeName, PodUid
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.regions import process


def entry(uid: str = "u1", **changes: Any) -> CheckpointEntry:
    held = lease_of(uid, share(**changes))
    activation = Allocation(
        pod=held.pod,
        namespace=held.namespace,
        name=held.name,
        container="main",
        resource="r",
        device_ids=("x",),
        lease=held,
    )
    return CheckpointEntry(allocation=activation, setup=ContainerSetup(environment={"A": "1"}))


async def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    first = Checkpoint(path, "node-0")
    await first.save(entry("u1", fence=3))

    second = Checkpoint(path, "node-0")
    await second.load()

    assert second.by_key == first.by_key
    assert second.fences == first.fences
    assert not second.lost


async def test_an_answer_broken_off_while_it_is_written_spoils_none_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, began, path = threading.Event(), threading.Event(), tmp_path / "checkpoint.json"
    open_now = Path.open

    def opened(path: Path, mode: str = "r") -> IO[Any]:
        file = open_now(path, mode)
        if not began.is_set():
            began.set()
            slow.wait(30)
        return file

    monkeypatch.setattr(Path, "open", opened)
    first = Checkpoint(path, "node-0")
    async with asyncio.TaskGroup() as group:
        broken = group.create_task(first.save(entry("u1")))
        await asyncio.to_thread(began.wait, 30)
        broken.cancel()
        await asyncio.wait({broken})
        following = group.create_task(first.save(entry("u2")))
        await asyncio.wait({following}, timeout=0.2)
        slow.set()
    second = Checkpoint(path, "node-0")
    await second.load()

    assert not second.lost
    assert second.by_key == first.by_key
    assert second.pods == {"u2"}


async def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    path.write_text('{"v": 1, "entr')
    record = Checkpoint(path, "node-0")

    await record.load()

    assert record.lost
    assert (tmp_path / "checkpoint.damaged").exists()
    assert record.allocations == ()


async def test_a_checkpoint_that_is_not_there_may_have_been_lost(tmp_path: Path) -> None:
    record = Checkpoint(tmp_path / "agent" / "checkpoint.json", "node-0")

    await record.load()

    assert record.lost
    assert not list(tmp_path.iterdir())


async def test_a_checkpoint_of_another_node_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    await Checkpoint(path, "node-1").save(entry())
    record = Checkpoint(path, "node-0")

    await record.load()

    assert record.lost


async def test_fences_outlive_the_pod_they_were_honoured_for(tmp_path: Path) -> None:
    record = Checkpoint(tmp_path / "checkpoint.json", "node-0")
    await record.save(entry("u1", fence=5, slot=0))
    await record.save(entry("u2", fence=6, slot=None, slotted=False))

    await record.forget([PodUid("u1"), PodUid("u2")])

    assert record.allocations == ()
    assert [fence.fence for fence in record.fences.values()] == [5]


def test_news_that_is_older_than_what_is_known_changes_nothing() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1", version=3)])

    assert leases.observe([lease_of("u1", version=2, state=LeaseState.RELEASED)]) == []
    assert leases.find(PodUid("u1")) == lease_of("u1", version=3)


def test_an_ended_lease_does_not_come_back_by_old_news() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1", version=3, state=LeaseState.RELEASED)])
    leases.observe([lease_of("u1", version=2)])

    assert leases.find(PodUid("u1")) is None


def test_a_new_lease_of_the_same_pod_is_news_although_its_version_is_low() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1", version=9, state=LeaseState.RELEASED, created_at=1.0)])
    leases.observe([lease_of("u1", version=1, created_at=2.0)])

    assert leases.find(PodUid("u1")) is not None


def test_a_new_lease_of_the_same_pod_is_news_although_its_placers_clock_is_behind() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1", version=8, created_at=5.0)])
    leases.observe([lease_of("u1", version=9, state=LeaseState.RELEASED, created_at=5.0)])

    leases.observe([lease_of("u1", version=12, created_at=3.0)])

    found = leases.find(PodUid("u1"))
    assert found is not None
    assert found.version == 12


def test_a_lease_of_another_node_is_not_ours() -> None:
    leases = KnownLeases(NodeName("node-0"))

    assert leases.observe([lease_of("u1", node=NodeName("node-1"))]) == []


def test_a_complete_list_drops_what_it_leaves_out_but_not_what_came_later() -> None:
    leases = KnownLeases(NodeName("node-0"))
    leases.observe([lease_of("u1"), lease_of("u2")])
    asked_at = leases.revision
    leases.observe([lease_of("u3")])

    leases.sync([lease_of("u2")], since=asked_at)

    assert set(leases.leases) == {"u2", "u3"}


def test_a_pod_is_over_when_kubelet_and_ledger_have_let_go_of_it() -> None:
    told = [entry("u1").allocation]
    pod = KubeletPod(uid=PodUid("u1"), namespace=Namespace("default"), name="pod")
    nothing = PodResources()

    assert ended_pods(told, [pod], nothing, {}) == set()
    assert ended_pods(told, [], nothing, {PodUid("u1"): lease_of("u1")}) == set()
    assert ended_pods(told, [], nothing, {}) == {"u1"}


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
