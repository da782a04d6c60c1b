"""The planner's mirror of the ledger, on a real Valkey."""

from collections.abc import Sequence
from itertools import groupby

import pytest

from services.planner.cluster_view import BOUND_LOOK_S, LeaseMirror
from shared.ledger.leases import RedisLeases
from shared.model.leases.lease import LeaseState
from shared.model.leases.ledger import NodeTotals
from shared.model.names import NodeName, PodUid
from tests.support.binder.world import running
from tests.support.clock import FakeClock
from tests.support.placer.ledger import ledger, reservation, reserve, share
from tests.support.waiting import until


async def everything(leases: RedisLeases) -> list[NodeTotals]:
    return [totals async for page in leases.totals.pages() for totals in page]


def note_reads(leases: RedisLeases, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[NodeName]]:
    """Return a list to which the nodes of each read are added."""
    read: list[Sequence[NodeName]] = []
    of_nodes = leases.totals.of_nodes

    async def noted(names: Sequence[NodeName]) -> list[NodeTotals]:
        read.append(names)
        return await of_nodes(names)

    monkeypatch.setattr(leases.totals, "of_nodes", noted)
    return read


async def test_only_nodes_that_have_changed_are_read_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ledger(url, {"a": 1, "b": 1}) as leases:
        clock = FakeClock()
        mirror = LeaseMirror(leases, clock)
        read = note_reads(leases, monkeypatch)

        async def is_current() -> bool:
            clock.advance(BOUND_LOOK_S)
            return await mirror.nodes() == await everything(leases)

        async with running(mirror.follow_ledger):
            await until(mirror.nodes, lambda _: len(read) > 0)
            assert read == [["a", "b"]]
            for name, node in (("p", "a"), ("q", "b")):
                await leases.bind(
                    await reserve(leases, reservation(name, share(node, 0, 4_000), node=node))
                )
                await leases.activate([(PodUid(name), NodeName(node))])
                await until(is_current)
            read.append([])
            await mirror.nodes()
            await leases.release([PodUid("p")], reason="it was deleted")
            await until(is_current)

    names = [list(group) for group, _ in groupby(read[1:])]
    assert names == [["a"], ["b"], [], ["a"]]


async def test_a_lease_is_seen_to_become_bound_at_once_and_active_soon(url: str) -> None:
    """Its node does not change by that, and is not in the feed."""
    async with ledger(url, {"a": 1}) as leases:
        clock = FakeClock()
        mirror = LeaseMirror(leases, clock)
        async with running(mirror.follow_ledger):

            async def state() -> LeaseState:
                return (await mirror.nodes())[0].leases[0].state

            reserved = await reserve(leases, reservation("p", share("a", 0, 4_000)))
            await until(mirror.nodes, lambda nodes: bool(nodes[0].leases))
            assert await state() is LeaseState.RESERVED
            await leases.bind(reserved)
            assert await state() is LeaseState.BOUND
            await leases.activate([(PodUid("p"), NodeName("a"))])
            clock.advance(BOUND_LOOK_S)
            assert await state() is LeaseState.ACTIVE


async def test_a_node_whose_leases_are_bound_is_read_again_after_seconds_only(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ledger(url, {"a": 1}) as leases:
        clock = FakeClock()
        mirror = LeaseMirror(leases, clock)
        read = note_reads(leases, monkeypatch)

        async def reads() -> int:
            before = len(read)
            await mirror.nodes()
            return len(read) - before

        async with running(mirror.follow_ledger):
            await leases.bind(await reserve(leases, reservation("p", share("a", 0, 4_000))))
            await until(mirror.nodes, lambda nodes: len(read) > 0 and bool(nodes[0].leases))
            await until(reads, lambda count: count == 0)

            clock.advance(BOUND_LOOK_S)

            assert await reads() == 1
            assert await reads() == 0


async def test_without_the_feed_of_changes_everything_is_read(url: str) -> None:
    async with ledger(url, {"a": 1, "b": 1}) as leases:
        mirror = LeaseMirror(leases, FakeClock())
        await mirror.nodes()

        await reserve(leases, reservation("p", share("a", 0, 4_000)))

        assert await mirror.nodes() == await everything(leases)
