"""What plans are made from: the pods as a watch has them, and those that it does not have yet."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.planner.clients import PODS, PlannerClient
from services.planner.cluster_view import ClusterView, LeaseMirror
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.events.pod_events import PodQueued
from shared.model.leases.ledger import WaitingPod
from shared.model.names import Namespace, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import PodRequest
from shared.pods.pod_snapshot import PodSnapshot
from tests.support.binder.world import running
from tests.support.clock import FakeClock
from tests.support.placer.ledger import ledger
from tests.support.simcluster.apiserver import ApiUnderTest, a_pod, api_server
from tests.support.waiting import until

NUMBERS = itertools.count()


class CountingClient(KubernetesClient):
    """Counts lists of pods, and fails watches of them on demand."""

    lists = 0
    fails = False

    async def list_page(self, path: str, **options: Any) -> Any:
        self.lists += path == PODS
        return await super().list_page(path, **options)

    def watch(self, path: str, **options: Any) -> Any:
        return super().watch("/api/v1/nothing" if self.fails else path, **options)


@dataclass
class Pods:
    api: ApiUnderTest
    client: CountingClient
    reader: PlannerClient = field(init=False)

    def __post_init__(self) -> None:
        self.reader = PlannerClient(self.client)

    def create(self, name: str, **labels: str) -> PodUid:
        created = self.api.store.create("pods", a_pod(name, labels=labels))
        return PodUid(created["metadata"]["uid"])

    async def seen(self) -> dict[PodUid, PodSnapshot]:
        return (await self.reader.list_pods())[0]

    @property
    def watch_has_failed(self) -> bool:
        followed = self.reader._followed
        return followed is not None and followed.has_failed

    async def lists(self) -> int:
        """Return how often the pods are listed for a plan."""
        before = self.client.lists
        await self.reader.list_pods()
        return self.client.lists - before


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    async with (
        api_server() as api,
        CountingClient(load_credentials(api.kubeconfig)) as client,
    ):
        yield Pods(api, client)


async def lists_after_a_change(pods: Pods) -> int:
    pods.create(f"pod-{next(NUMBERS)}")
    return await pods.lists()


def waiting_pod(uid: PodUid, name: str) -> WaitingPod:
    queued = PodQueued(
        pod=uid,
        namespace=Namespace("default"),
        name=name,
        resource_version="1",
        request=PodRequest(),
    )
    return WaitingPod(queued=queued, refusal=Refusal(reason="full"), capacity=1)


@asynccontextmanager
async def followed(pods: Pods) -> AsyncIterator[None]:
    async with running(pods.reader.follow_pods):
        await until(pods.lists, lambda lists: lists == 0)
        yield


async def test_pods_are_listed_once_and_then_as_the_watch_has_them(pods: Pods) -> None:
    kept = pods.create("kept", app="a")
    gone = pods.create("gone")
    assert await pods.lists() == 1
    async with followed(pods):
        assert (await pods.seen()).keys() == {kept, gone}
        new = pods.create("new", app="a")
        pods.api.store.delete("pods", "default", "gone", grace_s=0)
        await until(pods.seen, lambda seen: seen.keys() == {kept, new})
        budget = {"selector": {"matchLabels": {"app": "a"}}, "minAvailable": 1}
        metadata = {"name": "pdb", "namespace": "default"}
        kind = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget"}
        pods.api.store.create("poddisruptionbudgets", kind | {"metadata": metadata, "spec": budget})

        seen, (disruption_budget,) = await pods.reader.list_pods()

        assert seen[kept].labels == {"app": "a"}
        assert disruption_budget.pods == {kept, new}
        assert await pods.lists() == 0


async def test_while_the_watch_fails_pods_are_listed_for_each_plan(pods: Pods) -> None:
    """No plan is made from what was so before the watch failed."""
    pods.client.fails = True
    async with running(pods.reader.follow_pods):
        await until(lambda: pods.watch_has_failed)
        new = pods.create("new")
        assert new in await pods.seen()
        assert await pods.lists() == 1

        pods.client.fails = False

        await until(lambda: lists_after_a_change(pods), lambda lists: lists == 0)


async def test_a_pod_that_waits_and_that_the_watch_does_not_have_yet_is_read(
    pods: Pods, url: str
) -> None:
    async with ledger(url, {"a": 1}) as leases, followed(pods):
        new = pods.create("new")
        pods.reader._pods = {}
        waiting = [waiting_pod(new, "new"), waiting_pod(PodUid("gone"), "gone")]
        before = pods.client.lists

        cluster = await ClusterView(LeaseMirror(leases, FakeClock()), pods.reader).snapshot(waiting)

        assert cluster.pods.keys() == {new}
        assert pods.client.lists == before
