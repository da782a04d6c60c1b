"""One node with a T4 and an A100 in MIG mode, and the metrics of vendors' schedulers."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.servers.nats import free_port
from tests.support.stack import Stack, stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def metrics_port() -> int:
    return free_port()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole(metrics_port: int) -> AsyncIterator[Stack]:
    ports = ("--scheduler-metrics", f"127.0.0.1:{metrics_port}")
    async with stack("--nodes", "1", "--gpus", "1xT4+1xA100-40GB:mig", *ports) as started:
        yield started
