"""What modules of tests on a running stack share."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.dialects.checklist import delete_all_pods
from tests.support.stack import Stack


@pytest_asyncio.fixture(loop_scope="module")
async def up(whole: Stack) -> AsyncIterator[Stack]:
    """The module's stack; no pod and no lease is left over, also by an attempt that failed."""
    yield whole
    await delete_all_pods(whole)
