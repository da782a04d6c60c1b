"""Requests for more memory than the largest device has are denied, once that is known."""

import re
from typing import Any

import pytest

from services.webhook.admission import (
    STALE_S,
    AdmissionDecision,
    DeviceMaximum,
    LargestDevice,
)
from shared.model.events.pod_events import LargestDeviceReported
from tests.support.webhook.reviews import container, decided, pod

CARD = DeviceMaximum(memory_mib=16_384, memory_units=1638)
"""One device of 16 GiB, and one on a node that counts in units of 10 MiB."""
CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
KOORDINATOR = {"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-core": "50"}


def asked(
    limits: dict[str, str], largest: DeviceMaximum | None = CARD, **policy: Any
) -> AdmissionDecision:
    return decided(pod(container("log"), container("cuda", limits)), largest=largest, **policy)


FITTING = {
    "blocks": {CORE: "50", MEMORY: "64"},
    "units": {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1638"},
    "bytes": {**KOORDINATOR, "koordinator.sh/gpu-memory": "16Gi"},
    "percent": {**KOORDINATOR, "koordinator.sh/gpu-memory-ratio": "100"},
    "hami": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1638"},
    "whole": {CORE: "200", MEMORY: "4096"},
    "all": {"nvidia.com/gpu": "2"},
}
TOO_LARGE = {
    "blocks": ({CORE: "50", MEMORY: "65"}, f"{MEMORY}=65 is 16640 MiB of one GPU"),
    "units": (
        {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "1639"},
        "volcano.sh/vgpu-memory=1639, volcano.sh/vgpu-number=1 is 1639 units of memory of one "
        "GPU, and the largest of the cluster has 1638 (16384 MiB)",
    ),
    "bytes": (
        {**KOORDINATOR, "koordinator.sh/gpu-memory": str(16 * 2**30 + 1)},
        "16385 MiB of one GPU, and the largest of the cluster has 16384 MiB",
    ),
    "hami": ({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1639"}, "nvidia.com/gpumem=1639"),
    "gpushare": ({"volcano.sh/gpu-memory": "1639"}, "volcano.sh/gpu-memory=1639 is 1639 units"),
}


@pytest.mark.parametrize("limits", FITTING.values(), ids=FITTING)
def test_gpusharing_2_as_much_as_the_largest_device_has_is_admitted(limits: dict[str, str]) -> None:
    decision = asked(limits)

    assert (decision.allowed, decision.warnings) == (True, ()), decision.message


@pytest.mark.parametrize(("limits", "text"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_gpusharing_2_more_than_the_largest_device_has_is_denied_with_container_and_field(
    limits: dict[str, str], text: str
) -> None:
    decision = asked(limits)

    assert not decision.allowed
    assert decision.message.startswith('container "cuda": ')
    assert text in decision.message
    less = re.search(r"; set ([a-z./-]+): (\w+), or request a whole GPU$", decision.message)
    assert less is not None
    assert asked({**limits, less[1]: less[2]}).allowed


def test_an_init_container_larger_than_the_largest_device_is_denied() -> None:
    decision = decided(
        pod(initContainers=[container("cuda", TOO_LARGE["blocks"][0])]), largest=CARD
    )

    assert not decision.allowed
    assert TOO_LARGE["blocks"][1] in decision.message


@pytest.mark.parametrize(("limits", "_"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_before_any_device_is_known_every_size_is_admitted(limits: dict[str, str], _: str) -> None:
    assert asked(limits, None).allowed


def test_where_larger_requests_are_allowed_the_pod_is_admitted_with_a_warning() -> None:
    decision = asked(TOO_LARGE["blocks"][0], allow_larger_requests=True)

    assert decision.allowed
    assert any("the pod waits for a node" in text for text in decision.warnings)


def report(mib: int) -> LargestDeviceReported:
    return LargestDeviceReported(memory_mib=mib, memory_units=mib)


def test_a_device_counts_for_a_limited_time_after_its_last_report() -> None:
    largest = LargestDevice()
    assert largest.now(100.0) is None

    largest.note(report(80_000), 90.0)
    largest.note(report(80_000), 100.0)
    largest.note(report(16_000), 150.0)

    assert largest.now(100.0 + STALE_S) == DeviceMaximum(80_000, 80_000)
    assert largest.now(101.0 + STALE_S) == DeviceMaximum(16_000, 16_000)
    assert largest.now(151.0 + STALE_S) is None


def test_the_largest_units_and_the_largest_mib_may_be_of_different_devices() -> None:
    largest = LargestDevice()
    largest.note(LargestDeviceReported(memory_mib=80_000, memory_units=8_000), 1.0)
    largest.note(LargestDeviceReported(memory_mib=16_000, memory_units=16_000), 1.0)

    assert largest.now(2.0) == DeviceMaximum(80_000, 16_000)
