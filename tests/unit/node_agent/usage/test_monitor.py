"""The usage monitor over real files and a fake driver, scraped over HTTP."""

import struct
import time
from dataclasses import replace

import pytest
from msgspec import structs
from prometheus_client import generate_latest
from prometheus_client.openmetrics import parser as openmetrics

from services.node_agent.enforcers.limit_audit import ReadShare
from services.node_agent.gpus.inventory import DeviceSample
from services.node_agent.isolation.region import Region, Slot
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.isolation.region_reader import read_region
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.usage.idle_shares import LastUseFile
from services.node_agent.usage.leased_containers import LeasedContainer
from shared.dialects.dialect import ContainerSetup
from shared.model.bounds import MOST_MIB
from shared.model.devices.device import Hardware, XidEvent
from shared.model.events.request_reply import UsageReply
from shared.model.leases.lease import (
    MOST_PROCESSES,
    ClaimAllocation,
    Lease,
    MigPlacement,
    ProcessUse,
    share_key,
)
from shared.model.names import PodUid
from shared.nats import wire
from tests.support.build import allocation_of
from tests.support.node_agent.agent import NUMBER, lease_of, share
from tests.support.node_agent.monitor_world import (
    GPU,
    HAMI,
    ID,
    MIB,
    NUMBERS,
    OURS,
    OWN_NUMBERS,
    UID,
    VOLCANO,
    MonitorWorld,
    computing,
    read,
    scraped,
)
from tests.support.node_agent.node import kubelet_pod
from tests.support.node_agent.regions import process, rewritten


async def test_item_49_every_published_series_has_its_name_labels_and_value(
    world: MonitorWorld,
) -> None:
    computing(world)
    await world.monitor.scan()

    text = await scraped(world.monitor)

    found = read(text)
    for name, (labels, value) in NUMBERS.items():
        assert found[name] == {tuple(sorted(labels.items())): value}, name
        assert f"# TYPE {name} gauge\n{name}{{" in text
    for name, own in OWN_NUMBERS.items():
        assert found[name] == {tuple(sorted(OURS.items())): pytest.approx(own)}, name
    assert not [name for name in found if name.startswith(("python_", "process_"))]


async def test_series_name_what_holds_a_share_and_have_what_was_read_back_and_when(
    world: MonitorWorld,
) -> None:
    computing(world)
    await world.monitor.scan()
    before = read(await scraped(world.monitor))
    differing = ReadShare(memory_bytes=900 * MIB, cores_percent=10, difference="d", at=7.0)
    world.monitor.audit.read = {(PodUid(UID), "main", GPU): differing}

    series = read(await scraped(world.monitor))

    ours = tuple(sorted(OURS.items()))
    held = tuple(sorted((OURS | {"memory": "hami-core", "compute": "hami-core"}).items()))
    assert series["leasehold_container_enforcers_info"] == {held: 1}
    assert series["leasehold_container_memory_held_bytes"] == {ours: 900 * MIB}
    assert series["leasehold_container_cores_held_ratio"] == {ours: 0.1}
    assert series["leasehold_container_limits_differ"] == {ours: 1}
    assert series["leasehold_container_limits_read_timestamp_seconds"] == {ours: 7}
    assert "leasehold_container_memory_held_bytes" not in before, "nothing was read back yet"


async def test_the_report_says_how_limits_and_use_differ_from_the_lease(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.add_process(tenant, 71, inner=8, mib=3_000)
    world.monitor.audit.read = {
        (PodUid(UID), "main", GPU): ReadShare(difference="the driver has 9000 MiB", at=7.0)
    }
    await world.monitor.scan()

    (reported,) = world.monitor.report({}).shares

    assert reported.held_difference == (
        f"the driver has 9000 MiB; uses 3350 MiB of GPU {GPU}, and its share has 1000 MiB"
    )


# What Prometheus 3 sends by default, and headers that no scraper sends.
ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "application/openmetrics-text;version=x",
    "application/openmetrics-text;version=" + "9" * 4000,
)


@pytest.mark.parametrize("accept", ACCEPTS)
async def test_openmetrics_have_the_same_series_as_prometheus_text(
    world: MonitorWorld, accept: str
) -> None:
    computing(world)
    await world.monitor.scan()

    text = await scraped(world.monitor, accept)

    families = openmetrics.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    exported = {one.name for family in families for one in family.samples}
    assert exported == set(read(await scraped(world.monitor)))


async def test_the_report_of_a_node_can_be_read_whatever_a_container_writes_into_its_region(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    with rewritten(tenant.region_path) as image:
        for index, pid in enumerate((7, 8, 9)):
            process(image, index, pid, totals=((1 << 63) - 1,), host_pid=63 + pid)
            struct.pack_into("<Q", image, V1_2.slot_at(index) + 1160 + 16, 100)
    for pid in (8, 9):
        world.add_process(tenant, 63 + pid, inner=pid)
    world.restart(LastUseFile(world.root / "last-uses.json", save_s=0))
    await world.monitor.scan()

    (reply,) = wire.decode(wire.encode([world.monitor.report({})]), UsageReply)

    assert (reply.shares[0].memory_mib, reply.shares[0].cores_percent) == (MOST_MIB, 100)
    assert "GpuMemoryOverLease" in {each.reason for each in world.monitor.snapshot.violations}
    assert world.monitor.last_uses is not None
    assert await world.monitor.last_uses.load()


async def test_the_report_and_the_metrics_have_what_sensors_read(world: MonitorWorld) -> None:
    hardware = Hardware(
        device=GPU, at=world.clock.now(), temperature_c=61, power_w=312.5, throttle=("power limit",)
    )
    world.driver.samples = (DeviceSample(device=GPU, index=0, model="A", hardware=hardware),)
    xid = XidEvent(number=31, at=5.0, meaning="m")
    await world.monitor.scan()

    (reported,) = world.monitor.report({GPU: {31: xid}}).hardware

    assert reported == structs.replace(hardware, xids=(xid,))
    found = read(await scraped(world.monitor))
    of_device = ("device_uuid", GPU)
    (labels,) = found["hw_temperature_celsius"]
    assert dict(labels) == {"hw_id": GPU, "hw_type": "gpu", "hw_model": "A"}
    assert found["hw_temperature_celsius"] == {labels: 61}
    assert found["hw_power_watts"] == {labels: 312.5}
    assert "leasehold_gpu_power_limit_watts" not in found
    assert found["leasehold_gpu_throttled"] == {(of_device, ("reason", "power limit")): 1}


async def test_the_report_has_the_usage_of_each_share_and_since_when_it_is_idle(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    assert world.monitor.report({}).shares == ()
    await world.monitor.scan()
    (used,) = world.monitor.report({}).shares

    world.end_process(70)
    world.clock.advance(60)
    idle_at = world.clock.now()
    await world.monitor.scan()
    world.clock.advance(60)
    await world.monitor.scan()
    report = world.monitor.report({})

    assert used.key == share_key(tenant.lease.pod, share(0))
    assert used.memory_mib is not None
    assert used.memory_mib >= 300
    assert used.cores_percent
    assert (used.processes, used.idle_since) == (1, None)
    assert used.running == (
        ProcessUse(pid=70, inner_pid=7, command="python3", memory_mib=350, cores_percent=35),
    )
    (idle,) = report.shares
    assert report.measured_at == idle_at + 60
    assert (idle.cores_percent, idle.processes, idle.idle_since) == (0, 0, idle_at)
    assert idle.running == ()


async def test_of_many_processes_the_report_has_those_with_the_most_memory(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    for number in range(MOST_PROCESSES + 2):
        world.add_process(tenant, 80 + number, inner=10 + number, mib=400 + number)
    await world.monitor.scan()

    (used,) = world.monitor.report({}).shares

    assert used.processes == MOST_PROCESSES + 3
    largest = range(401 + MOST_PROCESSES, 401, -1)
    assert [process.memory_mib for process in used.running] == [*largest]


async def test_a_mig_instance_is_named_by_its_ids(world: MonitorWorld) -> None:
    place = MigPlacement(layout="all-1g", position=0, profile="1g.10gb")
    lease = lease_of(UID, share(0, 9728, mig=place))
    activation = allocation_of(lease, resource=NUMBER)
    setup = ContainerSetup(environment={"NVIDIA_VISIBLE_DEVICES": "MIG-a"})
    world.record(CheckpointEntry(allocation=activation, setup=setup, instances=("MIG-a",)))
    world.node.leases.observe([lease])

    await world.monitor.scan()

    found = read(generate_latest(world.monitor).decode())
    ids = {"profile": "1g.10gb", "gpu_instance_id": "3", "compute_instance_id": "0"}
    wanted = HAMI | ids | {"mig_uuid": "MIG-a"}
    assert found["hami_mig_device_info"] == {tuple(sorted(wanted.items())): 1}
    assert found["MigInfo"] == {tuple(sorted((VOLCANO | {"instanceid": "3"}).items())): 1}
    assert "hami_vgpu_memory_used_bytes" not in found
    assert "leasehold_container_isolation_lost" not in found


async def test_an_init_container_is_never_idle(world: MonitorWorld) -> None:
    world.add_container(lease_of(UID, share(init=True)))
    await world.monitor.scan()

    found = read(generate_latest(world.monitor).decode())

    assert "leasehold_container_gpus_leased" in found
    assert "leasehold_container_idle_seconds" not in found


async def test_hami_core_39_series_end_with_the_lease(world: MonitorWorld) -> None:
    computing(world)
    await world.monitor.scan()
    before = read(generate_latest(world.monitor).decode())
    world.node.leases.sync([], since=world.node.leases.revision)
    world.driver.samples = (replace(world.driver.samples[0], processes=()),)
    await world.monitor.scan()

    after = read(generate_latest(world.monitor).decode())

    assert "vGPU_device_memory_usage_in_bytes" in before
    assert not [name for name, rows in after.items() if any("pod" in dict(row) for row in rows)]
    assert "HostGPUMemoryUsage" in after


async def test_hami_core_9_nothing_that_a_container_writes_becomes_a_label(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.change(tenant, V1_2.uuids, b'GPU-1"} 5\nevil{x="\xff')
    await world.monitor.scan()

    text = generate_latest(world.monitor).decode()

    assert "evil" not in text
    assert read(text)["hami_vgpu_memory_used_bytes"] == {tuple(sorted(HAMI.items())): 300 * MIB}


async def test_a_killed_process_uses_nothing(world: MonitorWorld) -> None:
    tenant = computing(world)
    world.end_process(70)

    await world.monitor.scan()

    (use,) = world.monitor.snapshot.containers
    assert use.shares[0].region is not None
    assert use.shares[0].region.total == 0
    assert use.shares[0].region.enforced == 300 * MIB
    assert await world.monitor.living_pids(tenant.key) == frozenset()


CLAIM = lease_of("claim", claim=ClaimAllocation(generation="g", consumers=(PodUid(UID),)))


@pytest.mark.parametrize("lease", [None, CLAIM], ids=["of a pod", "of a claim"])
async def test_a_process_that_the_driver_does_not_list_counts_while_it_lives(
    world: MonitorWorld, lease: Lease | None
) -> None:
    tenant = computing(world, lease)
    world.driver.broken = True
    await world.monitor.scan()

    (use,) = world.monitor.snapshot.containers
    assert use.shares[0].region is not None
    assert use.shares[0].region.total == 300 * MIB
    assert await world.monitor.living_pids(tenant.key) == frozenset({7})
    (reported,) = world.monitor.report({}).shares
    assert (reported.memory_mib, reported.cores_percent) == (300, 25)
    found = read(generate_latest(world.monitor).decode())
    assert list(found["hami_vgpu_memory_used_bytes"].values()) == [300 * MIB]
    assert "leasehold_container_memory_drift_bytes" not in found
    assert "HostGPUMemoryUsage" not in found


async def test_a_process_that_the_library_did_not_find_is_written_into_the_region(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    world.add_process(tenant, 71, inner=8, mib=718)
    world.add_process(tenant, 72, inner=9)
    with rewritten(tenant.region_path) as image:
        process(image, 1, 8, totals=(200 * MIB,), host_pid=0)
        process(image, 2, 9, totals=(300 * MIB,), host_pid=70)
    before = slots_of(tenant)

    await world.monitor.scan()
    found = slots_of(tenant)
    await world.monitor.scan()
    counted = slots_of(tenant)
    await world.monitor.scan()

    assert [slot.host_pid for slot in found] == [70, 71, 72]
    assert [replace(slot, host_pid=0) for slot in found] == [
        replace(slot, host_pid=0) for slot in before
    ]
    assert [(slot.context[0], slot.total[0]) for slot in counted] == [
        (0, 300 * MIB),
        (518 * MIB, 718 * MIB),
        (0, 300 * MIB),
    ]
    assert slots_of(tenant) == counted


def slots_of(tenant: LeasedContainer) -> tuple[Slot, ...]:
    assert tenant.region_path is not None
    region = read_region(tenant.region_path)
    assert isinstance(region, Region)
    return region.slots


async def test_a_scrape_causes_no_requests(world: MonitorWorld) -> None:
    computing(world)
    await world.monitor.scan()
    list_calls = world.kubelet.list_calls
    world.driver.broken = True

    for _ in range(3):
        generate_latest(world.monitor)

    assert world.kubelet.list_calls == list_calls == 1


async def test_pods_are_listed_only_for_processes_in_a_container_that_was_not_listed(
    world: MonitorWorld,
) -> None:
    tenant = computing(world)
    cgroup = world.root / "proc" / "70" / "cgroup"
    calls = []
    for container in (ID, ID, "f" * 64, "f" * 64):
        cgroup.write_text(f"0::/kubepods/pod{UID}/{container}\n")
        pod = kubelet_pod("pod", UID, container_ids={container: "main"})
        world.kubelet.pods = [pod]
        await world.monitor.scan()
        calls.append(world.kubelet.list_calls)
        assert world.monitor.snapshot.containers[0].shares[0].processes == 1

    assert calls == [1, 1, 2, 2]
    assert await world.monitor.living_pids(tenant.key) == frozenset({7})


async def test_the_scan_of_50_containers_is_quick(world: MonitorWorld) -> None:
    for number in range(50):
        world.add_container(
            lease_of(f"{number:08d}-7f0c-4d55-9f5b-2f2f0f9d7a11", name=f"p{number}")
        )

    took = []
    for _ in range(3):
        began = time.process_time()
        await world.monitor.scan()
        took.append(time.process_time() - began)

    assert len(world.monitor.snapshot.containers) == 50
    assert min(took) < 1.0, took
