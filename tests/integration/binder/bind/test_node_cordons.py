"""A node whose agent is silent is cordoned until the agent replies, or another plugin serves it."""

import asyncio

import pytest

from services.binder.bind.agent_presence import (
    MAX_RETRY_S,
    NO_AGENT_S,
    RETRY_S,
    TRUSTED_S,
    AgentPresence,
    NodeCordons,
)
from services.binder.bind.pod_binder import EXPLAIN_S, GIVE_UP_S
from services.binder.observations import PodSnapshot
from shared.model.errors import UnavailableError
from shared.model.events.pod_events import BindingFailed, LeaseChanged
from shared.model.events.request_reply import BindReply
from shared.model.lease import LeaseState
from tests.support.binder.events import N1, N2, Agents, away
from tests.support.binder.world import NOW, NewWorld, World, chosen, lease, running
from tests.support.clock import FakeClock
from tests.support.waiting import until


def cordons(world: World, agents: Agents, clock: FakeClock) -> NodeCordons:
    return NodeCordons(world.ledger, AgentPresence(agents, agents.reported_by_agent, clock))


async def test_a_node_is_cordoned_after_two_missed_replies_and_uncordoned_by_the_next(
    new_world: NewWorld,
) -> None:
    world, agents, clock = await new_world(), Agents(), FakeClock()
    agents.hanging.add(N1)
    it = cordons(world, agents, clock)

    await it.presence.deferrals([lease()])
    await it.step()
    slow = dict(await world.cordoned())
    clock.advance(RETRY_S)
    await it.presence.deferrals([lease()])
    await it.step()
    cordoned = dict(await world.cordoned())
    agents.there[N1] = BindReply()
    clock.advance(MAX_RETRY_S)
    await it.step()

    assert slow == {}
    assert list(cordoned) == [N1]
    assert "does not respond" in cordoned[N1]
    assert await world.cordoned() == {}


async def test_a_node_is_cordoned_at_once_when_its_agent_is_being_stopped(
    new_world: NewWorld,
) -> None:
    world, agents, clock = await new_world(), Agents(), FakeClock()
    agents.there[N1] = away("p1")
    it = cordons(world, agents, clock)

    await it.presence.deferrals([lease()])
    await it.step()

    assert await world.cordoned() == {N1: "its agent is being stopped"}


async def test_a_device_report_of_a_cordoned_node_has_its_agent_probed_at_once(
    new_world: NewWorld,
) -> None:
    world, agents, clock = await new_world(), Agents(), FakeClock()
    agents.hanging.add(N1)
    it = cordons(world, agents, clock)
    for _ in range(8):
        await it.presence.deferrals([lease()])
        await it.step()
        clock.advance(MAX_RETRY_S)
    await it.step()
    agents.there[N1] = BindReply()

    await it.step()
    assert N1 in await world.cordoned(), "its pause is not over"
    it.presence.mark_present([N1, N2])
    async with asyncio.timeout(30):
        await it.wait()
    await it.step()

    assert await world.cordoned() == {}


async def test_a_node_of_another_device_plugin_is_uncordoned_and_gets_no_request(
    new_world: NewWorld,
) -> None:
    world, agents, clock = await new_world(), Agents(), FakeClock()
    agents.there[N1] = BindReply()
    one, two = cordons(world, agents, clock), cordons(world, agents, clock)
    for it in (one, two):
        await it.presence.deferrals([lease()])
    agents.there.clear()
    clock.advance(TRUSTED_S)
    for _ in range(2):
        await one.presence.deferrals([lease()])
        clock.advance(RETRY_S)
    for it in (one, two):
        await it.step()
    cordoned = dict(await world.cordoned())

    one.presence.mark_absent([N1])
    for it in (one, two):
        await it.step()
    requests = agents.requests
    clock.advance(NO_AGENT_S)

    assert list(cordoned) == [N1]
    assert await world.cordoned() == {}
    assert await one.presence.deferrals([lease()]) == {}
    assert agents.requests == requests
    assert await two.presence.deferrals([lease()]) == {}, "it knows that the node is uncordoned"
    for it in (one, two):
        await it.step()
    assert await world.cordoned() == {}


async def test_a_binder_uncordons_the_node_of_another_only_after_a_reply(
    new_world: NewWorld,
) -> None:
    world, agents, clock = await new_world(), Agents(), FakeClock()
    agents.there[N1] = BindReply()
    one, two = cordons(world, agents, clock), cordons(world, agents, clock)
    await two.presence.deferrals([lease()])
    agents.there.clear()
    agents.hanging.add(N1)
    for _ in range(2):
        await one.presence.deferrals([lease()])
        clock.advance(RETRY_S)
    await one.step()

    await two.step()
    assert N1 in await world.cordoned()
    assert (await two.presence.deferrals([lease()])) != {}
    agents.there[N1] = BindReply()
    clock.advance(MAX_RETRY_S)
    await two.step()
    assert await world.cordoned() == {}
    await one.step()
    await one.step()
    assert await world.cordoned() == {}, "the other one has the newer reply"
    assert await one.presence.deferrals([lease()]) == {}


async def test_a_pod_on_a_cordoned_node_is_explained_and_then_placed_elsewhere(
    new_world: NewWorld,
) -> None:
    new = lease("p1", created_at=NOW)
    world = await new_world(new)
    world.agents.replies = {N1: away("p1")}
    world.pods.seen["p1"] = PodSnapshot(new.pod, None, resource_version="7")
    batch = chosen(new)

    with pytest.raises(UnavailableError, match="being stopped"):
        await world.binder.bind_pods(batch)
    world.clock.advance(EXPLAIN_S)
    with pytest.raises(UnavailableError, match="being stopped"):
        await world.binder.bind_pods(batch)
    async with running(world.binder.write_conditions):
        await until(lambda: world.pods.patches)
    world.clock.advance(GIVE_UP_S)
    events = await world.binder.bind_pods(batch)

    [(_, patch)] = world.pods.patches
    [condition] = patch["status"]["conditions"]
    assert condition["message"] == (
        "its share is reserved on node n1, but it must wait: its agent is being stopped"
    )
    assert [type(event) for event in events] == [LeaseChanged, BindingFailed]
    assert await world.leases() == {}


async def test_only_a_pod_that_is_deferred_for_a_while_is_explained(new_world: NewWorld) -> None:
    new, old = lease("p1", created_at=NOW), lease("p2", created_at=NOW - EXPLAIN_S)
    world = await new_world(new, old)
    world.agents.replies = {N1: away("p1", "p2")}
    for each in (new, old):
        seen = PodSnapshot(each.pod, None, resource_version="7")
        world.pods.seen[each.name] = seen

    with pytest.raises(UnavailableError, match="being stopped"):
        await world.binder.bind_pods(chosen(new, old))
    async with running(world.binder.write_conditions):
        await until(lambda: world.pods.patches)

    assert [name for name, _ in world.pods.patches] == ["p2"]


async def test_a_committed_lease_is_not_given_up_however_long_its_node_is_cordoned(
    new_world: NewWorld,
) -> None:
    bound = lease("p1", state=LeaseState.BOUND)
    world = await new_world(bound)
    world.agents.replies = {N1: away("p1")}

    for _ in range(3):
        with pytest.raises(UnavailableError, match="being stopped"):
            await world.binder.bind_pods(chosen(bound))
        world.clock.advance(GIVE_UP_S)

    assert list(await world.leases()) == [bound.pod]


async def test_a_late_placement_does_not_wait_for_a_node_that_its_pod_has_left(
    new_world: NewWorld,
) -> None:
    world = await new_world(lease("p1", node="n2", state=LeaseState.ACTIVE))
    world.agents.replies = {N1: away("p1")}

    events = await world.binder.bind_pods(chosen(lease("p1")))

    assert not events
    assert [each.node for each in (await world.leases()).values()] == [N2]
