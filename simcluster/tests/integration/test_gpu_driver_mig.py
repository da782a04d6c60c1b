"""Programs in MIG instances of the simulated GPUs: each sees its instance only, with its memory."""

import subprocess

import pytest

from services.node_agent.gpus.nvml import mig as nvml_mig
from services.node_agent.gpus.nvml.calls import with_nvml
from services.node_agent.mig.gpu_models import A100_40
from shared.model.names import DeviceUuid
from tests.support.gpu_driver import CONTEXT, GIB, GpuDriver, gpu

GPU = gpu(1, name="NVIDIA A100-SXM4-40GB", memory_mib=40960, mig=True, profiles=A100_40)
OTHER = gpu(2, memory_mib=8192)
SMALL, LARGE, THIRD = (f"MIG-00000001-0000-4000-8000-{n:012x}" for n in (1, 2, 3))
"""Instances in the order of their creation."""


def create(profile: int, start: int) -> int:
    """Create a whole MIG device; return the ID of its instance."""
    gi = nvml_mig.create_instance(DeviceUuid(GPU.uuid), profile, start)
    nvml_mig.create_compute(DeviceUuid(GPU.uuid), gi)
    return gi


@pytest.fixture
def mig(nvml: GpuDriver) -> GpuDriver:
    """A driver with the devices SMALL (1g.5gb) and LARGE (2g.10gb)."""
    nvml.create(GPU, OTHER)
    with_nvml(lambda: (create(19, 0), create(14, 2)))
    return nvml


def shown(driver: GpuDriver, devices: str, *arguments: str) -> str:
    return subprocess.check_output(
        [driver.folder / "nvidia-smi", *arguments],
        env=driver.environment | {"NVIDIA_VISIBLE_DEVICES": devices},
        text=True,
    )


def test_an_instance_limits_its_programs_to_its_own_memory(mig: GpuDriver) -> None:
    small, large = (mig.load(NVIDIA_VISIBLE_DEVICES=uuid) for uuid in (SMALL, LARGE))

    assert small.value("total 0", "total") == 5 * GIB
    assert small.do("total 1").startswith("error")
    assert small.fits("4g")
    assert not small.fits("1g")
    assert large.fits("9g")
    assert large.value("info", "free") == GIB - CONTEXT


def test_nvidia_smi_lists_the_gpu_and_only_the_instance_that_the_container_has(
    mig: GpuDriver,
) -> None:
    assert shown(mig, SMALL, "-L") == (
        f"GPU 0: {GPU.name} (UUID: {GPU.uuid})\n  MIG 1g.5gb          Device  0: (UUID: {SMALL})\n"
    )
    listed = shown(mig, "all", "-L").splitlines()
    assert [line.split(":")[0].strip() for line in listed] == [
        "GPU 0", "MIG 1g.5gb          Device  0", "MIG 2g.10gb         Device  1", "GPU 1"
    ]  # fmt: skip


def test_nvidia_smi_shows_the_memory_of_the_instance_and_not_that_of_its_gpu(
    mig: GpuDriver,
) -> None:
    load = mig.load(NVIDIA_VISIBLE_DEVICES=LARGE)
    assert load.fits("2g")

    gpu_row, mig_row = [line for line in shown(mig, LARGE).splitlines() if line.count("|") == 5][1:]

    assert [cell.strip() for cell in gpu_row.split("|")[1:5]] == ["0", GPU.name, "N/A", "N/A"]
    assert [cell.strip() for cell in mig_row.split("|")[1:5]] == [
        "", "MIG 2g.10gb", "2304MiB /   10240MiB", "N/A"
    ]  # fmt: skip


def test_changed_instances_leave_programs_in_the_others_alone(mig: GpuDriver) -> None:
    load = mig.load(NVIDIA_VISIBLE_DEVICES=LARGE)
    assert load.fits("2g")

    def change() -> None:
        nvml_mig.destroy_compute(DeviceUuid(GPU.uuid), 1, 0)
        nvml_mig.destroy_instance(DeviceUuid(GPU.uuid), 1)
        create(19, 1)

    with_nvml(change)

    assert load.fits("7g")
    assert not load.fits("1g")
    assert mig.load(NVIDIA_VISIBLE_DEVICES=THIRD).value("info", "free") == 5 * GIB - CONTEXT
    assert [line for line in shown(mig, "all", "-L").splitlines() if SMALL in line] == []
