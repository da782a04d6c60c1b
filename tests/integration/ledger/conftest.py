"""One Valkey server for the tests of the ledger; each test uses keys of its own."""

from collections.abc import AsyncIterator, Iterator

import pytest

from shared.ledger.leases import RedisLeases
from tests.support.placer.ledger import ledger
from tests.support.servers.valkey import ValkeyServer, valkey_server


def pytest_configure(config: pytest.Config) -> None:
    text = "nodes(a=2, ...): the nodes of `leases`, and how many devices each has"
    config.addinivalue_line("markers", text)


@pytest.fixture(scope="package")
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as running:
        yield running


@pytest.fixture
async def url(server: ValkeyServer) -> str:
    await server.ready()
    return server.url


@pytest.fixture
async def leases(url: str, request: pytest.FixtureRequest) -> AsyncIterator[RedisLeases]:
    """A ledger of its own, with two devices on node `a` unless the test says otherwise."""
    marker = request.node.get_closest_marker("nodes")
    async with ledger(url, marker.kwargs if marker else None) as opened:
        yield opened
