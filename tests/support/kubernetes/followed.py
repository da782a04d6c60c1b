"""A reflector that follows a scripted API server, and the changes that it yielded."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager

from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.kubernetes.reflector import Batch, Reflector
from shared.kubernetes.types import ApiPod
from tests.support.kubernetes.scripted_apiserver import ScriptedApiserver, Step

PODS = "/api/v1/pods"


class Followed:
    """A reflector with its server; pauses are recorded instead of waited for."""

    def __init__(self, server: ScriptedApiserver, kube: KubernetesClient, silence_s: float) -> None:
        self.server = server
        self.pauses: list[float] = []
        self.batches: list[Batch[ApiPod]] = []
        self._changes: list[str] = []
        self._known: set[str] = set()
        self.reflector = Reflector(
            kube,
            PODS,
            ApiPod,
            field_selector="a=x",
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
                self._changes += self._texts(batch)
                if enough(self._changes):
                    break
        return self._changes

    async def changes_by_request(self, count: int) -> list[str]:
        """Follow until the server has received `count` requests; return the changes so far."""
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            following = group.create_task(self.changes_until(lambda _: False))
            await self.server.received(count)
            following.cancel()
        return self._changes

    def _texts(self, batch: Batch[ApiPod]) -> Iterator[str]:
        """Yield `+` new, `~` changed, `-` deleted objects, and `=` at the end of a list."""
        for named, item in batch.changed:
            sign = "-" if item is None else "~" if named.name in self._known else "+"
            (self._known.discard if item is None else self._known.add)(named.name)
            yield f"{sign}{named.name}@{named.resource_version}"
        if batch.listed:
            yield f"={self.reflector.resource_version}"
        if batch.restored:
            yield "restored"

    def watched_from(self) -> list[str]:
        requests = [r.query for r in self.server.requests if "watch" in r.query]
        return [query["resourceVersion"] for query in requests]


@asynccontextmanager
async def following(*steps: Step, silence_s: float = 30.0) -> AsyncIterator[Followed]:
    async with (
        ScriptedApiserver(*steps) as server,
        KubernetesClient(ClusterCredentials(server=server.url), timeout_s=5) as kube,
    ):
        yield Followed(server, kube, silence_s)


def has(expected: str) -> Callable[[list[str]], bool]:
    return lambda changes: expected in changes
