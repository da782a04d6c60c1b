"""What tests on a running stack share: one loop, and for those of a folder one stack."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.dialects.checklist import delete_all_pods
from tests.support.stack import Stack

FOLDER = "tests/e2e/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests of this folder in the loop of the session, where their stacks are."""
    for item in items:
        if item.nodeid.startswith(FOLDER) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(loop_scope="session")
async def up(whole: Stack) -> AsyncIterator[Stack]:
    """The stack; no pod and no lease is left over, also by an attempt that failed."""
    yield whole
    await delete_all_pods(whole)
