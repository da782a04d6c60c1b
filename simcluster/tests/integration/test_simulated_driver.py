"""The GPUs of a layout in their driver: what the agent's NVML code reads, faults included."""

import json
from pathlib import Path

import pytest

from services.node_agent.gpus.device_faults import Xid
from services.node_agent.gpus.inventory import Gpu
from shared.model.errors import UnavailableError
from shared.model.names import NodeName
from simcluster.node_agent.agent import SimulatedAgentSettings, simulated_gpus
from simcluster.node_agent.driver import DriverGpus, instances_in
from simcluster.node_agent.gpus import SimulatedGpus, uuid_of
from tests.support.gpu_driver import CONTEXT, GIB, GpuDriver
from tests.support.waiting import until

NODE = NodeName("node-0")
FIRST = uuid_of(NODE, 0)


def settings_of(driver: GpuDriver, gpus: str) -> SimulatedAgentSettings:
    folder = driver.state.parent
    return SimulatedAgentSettings(node=NODE, gpus=gpus, gpu_driver_dir=folder, state_dir=folder)


def opened(driver: GpuDriver, gpus: str) -> DriverGpus:
    """Open the node's GPUs, as the agent does."""
    simulated = simulated_gpus(settings_of(driver, gpus), hang_limit_s=1.0).driver
    assert isinstance(simulated, DriverGpus)
    return simulated


def set_fault(driver: GpuDriver, fault: str, gpu: int = 0) -> None:
    (driver.state.parent / "faults.json").write_text(json.dumps({str(gpu): fault} if fault else {}))


async def test_both_drivers_report_the_same_gpus_of_a_layout(nvml: GpuDriver) -> None:
    layout = "40xT4+2xA100-40GB+1xA100-80GB:mig"

    devices = await opened(nvml, layout).discover()
    simulated = await SimulatedGpus(NODE, layout).discover()

    def known(gpu: Gpu) -> tuple[object, ...]:
        return gpu.uuid, gpu.index, gpu.model, gpu.memory_mib, gpu.mig, gpu.instances, gpu.fault

    assert list(map(known, devices)) == list(map(known, simulated))


async def test_programs_on_the_gpus_are_measured(nvml: GpuDriver) -> None:
    gpus = opened(nvml, "2xT4+1xA100-40GB:mig")
    await gpus.discover()
    load = nvml.load(NVIDIA_VISIBLE_DEVICES=uuid_of(NODE, 1))
    assert load.fits("1g")

    after = await simulated_gpus(settings_of(nvml, "2xT4+1xA100-40GB:mig")).sample()

    (process,) = after[1].processes
    assert (process.pid, process.memory_bytes) == (load.pid, GIB + CONTEXT)
    assert after[1].used_bytes == GIB + CONTEXT
    assert after[0].processes == after[2].processes == ()


async def test_instances_outlive_the_agent_and_their_processes_are_measured(
    nvml: GpuDriver,
) -> None:
    layout = "1xA100-40GB:mig"
    gpus = opened(nvml, layout)
    await gpus.discover()
    for start in (0, 1):
        await gpus.create_compute(FIRST, await gpus.create_instance(FIRST, 19, start))

    again = opened(nvml, layout)
    (gpu,) = await again.discover()
    _, second = gpu.instances
    load = nvml.load(NVIDIA_VISIBLE_DEVICES=second.uuid)
    assert load.fits("1g")
    (sample,) = await simulated_gpus(settings_of(nvml, layout)).sample()

    (process,) = sample.processes
    assert (process.instance, process.memory_bytes) == (second.gi, GIB + CONTEXT)
    assert process.busy_percent is None, "NVML has no utilization of processes in MIG mode"
    assert instances_in(nvml.state.parent) == {
        instance.uuid: "1g.5gb" for instance in gpu.instances
    }


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("unhealthy", "RowRemapFailed"),
        ("hang", "NoResponse"),
        ("vanish", None),
        ("memory-8192", 8192),
        ("mode-flip", True),
        ("GPU-another", "GPU-another"),
    ],
)
async def test_a_fault_of_the_file_is_what_nvml_reports_until_it_is_removed(
    nvml: GpuDriver, fault: str, shown: object
) -> None:
    gpus = opened(nvml, "1xA100-40GB+1xT4")
    before = await gpus.discover()

    set_fault(nvml, fault)
    devices = await gpus.discover()
    set_fault(nvml, "")
    await until(gpus.discover, lambda after: after == before)

    faulty = next((gpu for gpu in devices if gpu.index == 0), None)
    if faulty is None:
        assert shown is None
    else:
        mode = faulty.mig is not None and faulty.mig.enabled
        code = faulty.fault and faulty.fault.code
        assert shown in {code, faulty.memory_mib, mode, faulty.uuid}
    assert [gpu.fault for gpu in devices if gpu.index == 1] == [None]


async def test_an_xid_is_an_event_at_each_probe_while_it_is_in_the_file(nvml: GpuDriver) -> None:
    gpus = opened(nvml, "2xT4")
    set_fault(nvml, "xid-79", gpu=1)

    async def seen() -> tuple[Xid, ...]:
        await gpus.discover()
        return gpus.xids()

    for _ in range(2):
        assert await until(seen) == (Xid(uuid_of(NODE, 1), 79),)


async def test_a_hot_gpu_is_healthy_and_slowed_down(nvml: GpuDriver) -> None:
    simulated = simulated_gpus(settings_of(nvml, "2xT4"))
    set_fault(nvml, "hot", gpu=1)

    gpus = await simulated.driver.discover()
    cold, hot = (sample.hardware for sample in await simulated.sample())

    assert [gpu.fault for gpu in gpus] == [None, None]
    assert cold is not None
    assert hot is not None
    assert (cold.is_hot, hot.is_hot, hot.temperature_c) == (False, True, 93)


@pytest.mark.parametrize("fault", ["create-fails", "create-nothing", "compute-fails"])
async def test_an_instance_cannot_be_created_while_a_fault_prevents_it(
    nvml: GpuDriver, fault: str
) -> None:
    gpus = opened(nvml, "1xA100-40GB:mig")
    set_fault(nvml, fault)
    await gpus.discover()

    with pytest.raises(UnavailableError):
        await gpus.create_compute(FIRST, await gpus.create_instance(FIRST, 19, 0))
    usable = [instance.uuid for instance in await gpus.instances(FIRST) if instance.uuid]

    assert usable == []


async def test_busy_instances_are_not_destroyed(nvml: GpuDriver) -> None:
    gpus = opened(nvml, "1xA100-40GB:mig")
    await gpus.discover()
    gi = await gpus.create_instance(FIRST, 19, 0)
    await gpus.create_compute(FIRST, gi)
    set_fault(nvml, "busy")
    await gpus.discover()

    with pytest.raises(UnavailableError, match="In use by another client"):
        await gpus.destroy_compute(FIRST, gi, 0)

    assert [instance.busy for instance in await gpus.instances(FIRST)] == [True]


async def test_without_a_compiler_the_gpus_are_simulated_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = SimulatedAgentSettings(
        node=NODE, gpus="2xT4", gpu_driver_dir=tmp_path, state_dir=tmp_path
    )

    simulated = simulated_gpus(settings)

    assert isinstance(simulated.driver, SimulatedGpus)
    assert [device.processes for device in await simulated.sample()] == [(), ()]
