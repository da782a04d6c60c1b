"""What the watch of the agent's own Node object leads to, on a scripted API server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.node_agent.views.advertisement import NodeAdvertisement
from services.node_agent.views.node_views import COMPARE_S, WRITE_AGAIN_S, ViewWriter
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.model.clock import end
from shared.model.names import NodeName
from tests.support.clock import FakeClock
from tests.support.kubernetes.scripted_apiserver import (
    Exchange,
    Object,
    ScriptedApiserver,
    modified,
    status,
)
from tests.support.node_agent.node import node_of
from tests.support.waiting import until

KEY = "leasehold.dev/agent"
WANTED = NodeAdvertisement(annotations={KEY: "true"}, node_status={"volcano.sh/vgpu-cores": 400})


def node(version: int, **annotations: str) -> Object:
    metadata = {"name": "node-1", "resourceVersion": str(version), "annotations": annotations}
    amounts = {"volcano.sh/vgpu-cores": "400", "nvidia.com/gpu": str(version)}
    return {"metadata": metadata, "status": {"capacity": amounts, "allocatable": amounts}}


class NodeApi:
    """Serves one Node object, and refuses to watch it unless told otherwise."""

    def __init__(self, *, watchable: bool) -> None:
        self.watchable = watchable
        self.away = False
        self.node = node(1, **{KEY: "true"})
        self.changes: asyncio.Queue[Object | None] = asyncio.Queue()
        """None ends the watch."""
        self.requests: list[str] = []

    async def answer(self, exchange: Exchange) -> None:
        request = exchange.request
        is_list = request.path.endswith("/nodes")
        self.requests.append("LIST" if is_list else request.method)
        if self.away:
            await exchange.answer(500, status(500, "InternalError"))
        elif is_list and not self.watchable:
            await exchange.answer(403, status(403, "Forbidden"))
        elif "watch" in request.query:
            exchange.open_stream()
            while (changed := await self.changes.get()) is not None:
                await exchange.events(modified(changed))
        elif is_list:
            assert request.query["fieldSelector"] == "metadata.name=node-1"
            await exchange.answer(200, {"metadata": {"resourceVersion": "1"}, "items": [self.node]})
        else:
            await exchange.answer(200, self.node)


@asynccontextmanager
async def written(api: NodeApi) -> AsyncIterator[tuple[ViewWriter, FakeClock]]:
    clock = FakeClock()
    async with (
        ScriptedApiserver(*[api.answer] * 1000) as server,
        KubernetesClient(ClusterCredentials(server=server.url)) as client,
    ):
        views = ViewWriter(node_of(name=NodeName("node-1"), kubernetes=client, clock=clock))
        running = asyncio.create_task(views.run())
        views.set_advertisement(WANTED)
        try:
            yield views, clock
        finally:
            api.changes.put_nowait(None)
            await end(running)


def pauses(clock: FakeClock) -> bool:
    """Return whether the writer pauses after a change of others."""
    return any(at == clock.time + WRITE_AGAIN_S for at, *_ in clock.sleepers)


async def test_a_change_of_others_is_overwritten_at_once_and_then_once_a_second() -> None:
    api = NodeApi(watchable=True)
    async with written(api) as (views, clock):
        await until(lambda: api.requests.count("LIST") == 2)  # the list and the watch
        api.changes.put_nowait(node(2, **{KEY: "false"}))
        await until(lambda: pauses(clock))
        for version in range(3, 20):
            api.changes.put_nowait(node(version, **{KEY: "false"}))
        await until(lambda: views._status.allocatable["nvidia.com/gpu"] == "19")
        assert api.requests.count("PATCH") == 1

        clock.advance(WRITE_AGAIN_S)
        await until(lambda: api.requests.count("PATCH") == 2)
        await until(lambda: pauses(clock))
        assert api.requests.count("PATCH") == 2


async def test_the_allocatable_amount_is_that_of_the_watch_unless_it_is_zero() -> None:
    api = NodeApi(watchable=True)
    async with written(api) as (views, _):
        await until(lambda: sorted(api.requests) == ["GET", "LIST", "LIST"])
        reads = api.requests.count("GET")

        assert await views.read_allocatable("nvidia.com/gpu") == 1
        assert api.requests.count("GET") == reads
        assert await views.read_allocatable("nvidia.com/other") is None
        assert api.requests.count("GET") == reads + 1


async def test_a_node_that_may_not_be_watched_is_read_periodically() -> None:
    api = NodeApi(watchable=False)
    async with written(api) as (views, clock):

        def count_reads() -> int:
            clock.advance(COMPARE_S)
            return api.requests.count("GET")

        await until(lambda: count_reads() > 3 and "LIST" in api.requests)
        assert "PATCH" not in api.requests
        assert await views.read_allocatable("nvidia.com/gpu") == 1
        api.node = node(2, **{KEY: "false"})
        await until(lambda: count_reads() and "PATCH" in api.requests)
        assert await views.read_allocatable("nvidia.com/gpu") == 2

    assert 0 < api.requests.count("LIST") < api.requests.count("GET"), "it is tried once a minute"


async def test_it_is_noted_when_the_api_server_was_last_away() -> None:
    api = NodeApi(watchable=True)
    async with written(api) as (views, clock):
        await until(lambda: api.requests.count("LIST") == 2 and clock.sleepers)
        assert views.known.api_away_at == clock.ticks(), "it may have been away before the list"

        clock.advance(COMPARE_S)
        await until(lambda: api.requests.count("GET") == 2 and clock.sleepers)
        assert views.known.api_away_at < clock.ticks()

        api.away = True
        clock.advance(COMPARE_S)
        await until(lambda: views.known.api_away_at == clock.ticks())
