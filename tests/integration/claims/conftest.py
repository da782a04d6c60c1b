"""What tests of claims start: what leases them, and binders."""

from collections.abc import AsyncIterator

import pytest

from tests.integration.binder.conftest import new_world
from tests.support.binder.claim_binder import ClaimBinder
from tests.support.placer.ledger import ledger
from tests.support.servers.valkey import ValkeyServer

__all__ = ["new_world"]


@pytest.fixture
async def binder(server: ValkeyServer) -> AsyncIterator[ClaimBinder]:
    """What leases claims, on an empty ledger."""
    await server.ready()
    async with ledger(server.url) as leases:
        yield ClaimBinder(leases)
