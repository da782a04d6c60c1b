"""Simulated GPUs whose driver programs use: what the agent describes, and what it measures."""

import subprocess
from pathlib import Path

from shared.model.names import NodeName
from simcluster.node_agent.agent import SimulatedAgentSettings, simulated_gpus
from simcluster.node_agent.gpus import SimulatedGpus, uuid_of
from tests.support.gpu_driver import CONTEXT, GIB, GpuDriver

NODE = NodeName("node-0")


def create(driver: GpuDriver, description: str) -> None:
    """Make the GPUs of a description."""
    command = [str(driver.folder / "gpu-control"), "create"]
    subprocess.run(command, env=driver.environment, input=description, text=True, check=True)


def opened(settings: SimulatedAgentSettings) -> SimulatedGpus:
    """Open the node's GPUs, as the agent does."""
    gpus = simulated_gpus(settings).driver
    assert isinstance(gpus, SimulatedGpus)
    return gpus


async def test_programs_on_simulated_gpus_are_measured_through_nvml(
    nvml: GpuDriver, tmp_path: Path
) -> None:
    folder = tmp_path / "driver"
    settings = SimulatedAgentSettings(
        node=NODE, gpus="2xT4+1xA100-40GB:mig", gpu_driver_dir=folder, state_dir=tmp_path
    )
    source = simulated_gpus(settings).usage
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


async def test_a_process_in_a_mig_instance_is_measured_with_the_id_of_the_instance(
    nvml: GpuDriver, tmp_path: Path
) -> None:
    folder, device = tmp_path / "driver", uuid_of(NODE, 0)
    settings = SimulatedAgentSettings(
        node=NODE, gpus="1xA100-40GB:mig", gpu_driver_dir=folder, state_dir=tmp_path
    )
    gpus = opened(settings)
    for start in (0, 1):
        await gpus.create_compute(device, await gpus.create_instance(device, 19, start))
    create(nvml, (folder / "description").read_text())
    nvml.make_instances((folder / "instances").read_text())
    (folder / "libnvidia-ml.so.1").symlink_to(nvml.folder / "libnvidia-ml.so.1")
    _, second = await gpus.instances(device)
    load = nvml.load(NVIDIA_VISIBLE_DEVICES=second.uuid)
    assert load.fits("1g")

    (sample,) = await simulated_gpus(settings).usage.sample()

    (process,) = sample.processes
    assert (process.instance, process.memory_bytes) == (second.gi, GIB + CONTEXT)
    assert process.busy_percent is None, "NVML has no utilization of processes in MIG mode"


async def test_an_agent_that_starts_describes_the_instances_that_there_are(tmp_path: Path) -> None:
    settings = SimulatedAgentSettings(
        node=NODE, gpus="1xA100-40GB:mig", gpu_driver_dir=tmp_path / "driver", state_dir=tmp_path
    )
    first, device = opened(settings), uuid_of(NODE, 0)
    await first.create_compute(device, await first.create_instance(device, 0, 0))
    described = (tmp_path / "driver" / "instances").read_text()
    (tmp_path / "driver" / "instances").unlink()

    simulated_gpus(settings)

    assert described.count("instance|") == 1
    assert (tmp_path / "driver" / "instances").read_text() == described


async def test_the_driver_is_told_at_most_sixteen_gpus(driver: GpuDriver, tmp_path: Path) -> None:
    settings = SimulatedAgentSettings(
        node=NODE, gpus="20xT4", gpu_driver_dir=tmp_path / "driver", state_dir=tmp_path
    )
    source = simulated_gpus(settings).usage

    create(driver, (tmp_path / "driver" / "description").read_text())

    assert len(await source.sample()) == 20
    load = driver.load(NVIDIA_VISIBLE_DEVICES=uuid_of(NODE, 15))
    assert load.value("total 0", "total") == 15 * GIB
