"""Pods with claims, as the watcher publishes them from a simulated API server."""

from typing import Any

import aiohttp
import msgspec

from shared.model.events.pod_events import PodQueued, PodRejected
from shared.model.requests.request import (
    ClaimVolume,
    NodeTerm,
    PodClaim,
    VolumeRequirement,
    VolumeRule,
)
from shared.nats.inbox import Inbox
from tests.integration.watcher.test_watcher import MERGE, pod, received, watching
from tests.support.simcluster.apiserver import api_server
from tests.support.storage import ZONE, Manifest, claim, in_, storage_class, volume

CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"


async def create(client: aiohttp.ClientSession, path: str, manifest: Manifest) -> dict[str, Any]:
    version = "storage.k8s.io/v1" if path == CLASSES else "v1"
    metadata = {k: v for k, v in manifest["metadata"].items() if k not in {"uid", "namespace"}}
    answer = await client.post(path, json={**manifest, "apiVersion": version, "metadata": metadata})
    assert answer.status == 201, await answer.text()
    created: dict[str, Any] = await answer.json()
    return created


def pod_with_claim(name: str) -> dict[str, Any]:
    manifest = pod("train", **{"volcano.sh/vgpu-number": "1"})
    manifest["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": name}}]
    return manifest


async def waits(inbox: Inbox, reason: str) -> None:
    """Wait until a pod is queued that waits for what this text says."""
    while True:
        for event in await received(inbox, 1):
            assert isinstance(event, PodQueued)
            if reason in event.request.node_requirements.waits_for:
                return


async def queued(inbox: Inbox, *claims: PodClaim) -> PodQueued:
    """Wait until a pod is queued with these claims."""
    while True:
        for event in await received(inbox, 1):
            if isinstance(event, PodQueued) and event.request.claims == claims:
                return event


async def test_a_pod_waits_for_its_claim_and_follows_it_to_its_volume() -> None:
    async with api_server() as api, watching(api) as bus, api.client() as client:
        inbox = await bus.subscribe([PodQueued, PodRejected], group="test")

        await client.post("/api/v1/namespaces/default/pods", json=pod_with_claim("data"))
        await waits(inbox, 'persistentvolumeclaim "data" not found')
        await create(client, CLASSES, storage_class())
        created = await create(client, CLAIMS, claim("data"))
        uid = created["metadata"]["uid"]
        unbound = PodClaim(name="data", uid=uid, provisions=True)
        await queued(inbox, unbound)
        await create(client, VOLUMES, volume("pv", in_(ZONE, "a")))
        available = {"status": {"phase": "Available"}}
        await client.patch(f"{VOLUMES}/pv/status", json=available, headers=MERGE)
        zone = (NodeTerm(key=ZONE, operator="In", values=("a",)),)
        candidate = ClaimVolume(name="pv", terms=(zone,))
        await queued(inbox, msgspec.structs.replace(unbound, volumes=(candidate,)))
        bound = {"spec": {"volumeName": "pv"}}
        await client.patch(f"{CLAIMS}/data", json=bound, headers=MERGE)
        await waits(inbox, "data is being bound to PersistentVolume pv")
        status = {"status": {"phase": "Bound"}}
        await client.patch(f"{CLAIMS}/data/status", json=status, headers=MERGE)
        follows = await queued(inbox, PodClaim(name="data", uid=uid, bound=True))

        assert follows.request.node_requirements.volumes == (
            VolumeRequirement(rule=VolumeRule.NODE_AFFINITY, terms=(zone,)),
        )
