"""A node with one GPU, a driver that limits memory, cgroups, and the partitioner's setter."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from services.node_agent.gpus.memory_limits import LimitTarget
from services.node_agent.gpus.nvml.memory_limits import NvmlMemoryLimits
from services.node_agent.memory_limits.cgroup_tree import CgroupTree
from services.node_agent.memory_limits.limit_setter import LimitSetter
from shared.model.names import DeviceUuid, PodUid
from tests.support.cgroups import CgroupTree as Tree
from tests.support.gpu_driver import DriverGpu, GpuDriver, GpuLoad, gpu

GPU = gpu(1)
DEVICE = DeviceUuid(GPU.uuid)
POD = PodUid("0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9")
OTHER_POD = PodUid("1a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9")
ID = "0123456789abcdef" * 4
POD_TARGET = LimitTarget(DEVICE, POD)
TARGET = LimitTarget(DEVICE, POD, ID)


@dataclass(kw_only=True)
class LimitedNode:
    root: Path
    driver: GpuDriver
    tree: Tree

    def setter(self) -> LimitSetter:
        """Return a setter as after a start of the partitioner."""
        return LimitSetter(
            NvmlMemoryLimits(),
            CgroupTree(self.tree.root),
            fences=self.root / "fences.json",
            proc=self.root / "proc",
        )

    def make_container(self, pod: PodUid = POD, container_id: str = ID) -> Path:
        return self.tree.make_container(self.tree.make_pod(pod), container_id)

    def add_process(self, pid: int, cgroup: str) -> None:
        (self.root / "proc" / str(pid)).mkdir(parents=True)
        (self.root / "proc" / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")

    def load(self, cgroup: Path) -> GpuLoad:
        return self.driver.load(GPU_DRIVER_CGROUP=str(cgroup))

    def limits(self, gpu: DriverGpu = GPU) -> dict[Path, int]:
        return self.driver.limits(gpu)


@pytest.fixture
def node(nvml: GpuDriver, tmp_path: Path) -> LimitedNode:
    nvml.create(GPU)
    nvml.limit_cgroups("dmem")
    tree = Tree(root=tmp_path / "cgroup")
    tree.make("kubepods.slice")
    return LimitedNode(root=tmp_path, driver=nvml, tree=tree)
