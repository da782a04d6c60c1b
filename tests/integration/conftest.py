"""One Valkey server for the tests of a module; each test uses keys of its own."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.servers.valkey import ValkeyServer, valkey_server


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as running:
        asyncio.run(running.ready())
        yield running


@pytest.fixture
def url(server: ValkeyServer) -> str:
    return server.url
