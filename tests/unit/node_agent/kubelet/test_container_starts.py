"""Which containers have devices and are still to be started."""

import pytest

from services.node_agent.kubelet.registration import REPLY_S, START_S, ContainerStarts
from shared.model.errors import RequestError
from tests.support.node_agent.plugin_handler import FakeHandler

RESOURCE = "volcano.sh/vgpu-number"


class Started:
    def __init__(self) -> None:
        self.now = 100.0
        self.starting = ContainerStarts(FakeHandler(), ticks=lambda: self.now)


async def test_a_container_starts_from_its_allocation_to_the_reply_to_its_start() -> None:
    made = Started()
    before = made.starting.any_due()
    await made.starting.allocate(RESOURCE, ["g-1", "g-0"])
    allocated = made.starting.any_due()
    await made.starting.pre_start_container(RESOURCE, ["g-0", "g-1"])
    replying = made.starting.any_due()
    made.now += REPLY_S
    assert (before, allocated, replying, made.starting.any_due()) == (False, True, True, False)


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
    with pytest.raises(RequestError, match="a reason"):
        await made.starting.allocate(RESOURCE, ["bad"])
    allocated = made.starting.any_due()
    with pytest.raises(RequestError, match="not allocated"):
        await made.starting.pre_start_container(RESOURCE, ["bad"])
    made.now += REPLY_S

    assert (allocated, made.starting.any_due()) == (False, False)
