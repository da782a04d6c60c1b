"""Simulated GPUs whose driver programs use: what the agent describes, and what it measures."""

import subprocess
from pathlib import Path

from services.node_agent.gpu_access import open_gpus, usage_source_of
from services.node_agent.gpus.simulated.gpus import uuid_of
from services.node_agent.settings import AgentSettings
from shared.model.names import NodeName
from tests.support.gpu_driver import CONTEXT, GIB, GpuDriver

NODE = NodeName("node-0")


def create(driver: GpuDriver, description: str) -> None:
    """Make the GPUs of a description."""
    command = [str(driver.folder / "gpu-control"), "create"]
    subprocess.run(command, env=driver.environment, input=description, text=True, check=True)


async def test_programs_on_simulated_gpus_are_measured_through_nvml(
    nvml: GpuDriver, tmp_path: Path
) -> None:
    folder = tmp_path / "driver"
    settings = AgentSettings(
        node=NODE, gpus="2xT4+1xA100-40GB:mig", gpu_driver_dir=folder, state_dir=tmp_path
    )
    source = usage_source_of(settings, open_gpus(settings))
    before = await source.sample()
    create(nvml, (folder / "description").read_text())
    (folder / "libnvidia-ml.so.1").symlink_to(nvml.folder / "libnvidia-ml.so.1")
    load = nvml.load(NVIDIA_VISIBLE_DEVICES=uuid_of(NODE, 1))
    assert load.fits("1g")

    after = await source.sample()

    assert [one.processes for one in before] == [(), (), ()]
    assert [(one.device, one.index, one.model) for one in before] == [
        (one.device, one.index, one.model) for one in after
    ]
    (process,) = after[1].processes
    assert (process.pid, process.memory_bytes) == (load.pid, GIB + CONTEXT)
    assert after[1].used_bytes == GIB + CONTEXT
    assert after[0].processes == after[2].processes == ()


async def test_the_driver_is_told_at_most_sixteen_gpus(driver: GpuDriver, tmp_path: Path) -> None:
    settings = AgentSettings(
        node=NODE, gpus="20xT4", gpu_driver_dir=tmp_path / "driver", state_dir=tmp_path
    )
    source = usage_source_of(settings, open_gpus(settings))

    create(driver, (tmp_path / "driver" / "description").read_text())

    assert len(await source.sample()) == 20
    load = driver.load(NVIDIA_VISIBLE_DEVICES=uuid_of(NODE, 15))
    assert load.value("total 0", "total") == 15 * GIB
