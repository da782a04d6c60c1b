"""A NATS server for each test."""

from collections.abc import AsyncIterator

import pytest

from tests.support.servers.nats import NatsServer, nats_server


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with nats_server() as running:
        yield running
