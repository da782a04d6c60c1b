"""The binder against a real NATS, a real Valkey and the simulated API server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from services.binder.clients import PodClient
from services.binder.service import Binder
from services.binder.wiring import BinderPorts, build_binder
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.leases import RedisLeases
from shared.model.clock import SystemClock
from shared.model.events.event import Event
from shared.model.events.node_events import DeviceReported
from shared.model.events.pod_events import (
    BindingFailed,
    ListedPods,
    NodeChanged,
    PlacementChosen,
    PodBound,
    PodsListed,
    QuotasUpdated,
    ResyncRequested,
)
from shared.model.lease import Lease, Share
from shared.model.lease_copy import ANNOTATION
from shared.model.ledger import Reservation, Reserved
from shared.model.names import Namespace, NodeName, PodUid
from shared.model.placement import Placement
from shared.model.request import Gang
from shared.nats.bus import Bus
from shared.runtime.runner import Runner
from shared.runtime.telemetry import Tracing
from tests.support.binder.world import FakeClaims, PermissiveAgents
from tests.support.build import devices, facts
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
        gang: Gang | None = None,
    ) -> list[Lease]:
        """Reserve a share for each pod, on the devices in turn."""
        wanted = [
            Reservation(
                pod=PodUid(pod["metadata"]["uid"]),
                namespace=Namespace("default"),
                name=pod["metadata"]["name"],
                resources={"pods": 1},
                candidates=(self._candidate(number),),
                gang=gang.name if gang else "",
            )
            for number, pod in enumerate(pods)
        ]
        now = time.time()
        if gang is None:
            outcomes = await self.ledger.reserve(wanted, now=now, ttl_s=30)
        else:
            outcomes = await self.ledger.reserve_gang(gang, wanted, now=now, ttl_s=30)
        return [outcome.lease for outcome in outcomes if isinstance(outcome, Reserved)]

    def _candidate(self, number: int) -> Placement:
        device = self.devices[number % len(self.devices)]
        share = Share(
            container="c",
            device=device.uuid,
            index=device.index,
            device_mib=device.memory_mib,
            memory_mib=100,
            cores_percent=0,
            slotted=False,
        )
        return Placement(node=NODE, shares=(share,))

    async def publish_all(self, request_ids: tuple[str, ...] = ()) -> None:
        """Say what a watcher and a node agent would say of a node without pods."""
        await self.bus.publish([QuotasUpdated(read_at=time.time())])
        await self.bus.publish([NodeChanged(node=facts(NODE, allocatable={"pods": 1000}))])
        await self.bus.publish(
            [
                DeviceReported(
                    node=NODE,
                    devices=self.devices,
                    served=(),
                    reported_at=time.time(),
                )
            ]
        )
        await self.bus.publish(
            [
                PodsListed(
                    listing_id="l", chunk=0, chunks=1, pods=ListedPods(), request_ids=request_ids
                )
            ]
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
