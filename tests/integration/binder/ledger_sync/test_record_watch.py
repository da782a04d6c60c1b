"""What is damaged is written anew: by the leader, if damage lasts, and not in a loop."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from services.binder.ledger_sync import record_watch
from services.binder.ledger_sync.record_watch import (
    MOST_RENEWED,
    MOST_REPAIRS,
    NOT_AGAIN_S,
    READ_S,
)
from shared.ledger.total_checks import Difference, LedgerReading
from shared.model.events.pod_events import ResyncRequested
from shared.model.leases.lease import Lease, LeaseState
from tests.support.binder.events import activation, bound, in_state, listing, report
from tests.support.binder.world import NewWorld, World, lease, running
from tests.support.placer.ledger import device, facts, uuid
from tests.support.placer.ledger import report as device_report
from tests.support.waiting import until


async def overwrite(world: World, kind: str, name: str) -> None:
    connection = world.ledger._connection
    await connection._redis.hset(f"{connection.prefix}{kind}", name, "rubbish")


async def stored(world: World, kind: str, name: str) -> bytes | None:
    connection = world.ledger._connection
    value: bytes | None = await connection._redis.hget(f"{connection.prefix}{kind}", name)
    return value


async def read(world: World, times: int = 1) -> list[ResyncRequested]:
    """Let the binder read the ledger so many times; return the events of the last."""
    events: list[ResyncRequested] = []
    for _ in range(times):
        world.clock.advance(READ_S)
        events = list(await world.binder.records.check_records() or ())
    return events


async def read_with_evidence(world: World, *leases: Lease) -> None:
    """Read the ledger; answer the request for a list of pods with these, and their agents."""
    await read(world)
    world.clock.advance(READ_S)
    reading = asyncio.ensure_future(world.binder.records.check_records())
    asked: Sequence[str] = ()
    while not reading.done():
        await until(lambda: world.clock.sleepers or reading.done())
        requests = [e for e in world.bus.published if isinstance(e, ResyncRequested)]
        if requests and not asked:
            asked = [event.request_id for event in requests]
            chunk = listing(*map(bound, leases), request_id=asked[-1])
            await world.binder.evidence.observe_lists([chunk])
            active = [activation(of) for of in leases if of.state is LeaseState.ACTIVE]
            await world.binder.evidence.observe_reports([report("n1", *active)])
        world.clock.advance(0.25)
    await reading


async def is_open(world: World) -> bool:
    return await world.ledger.generation() is not None


async def test_a_damaged_lease_is_restored_from_its_agent_and_pod_while_others_are_served(
    new_world: NewWorld,
) -> None:
    world = await new_world(in_state(LeaseState.ACTIVE), lease("p2", "n2", version=2))
    before = await world.leases()
    of_pod, other = sorted(before.values(), key=lambda of: of.name)
    generation = await world.ledger.generation()
    neighbour = await stored(world, "leases", other.pod)
    await overwrite(world, "leases", of_pod.pod)

    async with running(world.binder.events.write_events):
        await read_with_evidence(world, of_pod)
        assert await world.leases() == before
        assert await stored(world, "leases", other.pod) == neighbour
        assert await world.ledger.generation() == generation, "the ledger was open all the time"
        assert world.metrics.anomalies["records_unreadable"] == 1
        await read(world)
        await until(lambda: world.pods.events)

    [event] = world.pods.events.values()
    assert (event["reason"], event["involvedObject"]["name"]) == ("LedgerRecordUnreadable", "p1")


async def test_a_damaged_reservation_of_a_pod_that_is_not_bound_ends(new_world: NewWorld) -> None:
    world = await new_world(lease())
    await overwrite(world, "leases", lease().pod)

    await read_with_evidence(world)

    assert await world.leases() == {}
    assert await read(world, times=2) == []
    assert await is_open(world)


async def test_a_damaged_device_and_node_are_whole_once_they_are_reported_again(
    new_world: NewWorld,
) -> None:
    world = await new_world(in_state(LeaseState.ACTIVE))
    before = await world.ledger.snapshot()
    await overwrite(world, "devices", uuid("n1", 0))
    await overwrite(world, "nodes", "n1")

    events = await read(world, times=2)
    await world.ledger.save_nodes([facts("n1")])
    events += await read(world, times=2)
    await world.ledger.save_devices([device_report("n1", [device("n1", 0)])])
    await world.ledger.save_nodes([facts("n1")])

    assert [type(event) for event in events] == [ResyncRequested] * len(events)
    after = await world.ledger.snapshot()
    assert [node.facts for node in after.nodes] == [node.facts for node in before.nodes]
    assert [node.used for node in after.nodes] == [node.used for node in before.nodes]
    assert await read(world, times=2) == []


async def test_totals_that_are_not_the_sums_of_their_leases_close_the_ledger(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    connection = world.ledger._connection
    name = f"{connection.prefix}devices", uuid("n1", 0)
    empty = await connection._redis.hget(*name)
    await world.restore(in_state(LeaseState.ACTIVE))
    await connection._redis.hset(*name, empty)

    await read(world)
    assert await is_open(world), "what one reading finds may pass"
    await read(world)

    assert not await is_open(world)
    assert world.metrics.anomalies["totals_wrong"] == 1


async def test_bindings_go_on_while_totals_are_compared(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await new_world(lease())
    threads = list[int]()

    def note_thread(reading: LedgerReading) -> list[Difference]:
        threads.append(threading.get_ident())
        return []

    monkeypatch.setattr(record_watch, "CHECKS", (note_thread,))

    await read(world)

    assert threads
    assert threading.get_ident() not in threads


async def test_a_ledger_with_many_damaged_records_is_rebuilt(new_world: NewWorld) -> None:
    world = await new_world()
    for number in range(MOST_RENEWED + 1):
        await overwrite(world, "nodes", f"other-{number}")

    await read(world, times=2)

    assert not await is_open(world)


async def test_a_record_that_is_damaged_again_is_not_written_anew_again_at_once(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    await overwrite(world, "waiting", "p3")
    assert await read(world, times=2)
    assert await stored(world, "waiting", "p3") is None
    await overwrite(world, "waiting", "p3")

    assert not await read(world, times=3)
    assert await stored(world, "waiting", "p3") == b"rubbish"
    world.clock.advance(NOT_AGAIN_S)

    await read(world)
    assert await stored(world, "waiting", "p3") is None


@pytest.mark.parametrize("kind", ["waiting", "unsynced"])
async def test_whatever_is_damaged_records_are_written_anew_a_few_times_only(
    new_world: NewWorld, kind: str
) -> None:
    world = await new_world()
    renewed = 0
    for number in range(MOST_REPAIRS + 3):
        await overwrite(world, kind, f"other-{number}")
        renewed += len(await read(world, times=2))

    assert renewed == MOST_REPAIRS
    assert await is_open(world)


async def test_only_the_binder_that_leads_reads_the_ledger(new_world: NewWorld) -> None:
    world = await new_world()
    await world.ledger._connection.run("preemptions", "lead", "binder", "another", 60_000)
    await overwrite(world, "nodes", "n3")

    await read(world, times=3)

    assert await stored(world, "nodes", "n3") == b"rubbish"
