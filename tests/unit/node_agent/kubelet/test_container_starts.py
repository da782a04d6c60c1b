"""Which containers have devices and are still to be started."""

from collections.abc import Sequence

import pytest

from services.node_agent.kubelet.registration import REPLY_S, START_S, ContainerStarts
from shared.dialects.dialect import ContainerSetup
from shared.model.errors import RequestError

SETUP = ContainerSetup(environment={"A": "1"})
RESOURCE = "volcano.sh/vgpu-number"


class Handler:
    """Gives everything, and starts what is not refused."""

    def __init__(self) -> None:
        self.refuses = False

    async def get_preferred_allocation(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> Sequence[str]:
        return [*must_include, *available][:size]

    async def allocate(self, resource: str, device_ids: Sequence[str]) -> ContainerSetup:
        if self.refuses:
            raise RequestError("no lease")
        return SETUP

    async def pre_start_container(self, resource: str, device_ids: Sequence[str]) -> None:
        if self.refuses:
            raise RequestError("another container has them")


class Started:
    def __init__(self) -> None:
        self.now = 100.0
        self.handler = Handler()
        self.starting = ContainerStarts(self.handler, ticks=lambda: self.now)


async def test_a_container_starts_from_its_allocation_to_the_reply_to_its_start() -> None:
    made = Started()
    before = made.starting.any_due()
    setup = await made.starting.allocate(RESOURCE, ["g-1", "g-0"])
    allocated = made.starting.any_due()
    await made.starting.pre_start_container(RESOURCE, ["g-0", "g-1"])
    replying = made.starting.any_due()
    made.now += REPLY_S
    assert (before, allocated, replying, made.starting.any_due()) == (False, True, True, False)
    assert setup == SETUP


async def test_each_container_counts_for_itself_and_not_for_long() -> None:
    made = Started()
    await made.starting.allocate(RESOURCE, ["g-0"])
    await made.starting.allocate(RESOURCE, ["g-1"])
    await made.starting.pre_start_container(RESOURCE, ["g-0"])
    made.now += REPLY_S
    other = made.starting.any_due()
    made.now += START_S
    assert (other, made.starting.any_due()) == (True, False)


async def test_what_is_refused_does_not_start() -> None:
    made = Started()
    made.handler.refuses = True
    with pytest.raises(RequestError, match="no lease"):
        await made.starting.allocate(RESOURCE, ["g-0"])
    allocated = made.starting.any_due()
    with pytest.raises(RequestError, match="another container"):
        await made.starting.pre_start_container(RESOURCE, ["g-0"])
    made.now += REPLY_S
    assert (allocated, made.starting.any_due()) == (False, False)
