"""An API server in this process for each test, and a client of it."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.simcluster.apiserver import ApiUnderTest, api_server


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with api_server() as started:
        yield started


@pytest.fixture
async def client(api: ApiUnderTest) -> AsyncIterator[aiohttp.ClientSession]:
    async with api.client() as session:
        yield session
