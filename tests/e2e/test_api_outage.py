"""The API server is away while pods end and others wait: all of them run afterwards."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from shared.model.errors import UnavailableError
from tests.support.stack import Stack, gpu_pod, stack, vgpu
from tests.support.waiting import until

PODS = 12
HALF_MIB = 7_000
"""Two pods of this size fill one of the two devices."""
FINAL = frozenset({"Succeeded", "Failed"})
BRIEF = {"sim.leasehold.dev/run-for": "5s"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def whole() -> AsyncIterator[Stack]:
    async with stack("--nodes", "1", "--gpus", "2xT4") as started:
        yield started


async def statuses(up: Stack) -> list[Mapping[str, Any]]:
    """Return the status of each pod; none while the API server does not answer."""
    try:
        return [pod["status"] for pod in await up.pods()]
    except UnavailableError:
        return []


@pytest.mark.parametrize("denied_s", [0.0, 12.0])
async def test_pods_with_leases_outlive_an_outage_in_which_the_devices_are_full(
    up: Stack, denied_s: float
) -> None:
    """The kubelet admits new pods while its list shows ended ones as running, or is denied."""
    for number in range(PODS):
        await up.create(
            gpu_pod(f"p{number}", vgpu(memory=HALF_MIB), annotations=BRIEF, restartPolicy="Never")
        )
    await until(
        lambda: statuses(up),
        lambda pods: len([s for s in pods if s.get("phase") == "Running"]) == 4,
    )
    outage = {"for_s": 4.0, "denied_s": denied_s, "relist_s": 6.0}
    await up.kube.create("/debug/outage", outage)

    ended = await until(
        lambda: statuses(up),
        lambda pods: len([s for s in pods if s.get("phase") in FINAL]) == PODS,
        limit_s=120.0,
    )

    assert [status["message"] for status in ended if status["phase"] == "Failed"] == []
