"""GPUs that the kernel's driver lists, and NVML does not read."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.node_agent.gpus.inventory import Gpu
from services.node_agent.gpus.kernel_gpus import GPUS, KernelGpus
from shared.model.bounds import HIGHEST_INDEX, LONGEST_MODEL, MOST_DEVICES
from shared.model.devices.device import UNNAMED, UnreadDevice
from shared.model.names import DeviceUuid
from tests.support.kernel_gpus import list_gpu

A, B = (DeviceUuid(f"GPU-{digit * 8}-0000-0000-0000-{digit * 12}") for digit in "ab")
AT_A, AT_B = "0000:3b:00.0", "0001:af:00.0"


@pytest.fixture
def kernel(tmp_path: Path) -> KernelGpus:
    return KernelGpus(tmp_path, limit_s=lambda: 5.0)


def gpu(uuid: DeviceUuid, bus: str = "") -> Gpu:
    return Gpu(uuid=uuid, index=0, model="Tesla T4", memory_mib=15360, bus=bus)


async def test_without_a_driver_there_is_nothing_to_read(kernel: KernelGpus) -> None:
    assert await kernel.unread([]) == ()


async def test_a_gpu_that_nvml_did_not_read_is_returned(kernel: KernelGpus, tmp_path: Path) -> None:
    list_gpu(tmp_path, AT_A, A)
    list_gpu(tmp_path, AT_B, B, minor=7)

    (unread,) = await kernel.unread([gpu(A, AT_A)])

    assert (unread.uuid, unread.index, unread.model, unread.bus) == (B, 7, "NVIDIA H100", AT_B)
    assert f"lists a GPU at {AT_B}, and NVML cannot read it" in unread.reason


async def test_files_of_gpus_that_nvml_has_read_are_left_alone(
    kernel: KernelGpus, tmp_path: Path
) -> None:
    list_gpu(tmp_path, AT_A, B)  # the file differs from what NVML reports

    assert await kernel.unread([gpu(A, AT_A)]) == ()


async def test_a_gpu_whose_address_nvml_does_not_report_is_known_by_its_uuid(
    kernel: KernelGpus, tmp_path: Path
) -> None:
    list_gpu(tmp_path, AT_A, A)

    assert await kernel.unread([gpu(A)]) == ()


@pytest.mark.parametrize(
    "uuid",
    [
        "GPU-????????-????-????-????-????????????",
        "",
        "GPU-1",
        f"{A}0",
        "GPU-" + "x" * 5000,
    ],
)
async def test_a_gpu_without_uuid_is_unnamed(kernel: KernelGpus, tmp_path: Path, uuid: str) -> None:
    list_gpu(tmp_path, AT_A, uuid)

    (unread,) = await kernel.unread([])

    assert (unread.uuid, unread.bus) == (UNNAMED, AT_A)
    assert "could not initialise it" in unread.reason


async def test_a_file_without_text_is_that_of_an_unnamed_gpu(
    kernel: KernelGpus, tmp_path: Path
) -> None:
    list_gpu(tmp_path, AT_A, A).write_text("")

    (unread,) = await kernel.unread([])

    assert (unread.uuid, unread.index, unread.model) == (UNNAMED, -1, "")


async def test_a_gpu_that_the_driver_excludes_is_none_of_the_node(
    kernel: KernelGpus, tmp_path: Path
) -> None:
    list_gpu(tmp_path, AT_A, "GPU-????????-????-????-????-????????????", excluded=True)

    assert await kernel.unread([]) == ()


async def test_what_the_driver_writes_is_bounded(kernel: KernelGpus, tmp_path: Path) -> None:
    list_gpu(tmp_path, AT_A, A, model="M\x1b" + "m" * 200, minor=HIGHEST_INDEX + 1)
    (tmp_path / GPUS / "not an address").mkdir()
    for number in range(2 * MOST_DEVICES):
        (tmp_path / GPUS / f"0002:{number % 256:02x}:{number // 256:02x}.0").mkdir()

    (unread,) = await kernel.unread([])

    assert len(unread.model) == LONGEST_MODEL
    assert unread.model.isprintable()
    assert unread.index == -1


async def test_a_list_that_cannot_be_read_is_an_unnamed_gpu(
    kernel: KernelGpus, tmp_path: Path
) -> None:
    (tmp_path / GPUS.parent).mkdir(parents=True)
    (tmp_path / GPUS).write_text("")

    (unread,) = await kernel.unread([])

    assert (unread.uuid, unread.bus) == (UNNAMED, "")
    assert "Not a directory" in unread.reason


@pytest.fixture
def blocked(tmp_path: Path) -> Iterator[Path]:
    """A file that blocks its reader until the test ends."""
    path = list_gpu(tmp_path, AT_B, B)
    path.unlink()
    os.mkfifo(path)
    yield path
    threading.Thread(target=path.write_bytes, args=(b"",)).start()


@pytest.mark.usefixtures("blocked")
async def test_a_file_that_blocks_delays_neither_others_nor_later_calls(tmp_path: Path) -> None:
    list_gpu(tmp_path, AT_A, A)
    kernel = KernelGpus(tmp_path, limit_s=lambda: 0.2)

    unread = [await kernel.unread([]) for _ in range(3)]

    def names(gpus: tuple[UnreadDevice, ...]) -> list[tuple[str, str]]:
        return [(gpu.uuid, gpu.bus) for gpu in gpus]

    assert list(map(names, unread)) == [[(A, AT_A), (UNNAMED, AT_B)]] * 3
    assert "did not respond within 0.2 s" in unread[0][1].reason
