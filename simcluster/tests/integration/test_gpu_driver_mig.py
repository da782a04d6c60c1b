"""Programs in MIG instances of the simulated GPUs: each sees its instance only, with its memory."""

import subprocess

import pytest

from services.node_agent.mig.gpu_models import A100_40
from tests.support.gpu_driver import CONTEXT, GIB, GpuDriver, gpu

GPU = gpu(1, name="NVIDIA A100-SXM4-40GB", memory_mib=40960, mig=True, profiles=A100_40)
OTHER = gpu(2, memory_mib=8192)
SMALL, LARGE = (
    "MIG-00000000-aaaa-5000-8000-000000000001",
    "MIG-00000000-bbbb-5000-8000-000000000002",
)
INSTANCES = f"instance|{GPU.uuid}|7|19|0|{SMALL}\ninstance|{GPU.uuid}|3|14|2|{LARGE}\n"
"""Of the profiles 1g.5gb and 2g.10gb."""


@pytest.fixture
def mig(driver: GpuDriver) -> GpuDriver:
    driver.create(GPU, OTHER)
    driver.make_instances(INSTANCES)
    return driver


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

    third = SMALL.replace("aaaa", "cccc")
    mig.make_instances(f"instance|{GPU.uuid}|8|19|1|{third}\ninstance|{GPU.uuid}|3|14|2|{LARGE}\n")

    assert load.fits("7g")
    assert not load.fits("1g")
    assert mig.load(NVIDIA_VISIBLE_DEVICES=third).value("info", "free") == 5 * GIB - CONTEXT
    assert [line for line in shown(mig, "all", "-L").splitlines() if SMALL in line] == []


def test_instances_of_a_gpu_that_the_driver_does_not_have_are_left_out(mig: GpuDriver) -> None:
    mig.make_instances(f"{INSTANCES}instance|GPU-of-a-larger-node|7|19|0|MIG-x\n")

    assert mig.load(NVIDIA_VISIBLE_DEVICES=SMALL).fits("1g")
