"""One Valkey server for the tests of the ledger; each test uses keys of its own."""

from collections.abc import Iterator

import pytest

from tests.support.servers.valkey import ValkeyServer, valkey_server


@pytest.fixture(scope="package")
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as running:
        yield running


@pytest.fixture
async def url(server: ValkeyServer) -> str:
    await server.ready()
    return server.url
