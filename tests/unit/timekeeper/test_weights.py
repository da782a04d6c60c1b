"""What a lease counts as."""

from fractions import Fraction
from typing import Any

import pytest

from services.timekeeper.accounts.weights import weigh
from shared.model.budget import WeightMode
from shared.model.lease import Share
from tests.support import build
from tests.support.timekeeper.accounts import budget, lease

MODELS = {
    "T4": ("Tesla T4", 16_384),
    "A100": ("NVIDIA A100-SXM4-40GB", 40_960),
    "A100b": ("NVIDIA A100-SXM4-40GB", 40_960),
}


def share(uuid: str, **fields: Any) -> Share:
    model, mib = MODELS[uuid]
    return build.share(uuid, device_model=model, **({"device_mib": mib} | fields))


def weight(*shares: Share, factors: dict[str, Fraction] | None = None, **fields: Any) -> int:
    return weigh(lease("p", shares=shares), budget(**fields), factors or {}).milli_gpu


def half(uuid: str = "A100", **more: Any) -> Share:
    return share(uuid, memory_mib=20_480, cores_percent=30, **more)


def test_gpusharing_11_weights_of_each_dialect() -> None:
    vcuda = share("T4", memory_mib=15 * 256, cores_percent=50)
    koordinator = (half("A100"), half("A100b"))
    whole = share("T4", memory_mib=16_384, cores_percent=100, whole=True)

    assert weight(vcuda) == 500
    assert weight(half()) == 500
    assert weight(*koordinator) == 1000
    assert weight(whole) == 1000
    assert weight(whole, share("A100", memory_mib=1, whole=True)) == 2000


@pytest.mark.parametrize(
    ("mode", "expected"), [("dominant", 500), ("sum", 400), ("core", 300), ("memory", 500)]
)
def test_the_modes_weigh_cores_and_memory_differently(mode: str, expected: int) -> None:
    assert weight(half(), weight_mode=WeightMode(mode)) == expected


def test_a_share_without_a_core_limit_counts_as_its_memory_or_as_configured() -> None:
    uncapped = share("T4", memory_mib=4_096)

    assert weight(uncapped) == 250
    assert weight(uncapped, uncapped_core_percent=60) == 600


def test_init_containers_and_those_beside_each_other_count_as_the_larger() -> None:
    beside = [share("T4", memory_mib=4_096, container=name) for name in "ab"]
    before = share("T4", memory_mib=12_288, container="i", init=True)

    assert weight(*beside) == 500
    assert weight(before, *beside) == 750


def test_a_sidecar_is_weighed_with_the_init_containers_after_it() -> None:
    sidecar, main = (share("T4", memory_mib=2_048, container=name) for name in ("side", "main"))
    before = share("T4", memory_mib=4_096, container="i", init=True)

    assert weight(sidecar, before, main) == 375
    assert weight(before, sidecar, main) == 250


def test_the_longest_matching_model_name_gives_the_factor_and_the_sum_is_rounded_up_once() -> None:
    third = share("T4", memory_mib=1, cores_percent=33)

    assert weight(half(), factors={"a100": Fraction("2.5"), "A100-SXM4": Fraction(3)}) == 1500
    assert weight(third, factors={"T4": Fraction("0.001")}) == 1


def test_a_share_whose_device_had_no_memory_counts_as_the_whole_device() -> None:
    assert weight(share("T4", device_mib=0, memory_mib=4_096)) == 1000
