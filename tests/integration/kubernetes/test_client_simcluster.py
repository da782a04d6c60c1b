"""The Kubernetes client and reflector against the simulated API server: one set of rules."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from shared.kubernetes.client import Kube, pod_path
from shared.kubernetes.errors import KubeConflictError, NotFoundError, UnauthorizedError
from shared.kubernetes.known_objects import Appeared, Change, Changed, Gone, Synced
from shared.kubernetes.kubeconfig import Credentials, load_credentials
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import Pod
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
async def server() -> AsyncIterator[ApiUnderTest]:
    async with api_server() as server:
        yield server


@pytest.fixture
async def kube(server: ApiUnderTest) -> AsyncIterator[Kube]:
    async with Kube(load_credentials(server.kubeconfig)) as kube:
        yield kube


async def create(kube: Kube, name: str) -> Pod:
    container = {"name": "main", "image": "busybox"}
    body = {"metadata": {"name": name}, "spec": {"containers": [container]}}
    return await kube.create(PODS, {"apiVersion": "v1", "kind": "Pod", **body}, Pod)


async def test_a_binding_gives_the_pod_its_node_and_annotations_once(kube: Kube) -> None:
    pod = await create(kube, "a")

    await kube.bind_pod("default", "a", pod.metadata.uid, "node-1", {"x/y": "z"}, {"l": "m"})

    bound = await kube.read(pod_path("default", "a"), Pod)
    assert bound.spec.node_name == "node-1"
    assert (bound.metadata.annotations["x/y"], bound.metadata.labels["l"]) == ("z", "m")
    with pytest.raises(KubeConflictError):
        await kube.bind_pod("default", "a", pod.metadata.uid, "node-2", {})


async def test_a_binding_for_another_uid_is_a_conflict(kube: Kube) -> None:
    await create(kube, "a")

    with pytest.raises(KubeConflictError):
        await kube.bind_pod("default", "a", "another-uid", "node-1", {})


async def test_refusals_come_as_our_errors(kube: Kube, server: ApiUnderTest) -> None:
    with pytest.raises(NotFoundError):
        await kube.read(pod_path("default", "absent"))
    with pytest.raises(NotFoundError):
        await kube.bind_pod("default", "absent", "u", "node-1", {})
    await create(kube, "a")
    with pytest.raises(KubeConflictError):
        await create(kube, "a")
    with pytest.raises(KubeConflictError):
        await kube.delete(pod_path("default", "a"), uid="another-uid")
    ca = load_credentials(server.kubeconfig).ca_pem
    async with Kube(Credentials(server=server.url, ca_pem=ca)) as nobody:
        with pytest.raises(UnauthorizedError):
            await nobody.read(PODS)


async def test_changes_are_followed_from_list_to_deletion(kube: Kube) -> None:
    pod = await create(kube, "a")
    told: list[Change[Pod]] = []

    async with asyncio.timeout(30), aclosing(Reflector(kube, PODS, Pod).batches()) as batches:
        async for batch in batches:
            told += batch
            match batch[-1]:
                case Synced():
                    await kube.bind_pod("default", "a", pod.metadata.uid, "node-1", {})
                case Changed(item) if item.spec.node_name and not item.metadata.deletion_timestamp:
                    await kube.delete(pod_path("default", "a"), grace_s=0)
                case Gone():
                    break

    assert [type(change) for change in (told[0], told[1], told[2], told[-1])] == [
        Appeared,
        Synced,
        Changed,
        Gone,
    ]


async def test_a_deletion_during_a_gap_longer_than_the_servers_memory_is_seen() -> None:
    async with api_server(window=4) as server, Kube(load_credentials(server.kubeconfig)) as kube:
        for name in ("a", "b", "c"):
            await create(kube, name)
        reflector = Reflector(kube, PODS, Pod)
        told: set[str] = set()
        async with asyncio.timeout(30), aclosing(reflector.batches()) as batches:
            async for batch in batches:
                told |= {c.item.metadata.name for c in batch if isinstance(c, Appeared)}
                if isinstance(batch[-1], Synced):
                    break
        await kube.delete(pod_path("default", "b"), grace_s=0)
        for name in ("d", "e", "f", "g", "h"):
            await create(kube, name)

        changes: list[Change[Pod]] = []
        async with asyncio.timeout(30), aclosing(reflector.batches()) as batches:
            async for batch in batches:
                changes += batch
                if isinstance(batch[-1], Synced):
                    break

    assert told == {"a", "b", "c"}
    assert [c.item.metadata.name for c in changes if isinstance(c, Gone)] == ["b"]
    assert [c.item.metadata.name for c in changes if isinstance(c, Appeared)] == list("defgh")
