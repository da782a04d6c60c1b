"""Requests of too little memory for a CUDA program: the warning, and what was probably meant."""

import pytest

from services.webhook.pod_admission import DeviceMaximum
from tests.support.webhook.reviews import applied, container, decided, pod

T4 = DeviceMaximum(memory_mib=15360, memory_units=15360)
BLOCKS = DeviceMaximum(memory_mib=15360, memory_units=1536)
VGPU = {"volcano.sh/vgpu-number": "1"}
HAMI = {"nvidia.com/gpu": "1"}
KOORDINATOR = {"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-core": "50"}
VCUDA = {"tencent.com/vcuda-core": "50"}


@pytest.mark.parametrize(
    ("limits", "largest", "said"),
    [
        (HAMI | {"nvidia.com/gpumem": "8"}, T4, "gets 8 MiB of a GPU"),
        (HAMI | {"nvidia.com/gpumem": "8"}, T4, "for 8 GiB write nvidia.com/gpumem: 8192"),
        (HAMI | {"nvidia.com/gpumem": "3000m"}, None, "for 3 GiB write nvidia.com/gpumem: 3072"),
        (
            VGPU | {"volcano.sh/vgpu-memory": "8"},
            None,
            "for 8 GiB write volcano.sh/vgpu-memory: 8192",
        ),
        (
            VGPU | {"volcano.sh/vgpu-memory": "8"},
            BLOCKS,
            "for 8 GiB write volcano.sh/vgpu-memory: 819",
        ),
        ({"volcano.sh/gpu-memory": "8"}, T4, "for 8 GiB write volcano.sh/gpu-memory: 8192"),
        (
            VCUDA | {"tencent.com/vcuda-memory": "1"},
            T4,
            "for 1 GiB write tencent.com/vcuda-memory: 4",
        ),
        (KOORDINATOR | {"koordinator.sh/gpu-memory": "8Mi"}, T4, "gets 8 MiB"),
        (
            KOORDINATOR | {"koordinator.sh/gpu-memory": "8Mi"},
            T4,
            "for 8 GiB write koordinator.sh/gpu-memory: 8192Mi",
        ),
    ],
)
def test_a_container_with_too_little_memory_is_admitted_with_a_warning(
    limits: dict[str, str], largest: DeviceMaximum | None, said: str
) -> None:
    obj = pod(container("main", limits))

    decision = decided(obj, largest=largest)

    assert any("container main" in text and said in text for text in decision.warnings)
    assert (
        applied(obj, decision)["spec"]["containers"][0]["resources"]["limits"].items()
        >= limits.items()
    )


@pytest.mark.parametrize(
    "limits",
    [
        HAMI | {"nvidia.com/gpumem": "512"},
        HAMI,
        HAMI | {"nvidia.com/gpumem-percentage": "1"},
        VCUDA | {"tencent.com/vcuda-memory": "2"},
        KOORDINATOR | {"koordinator.sh/gpu-memory-ratio": "50"},
    ],
)
def test_enough_memory_and_parts_of_a_device_are_not_warned_of(limits: dict[str, str]) -> None:
    assert decided(pod(container("main", limits)), largest=T4).warnings == ()


def test_nothing_is_guessed_that_no_device_has() -> None:
    limits = HAMI | {"nvidia.com/gpumem": "100"}

    (text,) = decided(pod(container("main", limits)), largest=T4).warnings

    assert "100 MiB" in text
    assert "GiB" not in text
    assert decided(pod(container("main", limits)), least_share_mib=100).warnings == ()
