"""What the driver offers of a GPU: from which version on, and not beside other programs."""

import math
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.node_agent.enforcers.driver import DriverLimits
from services.node_agent.gpus.inventory import Gpu, SharingConfig
from services.node_agent.gpus.memory_limits import Accounting
from shared.model.names import DeviceUuid
from tests.integration.node_agent.memory_limits.conftest import (
    DEVICE,
    GPU,
    OTHER_POD,
    POD,
)
from tests.integration.node_agent.memory_limits.test_container_limits import (
    BOTH,
    OTHER_ID,
    Containers,
    containers,
    driver_lease,
    driver_share,
)
from tests.support.gpu_driver import GIB

__all__ = ["containers"]


def gpu_of(uuid: str = GPU.uuid) -> Gpu:
    return Gpu(uuid=DeviceUuid(uuid), index=0, model="A100", memory_mib=16_384)


async def test_it_is_offered_from_r615_on_and_the_reason_names_it(
    containers: Containers, caplog: pytest.LogCaptureFixture
) -> None:
    containers.node.driver.limit_cgroups("none")
    caplog.set_level("INFO")
    old = DriverLimits(containers.limits())
    for _ in range(3):
        await old.find_out([gpu_of()])
        old.limits._tried = (frozenset(), 0.0)  # type: ignore[union-attr]
    assert "older than R615" in old.missing(gpu_of(), SharingConfig())
    assert sum("older than R615" in message for message in caplog.messages) == 1

    containers.node.driver.limit_cgroups("dmem")
    new = DriverLimits(containers.limits())
    await new.find_out([gpu_of()])
    assert new.missing(gpu_of(), SharingConfig()) == ""


async def test_a_driver_that_was_replaced_by_an_older_one_is_not_offered(
    containers: Containers,
) -> None:
    enforcer = DriverLimits(containers.limits())
    await enforcer.find_out([gpu_of()])
    assert enforcer.missing(gpu_of(), SharingConfig()) == ""

    containers.node.driver.limit_cgroups("none")
    enforcer = DriverLimits(containers.limits())
    await enforcer.find_out([gpu_of()])

    assert "older than R615" in enforcer.missing(gpu_of(), SharingConfig())


async def test_an_agent_that_is_limited_itself_is_not_ready(containers: Containers) -> None:
    setter = containers.node.setter()
    container = containers.node.make_container(OTHER_POD)
    containers.node.driver.set_limit(GPU, container, 4 * GIB)
    containers.node.add_process(70, f"/{container.relative_to(containers.node.tree.root)}")
    limits = containers.limits()

    async def accounting(device: DeviceUuid) -> Any:
        return await setter.accounting(device, agent_pid=70)

    limits.setter.accounting = accounting  # type: ignore[method-assign]
    enforcer = DriverLimits(limits)
    await enforcer.find_out([gpu_of()])

    assert "limits this agent itself to 4096 MiB" in enforcer.unready_reason()


@BOTH
async def test_a_gpu_with_a_limit_of_another_program_is_not_offered_and_the_limit_stays(
    containers: Containers, accounting: Accounting, caplog: pytest.LogCaptureFixture
) -> None:
    containers.node.driver.limit_cgroups(accounting)
    enforcer = DriverLimits(containers.limits())
    limits = enforcer.limits
    assert limits is not None
    await containers.run(limits, driver_lease(driver_share(2000)))
    foreign = containers.node.make_container(OTHER_POD, OTHER_ID)
    containers.show(OTHER_POD, {OTHER_ID: "main"})

    async def find_out() -> str:
        limits._tried = (frozenset(), -math.inf)
        limits.listed.read_at = -math.inf
        await enforcer.find_out([gpu_of()])
        return enforcer.missing(gpu_of(), SharingConfig())

    assert await find_out() == ""
    containers.node.driver.set_limit(GPU, foreign, 4 * GIB)
    caplog.clear()

    reason = await find_out()

    assert "another program limits memory by the driver, of a pod's cgroup" in reason
    assert await find_out() == reason
    (finding,) = limits.findings
    assert (finding.reason, finding.pod, finding.name) == ("GpuLimitForeign", OTHER_POD, "pod")
    assert "has set 4096 MiB at most" in finding.message
    assert f"nvidia-smi memory-limits --set -n {foreign}" in finding.message
    assert caplog.messages.count(finding.message) == 1
    assert REGISTRY.get_sample_value(
        "leasehold_foreign_memory_limits", {"device_uuid": DEVICE}
    ) == 1  # fmt: skip
    await limits.end({POD})
    assert containers.node.limits()[foreign] == 4 * GIB

    containers.node.driver.set_limit(GPU, foreign, "max")
    assert await find_out() == ""
    assert limits.findings == ()


async def test_a_limit_of_a_lease_is_not_of_another_program_after_its_fences_are_lost(
    containers: Containers,
) -> None:
    await containers.run(containers.limits(), driver_lease(driver_share(2000)))
    (containers.node.root / "fences.json").unlink()
    enforcer = DriverLimits(containers.limits())

    await enforcer.find_out([gpu_of()])

    assert enforcer.missing(gpu_of(), SharingConfig()) == ""
