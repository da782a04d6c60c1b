"""Three nodes with eight GPUs each, and two placers."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.stack import Stack, stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole() -> AsyncIterator[Stack]:
    async with stack("--nodes", "3", "--gpus", "8xA100-80GB", placers=2) as started:
        yield started
