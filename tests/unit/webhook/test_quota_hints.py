"""What a hint about a quota or a budget says is done by a program: the pod runs, or must wait."""

from collections.abc import Iterator
from typing import Any

import pytest

from shared.model.budgets.quota import Quota, QuotaLimits
from tests.support.placer.quotas import Team
from tests.support.webhook.hints import (
    NAMESPACE,
    NVIDIA,
    RIGHT,
    Limits,
    Pod,
    added_names,
    charge,
    domains,
    follow,
)
from tests.support.webhook.reviews import container, pod

MEASURES = ("cores_milli", "milli_gpu", "memory_mib", "cards")
WHOLE = {"volcano.sh/gpu-number": "1"}
CONTAINERS_ONLY = ("volcano.sh/vgpu-number", "volcano.sh/gpu-number")
"""Init containers may not request these."""


def one(limits: Limits, **fields: Any) -> Pod:
    return pod(container("main", dict(limits)), **fields)


def two(limits: Limits) -> Pod:
    return pod(container("main", dict(limits)), container("side", dict(limits)))


def after_init(limits: Limits) -> Pod:
    first = container("first", dict(limits))
    return pod(container("main", dict(limits)), initContainers=[first])


def beside_sidecar(limits: Limits) -> Pod:
    first = container("first", dict(limits), restartPolicy="Always")
    return pod(container("main", dict(limits)), initContainers=[first])


def counted(written: Pod) -> dict[str, int]:
    """Return what a pod counts where no quota refuses it."""
    usage = charge(follow(written).request)
    return {
        "cores_milli": usage.cores_milli,
        "milli_gpu": usage.milli_gpu,
        "memory_mib": usage.memory_mib,
        "cards": len(usage.devices),
    }


def allowed(**limits: int) -> Team:
    return Team(Quota(namespace=NAMESPACE, limits=QuotaLimits(**limits)))


def cases() -> Iterator[Any]:
    for limits in (*RIGHT, {"nvidia.com/gpu": "4"}, NVIDIA | {"nvidia.com/gpu": "2"}):
        for shape in (one, two, after_init, beside_sidecar):
            if shape in {after_init, beside_sidecar} and not limits.keys().isdisjoint(
                CONTAINERS_ONLY
            ):
                continue
            written = shape(limits)
            names = "+".join(name.rpartition("/")[2] for name in limits)
            for measure, amount in counted(written).items():
                if amount > 1:
                    yield pytest.param(
                        limits, written, measure, amount, id=f"{names} {shape.__name__} {measure}"
                    )


def is_the_least(limits: Limits, measure: str) -> bool:
    """Return whether the words of a pod have nothing smaller than the least by this measure.

    Numbers of GPUs are whole ones; containers of a pod of Koordinator never share a card.
    """
    of_koordinator = all(name.startswith("koordinator.sh/") for name in limits)
    return limits == WHOLE or (of_koordinator and measure == "cards")


@pytest.mark.parametrize(("limits", "wrong", "measure", "amount"), [*cases()])
def test_a_pod_that_counts_twice_what_its_quota_allows_is_led_to_one_that_runs(
    limits: Limits, wrong: Pod, measure: str, amount: int
) -> None:
    followed = follow(wrong, team=allowed(**{measure: amount // 2}))

    if is_the_least(limits, measure):
        assert followed.waits == "the least"
        return
    assert followed.request.dialect == follow(wrong).request.dialect
    assert domains(dict.fromkeys(added_names(followed.hints))) <= domains(limits)
    assert measure == "cards" or "does not help: request at most" in followed.hints[0].text
