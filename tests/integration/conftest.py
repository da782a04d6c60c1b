"""A Valkey server for the tests of a module, and the simulated GPUs' driver."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.driver_fixtures import driver, driver_folder, nvml
from tests.support.servers.valkey import ValkeyServer, valkey_server

__all__ = ["driver", "driver_folder", "nvml", "server", "url"]


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    """One server; each test uses keys of its own."""
    with valkey_server() as running:
        asyncio.run(running.ready())
        yield running


@pytest.fixture
def url(server: ValkeyServer) -> str:
    return server.url
