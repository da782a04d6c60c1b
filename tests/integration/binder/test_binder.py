"""The binder against a real NATS, a real Valkey and the simulated API server."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.ledger.leases import RedisLeases
from shared.model.events.event import Event
from shared.model.events.pod_events import BindingFailed, PlacementChosen, PodBound
from shared.model.lease import Lease
from shared.model.ledger import Reserved
from shared.model.names import NodeName
from shared.model.request import Gang
from shared.nats.bus import Bus
from tests.support.binder.world import whole_binder
from tests.support.placer.ledger import ledger, reservation, reserve, share
from tests.support.servers.nats import nats_server
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

NODE = NodeName("n1")
PODS = "/api/v1/namespaces/default/pods"


@dataclass(slots=True)
class Stage:
    """Everything around one running binder."""

    api: ApiUnderTest
    kube: KubernetesClient
    bus: Bus
    ledger: RedisLeases

    async def pod(self, name: str) -> dict[str, Any]:
        """Create a pod that waits."""
        body = {
            "metadata": {"name": name},
            "spec": {"schedulerName": "leasehold", "containers": [{"name": "c", "image": "i"}]},
        }
        return dict(await self.kube.create(PODS, body, dict))

    async def reserve(
        self, pods: Sequence[dict[str, Any]], gang: Gang | None = None
    ) -> list[Lease]:
        """Reserve a share for each pod, on the devices in turn."""
        metas = [pod["metadata"] for pod in pods]
        wanted = [
            replace(
                reservation(meta["uid"], share(NODE, number % 8, 100, slotted=False), node=NODE),
                name=meta["name"],
                gang=gang.name if gang else "",
            )
            for number, meta in enumerate(metas)
        ]
        if gang is None:
            return await reserve(self.ledger, *wanted, now=time.time())
        outcomes = await self.ledger.reserve_gang(gang, wanted, now=time.time(), ttl_s=30)
        return [outcome.lease for outcome in outcomes if isinstance(outcome, Reserved)]


@pytest.fixture
async def stage(url: str) -> AsyncIterator[Stage]:
    async with (
        nats_server() as nats,
        api_server() as api,
        KubernetesClient(load_credentials(api.kubeconfig)) as kube,
        Bus.connect(nats.url, name="test") as bus,
        ledger(url, {NODE: 8}) as leases,
        whole_binder(leases, kube, nats.url),
    ):
        yield Stage(api, kube, bus, leases)


async def _received(stage: Stage, kind: type[Event]) -> Any:
    return await stage.bus.subscribe([kind], group=f"test-{kind.subject.replace('.', '-')}")


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
