"""An API server with custom kinds for each test."""

from collections.abc import AsyncIterator

import pytest

from tests.support.simcluster.apiserver import ApiUnderTest
from tests.support.simcluster.custom_kinds import custom_kinds


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with custom_kinds() as started:
        yield started
