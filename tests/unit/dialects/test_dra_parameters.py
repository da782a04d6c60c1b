"""Parameters of NVIDIA's DRA driver in claims for ours: what is accepted, and what is refused."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from shared.dialects.nvidia.dra_parameters import NO_SLICES, Effects, read_parameters
from shared.model.devices.time_slices import INTERVALS, Interval
from shared.model.errors import RequestError
from shared.model.events.claim_events import AllocatedDevice
from shared.model.leases.lease import MIB

HEAD = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}
MIG = HEAD | {"kind": "MigDeviceConfig"}


BY_TURNS = (AllocatedDevice(request="gpu", device="gpu-a", memory_mib=1024),)
WHOLE = (AllocatedDevice(request="all", device="gpu-b"),)
BY_MPS = (
    AllocatedDevice(request="gpu", device="gpu-a-mps", memory_mib=1024, cores_percent=25),
    AllocatedDevice(request="more", device="gpu-b-mps", memory_mib=2048, cores_percent=25),
)


def check(
    sharing: Any = None,
    head: dict[str, Any] = HEAD,
    devices: Sequence[AllocatedDevice] = BY_TURNS,
    *,
    of_class: bool = False,
    **more: Any,
) -> Effects:
    config = head | more | ({} if sharing is None else {"sharing": sharing})
    return read_parameters(json.dumps(config).encode(), devices, of_class=of_class)


def slicing(interval: str) -> dict[str, Any]:
    return {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}


def mps(**config: Any) -> dict[str, Any]:
    return {"strategy": "MPS", "mpsConfig": config}


@pytest.mark.parametrize(
    ("sharing", "head"),
    [
        (None, HEAD),
        (None, MIG),
        ({"strategy": "TimeSlicing"}, HEAD),
        ({"strategy": "TimeSlicing", "timeSlicingConfig": {}}, HEAD),
    ],
)
def test_what_a_claim_has_anyway_is_accepted(sharing: Any, head: dict[str, Any]) -> None:
    assert check(sharing, head) == Effects()


@pytest.mark.parametrize("interval", INTERVALS)
def test_words_31_an_interval_is_what_the_claims_gpus_ask_for(interval: Interval) -> None:
    assert check(slicing(interval), devices=WHOLE) == Effects(interval=interval)
    assert check(slicing(interval), of_class=True) == Effects(interval=interval)


def test_only_a_class_names_an_interval_for_a_part_of_a_gpu() -> None:
    """Others on that GPU have turns of that length, too."""
    fault = "interval is Long, and request gpu is for a part of a GPU, whose other users"
    with pytest.raises(RequestError, match=fault):
        check(slicing("Long"), devices=(*WHOLE, *BY_TURNS))
    assert check(slicing("Default")) == Effects(), "it does not keep others from theirs"


@pytest.mark.parametrize("interval", INTERVALS)
def test_words_33_time_slices_of_an_instance_are_accepted_and_said_to_have_no_effect(
    interval: str,
) -> None:
    assert check(slicing(interval), MIG) == Effects(warning=NO_SLICES)


@pytest.mark.parametrize(
    ("sharing", "fault"),
    [
        (slicing("Longer"), "invalid: Invalid enum value 'Longer'"),
        ({"strategy": "Exclusive"}, "invalid: Invalid enum value 'Exclusive'"),
        ({}, "missing required field `strategy`"),
        ({"strategy": "TimeSlicing", "mpsConfig": {}}, "strategy is TimeSlicing"),
        (
            mps() | {"timeSlicingConfig": {}},
            "timeSlicingConfig is set, and sharing.strategy is MPS",
        ),
        ({"strategy": "MPS"}, "the claim has a device without: select the DeviceClass mps."),
        (mps(defaultActiveThreadPercentage=101), "`int` <= 100"),
        (mps(defaultActiveThreadPercentage=-1), "`int` >= 0"),
        (mps(multiUser="yes"), "Expected `bool"),
        (mps(defaultPinnedDeviceMemoryLimit="1023Ki"), "must be 1Mi or more, got '1023Ki'"),
        (mps(defaultPinnedDeviceMemoryLimit="much"), "is not a Kubernetes quantity"),
        (mps(defaultPerDevicePinnedMemoryLimit={"0": "1"}), "Limit[0] must be 1Mi or more"),
        (mps(defaultPerDevicePinnedMemoryLimit={"card": "1Gi"}), "its key is no index and no UUID"),
        (mps(defaultPerDevicePinnedMemoryLimit={"0": "1Gi", "GPU-1": "2Gi"}), "a device without"),
        (mps(unknown=1), "contains unknown field `unknown`"),
    ],
)
def test_what_is_wrong_or_cannot_be_met_is_refused_with_the_field(sharing: Any, fault: str) -> None:
    with pytest.raises(RequestError) as refused:
        check(sharing)

    assert fault in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"defaultActiveThreadPercentage": 25, "multiUser": False},
        {"defaultPerDevicePinnedMemoryLimit": {"0": "1Gi", "1": "2Gi"}},
        {"defaultPerDevicePinnedMemoryLimit": {"GPU-A": "1Gi", "GPU-B": str(2048 * MIB + 1)}},
        {
            "defaultPinnedDeviceMemoryLimit": "2Gi",
            "defaultPerDevicePinnedMemoryLimit": {"0": "9Gi", "GPU-A": "1Gi"},
        },
    ],
)
def test_words_31_and_32_limits_of_mps_repeat_what_the_claim_was_allocated(config: Any) -> None:
    """The own limit of a device goes before that of all, and its UUID before its index."""
    assert check(mps(**config), devices=BY_MPS) == Effects()


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"defaultPinnedDeviceMemoryLimit": "2Gi"}, 'has 1024 MiB: request it as .*"2048Mi"'),
        ({"defaultPerDevicePinnedMemoryLimit": {"1": "1Gi"}}, r"Limit\[1\] is 1024 MiB"),
        ({"defaultPerDevicePinnedMemoryLimit": {"GPU-A": "2Gi"}}, r"Limit\[GPU-A\] is 2048 MiB"),
        ({"defaultPerDevicePinnedMemoryLimit": {"2": "2Gi"}}, r"\[2\]: the claim has no such"),
        ({"defaultPerDevicePinnedMemoryLimit": {"GPU-C": "2Gi"}}, r"\[GPU-C\]: the claim has no"),
        ({"defaultActiveThreadPercentage": 50}, 'is 50, and the claim has 25 % .*cores: "50"'),
        ({"multiUser": True}, "a claim's daemon serves one user"),
    ],
)
def test_words_31_and_32_a_limit_of_mps_that_is_not_allocated_says_what_to_request(
    config: Any, fault: str
) -> None:
    with pytest.raises(RequestError, match=fault):
        check(mps(**config), devices=BY_MPS)


def test_time_slices_of_a_gpu_that_was_selected_by_mps_are_refused() -> None:
    with pytest.raises(RequestError, match="the claim has a GPU by MPS"):
        check({"strategy": "TimeSlicing"}, devices=BY_MPS)


@pytest.mark.parametrize(
    "head", [{"apiVersion": "v1"}, {"kind": "VfioDeviceConfig"}, {"more": 1}, {"sharing": []}]
)
def test_other_kinds_and_unknown_fields_are_refused(head: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="parameters of the claim are invalid"):
        check(**head)


@pytest.mark.parametrize("text", [b"", b"null", b"[" * 100_000, b"\xff"])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(RequestError, match="parameters of the claim are invalid"):
        read_parameters(text, ())
