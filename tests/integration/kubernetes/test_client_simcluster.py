"""The reflector against the simulated API server, which forgets what happened long ago."""

import asyncio
from contextlib import aclosing

from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.known_objects import Change, ListSynced, ObjectAdded, ObjectDeleted
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ApiPod
from tests.support.simcluster.apiserver import api_server

PODS = "/api/v1/namespaces/default/pods"


async def changes_until_synced(reflector: Reflector[ApiPod]) -> list[Change[ApiPod]]:
    changes: list[Change[ApiPod]] = []
    async with asyncio.timeout(30), aclosing(reflector.batches()) as batches:
        async for batch in batches:
            changes += batch
            if isinstance(batch[-1], ListSynced):
                break
    return changes


def added(changes: list[Change[ApiPod]]) -> list[str]:
    return [change.item.metadata.name for change in changes if isinstance(change, ObjectAdded)]


async def test_a_deletion_during_a_gap_longer_than_the_servers_memory_is_seen() -> None:
    async with (
        api_server(window=4) as server,
        KubernetesClient(load_credentials(server.kubeconfig)) as kube,
    ):

        async def create(*names: str) -> None:
            spec = {"containers": [{"name": "main", "image": "busybox"}]}
            for name in names:
                await kube.create(PODS, {"metadata": {"name": name}, "spec": spec}, ApiPod)

        await create("a", "b", "c")
        reflector = Reflector(kube, PODS, ApiPod)
        before = await changes_until_synced(reflector)
        await kube.delete(pod_path("default", "b"), grace_s=0)
        await create(*"defgh")
        changes = await changes_until_synced(reflector)

    assert sorted(added(before)) == list("abc")
    assert [change.item.name for change in changes if isinstance(change, ObjectDeleted)] == ["b"]
    assert added(changes) == list("defgh")
