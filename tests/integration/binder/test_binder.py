"""The binder against a real NATS, a real Valkey and the simulated API server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.binder.pod_client import PodClient
from services.binder.service import Binder
from services.binder.wiring import BinderPorts, build_binder
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.model.events.event import Event
from shared.model.events.node_events import Allocation, DeviceReported
from shared.model.events.pod_events import (
    BindingFailed,
    BoundPod,
    ListedPods,
    NodeChanged,
    PlacementChosen,
    PlacementRefused,
    PodBound,
    PodQueued,
    PodsListed,
    QuotasUpdated,
    ResyncRequested,
)
from shared.model.lease import Lease, LeaseState, Share
from shared.model.lease_copy import ANNOTATION
from shared.model.ledger import Reservation, Reserved, WaitingPod
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.placement import Placement, Refusal
from shared.model.request import Gang, GpuRequest, PodRequest
from shared.nats.bus import Bus
from shared.runtime.runner import Runner
from shared.runtime.telemetry import Tracing
from tests.support.binder.claims import FakeClaims
from tests.support.binder.world import PermissiveAgents
from tests.support.build import allocation_of, devices, facts
from tests.support.servers.nats import nats_server
from tests.support.servers.valkey import valkey_server
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.waiting import until

NODE = NodeName("n1")
PODS = "/api/v1/namespaces/default/pods"


@dataclass(slots=True)
class Stage:
    """Everything around one running binder."""

    api: ApiUnderTest
    kube: KubernetesClient
    bus: Bus
    ledger: RedisLeases
    binder: Binder
    runner: Runner
    devices: tuple[Any, ...]
    allocations: tuple[Allocation, ...] = ()

    async def pod(self, name: str) -> dict[str, Any]:
        """Create a pod that waits."""
        body = {
            "metadata": {"name": name},
            "spec": {"schedulerName": "leasehold", "containers": [{"name": "c", "image": "i"}]},
        }
        return dict(await self.kube.create(PODS, body, dict))

    async def reserve(
        self,
        pods: Sequence[dict[str, Any]],
        *,
        mib: int = 100,
        ttl_s: float = 30,
        gang: Gang | None = None,
    ) -> list[Lease]:
        """Reserve a share for each pod, on the devices in turn."""
        wanted = [
            Reservation(
                pod=PodUid(pod["metadata"]["uid"]),
                namespace=Namespace("default"),
                name=pod["metadata"]["name"],
                resources={"pods": 1},
                candidates=(self._candidate(number, mib),),
                gang=gang.name if gang else "",
            )
            for number, pod in enumerate(pods)
        ]
        now = time.time()
        if gang is None:
            outcomes = await self.ledger.reserve(wanted, now=now, ttl_s=ttl_s)
        else:
            outcomes = await self.ledger.reserve_gang(gang, wanted, now=now, ttl_s=ttl_s)
        return [outcome.lease for outcome in outcomes if isinstance(outcome, Reserved)]

    def _candidate(self, number: int, mib: int) -> Placement:
        device = self.devices[number % len(self.devices)]
        share = Share(
            container="c",
            device=device.uuid,
            index=device.index,
            device_mib=device.memory_mib,
            memory_mib=mib,
            cores_percent=0,
            slotted=False,
        )
        return Placement(node=NODE, shares=(share,))

    async def publish_all(self, request_ids: tuple[str, ...] = ()) -> None:
        """Say what a watcher and a node agent would say."""
        found = dict(await self.kube.read(PODS, dict))
        bound = tuple(
            BoundPod(
                pod=PodUid(pod["metadata"]["uid"]),
                namespace=Namespace("default"),
                name=pod["metadata"]["name"],
                node=NodeName(pod["spec"]["nodeName"]),
                lease=pod["metadata"].get("annotations", {}).get(ANNOTATION, ""),
            )
            for pod in found["items"]
            if pod["spec"].get("nodeName")
        )
        half = len(bound) // 2
        listing = PodsListed(
            listing_id=f"l{time.time()}",
            chunk=0,
            chunks=2,
            pods=ListedPods(bound=bound[:half]),
            request_ids=request_ids,
        )
        await self.bus.publish([QuotasUpdated(read_at=time.time())])
        await self.bus.publish([NodeChanged(node=facts(NODE, allocatable={"pods": 1000}))])
        await self.bus.publish(
            [
                DeviceReported(
                    node=NODE,
                    devices=self.devices,
                    served=(),
                    allocations=self.allocations,
                    reported_at=time.time(),
                )
            ]
        )
        await self.bus.publish(
            [listing, replace(listing, chunk=1, pods=ListedPods(bound=bound[half:]))]
        )


@contextlib.asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    """Start the servers and a binder on them, and play watcher and agent beside it."""
    with valkey_server() as valkey:
        await valkey.ready()
        async with (
            nats_server() as nats,
            api_server() as api,
            KubernetesClient(load_credentials(api.kubeconfig)) as kube,
            Bus.connect(nats.url, name="test") as bus,
            RedisLeases.connect(valkey.url) as ledger,
        ):
            binder = build_binder(
                BinderPorts(
                    ledger=ledger,
                    pods=PodClient(kube),
                    claims=FakeClaims(),
                    agents=PermissiveAgents(bus),
                    publish=bus.publish,
                    clock=SystemClock(),
                    host_clock=SystemClock(),
                ),
            )
            runner = Runner("binder", binder, bus, Tracing("binder", None))
            stage = Stage(api, kube, bus, ledger, binder, runner, devices(8, NODE))
            async with _background(runner, stage):
                await until(lambda: _is_ready(ledger))
                yield stage


@contextlib.asynccontextmanager
async def _background(runner: Runner, stage: Stage) -> AsyncIterator[None]:
    wanted = await stage.bus.subscribe([ResyncRequested], group="test-watcher")

    async def publish_placements() -> None:
        while True:
            requests = await wanted.batch()
            ids = (event.request_id for each in requests for event in each.events)
            await stage.publish_all(tuple(ids))

    tasks = [
        asyncio.create_task(publish_placements()),
        asyncio.create_task(runner.run(asyncio.Event())),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _is_ready(ledger: RedisLeases) -> bool:
    return await ledger.generation() is not None and bool((await ledger.snapshot()).nodes)


async def _devices(ledger: RedisLeases) -> int:
    return sum(len(node.devices) for node in (await ledger.snapshot()).nodes)


async def _received(stage: Stage, kind: type[Event]) -> Any:
    return await stage.bus.subscribe([kind], group=f"test-{kind.subject.replace('.', '-')}")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as one:
        yield one


async def test_100_placements_are_bound_with_exactly_one_write_per_pod(stage: Stage) -> None:
    pods = [await stage.pod(f"p{number}") for number in range(100)]
    received = await _received(stage, PodBound)
    leases = await stage.reserve(pods)
    chosen = [PlacementChosen(lease=lease) for lease in leases]

    await stage.bus.publish(chosen)
    await stage.bus.publish(list(reversed(chosen)))
    bound: list[PodBound] = []
    async with asyncio.timeout(20):
        while len({event.lease.pod for event in bound}) < 100:
            bound += [event for batch in await received.batch() for event in batch.events]

    found = dict(await stage.kube.read(PODS, dict))["items"]
    assert {pod["spec"]["nodeName"] for pod in found} == {NODE}
    assert all(ANNOTATION in pod["metadata"]["annotations"] for pod in found)
    for pod in found:
        writes = stage.api.store.writes.counts("pods", f"default/{pod['metadata']['name']}")
        assert {verb: n for verb, n in writes.items() if "refused" not in verb} == {
            "create": 1,
            "create/binding": 1,
        }


async def test_no_pod_of_a_gang_is_bound_if_one_was_deleted_since_they_were_counted(
    stage: Stage,
) -> None:
    """The event of the deletion is still on its way: the API server is read before a Binding."""
    gang = Gang(name="default/g", min_member=3)
    pods = [await stage.pod(name) for name in ("p", "ghost", "q")]
    received = await _received(stage, BindingFailed)
    leases = await stage.reserve(pods, gang=gang)
    await stage.kube.delete(f"{PODS}/ghost", grace_s=0)

    await stage.bus.publish([PlacementChosen(lease=lease) for lease in leases])
    failed: set[str] = set()
    async with asyncio.timeout(20):
        while not failed >= {"p", "q"}:
            failed |= {event.name for batch in await received.batch() for event in batch.events}

    assert await stage.ledger.load([lease.pod for lease in leases]) == [None] * 3
    found = dict(await stage.kube.read(PODS, dict))["items"]
    assert {pod["metadata"]["name"] for pod in found} == {"p", "q"}
    assert not any(pod["spec"].get("nodeName") for pod in found)

    last = await stage.pod("r")
    bound = await _received(stage, PodBound)
    complete = await stage.reserve([*(pods[0], pods[2]), last], gang=gang)
    await stage.bus.publish([PlacementChosen(lease=lease) for lease in complete])
    names: set[str] = set()
    async with asyncio.timeout(20):
        while names != {"p", "q", "r"}:
            names |= {event.lease.name for batch in await bound.batch() for event in batch.events}


async def test_after_flushall_the_rebuild_restores_the_same_leases(stage: Stage) -> None:
    pods = [await stage.pod(f"p{number}") for number in range(20)]
    leases = await stage.reserve(pods)
    await stage.bus.publish([PlacementChosen(lease=lease) for lease in leases])

    async def all_bound() -> bool:
        found = await stage.ledger.load([lease.pod for lease in leases])
        items = dict(await stage.kube.read(PODS, dict))["items"]
        in_cluster = all(pod["spec"].get("nodeName") for pod in items)
        return in_cluster and all(each and each.state is LeaseState.BOUND for each in found)

    await until(all_bound)
    held = [each for each in await stage.ledger.load([lease.pod for lease in leases]) if each]
    active = held[0]
    stage.allocations = (allocation_of(active, container="c"),)
    epoch = await stage.ledger.generation()
    await stage.ledger._connection._redis.flushall()

    async def rebuilt() -> bool:
        return await stage.ledger.generation() not in {None, epoch}

    await until(rebuilt)
    again = [each for each in await stage.ledger.load([each.pod for each in held]) if each]
    assert [each.shares for each in again] == [each.shares for each in held]
    assert again[0].state is LeaseState.ACTIVE
    assert {each.state for each in again[1:]} == {LeaseState.BOUND}


async def test_an_expired_reservation_frees_its_capacity_for_waiting_pods(stage: Stage) -> None:
    first, second = await stage.pod("first"), await stage.pod("second")
    whole = stage.devices[0].memory_mib
    queued = PodQueued(
        pod=PodUid(second["metadata"]["uid"]),
        namespace=Namespace("default"),
        name="second",
        resource_version="1",
        request=PodRequest(
            containers=(GpuRequest(container="c", gpus=1, memory_units=whole, slotted=False),)
        ),
    )
    stage.devices = stage.devices[:1]
    await stage.publish_all()
    await until(lambda: _devices(stage.ledger), lambda devices: devices == 1)
    capacity = await stage.ledger.capacity()
    (lease,) = await stage.reserve([first], mib=whole, ttl_s=1.0)
    verdict = WaitingPod(queued=queued, refusal=Refusal(reason="full"), capacity=capacity)
    await stage.ledger.waiting_pods.enqueue(
        [replace(verdict, capacity=await stage.ledger.capacity())]
    )
    offered = await _received(stage, PodQueued)

    async with asyncio.timeout(30):
        (delivered,) = await offered.batch()

    assert [event.name for event in delivered.events] == ["second"]
    assert delivered.events[0].requeue_number > 0
    assert await stage.ledger.load([lease.pod]) == [None]


async def test_a_refusal_is_visible_on_the_pod_within_seconds(stage: Stage) -> None:
    pod = await stage.pod("waits")
    refused = PlacementRefused(
        pod=PodUid(pod["metadata"]["uid"]),
        namespace=Namespace("default"),
        name="waits",
        refusal=Refusal(reason="0/1 nodes are available: 1 has no device with 99999 MiB free."),
    )

    await stage.bus.publish([refused])

    async def visible() -> bool:
        now = dict(await stage.kube.read(f"{PODS}/waits", dict))
        events = dict(await stage.kube.read("/api/v1/namespaces/default/events", dict))["items"]
        conditions = [c for c in now["status"].get("conditions", []) if c["type"] == "PodScheduled"]
        return bool(
            conditions
            and conditions[0]["reason"] == "Unschedulable"
            and conditions[0]["message"] == refused.refusal.reason
            and any(event["reason"] == "FailedScheduling" for event in events)
        )

    await until(visible, limit_s=5)
