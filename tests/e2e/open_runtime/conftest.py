"""Two nodes with two T4, of which one has an open container runtime; and no webhook."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.stack import Stack, stack

CLOSED, OPEN = "node-0", "node-1"


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole() -> AsyncIterator[Stack]:
    async with stack("--nodes", "2", "--gpus", "2xT4") as started:
        label = {"metadata": {"labels": {"sim.leasehold.dev/open-runtime": "true"}}}
        await started.kube.patch_merge(f"/api/v1/nodes/{OPEN}", label)
        started.open_runtime = True
        yield started
