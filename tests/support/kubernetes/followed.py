"""A reflector that follows a scripted API server, and the changes that it yielded."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.known_objects import (
    Change,
    ListSynced,
    ObjectAdded,
    ObjectDeleted,
    ObjectUpdated,
)
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.kubernetes.reflector import Reflector
from shared.kubernetes.types import ApiPod
from tests.support.kubernetes.scripted_apiserver import ScriptedApiserver, Step

PODS = "/api/v1/pods"


class Followed:
    """A reflector with its server; pauses are recorded instead of waited for."""

    def __init__(self, server: ScriptedApiserver, kube: KubernetesClient, silence_s: float) -> None:
        self.server = server
        self.pauses: list[float] = []
        self.batches: list[list[Change[ApiPod]]] = []
        self.reflector = Reflector(
            kube,
            PODS,
            ApiPod,
            label_selector="app=x",
            silence_s=silence_s,
            pause=self._pause,
            uniform=lambda _, high: high,
        )

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    async def changes_until(self, enough: Callable[[list[str]], bool]) -> list[str]:
        """Follow until `enough` holds for the changes so far; return all of them as text."""
        async with asyncio.timeout(30), aclosing(self.reflector.batches()) as batches:
            async for batch in batches:
                self.batches.append(batch)
                if enough(self.changes()):
                    break
        return self.changes()

    async def changes_by_request(self, count: int) -> list[str]:
        """Follow until the server has received `count` requests; return the changes so far."""
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            following = group.create_task(self.changes_until(lambda _: False))
            await self.server.received(count)
            following.cancel()
        return self.changes()

    def changes(self) -> list[str]:
        return [_text(change) for batch in self.batches for change in batch]

    def watched_from(self) -> list[str]:
        requests = [r.query for r in self.server.requests if "watch" in r.query]
        return [query["resourceVersion"] for query in requests]


def _text(change: Change[ApiPod]) -> str:
    match change:
        case ObjectAdded(item):
            return f"+{item.metadata.name}@{item.metadata.resource_version}"
        case ObjectUpdated(item):
            return f"~{item.metadata.name}@{item.metadata.resource_version}"
        case ObjectDeleted(item):
            return f"-{item.name}@{item.resource_version}"
        case ListSynced(version, restored):
            return f"={version}{' restored' if restored else ''}"
    raise AssertionError(change)


@asynccontextmanager
async def following(*steps: Step, silence_s: float = 30.0) -> AsyncIterator[Followed]:
    async with (
        ScriptedApiserver(*steps) as server,
        KubernetesClient(ClusterCredentials(server=server.url), timeout_s=5) as kube,
    ):
        yield Followed(server, kube, silence_s)


def has(expected: str) -> Callable[[list[str]], bool]:
    return lambda changes: expected in changes
