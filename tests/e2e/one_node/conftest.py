"""One node with four T4, and no webhook."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.stack import Stack, stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole() -> AsyncIterator[Stack]:
    async with stack("--nodes", "1", "--gpus", "4xT4") as started:
        yield started
