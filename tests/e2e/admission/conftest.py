"""One node with two T4, the webhook, and the extender of kube-scheduler."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.stack import Stack, stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole() -> AsyncIterator[Stack]:
    flags = ("--nodes", "1", "--gpus", "2xT4")
    async with stack(*flags, webhook=True) as started:
        yield started
