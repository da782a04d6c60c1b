"""What agents say of an earlier or expired lease of a pod says nothing of its present one."""

import pytest

from services.binder.bind.pod_binder import GIVE_UP_AGE_S
from shared.model.events.pod_events import BindingFailed
from shared.model.events.request_reply import BindReply
from shared.model.leases.lease import LeaseState
from tests.support.binder.events import N1
from tests.support.binder.world import NOW, NewWorld, chosen, lease, running


async def test_what_a_node_replies_about_an_earlier_lease_does_not_end_the_pods_present_one(
    new_world: NewWorld,
) -> None:
    present = lease(version=2, created_at=NOW - GIVE_UP_AGE_S)
    earlier = lease(created_at=NOW - 20)
    world = await new_world(present)
    refusals = {earlier.pod: "its share was given to another pod later"}
    world.agents.replies = {N1: BindReply(window_open=False, refusals=refusals)}

    events = await world.binder.pods.bind_pods(chosen(earlier))

    assert events == [], "the present lease has a placement of its own"
    assert await world.states() == {"p1": LeaseState.RESERVED}


@pytest.mark.parametrize("again", [True, False], ids=["placed again", "not yet"])
async def test_no_agent_keeps_a_place_for_a_reservation_that_has_expired(
    new_world: NewWorld, *, again: bool
) -> None:
    expired = lease(created_at=NOW - 40, expires_at=NOW - 10)
    others = [lease("p2", node="n2"), *([lease(version=2)] if again else [])]
    world = await new_world(*others)

    async with running(world.binder.sender.send_bindings):
        events = await world.binder.pods.bind_pods(chosen(expired, lease("p2", node="n2")))

    assert [lease.name for lease in world.agents.bind_requests] == ["p2"]
    assert [name for name, *_ in world.pods.bindings] == ["p2"]
    assert any(isinstance(event, BindingFailed) for event in events) is not again
