"""What watchers and agents say of nodes: late, twice, or of what is not their own."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.binder.bind.agent_presence import REFUSED, REFUSED_S
from services.binder.ledger_sync.agent_reports import LOOKUPS_S, MOST_LOOKUPS
from services.watcher.node_trackers import NodeTracker
from services.watcher.pod_tracker import PodTracker
from shared.ledger.leases import RedisLeases
from shared.model.devices.node import NodeFacts
from shared.model.events.node_events import (
    DeviceReported,
    HealthChanged,
    LeaseHolder,
    ShareActivated,
    ShareRefused,
    ViolationFound,
)
from shared.model.events.pod_events import NodeChanged, NodesListed
from shared.model.events.request_reply import BindReply
from shared.model.leases.lease import LeaseState
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.events import activation
from tests.support.binder.world import NewWorld, World, lease, running
from tests.support.placer.ledger import facts, ledger
from tests.support.waiting import until

STOLEN = NodeName("n1")
OTHER = NodeName("n2")
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

    async with running(world.binder.events.write_events):
        await say(world)
        await until(lambda: world.pods.events)

    [event] = world.pods.events.values()
    assert (event["reason"], event["involvedObject"]["name"]) == ("AgentMessageRefused", STOLEN)
    assert world.metrics.anomalies["refused_of_nodes"] == 1
    assert await world.leases() == {VICTIM.pod: VICTIM}
    await world.binder.cordons.cordon_nodes()
    assert list(await world.cordoned()) == [STOLEN]
    assert (await world.cordoned())[STOLEN].startswith(REFUSED)


async def test_an_agent_that_names_made_up_pods_costs_the_api_server_few_requests(
    world: World,
) -> None:
    reads = Counter[str]()

    async def count() -> None:
        reads["all"] += 1

    world.pods.before_read = count
    forged = [
        ViolationFound(
            pod=PodUid(f"uid-{number}"),
            namespace=VICTIM.namespace,
            name=f"made-up-{number}",
            node=STOLEN,
            container="c",
            reason="GpuMemoryOverLease",
            message="it lies",
        )
        for number in range(4 * MOST_LOOKUPS)
    ]

    await world.binder.report_violations(forged)
    await world.binder.report_violations([replace(each, node=OTHER) for each in forged[:3]])
    assert reads["all"] == MOST_LOOKUPS + 3

    world.clock.advance(LOOKUPS_S)
    await world.binder.report_violations(forged[:3])
    assert reads["all"] == MOST_LOOKUPS + 6


async def test_a_device_s_fault_is_an_event_of_the_pods_that_have_a_lease_on_it(
    new_world: NewWorld,
) -> None:
    own = lease("own", STOLEN)
    world = await new_world(VICTIM, own)
    device = DeviceUuid("GPU-n1-0")
    holders = tuple(
        LeaseHolder(pod=each.pod, namespace=each.namespace, name="forged") for each in (VICTIM, own)
    )

    async with running(world.binder.events.write_events):
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
    both = (one.binder, two.binder)

    one.binder.refusals.refuse(STOLEN, "device.reported.v1: it lies")
    one.binder.presence.record_reports([good])
    for binding in both:
        await binding.cordons.cordon_nodes()
        assert await binding.presence.deferrals([lease("p", STOLEN)]) != {}
    cordoned = await one.cordoned()
    for world in (one, two):
        world.clock.advance(REFUSED_S)
    two.binder.presence.record_reports([good])
    for binding in both:
        await binding.cordons.cordon_nodes()

    assert list(cordoned) == [STOLEN]
    assert await one.cordoned() == {}


async def test_a_reply_about_pods_of_other_nodes_defers_none_of_them(world: World) -> None:
    own = lease("own", STOLEN)
    other = lease("other", OTHER)
    world.agents.replies[STOLEN] = BindReply(
        deferred_pods=(other.pod, own.pod), unserved_pods=(other.pod,), reason="it lies"
    )

    deferred = await world.binder.presence.deferrals([own, other])

    assert deferred.keys() == {PodUid("uid-own")}


class Watch:
    """The nodes that one watcher publishes."""

    def __init__(self) -> None:
        self.nodes = NodeTracker(PodTracker())

    def change(self, node: NodeFacts, version: int) -> list[NodeChanged]:
        return self.nodes.update(node, version)

    def listings(self) -> list[NodesListed]:
        return [event for event in self.nodes.resync() if isinstance(event, NodesListed)]

    def delete(self, node: NodeFacts, version: int) -> list[NodeChanged]:
        return self.nodes.remove(node.name, version)


async def known_nodes(leases: RedisLeases) -> dict[NodeName, NodeFacts]:
    return {node.facts.name: node.facts for node in (await leases.snapshot()).nodes}


async def test_the_newest_of_a_batch_counts_in_any_order(url: str) -> None:
    node = facts("a")
    watch = Watch()
    there = watch.change(node, 1)
    gone = watch.delete(node, 2)
    back = watch.change(node, 3)
    async with ledger(url, {}) as leases:
        for batch in ([*there, *back, *gone], [*gone, *there]):
            await World(leases).binder.updater.save_nodes(batch)

            assert set(await known_nodes(leases)) == {node.name}


async def test_a_node_that_was_deleted_without_an_event_is_removed_with_the_next_list(
    url: str,
) -> None:
    """Events may be lost; the lists that follow compare the ledger with the cluster."""
    kept = facts("a")
    gone = facts("b")
    watch = Watch()
    async with ledger(url, {}) as leases:
        world = World(leases)
        world.pods.nodes = {kept.name}
        await world.binder.updater.save_nodes([*watch.change(kept, 1), *watch.change(gone, 2)])
        watch.delete(gone, 3)
        watch.nodes.revision = 3

        await world.binder.reconciler.remove_deleted_nodes(watch.listings())

        assert set(await known_nodes(leases)) == {kept.name}


async def test_a_list_that_is_older_than_a_node_does_not_remove_it(url: str) -> None:
    new = facts("new")
    watch = Watch()
    watch.nodes.revision = 5
    [before] = watch.listings()
    async with ledger(url, {}) as leases:
        world = World(leases)
        await world.binder.updater.save_nodes(watch.change(new, 6))

        await world.binder.reconciler.remove_deleted_nodes([before])
        assert set(await known_nodes(leases)) == {new.name}, "saved after the list"

        world.pods.nodes = {new.name}
        await world.binder.reconciler.remove_deleted_nodes([replace(before, revision=9)])
        assert set(await known_nodes(leases)) == {new.name}, "the API server has it"


async def test_a_restored_api_server_replaces_states_of_higher_versions_at_once(url: str) -> None:
    cordoned = replace(facts("a"), unschedulable=True)
    gone = facts("b")
    watch = Watch()
    restored = Watch()
    restored.nodes.revision = 40
    restored.nodes.revisions_forgotten = True
    async with ledger(url, {}) as leases:
        world = World(leases)
        world.pods.nodes = {cordoned.name}
        binder = world.binder
        before = [*watch.change(cordoned, 90), *watch.change(gone, 91)]
        await binder.updater.save_nodes(before)

        restored.change(facts("a"), 30)
        [event, listing] = restored.nodes.resync()
        assert isinstance(event, NodeChanged)
        assert isinstance(listing, NodesListed)
        await binder.updater.save_nodes([*before[:1], event])
        await binder.reconciler.remove_deleted_nodes([listing])
        assert list((await known_nodes(leases)).values()) == [facts("a")]

        await binder.updater.save_nodes(restored.change(cordoned, 41))
        assert (await known_nodes(leases))[cordoned.name].unschedulable
