"""What the usage monitor reports as violations, and restores."""

import asyncio
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from services.node_agent.isolation.region import Region, decode
from services.node_agent.isolation.region_image import image_of
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.kubelet.pods import ClaimHolding, KubeletContainer, KubeletPod
from services.node_agent.usage.monitor import LASTING_S, REPORT_AGAIN_S, RegionSymptoms
from shared.model.events.node_events import ViolationReason
from shared.model.names import Namespace, PodUid
from shared.model.requests.claim import device_name
from tests.support.node_agent.agent import lease_of, share
from tests.support.node_agent.monitor_world import (
    GPU,
    MIB,
    OURS,
    UID,
    MonitorWorld,
    computing,
    read,
)
from tests.support.node_agent.regions import fresh, process, rewritten, use_memory


@pytest.mark.parametrize(
    ("at", "data", "text"),
    [
        (V1_2.memory_limits, struct.pack("<Q", 80_000 * MIB), "memory limit of device 0"),
        (V1_2.core_limits, bytes(8), "the core limit of device 0 is 0 % instead of 10"),
        (V1_2.switch, bytes(4), "the switch of its core limits is 0"),
    ],
    ids=["memory", "cores", "switch"],
)
async def test_hami_core_38_altered_limits_are_reported_once_and_restored_in_place(
    world: MonitorWorld, at: int, data: bytes, text: str
) -> None:
    tenant = computing(world)
    assert tenant.region_path is not None
    place = Path(tenant.region_path)
    before = place.read_bytes()
    inode = place.stat().st_ino
    await world.monitor.scan()
    world.change(tenant, at, data)

    await world.monitor.scan()
    (violation,) = await world.monitor.violations()
    await world.monitor.scan()

    assert (place.read_bytes(), place.stat().st_ino) == (before, inode)
    assert (violation.reason, violation.pod) == (ViolationReason.TAMPERED, UID)
    assert text in violation.message
    found = read(generate_latest(world.monitor).decode())
    assert found["leasehold_limits_restored_total"] == {(): 1}
    assert "leasehold_violations" not in found


async def test_hami_core_35_a_bypass_is_reported_once_until_it_ends_and_again_after_five_minutes(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.add_process(tenant, 71, inner=8)

    violations = []
    for _ in range(3):
        await world.monitor.scan()
        violations += await world.monitor.violations()
        world.clock.advance(REPORT_AGAIN_S - 1)
        await world.monitor.scan()
        world.clock.advance(1)

    assert [one.reason for one in violations] == 3 * [ViolationReason.ISOLATION_LOST]
    row = {key: OURS[key] for key in ("namespace", "pod", "container")}
    found = read(generate_latest(world.monitor).decode())
    assert found["leasehold_container_isolation_lost"] == {tuple(sorted(row.items())): 1}
    assert found["leasehold_violations"] == {(("reason", "GpuIsolationLost"),): 1}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await world.monitor.violations()


async def test_a_process_that_hami_core_has_lost_is_reported(world: MonitorWorld) -> None:
    tenant = computing(world)
    world.add_process(tenant, 71, inner=8, mib=600)
    with rewritten(tenant.region_path) as image:
        process(image, 5, 8, totals=(600 * MIB,), counted=False)

    await world.monitor.scan()

    (violation,) = await world.monitor.violations()
    (use,) = world.monitor.snapshot.containers
    assert use.lost_pids == (8,)
    assert use.shares[0].region is not None
    assert use.shares[0].region.total == 900 * MIB
    assert violation.reason is ViolationReason.ISOLATION_LOST
    assert "PIDs 8 in the container" in violation.message
    found = read(generate_latest(world.monitor).decode())
    assert list(found["leasehold_container_region_orphan_slots"].values()) == [1]


async def test_a_region_that_stays_locked_is_reported(world: MonitorWorld) -> None:
    tenant = computing(world)
    world.change(tenant, V1_2.semaphore, bytes(4))
    world.change(tenant, V1_2.owner, struct.pack("<Q", 7))

    await world.monitor.scan()
    assert not world.monitor.snapshot.violations
    world.clock.advance(30)
    await world.monitor.scan()

    (violation,) = await world.monitor.violations()
    assert violation.reason is ViolationReason.STUCK
    assert "by PID 7 in the container" in violation.message


async def test_a_reused_pid_causes_no_violation(world: MonitorWorld) -> None:
    tenant = world.add_container(lease_of(UID))
    world.add_process(tenant, 70, inner=7, began_ticks=1000 * os.sysconf("SC_CLK_TCK"))
    (sample,) = world.driver.samples

    world.driver.samples = (replace(sample, sampled_at_s=999.0),)
    await world.monitor.scan()
    before = world.monitor.snapshot.violations
    world.driver.samples = (replace(sample, sampled_at_s=1001.0),)
    await world.monitor.scan()

    assert before == ()
    assert [one.reason for one in world.monitor.snapshot.violations] == [
        ViolationReason.ISOLATION_LOST
    ]


@pytest.mark.parametrize("what", ["fifo", "link", "short", "gone"])
async def test_metrics_are_served_whatever_replaced_the_region(
    world: MonitorWorld, what: str
) -> None:
    tenant = computing(world)
    assert tenant.region_path is not None
    assert tenant.seed is not None
    path = Path(tenant.region_path)
    path.unlink()
    if what == "link":
        path.symlink_to("/etc/passwd")
    elif what == "short":
        path.write_bytes(b"x")
    elif what == "fifo":
        os.mkfifo(path)

    await world.monitor.scan()

    found = read(generate_latest(world.monitor).decode())
    assert "hami_vgpu_memory_used_bytes" not in found
    assert list(found["leasehold_container_isolation_lost"].values()) == [1]
    assert list(found["leasehold_container_memory_measured_bytes"].values()) == [350 * MIB]
    assert list(found["leasehold_container_region_tampered"].values()) == [what != "gone"]
    assert found["leasehold_limits_restored_total"] == {(): 1}
    assert path.read_bytes() == image_of(tenant.seed)
    assert Path("/etc/passwd").stat().st_size > 100


async def test_limits_that_cannot_be_restored_are_logged_once(
    world: MonitorWorld, caplog: pytest.LogCaptureFixture
) -> None:
    tenant = computing(world)
    assert tenant.region_path is not None
    shutil.rmtree(tenant.region_path.parent)

    await world.monitor.scan()
    await world.monitor.scan()

    messages = [record.message for record in caplog.records]
    assert sum("altered limits could not be restored" in one for one in messages) == 1


async def test_no_process_is_reported_as_unleased_before_leases_are_known(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.node.checkpoint.by_key.clear()
    world.node.checkpoint.lost = True
    await world.monitor.scan()
    early = world.monitor.snapshot
    world.node.checkpoint.lost = False
    world.node.leases.sync([], since=world.node.leases.revision)

    await world.monitor.scan()

    assert not early.violations
    assert [(one.reason, one.pod) for one in world.monitor.snapshot.violations] == [
        (ViolationReason.UNLEASED, tenant.lease.pod)
    ]


async def test_a_process_with_administrative_access_to_its_device_is_no_violation(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.node.checkpoint.by_key.clear()
    world.node.leases.sync([], since=world.node.leases.revision)
    containers = (KubeletContainer(name="main"),)
    pod = KubeletPod(
        uid=tenant.lease.pod, namespace=Namespace("default"), name="pod", containers=containers
    )
    world.kubelet.pods = [pod]

    async def reasons(device: str) -> list[str]:
        holding = ClaimHolding(
            namespace=pod.namespace, pod=pod.name, claim="admin", device=device, share_id=""
        )
        world.kubelet.claims = frozenset({holding})
        await world.monitor.scan()
        return [one.reason for one in world.monitor.snapshot.violations]

    assert await reasons(device_name(GPU)) == []
    assert await reasons("another") == [ViolationReason.UNLEASED]


# What lasts in a region


KEY = (PodUid("u1"), "main")


def region(owner: int | None = None, *, torn: frozenset[int] = frozenset()) -> Region:
    image = fresh()
    process(image, 0, 7)
    if owner is not None:
        image[V1_2.semaphore] = 0
        image[V1_2.owner] = owner
    return decode(V1_2, image, torn=torn)


FREE = region()
TORN = region(torn=frozenset({0}))
SYMPTOMS: list[tuple[Region, Region, str]] = [
    (region(owner=7), FREE, "held for more than 30 s by PID 7"),
    (region(owner=0), FREE, "a process that was killed"),
    (TORN, replace(TORN, slots=()), "record 0 of HAMi-core's file"),
]


@pytest.mark.parametrize(("ill", "well", "why"), SYMPTOMS)
def test_what_lasts_for_30_s_is_stuck_until_it_ends(ill: Region, well: Region, why: str) -> None:
    symptoms = RegionSymptoms()

    def stuck(now: float, found: Region) -> str:
        hangs, _ = symptoms.observe({KEY: found}, None, now)
        return hangs.get(KEY, "")

    assert (stuck(100.0, ill), stuck(129.0, ill)) == ("", "")
    assert why in stuck(130.0, ill)
    assert (stuck(131.0, well), stuck(132.0, ill)) == ("", "")


def test_a_lock_that_changes_hands_is_not_stuck() -> None:
    symptoms = RegionSymptoms()

    for number in range(20):
        assert not symptoms.observe({KEY: region(7 + number % 2)}, None, 5.0 * number)[0]


async def test_a_capped_process_whose_pid_nobody_finds_is_reported_once_it_stays_so(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    listed = world.driver.samples
    world.add_process(tenant, 71, inner=8, mib=200)
    world.driver.samples = listed
    with rewritten(tenant.region_path) as image:
        process(image, 1, 8, totals=(200 * MIB,), host_pid=0)

    await world.monitor.scan()
    early = world.monitor.snapshot.violations
    world.clock.advance(LASTING_S)
    await world.monitor.scan()
    (violation,) = await world.monitor.violations()
    world.end_process(71)
    await world.monitor.scan()

    assert early == ()
    assert violation.reason is ViolationReason.CORES_NOT_LIMITED
    assert "8" not in violation.message, "an Event with a PID would be one per process"
    assert world.monitor.snapshot.violations == ()


async def test_a_process_without_a_limit_of_cores_needs_no_pid(world: MonitorWorld) -> None:
    tenant = world.add_container(lease_of(UID, share(0, 1000, cores_percent=0)))
    use_memory(tenant.region_path, 200)
    world.add_process(tenant, 70, inner=7)

    for _ in range(2):
        await world.monitor.scan()
        world.clock.advance(LASTING_S)

    assert world.monitor.snapshot.violations == ()
