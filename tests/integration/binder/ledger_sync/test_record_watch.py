"""A damaged ledger is closed to be rebuilt: by the leader, if damage lasts, and not in a loop."""

from services.binder.ledger_sync.record_watch import MOST_REBUILDS, NOT_AGAIN_S, READ_S
from shared.model.leases.lease import LeaseState
from tests.support.binder.events import in_state
from tests.support.binder.world import NewWorld, World, lease, running
from tests.support.placer.ledger import uuid
from tests.support.waiting import until


async def overwrite(world: World, kind: str, name: str) -> None:
    connection = world.ledger._connection
    await connection._redis.hset(f"{connection.prefix}{kind}", name, "rubbish")


async def read(world: World, times: int = 1) -> None:
    """Let the binder read the ledger so many times."""
    for _ in range(times):
        world.clock.advance(READ_S)
        await world.binder.records.check_records()


async def is_open(world: World) -> bool:
    return await world.ledger.generation() is not None


async def test_a_damaged_lease_is_an_event_of_its_pod_once_it_is_restored(
    new_world: NewWorld,
) -> None:
    world = await new_world(in_state(LeaseState.ACTIVE))
    await overwrite(world, "leases", lease().pod)

    async with running(world.binder.events.write_events):
        await read(world, times=2)
        assert world.metrics.anomalies["records_unreadable"] == 1
        assert not await is_open(world)
        await world.rebuild(in_state(LeaseState.ACTIVE))
        await read(world)
        await until(lambda: world.pods.events)

    [event] = world.pods.events.values()
    assert (event["reason"], event["involvedObject"]["name"]) == ("LedgerRecordUnreadable", "p1")


async def test_totals_that_are_not_the_sums_of_their_leases_close_the_ledger(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    connection = world.ledger._connection
    device = f"{connection.prefix}devices", uuid("n1", 0)
    empty = await connection._redis.hget(*device)
    await world.restore(in_state(LeaseState.ACTIVE))
    await connection._redis.hset(*device, empty)

    await read(world)
    assert await is_open(world), "what one reading finds may pass"
    await read(world)

    assert not await is_open(world)
    assert world.metrics.anomalies["totals_wrong"] == 1


async def test_a_ledger_is_not_closed_again_for_what_a_rebuild_has_not_mended(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    await overwrite(world, "nodes", "n3")
    await read(world, times=2)
    assert not await is_open(world)
    await world.rebuild()
    await overwrite(world, "nodes", "n3")

    await read(world, times=3)
    assert await is_open(world)
    world.clock.advance(NOT_AGAIN_S)
    await read(world, times=2)

    assert not await is_open(world)


async def test_whatever_is_damaged_the_ledger_is_closed_a_few_times_only(
    new_world: NewWorld,
) -> None:
    world = await new_world()
    closed = 0
    for number in range(MOST_REBUILDS + 3):
        await overwrite(world, "nodes", f"other-{number}")
        await read(world, times=2)
        if not await is_open(world):
            closed += 1
            await world.rebuild()

    assert closed == MOST_REBUILDS


async def test_only_the_binder_that_leads_reads_the_ledger(new_world: NewWorld) -> None:
    world = await new_world()
    await world.ledger._connection.run("preemptions", "lead", "binder", "another", 60_000)
    await overwrite(world, "nodes", "n3")

    await read(world, times=3)

    assert await is_open(world)
