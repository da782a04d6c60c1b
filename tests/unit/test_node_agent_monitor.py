"""The monitor over real files and a made-up driver, scraped over HTTP."""

import asyncio
import os
import shutil
import struct
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.node_agent.entry import Entry
from services.node_agent.identity import KubeletPod
from services.node_agent.isolation import Layout
from services.node_agent.leases_known import LeasesKnown
from services.node_agent.mig import MigInstance
from services.node_agent.monitor import TOLD_AGAIN_S, Monitor, page, pages, tenants_of
from services.node_agent.region import Region
from services.node_agent.region_image import image_of
from services.node_agent.region_layouts import V1_2
from services.node_agent.region_reading import read_region
from services.node_agent.region_seeding import seed_region
from services.node_agent.usage import DeviceSample, Process, Tenant
from shared.dialects import DIALECTS
from shared.dialects.dialect import ContainerSetup
from shared.model.errors import UnavailableError
from shared.model.lease import Lease, MigPlace
from shared.model.names import DeviceUuid, NodeName
from shared.model.node_events import Activation, Rule
from shared.runtime.health import served
from tests.support.clock import FakeClock
from tests.support.kubelet import NODE
from tests.support.node_agent import NUMBER, lease_of, share
from tests.support.regions import path_of, process

MIB = 1 << 20
UID = "0b7a4d0e-7f0c-4d55-9f5b-2f2f0f9d7a11"
ID = "e" * 64
GPU = share(0).device
HAMI = {
    "zone": "vGPU", "namespace": "default", "pod": "pod", "container": "main",
    "vdevice_index": "0", "device_uuid": GPU,
}  # fmt: skip
VOLCANO = {
    "zone": "vGPU", "podnamespace": "default", "podname": "pod", "ctrname": "main",
    "vdeviceid": "0", "deviceuuid": GPU,
}  # fmt: skip
HOST = {"zone": "vGPU", "device_index": "0", "device_uuid": GPU, "device_type": "Tesla T4"}
DESCRIBED = {**VOLCANO, "context": "0", "module": "0", "data": str(300 * MIB), "offset": "0"}
NUMBERS = {
    "HostGPUMemoryUsage": ({"zone": "vGPU", "deviceidx": "0", "deviceuuid": GPU}, 700 * MIB),
    "HostCoreUtilization": ({"zone": "vGPU", "deviceidx": "0", "deviceuuid": GPU}, 40),
    "vGPU_device_memory_usage_in_bytes": (VOLCANO, 300 * MIB),
    "vGPU_device_memory_limit_in_bytes": (VOLCANO, 1000 * MIB),
    "Device_memory_desc_of_container": (DESCRIBED, 300 * MIB),
    "Device_utilization_desc_of_container": (VOLCANO, 25),
    "Device_last_kernel_of_container": (VOLCANO, 30),
    "hami_host_gpu_memory_used_bytes": ({**HOST, "node": NODE}, 700 * MIB),
    "hami_host_gpu_utilization_ratio": ({**HOST, "node": NODE}, 40),
    "hami_host_gpu_memory_controller_utilization_ratio": (HOST, 12),
    "hami_vgpu_memory_used_bytes": (HAMI, 300 * MIB),
    "hami_vgpu_memory_limit_bytes": (HAMI, 1000 * MIB),
    "hami_container_device_memory_bytes": (HAMI, 300 * MIB),
    "hami_vgpu_memory_context_bytes": (HAMI, 0),
    "hami_vgpu_memory_module_bytes": (HAMI, 0),
    "hami_vgpu_memory_buffer_bytes": (HAMI, 300 * MIB),
    "hami_container_device_utilization_ratio": (HAMI, 25),
    "hami_container_last_kernel_elapsed_seconds": (HAMI, 30),
}
OURS = {"namespace": "default", "pod": "pod", "container": "main", "device_uuid": GPU}
OWN_NUMBERS = {
    "leasehold_container_memory_leased_bytes": 1000 * MIB,
    "leasehold_container_memory_measured_bytes": 350 * MIB,
    "leasehold_container_memory_overrun_bytes": 0,
    "leasehold_container_memory_enforced_bytes": 300 * MIB,
    "leasehold_container_memory_drift_bytes": 50 * MIB,
    "leasehold_container_cores_leased_ratio": 0.1,
    "leasehold_container_cores_measured_ratio": 0.35,
}


@dataclass
class Driver:
    """Says what a test says."""

    samples: tuple[DeviceSample, ...] = ()
    broken: bool = False

    async def look(self) -> tuple[DeviceSample, ...]:
        if self.broken:
            raise UnavailableError("NVML: GPU is lost")
        return self.samples


@dataclass
class Hardware:
    async def instances(self, device: DeviceUuid) -> tuple[MigInstance, ...]:
        assert device == GPU
        one = MigInstance(
            gi=3, profile="1g.10gb", start=0, memory_slices=1, compute_slices=1,
            computes=(0,), uuid="MIG-a",
        )  # fmt: skip
        return (replace(one, gi=4, uuid="MIG-b", start=1), one)


@dataclass
class Kubelet:
    pods: tuple[KubeletPod, ...] = ()
    asked: int = 0

    async def list_pods(self) -> tuple[KubeletPod, ...]:
        self.asked += 1
        return self.pods


@dataclass
class Record:
    told: list[Entry] = field(default_factory=list)
    lost: bool = False
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def answers(self) -> tuple[Entry, ...]:
        return tuple(self.told)


@dataclass
class World:
    root: Path
    monitor: Monitor
    driver: Driver
    kubelet: Kubelet
    record: Record
    known: LeasesKnown
    clock: FakeClock

    def give(self, lease: Lease) -> Tenant:
        """Have the kubelet told of a container, and its region seeded."""
        layout = Layout(state_dir=self.root, library=self.root / "libvgpu.so")  # type: ignore[arg-type]
        setup = DIALECTS[lease.dialect].environment(lease, "main", {}, layout.paths)
        activation = Activation(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container="main",
            resource=NUMBER,
            device_ids=("x",),
            lease=lease,
        )
        self.record.told.append(Entry(activation=activation, setup=setup))
        self.known.note([lease])
        (tenant,) = tenants_of(self.record.told[-1:], self.known.leases, complete=True)
        assert tenant.place is not None
        assert tenant.seed is not None
        Path(tenant.place.directory).mkdir(parents=True)
        seed_region(tenant.place, tenant.seed, starting=True)
        return tenant

    def runs(self, tenant: Tenant, pid: int, *, inner: int, mib: int = 350) -> None:
        """Have a process run on GPU 0."""
        directory = self.root / "proc" / str(pid)
        directory.mkdir(parents=True)
        (directory / "cgroup").write_text(f"0::/kubepods/pod{tenant.lease.pod}/{ID}\n")
        (directory / "status").write_text(f"NSpid:\t{pid}\t{inner}\n")
        (before,) = self.driver.samples
        one = Process(pid=pid, memory_bytes=mib * MIB, busy_percent=35)
        self.driver.samples = (replace(before, processes=(*before.processes, one)),)

    def change(self, tenant: Tenant, at: int, data: bytes) -> None:
        assert tenant.place is not None
        with path_of(tenant.place).open("r+b") as file:
            file.seek(at)
            file.write(data)


@pytest.fixture
def world(tmp_path: Path) -> World:
    idle = DeviceSample(
        device=GPU,
        index=0,
        model="Tesla T4",
        used_bytes=700 * MIB,
        busy_percent=40,
        memory_busy_percent=12,
    )
    driver, kubelet, record, clock = Driver((idle,)), Kubelet(), Record(), FakeClock()
    known = LeasesKnown(NodeName(NODE), settled=True)
    monitor = Monitor(
        NodeName(NODE),
        usage=driver,
        mig=Hardware(),
        pods=kubelet,
        record=record,
        leases=known,
        clock=clock,
        proc=tmp_path / "proc",
    )
    return World(tmp_path, monitor, driver, kubelet, record, known, clock)


def computing(world: World) -> Tenant:
    """Have a container whose process has used its GPU 30 s ago."""
    tenant = world.give(lease_of(UID))
    assert tenant.place is not None
    image = bytearray(path_of(tenant.place).read_bytes())
    process(image, 0, 7, totals=(300 * MIB,))
    struct.pack_into("<Q", image, V1_2.slots + 1160 + 16, 25)
    struct.pack_into("<Q", image, 2008912, int(world.clock.now()) - 30)
    path_of(tenant.place).write_bytes(bytes(image))
    world.runs(tenant, 70, inner=7)
    return tenant


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(sorted(one.labels.items()))] = one.value
    return found


async def scraped(monitor: Monitor) -> str:
    async with (
        served(pages(monitor), "127.0.0.1:0") as address,
        aiohttp.ClientSession() as client,
        client.get(f"http://{address}/metrics") as answer,
    ):
        assert answer.status == 200
        return await answer.text()


async def test_item_49_every_published_series_has_its_name_labels_and_value(world: World) -> None:
    computing(world)
    await world.monitor.look()

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


async def test_a_mig_instance_is_named_by_its_ids(world: World) -> None:
    place = MigPlace(layout="all-1g", position=0, profile="1g.10gb")
    lease = lease_of(UID, share(0, 9728, mig=place))
    activation = Activation(
        pod=lease.pod, namespace=lease.namespace, name=lease.name, container="main",
        resource=NUMBER, device_ids=("x",), lease=lease,
    )  # fmt: skip
    setup = ContainerSetup(environment={"NVIDIA_VISIBLE_DEVICES": "MIG-a"})
    world.record.told.append(Entry(activation=activation, setup=setup, instances=("MIG-a",)))
    world.known.note([lease])

    await world.monitor.look()

    found = read(page(world.monitor).decode())
    ids = {"profile": "1g.10gb", "gpu_instance_id": "3", "compute_instance_id": "0"}
    wanted = HAMI | ids | {"mig_uuid": "MIG-a"}
    assert found["hami_mig_device_info"] == {tuple(sorted(wanted.items())): 1}
    assert found["MigInfo"] == {tuple(sorted((VOLCANO | {"instanceid": "3"}).items())): 1}
    assert "hami_vgpu_memory_used_bytes" not in found
    assert "leasehold_container_isolation_lost" not in found


async def test_hami_core_39_series_end_with_the_lease(world: World) -> None:
    computing(world)
    await world.monitor.look()
    before = read(page(world.monitor).decode())
    world.known.settle([], asked_at=world.known.news)
    world.driver.samples = (replace(world.driver.samples[0], processes=()),)
    await world.monitor.look()

    after = read(page(world.monitor).decode())

    assert "vGPU_device_memory_usage_in_bytes" in before
    assert not [name for name, rows in after.items() if any("pod" in dict(row) for row in rows)]
    assert "HostGPUMemoryUsage" in after


async def test_hami_core_9_nothing_that_a_container_writes_becomes_a_label(world: World) -> None:
    tenant = computing(world)
    world.change(tenant, V1_2.uuids, b'GPU-1"} 5\nevil{x="\xff')
    await world.monitor.look()

    text = page(world.monitor).decode()

    assert "evil" not in text
    assert read(text)["hami_vgpu_memory_used_bytes"] == {tuple(sorted(HAMI.items())): 300 * MIB}


async def test_hami_core_44_our_own_names_carry_units_and_no_values_as_labels(world: World) -> None:
    computing(world)
    await world.monitor.look()

    for family in world.monitor.collect():
        for one in family.samples:
            if one.name.startswith("leasehold_"):
                assert set(one.labels) <= {*OURS, "reason"}
                if one.name.endswith("_ratio"):
                    assert 0 <= one.value <= 1


async def test_altered_limits_are_told_once_and_set_again_in_place(world: World) -> None:
    tenant = computing(world)
    await world.monitor.look()
    world.change(tenant, V1_2.memory_limits, struct.pack("<Q", 80_000 * MIB))

    await world.monitor.look()
    (violation,) = await world.monitor.violations()
    await world.monitor.look()

    assert tenant.place is not None
    region = read_region(tenant.place)
    assert isinstance(region, Region)
    assert region.memory_limits[0] == 1000 * MIB
    assert region.pids == {7}
    assert (violation.rule, violation.pod) == (Rule.TAMPERED, UID)
    found = read(page(world.monitor).decode())
    assert found["leasehold_limits_restored_total"] == {(): 1}
    assert "leasehold_violations" not in found


async def test_hami_core_38_a_switch_that_was_turned_off_is_on_again_after_a_look(
    world: World,
) -> None:
    tenant = computing(world)
    world.change(tenant, V1_2.switch, struct.pack("<i", 0))

    await world.monitor.look()

    assert tenant.place is not None
    region = read_region(tenant.place)
    assert isinstance(region, Region)
    assert region.utilization_switch == 1


async def test_hami_core_35_a_bypass_is_told_once_until_it_has_ended(world: World) -> None:
    tenant = computing(world)
    world.runs(tenant, 71, inner=8)

    await world.monitor.look()
    (violation,) = await world.monitor.violations()
    await world.monitor.look()

    assert violation.rule is Rule.ISOLATION_LOST
    row = {key: OURS[key] for key in ("namespace", "pod", "container")}
    found = read(page(world.monitor).decode())
    assert found["leasehold_container_isolation_lost"] == {tuple(sorted(row.items())): 1}
    assert found["leasehold_violations"] == {(("reason", "GpuIsolationLost"),): 1}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await world.monitor.violations()


@pytest.mark.parametrize("what", ["fifo", "link", "short", "gone"])
async def test_whatever_lies_where_the_region_was_the_page_is_written(
    world: World, what: str
) -> None:
    tenant = computing(world)
    assert tenant.place is not None
    assert tenant.seed is not None
    path = path_of(tenant.place)
    path.unlink()
    if what == "link":
        path.symlink_to("/etc/passwd")
    elif what == "short":
        path.write_bytes(b"x")
    elif what == "fifo":
        os.mkfifo(path)

    await world.monitor.look()

    found = read(page(world.monitor).decode())
    assert "hami_vgpu_memory_used_bytes" not in found
    assert list(found["leasehold_container_isolation_lost"].values()) == [1]
    assert list(found["leasehold_container_memory_measured_bytes"].values()) == [350 * MIB]
    assert list(found["leasehold_container_region_tampered"].values()) == [what != "gone"]
    assert found["leasehold_limits_restored_total"] == {(): 1}
    assert path.read_bytes() == image_of(tenant.seed)
    assert Path("/etc/passwd").stat().st_size > 100


async def test_limits_that_cannot_be_put_back_are_said_so_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    tenant = computing(world)
    assert tenant.place is not None
    shutil.rmtree(tenant.place.directory)

    await world.monitor.look()
    await world.monitor.look()

    said = [record.message for record in caplog.records if "limits stay altered" in record.message]
    assert len(said) == 1


async def test_what_goes_on_is_told_again_after_five_minutes(world: World) -> None:
    tenant = computing(world)
    world.runs(tenant, 71, inner=8)
    told = []

    for _ in range(3):
        await world.monitor.look()
        told += await world.monitor.violations()
        world.clock.advance(TOLD_AGAIN_S - 1)
        await world.monitor.look()
        world.clock.advance(1)

    assert [one.rule for one in told] == 3 * [Rule.ISOLATION_LOST]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await world.monitor.violations()


async def test_without_a_driver_regions_are_still_seen(world: World) -> None:
    computing(world)
    world.driver.broken = True

    await world.monitor.look()

    found = read(page(world.monitor).decode())
    assert list(found["hami_vgpu_memory_used_bytes"].values()) == [300 * MIB]
    assert "leasehold_container_memory_drift_bytes" not in found
    assert "HostGPUMemoryUsage" not in found


async def test_nobody_is_said_to_be_without_a_lease_before_leases_are_known(world: World) -> None:
    tenant = computing(world)
    world.record.told.clear()
    world.record.lost = True
    await world.monitor.look()
    early = world.monitor.seen
    world.record.lost = False
    world.known.settle([], asked_at=world.known.news)

    await world.monitor.look()

    assert not early.violations
    assert [(one.rule, one.pod) for one in world.monitor.seen.violations] == [
        (Rule.UNLEASED, tenant.lease.pod)
    ]


async def test_a_scrape_asks_nobody(world: World) -> None:
    computing(world)
    await world.monitor.look()
    asked = world.kubelet.asked
    world.driver.broken = True

    for _ in range(3):
        page(world.monitor)

    assert world.kubelet.asked == asked == 1


async def test_the_scan_of_50_containers_is_quick(world: World) -> None:
    for number in range(50):
        world.give(lease_of(f"{number:08d}-7f0c-4d55-9f5b-2f2f0f9d7a11", name=f"p{number}"))

    took = []
    for _ in range(3):
        began = time.perf_counter()
        await world.monitor.look()
        took.append(time.perf_counter() - began)

    assert len(world.monitor.seen.containers) == 50
    assert min(took) < 1.0
