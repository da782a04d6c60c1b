"""A node with one GPU, pods and binders, on an empty ledger."""

from collections.abc import AsyncIterator

import pytest

from tests.support.binder.preemption import Scene, scene
from tests.support.servers.valkey import ValkeyServer


@pytest.fixture
async def at(server: ValkeyServer) -> AsyncIterator[Scene]:
    await server.ready()
    await server.command("FLUSHALL")
    async with scene(server.url) as made:
        yield made
