"""Small nodes, shares and reservations for tests of the ledger, and a gang of three pods."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from msgspec import structs

from services.binder.ledger_sync.record_watch import damages_in
from shared.ledger.leases import RedisLeases
from shared.model.devices.device import Device, DeviceUse
from shared.model.devices.node import NodeFacts
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import Lease, Share
from shared.model.leases.ledger import (
    NoCapacity,
    Reservation,
    ReservedLease,
    WaitingPod,
    counted_use,
)
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.placement import Placement, Refusal
from shared.model.requests.request import Gang, PodRequest, SharingPolicy
from tests.support import build

NOW = 1_787_000_000.0
_prefixes = count()


def uuid(node: str, gpu: int) -> DeviceUuid:
    return DeviceUuid(f"GPU-{node}-{gpu}")


def device(node: str, gpu: int, **changed: Any) -> Device:
    defaults = {"model": "Tesla T4", "memory_mib": 16_000, "slots": 4}
    return build.device(changed.pop("uuid", uuid(node, gpu)), gpu, **(defaults | changed))


def facts(name: str, **amounts: int) -> NodeFacts:
    return NodeFacts(name=NodeName(name), allocatable={"cpu": 64_000, "pods": 110, **amounts})


def report(name: str, devices: Sequence[Device], at: float = 0.0) -> DeviceReported:
    return DeviceReported(
        node=NodeName(name),
        devices=tuple(devices),
        served=("volcano.sh/vgpu-number",),
        reported_at=at,
    )


def share(node: str, gpu: int = 0, mib: int = 4_000, cores: int = 0, **more: Any) -> Share:
    exclusive = cores == 100 or more.get("whole")
    defaults: dict[str, Any] = {
        "device_mib": 16_000,
        "device_model": "Tesla T4",
        "memory_mib": mib,
        "cores_percent": cores,
        "sharing": SharingPolicy.EXCLUSIVE if exclusive else SharingPolicy.SHARED,
    }
    where = more.pop("device", uuid(node, gpu))
    index = more.pop("index", gpu)
    return build.share(where, index, **(defaults | more))


def reservation(
    pod: str, *shares: Share, node: str = "a", tag: str = "", cpu: int = 100
) -> Reservation:
    return reservation_among(pod, [(node, shares)], tag=tag, cpu=cpu)


def reservation_among(
    pod: str,
    candidates: Sequence[tuple[str, Sequence[Share]]],
    *,
    tag: str = "",
    cpu: int = 100,
) -> Reservation:
    return Reservation(
        pod=PodUid(pod),
        namespace=Namespace("default"),
        name=f"name-of-{pod}",
        dialect="volcano-vgpu",
        resources={"cpu": cpu, "pods": 1},
        anti_affinity_groups=(tag,) if tag else (),
        trace="00-trace",
        candidates=tuple(
            Placement(node=NodeName(node), shares=tuple(shares)) for node, shares in candidates
        ),
    )


def queued(pod: str, *, units: int = 4_000, gpus: int = 1, priority: int = 0) -> PodQueued:
    containers = (build.gpu("main", gpus, units),) if gpus else ()
    wanted = PodRequest(containers=containers, priority=priority)
    return build.pod_queued(pod, wanted, resource_version="7", created_at=NOW)


def verdict(event: PodQueued, capacity: int) -> WaitingPod:
    return WaitingPod(queued=event, refusal=Refusal(reason="full"), capacity=capacity)


@asynccontextmanager
async def ledger(
    url: str,
    nodes: Mapping[str, int] | None = None,
    *,
    feed_length: int = 10_000,
    kind: type[RedisLeases] = RedisLeases,
) -> AsyncIterator[RedisLeases]:
    """Open a ledger of its own, ready, with so many devices per node, as a witness."""
    prefix = f"t{next(_prefixes)}:"
    async with kind.connect(
        url, prefix=prefix, feed_length=feed_length, detects_lost_writes=True
    ) as leases:
        await rebuild(leases, {"a": 2} if nodes is None else nodes)
        yield leases


async def rebuild(
    leases: RedisLeases,
    nodes: Mapping[str, int] | None = None,
    kept: Sequence[Lease] = (),
    *,
    now: float = NOW,
    force: bool = False,
) -> None:
    """Build the ledger, or build it anew, with so many devices per node and these leases."""
    token = await leases.begin_rebuild(now=now, force=force)
    assert token is not None
    for name, devices in (nodes or {}).items():
        await leases.save_nodes([facts(name)])
        await leases.save_devices([report(name, [device(name, gpu) for gpu in range(devices)])])
    assert await leases.restore(kept, now=now, token=token) == []
    assert await leases.finish_rebuild(token)


async def reserve(leases: RedisLeases, *wanted: Reservation, now: float = NOW) -> list[Lease]:
    """Reserve what must fit."""
    outcomes = await leases.reserve(wanted, now=now, ttl_s=30)
    assert all(isinstance(outcome, ReservedLease) for outcome in outcomes), outcomes
    return [outcome.lease for outcome in outcomes if isinstance(outcome, ReservedLease)]


async def refusal(leases: RedisLeases, wanted: Reservation, *, now: float = NOW) -> NoCapacity:
    """Reserve what must not fit."""
    [outcome] = await leases.reserve([wanted], now=now, ttl_s=30)
    assert isinstance(outcome, NoCapacity), outcome
    return outcome


async def uses(leases: RedisLeases) -> dict[DeviceUuid, DeviceUse]:
    """Return what is taken of every device."""
    return {
        device.uuid: use
        async for page in leases.totals.pages()
        for account in page
        for device, use in account.node.devices
    }


async def damages(leases: RedisLeases) -> dict[str, str]:
    """Return what the leading binder finds damaged."""
    return damages_in(await leases.checks.read())


async def assert_sound(leases: RedisLeases) -> list[Lease]:
    """Check that totals are the sums over leases, that nothing is over-committed; return these."""
    assert await damages(leases) == {}
    placed: list[Lease] = []
    async for page in leases.totals.pages():
        for account in page:
            assert not account.index_mismatches
            placed += account.leases
            devices, nodes = counted_use(account.leases)
            used = nodes.get(account.node.facts.name, {})
            assert {k: v for k, v in account.node.used.items() if v} == {
                k: v for k, v in used.items() if v
            }
            for device, use in account.node.devices:
                summed = devices.pop(device.uuid, DeviceUse())
                assert use.fence >= summed.fence
                assert structs.replace(use, fence=summed.fence, held=None) == summed
                assert use.cores_percent <= 100
            assert not devices
    taken = {
        (s.device, s.slot, lease.pod)
        for lease in placed
        for s in lease.shares
        if s.slot is not None
    }
    assert len({(where, slot) for where, slot, _ in taken}) == len(taken), taken
    counted = {(gang, pod) for gang, pods in (await leases.totals.gangs()).items() for pod in pods}
    assert counted == {(lease.gang, lease.pod) for lease in placed if lease.gang}
    return placed


GANG = Gang(name="default/g", min_member=3)


def member(pod: str, gpu: int = 0, mib: int = 4_000) -> Reservation:
    """A reservation of a pod of the gang on node a."""
    return structs.replace(reservation(pod, share("a", gpu, mib)), gang=GANG.name)


def in_gang(pod: str, units: int = 4_000, gang: Gang = GANG, *, priority: int = 0) -> PodQueued:
    """A queued pod of a gang."""
    event = queued(pod, units=units, priority=priority)
    return replace(event, request=structs.replace(event.request, gang=gang))


async def reserve_gang(leases: RedisLeases, *wanted: Reservation) -> list[type]:
    """Reserve for all or none; return the types of the outcomes."""
    outcomes = await leases.reserve_gang(GANG, wanted, now=NOW, ttl_s=30)
    return [type(outcome) for outcome in outcomes]
