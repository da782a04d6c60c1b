"""What a node says of what is not its own is refused, and the node is cordoned."""

from collections.abc import Callable
from typing import Any

import pytest

from services.binder.bind.agent_presence import REFUSED, REFUSED_S
from services.binder.observations import PodSnapshot
from shared.model.events.node_events import (
    DeviceReported,
    HealthChanged,
    LeaseHolder,
    ShareActivated,
    ShareRefused,
    ViolationFound,
)
from shared.model.events.request_reply import BindReply
from shared.model.lease import LeaseState
from shared.model.names import DeviceUuid, NodeName, PodUid
from tests.support.binder.events import activation
from tests.support.binder.world import NewWorld, World, lease, running
from tests.support.waiting import until

STOLEN, OTHER = NodeName("n1"), NodeName("n2")
VICTIM = lease("victim", OTHER, state=LeaseState.BOUND)
NAMED: dict[str, Any] = {"pod": VICTIM.pod, "namespace": VICTIM.namespace, "name": VICTIM.name}


async def violation(world: World) -> None:
    found = ViolationFound(
        **NAMED, node=STOLEN, container="c", reason="GpuMemoryOverLease", message="it lies"
    )
    await world.binder.report_violations([found])


async def refusal(world: World) -> None:
    await world.binder.release_refused([ShareRefused(**NAMED, node=STOLEN, reason="it lies")])


async def activated(world: World) -> None:
    forged = activation(lease("victim", STOLEN))
    await world.binder.activate_shares([ShareActivated(node=STOLEN, allocation=forged)])


async def reported(world: World) -> None:
    forged = activation(lease("victim", STOLEN))
    await world.binder.save_devices(
        [DeviceReported(node=STOLEN, devices=(), served=(), allocations=(forged,))]
    )


@pytest.mark.parametrize("say", [violation, refusal, activated, reported])
async def test_what_a_node_says_of_the_pod_of_another_node_is_an_event_of_the_node_alone(
    new_world: NewWorld,
    say: Callable[[World], Any],
) -> None:
    world = await new_world(VICTIM)
    world.pods.seen["victim"] = PodSnapshot(VICTIM.pod, OTHER)

    async with running(world.binder.write_events):
        await say(world)
        await until(lambda: world.pods.events)

    [event] = world.pods.events.values()
    assert (event["reason"], event["involvedObject"]["name"]) == ("AgentMessageRefused", STOLEN)
    assert world.metrics.anomalies["refused_of_nodes"] == 1
    assert await world.leases() == {VICTIM.pod: VICTIM}
    await world.binder.binding.cordons.step()
    assert list(await world.cordoned()) == [STOLEN]
    assert (await world.cordoned())[STOLEN].startswith(REFUSED)


async def test_a_device_s_fault_is_an_event_of_the_pods_that_have_a_lease_on_it(
    new_world: NewWorld,
) -> None:
    own = lease("own", STOLEN)
    world = await new_world(VICTIM, own)
    device = DeviceUuid("GPU-n1-0")
    holders = tuple(
        LeaseHolder(pod=each.pod, namespace=each.namespace, name="forged") for each in (VICTIM, own)
    )

    async with running(world.binder.write_events):
        await world.binder.report_health(
            [HealthChanged(node=STOLEN, device=device, index=0, healthy=False, holders=holders)]
        )
        await until(lambda: len(world.pods.events) >= 2)

    involved = {each["involvedObject"]["name"] for each in world.pods.events.values()}
    assert involved == {"own", STOLEN}


async def test_a_node_stays_cordoned_until_a_report_of_it_is_accepted_by_any_binder(
    new_world: NewWorld,
) -> None:
    one = await new_world()
    two = one.replica()
    good = DeviceReported(node=STOLEN, devices=(), served=())
    both = (one.binder.binding, two.binder.binding)

    one.binder.reports.refusals.refuse(STOLEN, "device.reported.v1: it lies")
    one.binder.binding.presence.record_reports([good])
    for binding in both:
        await binding.cordons.step()
        assert await binding.presence.deferrals([lease("p", STOLEN)]) != {}
    cordoned = await one.cordoned()
    for world in (one, two):
        world.clock.advance(REFUSED_S)
    two.binder.binding.presence.record_reports([good])
    for binding in both:
        await binding.cordons.step()

    assert list(cordoned) == [STOLEN]
    assert await one.cordoned() == {}


async def test_a_reply_about_pods_of_other_nodes_defers_none_of_them(new_world: NewWorld) -> None:
    world = await new_world()
    own, other = lease("own", STOLEN), lease("other", OTHER)
    world.agents.replies[STOLEN] = BindReply(
        deferred_pods=(other.pod, own.pod), unserved_pods=(other.pod,), reason="it lies"
    )

    deferred = await world.binder.binding.presence.deferrals([own, other])

    assert deferred.keys() == {PodUid("uid-own")}
