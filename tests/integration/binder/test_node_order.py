"""Changes and lists of nodes that arrive late or twice, on a real ledger."""

from dataclasses import replace

from services.watcher.trackers import NodeTracker, PodTracker
from shared.ledger.leases import RedisLeases
from shared.model.events.pod_events import NodeChanged, NodesListed
from shared.model.names import NodeName
from shared.model.node import NodeFacts
from tests.support.binder.world import World
from tests.support.placer.ledger import facts, ledger


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
    node, watch = facts("a"), Watch()
    there, gone = watch.change(node, 1), watch.delete(node, 2)
    back = watch.change(node, 3)
    async with ledger(url, {}) as leases:
        for batch in ([*there, *back, *gone], [*gone, *there]):
            await World(leases).binder.save_nodes(batch)

            assert set(await known_nodes(leases)) == {node.name}


async def test_a_node_that_was_deleted_without_an_event_is_removed_with_the_next_list(
    url: str,
) -> None:
    """Events may be lost; the lists that follow compare the ledger with the cluster."""
    kept, gone, watch = facts("a"), facts("b"), Watch()
    async with ledger(url, {}) as leases:
        world = World(leases)
        world.pods.nodes = {kept.name}
        await world.binder.save_nodes([*watch.change(kept, 1), *watch.change(gone, 2)])
        watch.delete(gone, 3)
        watch.nodes.revision = 3

        await world.binder.remove_deleted_nodes(watch.listings())

        assert set(await known_nodes(leases)) == {kept.name}


async def test_a_list_that_is_older_than_a_node_does_not_remove_it(url: str) -> None:
    new, watch = facts("new"), Watch()
    watch.nodes.revision = 5
    [before] = watch.listings()
    async with ledger(url, {}) as leases:
        world = World(leases)
        await world.binder.save_nodes(watch.change(new, 6))

        await world.binder.remove_deleted_nodes([before])
        assert set(await known_nodes(leases)) == {new.name}, "saved after the list"

        world.pods.nodes = {new.name}
        await world.binder.remove_deleted_nodes([replace(before, revision=9)])
        assert set(await known_nodes(leases)) == {new.name}, "the API server has it"


async def test_a_restored_api_server_replaces_states_of_higher_versions_at_once(url: str) -> None:
    cordoned, gone = replace(facts("a"), unschedulable=True), facts("b")
    watch, restored = Watch(), Watch()
    restored.nodes.revision, restored.nodes.revisions_forgotten = 40, True
    async with ledger(url, {}) as leases:
        world = World(leases)
        world.pods.nodes, binder = {cordoned.name}, world.binder
        before = [*watch.change(cordoned, 90), *watch.change(gone, 91)]
        await binder.save_nodes(before)

        restored.change(facts("a"), 30)
        [event, listing] = restored.nodes.resync()
        assert isinstance(event, NodeChanged)
        assert isinstance(listing, NodesListed)
        await binder.save_nodes([*before[:1], event])
        await binder.remove_deleted_nodes([listing])
        assert list((await known_nodes(leases)).values()) == [facts("a")]

        await binder.save_nodes(restored.change(cordoned, 41))
        assert (await known_nodes(leases))[cordoned.name].unschedulable
