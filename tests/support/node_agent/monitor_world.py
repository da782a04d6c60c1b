"""The GPUs, regions and pods of a fake node that a usage monitor scans."""

import shutil
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from services.node_agent.gpus.inventory import DeviceSample, GpuProcess
from services.node_agent.isolation.region_layouts import V1_2
from services.node_agent.isolation.region_writer import seed_region
from services.node_agent.mig.instances import MigInstance
from services.node_agent.node import Node
from services.node_agent.records.checkpoint_entry import CheckpointEntry
from services.node_agent.usage.idle_shares import LastUseFile
from services.node_agent.usage.leased_containers import LeasedContainer, leased_containers
from services.node_agent.usage.monitor import UsageMonitor
from shared.dialects import DIALECTS
from shared.dialects.dialect import Paths
from shared.model.errors import UnavailableError
from shared.model.leases.lease import Lease
from shared.model.names import DeviceUuid
from shared.runtime.health import metrics_application, served
from tests.support.build import allocation_of
from tests.support.clock import FakeClock
from tests.support.node_agent.agent import NUMBER, lease_of, share
from tests.support.node_agent.node import FakeKubelet, node_of
from tests.support.node_agent.regions import process, rewritten
from tests.support.simcluster.kubelet import NODE

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
HOST = {
    "zone": "vGPU", "node": NODE, "device_index": "0", "device_uuid": GPU,
    "device_type": "NVIDIA-Tesla T4",
}  # fmt: skip
OLD_HOST = {
    "zone": "vGPU", "nodeid": NODE, "deviceidx": "0", "deviceuuid": GPU,
    "devicetype": "NVIDIA-Tesla T4",
}  # fmt: skip
DESCRIBED = {**VOLCANO, "context": "0", "module": "0", "data": str(300 * MIB), "offset": "0"}
NUMBERS = {
    "HostGPUMemoryUsage": (OLD_HOST, 700 * MIB),
    "HostCoreUtilization": (OLD_HOST, 40),
    "vGPU_device_memory_usage_in_bytes": (VOLCANO, 300 * MIB),
    "vGPU_device_memory_limit_in_bytes": (VOLCANO, 1000 * MIB),
    "Device_memory_desc_of_container": (DESCRIBED, 300 * MIB),
    "Device_utilization_desc_of_container": (VOLCANO, 25),
    "Device_last_kernel_of_container": (VOLCANO, 30),
    "hami_host_gpu_memory_used_bytes": (HOST, 700 * MIB),
    "hami_host_gpu_utilization_ratio": (HOST, 40),
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
    "leasehold_container_gpus_leased": 0.1,
    "leasehold_container_cores_measured_ratio": 0.35,
    "leasehold_container_idle_seconds": 0,
}


@dataclass
class FakeDriver:
    """Returns samples that a test sets."""

    samples: tuple[DeviceSample, ...] = ()
    broken: bool = False

    async def sample(self) -> tuple[DeviceSample, ...]:
        if self.broken:
            raise UnavailableError("NVML: GPU is lost")
        return self.samples


async def list_instances(device: DeviceUuid) -> tuple[MigInstance, ...]:
    assert device == GPU
    instance = MigInstance(
        gi=3, profile="1g.10gb", start=0, memory_slices=1, compute_slices=1,
        compute_ids=(0,), uuid="MIG-a",
    )  # fmt: skip
    return (replace(instance, gi=4, uuid="MIG-b", start=1), instance)


@dataclass
class MonitorWorld:
    root: Path
    node: Node
    monitor: UsageMonitor
    driver: FakeDriver
    kubelet: FakeKubelet
    clock: FakeClock

    def add_container(self, lease: Lease) -> LeasedContainer:
        """Add a container with a lease, a checkpoint entry and a seeded region."""
        paths = Paths.below(self.root, self.root / "libvgpu.so")
        setup = DIALECTS[lease.dialect].container_setup(lease, "main", {}, paths)
        activation = allocation_of(lease, resource=NUMBER)
        entry = self.record(CheckpointEntry(allocation=activation, setup=setup))
        self.node.leases.observe([lease])
        (tenant,) = leased_containers([entry], self.node.leases.leases, complete=True)
        assert tenant.region_path is not None
        assert tenant.seed is not None
        Path(tenant.region_path).parent.mkdir(parents=True)
        seed_region(tenant.region_path, tenant.seed, starting=True)
        return tenant

    def record(self, entry: CheckpointEntry) -> CheckpointEntry:
        self.node.checkpoint.by_key[entry.key] = entry
        return entry

    def add_process(
        self, tenant: LeasedContainer, pid: int, *, inner: int, mib: int = 350, began_ticks: int = 0
    ) -> None:
        """Add a process on GPU 0."""
        directory = self.root / "proc" / str(pid)
        directory.mkdir(parents=True)
        (directory / "cgroup").write_text(f"0::/kubepods/pod{tenant.pods[0]}/{ID}\n")
        (directory / "status").write_text(f"Name:\tpython3\nNSpid:\t{pid}\t{inner}\n")
        (directory / "stat").write_text(stat_of(pid, began_ticks))
        (before,) = self.driver.samples
        process = GpuProcess(pid=pid, memory_bytes=mib * MIB, busy_percent=35)
        self.driver.samples = (replace(before, processes=(*before.processes, process)),)

    def end_process(self, pid: int) -> None:
        """Remove a process; its slot stays as it was."""
        shutil.rmtree(self.root / "proc" / str(pid))
        (before,) = self.driver.samples
        left = tuple(process for process in before.processes if process.pid != pid)
        self.driver.samples = (replace(before, processes=left),)

    def restart(self, last_uses: LastUseFile) -> UsageMonitor:
        """Start another monitor on the same node, which has this file."""
        self.monitor = monitor_of(self.node, self.driver, self.root, last_uses)
        return self.monitor

    def change(self, tenant: LeasedContainer, at: int, data: bytes) -> None:
        with rewritten(tenant.region_path) as image:
            image[at : at + len(data)] = data


def stat_of(pid: int, began_ticks: int) -> str:
    """Write /proc/PID/stat of a process whose name has parentheses and spaces."""
    return f"{pid} (a) b) (R) S {'0 ' * 18}{began_ticks} 0 0\n"


def monitored(tmp_path: Path) -> MonitorWorld:
    idle = DeviceSample(
        device=GPU,
        index=0,
        model="Tesla T4",
        used_bytes=700 * MIB,
        busy_percent=40,
        memory_busy_percent=12,
    )
    (tmp_path / "proc").mkdir()
    driver = FakeDriver((idle,))
    kubelet = FakeKubelet()
    clock = FakeClock()
    node = node_of(kubelet, clock=clock)
    return MonitorWorld(tmp_path, node, monitor_of(node, driver, tmp_path), driver, kubelet, clock)


def monitor_of(
    node: Node, driver: FakeDriver, root: Path, last_uses: LastUseFile | None = None
) -> UsageMonitor:
    return UsageMonitor(
        node,
        sample=driver.sample,
        list_instances=list_instances,
        proc=root / "proc",
        last_uses=last_uses,
    )


def computing(world: MonitorWorld, lease: Lease | None = None) -> LeasedContainer:
    """Add a container whose process used its GPU 30 s ago."""
    tenant = world.add_container(lease or lease_of(UID))
    with rewritten(tenant.region_path) as image:
        process(image, 0, 7, totals=(300 * MIB,), host_pid=70)
        struct.pack_into("<Q", image, V1_2.slot_at(0) + V1_2.slot.utilization + 16, 25)
        struct.pack_into("<Q", image, 2008912, int(world.clock.now()) - 30)
    world.add_process(tenant, 70, inner=7)
    return tenant


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return values


async def scraped(monitor: UsageMonitor, accept: str = "text/plain") -> str:
    async with (
        served(metrics_application(monitor), "127.0.0.1:0") as address,
        aiohttp.ClientSession() as client,
        client.get(f"http://{address}/metrics", headers={"Accept": accept}) as answer,
    ):
        assert answer.status == 200
        return await answer.text()
