"""The Kubernetes client and reflector against the simulated API server: one set of rules."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from shared.kubernetes.client import KubernetesClient, pod_path
from shared.kubernetes.errors import KubernetesConflictError, NotFoundError, UnauthorizedError
from shared.kubernetes.known_objects import (
    Change,
    ListSynced,
    ObjectAdded,
    ObjectDeleted,
    ObjectUpdated,
)
from shared.kubernetes.kubeconfig import ClusterCredentials, load_credentials
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ApiPod
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
async def server() -> AsyncIterator[ApiUnderTest]:
    async with api_server() as server:
        yield server


@pytest.fixture
async def kube(server: ApiUnderTest) -> AsyncIterator[KubernetesClient]:
    async with KubernetesClient(load_credentials(server.kubeconfig)) as kube:
        yield kube


async def create(kube: KubernetesClient, name: str) -> ApiPod:
    container = {"name": "main", "image": "busybox"}
    body = {"metadata": {"name": name}, "spec": {"containers": [container]}}
    return await kube.create(PODS, {"apiVersion": "v1", "kind": "Pod", **body}, ApiPod)


async def test_a_binding_gives_the_pod_its_node_and_annotations_once(
    kube: KubernetesClient,
) -> None:
    pod = await create(kube, "a")

    await kube.bind_pod("default", "a", pod.metadata.uid, "node-1", {"x/y": "z"}, {"l": "m"})

    bound = await kube.read(pod_path("default", "a"), ApiPod)
    assert bound.spec.node_name == "node-1"
    assert (bound.metadata.annotations["x/y"], bound.metadata.labels["l"]) == ("z", "m")
    with pytest.raises(KubernetesConflictError):
        await kube.bind_pod("default", "a", pod.metadata.uid, "node-2", {})


async def test_a_binding_for_another_uid_is_a_conflict(kube: KubernetesClient) -> None:
    await create(kube, "a")

    with pytest.raises(KubernetesConflictError):
        await kube.bind_pod("default", "a", "another-uid", "node-1", {})


async def test_status_codes_are_raised_as_our_errors(
    kube: KubernetesClient, server: ApiUnderTest
) -> None:
    with pytest.raises(NotFoundError):
        await kube.read(pod_path("default", "absent"))
    with pytest.raises(NotFoundError):
        await kube.bind_pod("default", "absent", "u", "node-1", {})
    await create(kube, "a")
    with pytest.raises(KubernetesConflictError):
        await create(kube, "a")
    with pytest.raises(KubernetesConflictError):
        await kube.delete(pod_path("default", "a"), uid="another-uid")
    ca = load_credentials(server.kubeconfig).ca_pem
    async with KubernetesClient(ClusterCredentials(server=server.url, ca_pem=ca)) as anonymous:
        with pytest.raises(UnauthorizedError):
            await anonymous.read(PODS)


async def test_changes_are_followed_from_list_to_deletion(kube: KubernetesClient) -> None:
    pod = await create(kube, "a")
    yielded: list[Change[ApiPod]] = []

    async with asyncio.timeout(30), aclosing(Reflector(kube, PODS, ApiPod).batches()) as batches:
        async for batch in batches:
            yielded += batch
            match batch[-1]:
                case ListSynced():
                    await kube.bind_pod("default", "a", pod.metadata.uid, "node-1", {})
                case ObjectUpdated(item) if (
                    item.spec.node_name and not item.metadata.deletion_timestamp
                ):
                    await kube.delete(pod_path("default", "a"), grace_s=0)
                case ObjectDeleted():
                    break

    assert [type(change) for change in (yielded[0], yielded[1], yielded[2], yielded[-1])] == [
        ObjectAdded,
        ListSynced,
        ObjectUpdated,
        ObjectDeleted,
    ]


async def test_a_deletion_during_a_gap_longer_than_the_servers_memory_is_seen() -> None:
    async with (
        api_server(window=4) as server,
        KubernetesClient(load_credentials(server.kubeconfig)) as kube,
    ):
        for name in ("a", "b", "c"):
            await create(kube, name)
        reflector = Reflector(kube, PODS, ApiPod)
        yielded: set[str] = set()
        async with asyncio.timeout(30), aclosing(reflector.batches()) as batches:
            async for batch in batches:
                yielded |= {c.item.metadata.name for c in batch if isinstance(c, ObjectAdded)}
                if isinstance(batch[-1], ListSynced):
                    break
        await kube.delete(pod_path("default", "b"), grace_s=0)
        for name in ("d", "e", "f", "g", "h"):
            await create(kube, name)

        changes: list[Change[ApiPod]] = []
        async with asyncio.timeout(30), aclosing(reflector.batches()) as batches:
            async for batch in batches:
                changes += batch
                if isinstance(batch[-1], ListSynced):
                    break

    assert yielded == {"a", "b", "c"}
    assert [c.item.name for c in changes if isinstance(c, ObjectDeleted)] == ["b"]
    assert [c.item.metadata.name for c in changes if isinstance(c, ObjectAdded)] == list("defgh")
