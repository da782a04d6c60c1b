"""What tests of several files start: a node with pods and binders."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from shared.model.leases.lease import Lease
from tests.support.binder import world as worlds
from tests.support.binder.world import NewWorld, World
from tests.support.planner.scene import at

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
