"""A server for admission webhooks, whose decisions a test sets."""

from collections.abc import AsyncIterator

import pytest

from tests.support.simcluster.admission_webhook import WebhookUnderTest, webhook_server


@pytest.fixture
async def hooks() -> AsyncIterator[WebhookUnderTest]:
    async with webhook_server() as started:
        yield started
