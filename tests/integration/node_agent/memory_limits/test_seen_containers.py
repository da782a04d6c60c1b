"""Limits of containers that the agent sees, does not see, or that have not started yet."""

import math

import pytest

from services.node_agent.gpus.memory_limits import LimitTarget
from shared.model.errors import RequestError, UnavailableError
from tests.integration.node_agent.memory_limits.conftest import DEVICE, GPU, ID, POD
from tests.integration.node_agent.memory_limits.test_container_limits import (
    Containers,
    audit,
    call_of,
    containers,
    driver_lease,
    driver_share,
    reasons,
)
from tests.support.gpu_driver import MIB
from tests.support.node_agent.node import entry_of

__all__ = ["containers"]


async def test_a_pod_whose_containers_have_not_started_yet_lacks_no_limit(
    containers: Containers,
) -> None:
    """The kubelet makes its cgroup first, and may pull an image before it starts a container."""
    limits = containers.limits()
    (entry,) = await containers.give(driver_lease(driver_share(2000)))
    containers.node.tree.make_pod(POD)
    containers.show(POD, {})
    assert await audit(limits) == []

    await limits.limit_pods(entry)
    await limits.start_container(call_of(entry, containers.create()))
    containers.node.driver.forget_limits()

    assert await reasons(limits) == ["GpuLimitMissing", "GpuLimitMissing"]


async def test_containers_that_are_not_seen_are_neither_resized_nor_taken_for_compared(
    containers: Containers, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent knows those that started before it from the kubelet alone."""
    entry = await containers.run(containers.limits(), driver_lease(driver_share(2000)))
    own = containers.path(container_id=ID)
    containers.list_error = RequestError("GET /pods failed: 403: pods is forbidden")
    restarted = containers.limits()
    containers.node.driver.set_limit(GPU, own, 9000 * MIB)
    containers.node.driver.set_limit(GPU, containers.path(), 9000 * MIB)

    (difference,) = await audit(restarted)

    assert f"for {LimitTarget(DEVICE, POD)} " in difference.text
    assert containers.node.limits() == {containers.path(): 2000 * MIB, own: 9000 * MIB}
    assert caplog.text.count("cannot be listed for limits of memory: GET /pods failed: 403") == 1
    larger = entry_of(driver_lease(driver_share(3000)))
    with pytest.raises(UnavailableError, match=r"cannot be seen.*pods is forbidden"):
        await restarted.resize(larger)
    containers.list_error = None
    restarted.listed.read_at = -math.inf
    await restarted.resize(entry)
    assert set(containers.node.limits().values()) == {2000 * MIB}


async def test_a_pod_that_the_kubelet_does_not_list_yet_is_not_resized(
    containers: Containers,
) -> None:
    """Its container has a limit of its own, and with `misc` that alone counts."""
    entry = await containers.run(containers.limits(), driver_lease(driver_share(2000)))
    listed, containers.pods = containers.pods, []
    restarted = containers.limits()
    smaller = entry_of(driver_lease(driver_share(1000)))

    with pytest.raises(UnavailableError, match=f"does not list pod {POD}"):
        await restarted.resize(smaller)

    await restarted.put_back(entry)
    containers.pods = listed
    restarted.listed.read_at = -math.inf
    await restarted.resize(smaller)
    assert set(containers.node.limits().values()) == {1000 * MIB}


async def test_a_container_whose_hook_called_is_resized_without_the_kubelets_list(
    containers: Containers,
) -> None:
    limits = containers.limits()
    containers.list_error = UnavailableError("GET /pods failed: 500")
    await containers.run(limits, driver_lease(driver_share(2000)))

    await limits.resize(entry_of(driver_lease(driver_share(3000))))

    assert set(containers.node.limits().values()) == {3000 * MIB}
