"""What a lease is charged whose node or device is gone when the timekeeper reads of it."""

from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from shared.model.lease import Lease, LeaseState
from shared.model.names import Namespace, NodeName
from tests.support.placer.ledger import facts, report, reservation, reserve, share
from tests.support.servers.valkey import ValkeyServer
from tests.support.timekeeper.accounts import AccountLedger, account_ledger, budget
from tests.support.waiting import until

DEFAULT, NODE = Namespace("default"), NodeName("a")
QUARTER = 250


@pytest.fixture
async def opened(server: ValkeyServer) -> AsyncIterator[AccountLedger]:
    async with account_ledger(server.url, budget(None, DEFAULT)) as found:
        yield found


async def bound_for_a_moment(found: AccountLedger) -> Lease:
    """Bind a pod to a quarter of a device; return when its lease has lasted some milliseconds."""
    [reserved] = await reserve(found.leases, reservation("p", share("a", 0)))
    await found.leases.bind([reserved])
    bound_ms = await found.store.now_ms()
    await until(found.store.now_ms, lambda now_ms: now_ms > bound_ms + 1)
    return structs.replace(reserved, state=LeaseState.BOUND)


async def assert_charged_as_a_quarter(found: AccountLedger) -> None:
    """Count with a replica that has read nothing before, and compare what it charges."""
    keeper = found.timekeeper(charge_every_s=0, store=found.store)
    await keeper.count()
    charges = await found.charges(DEFAULT)
    assert {(each.weight, each.model) for each in charges} == {(QUARTER, "Tesla T4")}


@pytest.mark.parametrize("is_released", [False, True])
async def test_a_lease_counts_by_its_device_although_the_node_was_removed_before(
    opened: AccountLedger, is_released: bool
) -> None:
    """With the last lease, the ledger also deletes what it knew of the devices."""
    bound = await bound_for_a_moment(opened)
    await opened.leases.remove_node(NODE)
    if is_released:
        await opened.leases.release([bound.pod], reason="a test")

    await assert_charged_as_a_quarter(opened)


async def test_a_lease_counts_by_its_device_although_the_node_does_not_report_it_any_more(
    opened: AccountLedger,
) -> None:
    await bound_for_a_moment(opened)
    await opened.leases.save_devices([report("a", [])])

    await assert_charged_as_a_quarter(opened)


async def test_a_lease_of_a_rebuilt_ledger_counts_by_its_device_before_that_is_reported(
    opened: AccountLedger,
) -> None:
    bound = await bound_for_a_moment(opened)
    token = await opened.leases.begin_rebuild(now=bound.created_at, force=True)
    assert token
    await opened.leases.save_nodes([facts("a")])
    assert not await opened.leases.restore([bound], now=bound.created_at, token=token)
    assert await opened.leases.finish_rebuild(token)
    await opened.leases.release([bound.pod], reason="a test")

    await assert_charged_as_a_quarter(opened)
