"""Pods with claims, as the watcher publishes them from a simulated API server."""

from typing import Any

import aiohttp

from shared.model.events.pod_events import PodQueued, PodRejected
from shared.model.requests.request import NodeTerm, PodClaim, VolumeRequirement, VolumeRule
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


async def test_a_pod_waits_for_its_claim_and_follows_it_to_its_volume() -> None:
    async with api_server() as api, watching(api) as bus, api.client() as client:
        inbox = await bus.subscribe([PodQueued, PodRejected], group="test")

        await client.post("/api/v1/namespaces/default/pods", json=pod_with_claim("data"))
        (missing,) = await received(inbox, 1)
        await create(client, CLASSES, storage_class())
        created = await create(client, CLAIMS, claim("data"))
        (waiting,) = await received(inbox, 1)
        if isinstance(waiting, PodRejected):  # the claim was read before its class
            (waiting,) = await received(inbox, 1)
        await create(client, VOLUMES, volume("pv", in_(ZONE, "a")))
        (with_volume,) = await received(inbox, 1)
        bound = {"spec": {"volumeName": "pv"}}
        await client.patch(f"{CLAIMS}/data", json=bound, headers=MERGE)
        (being_bound,) = await received(inbox, 1)
        status = {"status": {"phase": "Bound"}}
        await client.patch(f"{CLAIMS}/data/status", json=status, headers=MERGE)
        (follows,) = await received(inbox, 1)

        uid = created["metadata"]["uid"]
        assert isinstance(missing, PodRejected)
        assert missing.reason.startswith('persistentvolumeclaim "data" not found')
        assert isinstance(waiting, PodQueued)
        assert waiting.request.claims == (PodClaim(name="data", uid=uid, provisions=True),)
        assert isinstance(with_volume, PodQueued)
        [candidate] = with_volume.request.claims[0].volumes
        assert candidate.name == "pv"
        assert isinstance(being_bound, PodRejected)
        assert "data is being bound to PersistentVolume pv" in being_bound.reason
        assert isinstance(follows, PodQueued)
        assert follows.request.claims == (PodClaim(name="data", uid=uid, bound=True),)
        zone = NodeTerm(key=ZONE, operator="In", values=("a",))
        assert follows.request.node_requirements.volumes == (
            VolumeRequirement(rule=VolumeRule.NODE_AFFINITY, terms=((zone,),)),
        )
