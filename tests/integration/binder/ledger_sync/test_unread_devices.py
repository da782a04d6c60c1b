"""Devices that their node's agent cannot read stay with the node, and get no pods."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.binder.ledger_sync.unread_devices import UNMEASURED_MIB
from shared.model.bounds import MOST_DEVICES
from shared.model.devices.device import Device, UnreadDevice
from shared.model.events.node_events import DeviceReported
from shared.model.names import DeviceUuid, NodeName
from tests.support.binder.world import NOW, World
from tests.support.placer.ledger import device, report

N1 = NodeName("n1")
N2 = NodeName("n2")
FIRST, SECOND = device(N1, 0), device(N1, 1)
UNREAD = UnreadDevice(uuid=SECOND.uuid, index=1, model="Tesla T4", reason="it hangs")
UNNAMED_GPU = UnreadDevice(reason="the driver could not initialise it")


def partly(
    *unread: UnreadDevice, at: float, devices: Sequence[Device] = (FIRST,)
) -> DeviceReported:
    return replace(report(N1, devices, at=at), unread=unread)


async def devices_of(world: World, node: NodeName) -> dict[DeviceUuid, Device]:
    (totals,) = await world.ledger.totals.of_nodes([node])
    return {device.uuid: device for device, _ in totals.node.devices}


@pytest.mark.parametrize("unread", [UNREAD, UNNAMED_GPU], ids=["named", "unnamed"])
async def test_a_device_that_cannot_be_read_stays_as_it_was_and_no_other_node_takes_it(
    world: World, unread: UnreadDevice
) -> None:
    await world.binder.save_devices([report(N1, [FIRST, SECOND], at=NOW)])
    await world.binder.save_devices([partly(unread, at=NOW + 1)])
    stolen = report(N2, [device(N2, 0), replace(SECOND, index=1)], at=NOW + 2)
    await world.binder.save_devices([stolen])

    kept = await devices_of(world, N1)
    assert kept == {
        FIRST.uuid: FIRST,
        SECOND.uuid: replace(SECOND, healthy=False, fault=f"NoResponse: {unread.reason}"),
    }
    assert SECOND.uuid not in await devices_of(world, N2)

    await world.binder.save_devices([report(N1, [FIRST, SECOND], at=NOW + 3)])
    assert (await devices_of(world, N1))[SECOND.uuid] == SECOND


async def test_a_device_that_nobody_has_read_belongs_to_its_node_until_the_node_lacks_it(
    world: World,
) -> None:
    await world.binder.save_devices([partly(UNREAD, at=NOW)])
    stolen = report(N2, [device(N2, 0), replace(SECOND, index=1)], at=NOW + 1)
    await world.binder.save_devices([stolen])

    unread = (await devices_of(world, N1))[SECOND.uuid]
    assert (unread.memory_mib, unread.healthy, unread.model) == (UNMEASURED_MIB, False, "Tesla T4")
    assert SECOND.uuid not in await devices_of(world, N2)

    await world.binder.save_devices([partly(at=NOW + 2)])
    await world.binder.save_devices([replace(stolen, reported_at=NOW + 3)])
    assert SECOND.uuid in await devices_of(world, N2)


async def test_an_agent_takes_no_device_of_another_node_by_reporting_that_it_cannot_read_it(
    world: World,
) -> None:
    before = await devices_of(world, N2)
    (theirs,) = before.values()
    await world.binder.save_devices([partly(replace(UNREAD, uuid=theirs.uuid), at=NOW)])

    assert await devices_of(world, N2) == before
    assert theirs.uuid not in await devices_of(world, N1)


async def test_a_node_keeps_no_more_devices_than_a_node_can_have(world: World) -> None:
    for at in range(3):
        first = at * MOST_DEVICES // 2
        devices = [device(N1, first + number) for number in range(MOST_DEVICES // 2)]
        await world.binder.save_devices([partly(UNNAMED_GPU, at=NOW + at, devices=devices)])

    kept = await devices_of(world, N1)
    assert len(kept) == MOST_DEVICES
    assert {device.uuid for device in devices} < kept.keys()


async def test_unread_devices_are_kept_while_the_ledger_is_rebuilt(world: World) -> None:
    await world.lose()
    token = await world.ledger.begin_rebuild(now=NOW, force=True)
    await world.binder.save_devices([report(N1, [FIRST, SECOND], at=NOW)])
    await world.binder.save_devices([partly(UNNAMED_GPU, at=NOW + 1)])
    assert await world.ledger.finish_rebuild(token or "")

    assert not (await devices_of(world, N1))[SECOND.uuid].healthy
