"""For each test an API server in this process, a client of it, and a server of its webhooks."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.support.simcluster.admission_webhook import WebhookUnderTest, webhook_server
from tests.support.simcluster.apiserver import ApiUnderTest, api_server


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with api_server() as started:
        yield started


@pytest.fixture
async def client(api: ApiUnderTest) -> AsyncIterator[aiohttp.ClientSession]:
    async with api.client() as session:
        yield session


@pytest.fixture
async def hooks() -> AsyncIterator[WebhookUnderTest]:
    async with webhook_server() as started:
        yield started
