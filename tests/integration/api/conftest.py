"""A browser and servers for each module, and an API for each test."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest_asyncio
from playwright.async_api import Browser

from tests.support.api.browser import chromium
from tests.support.api.running import RunningApi, running_api
from tests.support.servers.nats import nats_server
from tests.support.servers.valkey import ValkeyServer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def browser(running_browser: Browser) -> AsyncIterator[Browser]:
    """The browser; pages that a test leaves open are closed, or they would draw and connect on."""
    yield running_browser
    for context in running_browser.contexts:
        await context.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serve(server: ValkeyServer) -> AsyncIterator[Any]:
    """Return `running_api` on the servers of this module."""
    async with nats_server() as nats:
        yield partial(running_api, servers=(nats.url, server.url))


@pytest_asyncio.fixture(loop_scope="module")
async def shown(serve: Any) -> AsyncIterator[RunningApi]:
    async with serve() as running:
        yield running
