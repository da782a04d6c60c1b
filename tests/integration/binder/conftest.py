"""What tests of several files start: a node with pods and binders, or what leases claims."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from shared.model.leases.lease import Lease
from tests.support.binder import world as worlds
from tests.support.binder.claim_binder import ClaimBinder
from tests.support.binder.world import NewWorld, World
from tests.support.placer.ledger import ledger
from tests.support.planner.scene import at
from tests.support.servers.valkey import ValkeyServer

__all__ = ["at"]


@pytest.fixture
async def new_world(url: str) -> AsyncIterator[NewWorld]:
    """Return what makes binders, each on a ledger of its own."""
    async with AsyncExitStack() as stack:

        async def make(*leases: Lease, **options: Any) -> World:
            return await stack.enter_async_context(worlds.world(url, *leases, **options))

        yield make


@pytest.fixture
async def world(new_world: NewWorld) -> World:
    """A binder on an empty ledger."""
    return await new_world()


@pytest.fixture
async def binder(server: ValkeyServer) -> AsyncIterator[ClaimBinder]:
    """A binder's part for claims, on an empty ledger."""
    await server.ready()
    async with ledger(server.url) as leases:
        yield ClaimBinder(leases)
