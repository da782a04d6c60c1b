"""The usage monitor over real files and a fake driver, scraped over HTTP."""

import asyncio
import os
import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest

from services.node_agent.isolation.region import Region
from services.node_agent.isolation.region_image import image_of
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.usage.monitor import REPORT_AGAIN_S
from services.node_agent.usage.usage_metrics import render_metrics
from shared.dialects.dialect import ContainerSetup
from shared.model.events.node_events import ViolationReason
from shared.model.lease import MigPlacement
from tests.support.build import allocation_of
from tests.support.node_agent.agent import NUMBER, lease_of, share
from tests.support.node_agent.monitor_world import (
    HAMI,
    MIB,
    NUMBERS,
    OURS,
    OWN_NUMBERS,
    UID,
    VOLCANO,
    MonitorWorld,
    computing,
    monitored,
    read,
    scraped,
)
from tests.support.node_agent.regions import path_of, process


@pytest.fixture
def world(tmp_path: Path) -> MonitorWorld:
    return monitored(tmp_path)


async def test_item_49_every_published_series_has_its_name_labels_and_value(
    world: MonitorWorld,
) -> None:
    computing(world)
    await world.monitor.scan()

    text = await scraped(world.monitor)

    found = read(text)
    for name, (labels, value) in NUMBERS.items():
        counter = name == "Device_memory_desc_of_container"
        parsed = f"{name}_total" if counter else name  # the parser's own idea of counters
        assert found[parsed] == {tuple(sorted(labels.items())): value}, name
        assert f"# TYPE {name} {'counter' if counter else 'gauge'}\n{name}{{" in text
    for name, own in OWN_NUMBERS.items():
        assert found[name] == {tuple(sorted(OURS.items())): pytest.approx(own)}, name
    assert not [name for name in found if name.startswith(("python_", "process_"))]


async def test_the_report_has_the_usage_of_each_share_and_since_when_it_is_idle(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    assert world.monitor.report().shares == ()
    await world.monitor.scan()
    (used,) = world.monitor.report().shares

    world.end_process(70)
    world.clock.advance(60)
    idle_at = world.clock.now()
    await world.monitor.scan()
    world.clock.advance(60)
    await world.monitor.scan()
    report = world.monitor.report()

    assert used.key == (tenant.lease.pod, "main", share(0).device)
    assert used.memory_mib is not None
    assert used.memory_mib >= 300
    assert used.cores_percent
    assert (used.processes, used.idle_since) == (1, None)
    (idle,) = report.shares
    assert report.measured_at == idle_at + 60
    assert (idle.cores_percent, idle.processes, idle.idle_since) == (0, 0, idle_at)


async def test_a_mig_instance_is_named_by_its_ids(world: MonitorWorld) -> None:
    place = MigPlacement(layout="all-1g", position=0, profile="1g.10gb")
    lease = lease_of(UID, share(0, 9728, mig=place))
    activation = allocation_of(lease, resource=NUMBER)
    setup = ContainerSetup(environment={"NVIDIA_VISIBLE_DEVICES": "MIG-a"})
    world.record.recorded.append(
        CheckpointEntry(allocation=activation, setup=setup, instances=("MIG-a",))
    )
    world.known.observe([lease])

    await world.monitor.scan()

    found = read(render_metrics(world.monitor).decode())
    ids = {"profile": "1g.10gb", "gpu_instance_id": "3", "compute_instance_id": "0"}
    wanted = HAMI | ids | {"mig_uuid": "MIG-a"}
    assert found["hami_mig_device_info"] == {tuple(sorted(wanted.items())): 1}
    assert found["MigInfo"] == {tuple(sorted((VOLCANO | {"instanceid": "3"}).items())): 1}
    assert "hami_vgpu_memory_used_bytes" not in found
    assert "leasehold_container_isolation_lost" not in found


async def test_hami_core_39_series_end_with_the_lease(world: MonitorWorld) -> None:
    computing(world)
    await world.monitor.scan()
    before = read(render_metrics(world.monitor).decode())
    world.known.sync([], since=world.known.revision)
    world.driver.samples = (replace(world.driver.samples[0], processes=()),)
    await world.monitor.scan()

    after = read(render_metrics(world.monitor).decode())

    assert "vGPU_device_memory_usage_in_bytes" in before
    assert not [name for name, rows in after.items() if any("pod" in dict(row) for row in rows)]
    assert "HostGPUMemoryUsage" in after


async def test_hami_core_9_nothing_that_a_container_writes_becomes_a_label(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.change(tenant, V1_2.uuids, b'GPU-1"} 5\nevil{x="\xff')
    await world.monitor.scan()

    text = render_metrics(world.monitor).decode()

    assert "evil" not in text
    assert read(text)["hami_vgpu_memory_used_bytes"] == {tuple(sorted(HAMI.items())): 300 * MIB}


async def test_hami_core_44_our_own_names_carry_units_and_no_values_as_labels(
    world: MonitorWorld,
) -> None:
    computing(world)
    await world.monitor.scan()

    for family in world.monitor.collect():
        for one in family.samples:
            if one.name.startswith("leasehold_"):
                assert set(one.labels) <= {*OURS, "reason"}
                if one.name.endswith("_ratio"):
                    assert 0 <= one.value <= 1


async def test_altered_limits_are_reported_once_and_restored_in_place(world: MonitorWorld) -> None:
    tenant = computing(world)
    await world.monitor.scan()
    world.change(tenant, V1_2.memory_limits, struct.pack("<Q", 80_000 * MIB))

    await world.monitor.scan()
    (violation,) = await world.monitor.violations()
    await world.monitor.scan()

    assert tenant.region_path is not None
    region = read_region(tenant.region_path)
    assert isinstance(region, Region)
    assert region.memory_limits[0] == 1000 * MIB
    assert [slot.pid for slot in region.slots] == [7]
    assert (violation.reason, violation.pod) == (ViolationReason.TAMPERED, UID)
    found = read(render_metrics(world.monitor).decode())
    assert found["leasehold_limits_restored_total"] == {(): 1}
    assert "leasehold_violations" not in found


async def test_hami_core_38_a_disabled_switch_is_restored_by_the_next_scan(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.change(tenant, V1_2.switch, struct.pack("<i", 0))

    await world.monitor.scan()

    assert tenant.region_path is not None
    region = read_region(tenant.region_path)
    assert isinstance(region, Region)
    assert region.utilization_switch == 1


async def test_hami_core_35_a_bypass_is_reported_once_until_it_ends(world: MonitorWorld) -> None:
    tenant = computing(world)
    world.add_process(tenant, 71, inner=8)

    await world.monitor.scan()
    (violation,) = await world.monitor.violations()
    await world.monitor.scan()

    assert violation.reason is ViolationReason.ISOLATION_LOST
    row = {key: OURS[key] for key in ("namespace", "pod", "container")}
    found = read(render_metrics(world.monitor).decode())
    assert found["leasehold_container_isolation_lost"] == {tuple(sorted(row.items())): 1}
    assert found["leasehold_violations"] == {(("reason", "GpuIsolationLost"),): 1}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await world.monitor.violations()


async def test_a_killed_process_uses_nothing(world: MonitorWorld) -> None:
    tenant = computing(world)
    world.end_process(70)

    await world.monitor.scan()

    (use,) = world.monitor.snapshot.containers
    assert use.shares[0].region is not None
    assert use.shares[0].region.total == 0
    assert use.shares[0].region.enforced == 300 * MIB
    assert await world.monitor.living_pids(tenant.key) == frozenset()


async def test_a_process_that_the_driver_does_not_list_counts_while_it_lives(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.driver.broken = True

    await world.monitor.scan()

    (use,) = world.monitor.snapshot.containers
    assert use.shares[0].region is not None
    assert use.shares[0].region.total == 300 * MIB
    assert await world.monitor.living_pids(tenant.key) == frozenset({7})


async def test_a_process_that_hami_core_has_lost_is_reported(world: MonitorWorld) -> None:
    tenant = computing(world)
    assert tenant.region_path is not None
    world.add_process(tenant, 71, inner=8, mib=600)
    image = bytearray(path_of(tenant.region_path).read_bytes())
    process(image, 5, 8, totals=(600 * MIB,), counted=False)
    path_of(tenant.region_path).write_bytes(bytes(image))

    await world.monitor.scan()

    (violation,) = await world.monitor.violations()
    (use,) = world.monitor.snapshot.containers
    assert use.lost_pids == (8,)
    assert use.shares[0].region is not None
    assert use.shares[0].region.total == 900 * MIB
    assert violation.reason is ViolationReason.ISOLATION_LOST
    assert "PIDs 8 in the container" in violation.message
    found = read(render_metrics(world.monitor).decode())
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


async def test_a_reused_pid_causes_no_violation(
    world: MonitorWorld,
) -> None:
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
    path = path_of(tenant.region_path)
    path.unlink()
    if what == "link":
        path.symlink_to("/etc/passwd")
    elif what == "short":
        path.write_bytes(b"x")
    elif what == "fifo":
        os.mkfifo(path)

    await world.monitor.scan()

    found = read(render_metrics(world.monitor).decode())
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
    shutil.rmtree(tenant.region_path.directory)

    await world.monitor.scan()
    await world.monitor.scan()

    messages = [record.message for record in caplog.records]
    assert sum("altered limits could not be restored" in one for one in messages) == 1


async def test_an_ongoing_violation_is_reported_again_after_five_minutes(
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
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await world.monitor.violations()


async def test_without_a_driver_regions_are_still_read(world: MonitorWorld) -> None:
    computing(world)
    world.driver.broken = True

    await world.monitor.scan()

    found = read(render_metrics(world.monitor).decode())
    assert list(found["hami_vgpu_memory_used_bytes"].values()) == [300 * MIB]
    assert "leasehold_container_memory_drift_bytes" not in found
    assert "HostGPUMemoryUsage" not in found


async def test_no_process_is_reported_as_unleased_before_leases_are_known(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.record.recorded.clear()
    world.record.lost = True
    await world.monitor.scan()
    early = world.monitor.snapshot
    world.record.lost = False
    world.known.sync([], since=world.known.revision)

    await world.monitor.scan()

    assert not early.violations
    assert [(one.reason, one.pod) for one in world.monitor.snapshot.violations] == [
        (ViolationReason.UNLEASED, tenant.lease.pod)
    ]


async def test_a_scrape_causes_no_requests(world: MonitorWorld) -> None:
    computing(world)
    await world.monitor.scan()
    list_calls = world.kubelet.list_calls
    world.driver.broken = True

    for _ in range(3):
        render_metrics(world.monitor)

    assert world.kubelet.list_calls == list_calls == 1


async def test_the_scan_of_50_containers_is_quick(world: MonitorWorld) -> None:
    for number in range(50):
        world.add_container(
            lease_of(f"{number:08d}-7f0c-4d55-9f5b-2f2f0f9d7a11", name=f"p{number}")
        )

    took = []
    for _ in range(3):
        began = time.perf_counter()
        await world.monitor.scan()
        took.append(time.perf_counter() - began)

    assert len(world.monitor.snapshot.containers) == 50
    assert min(took) < 1.0
