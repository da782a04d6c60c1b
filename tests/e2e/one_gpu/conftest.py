"""One node with one T4, whose components send their spans to a receiver of the tests."""

from collections.abc import AsyncIterator

import pytest_asyncio

from shared.dialects import SCHEDULERS
from tests.support.servers.otlp import Spans, otlp_receiver
from tests.support.stack import Stack, stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def spans() -> AsyncIterator[Spans]:
    async with otlp_receiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole(spans: Spans) -> AsyncIterator[Stack]:
    flags = ("--nodes", "1", "--gpus", "1xT4", "--otlp-endpoint", spans.url)
    served = {"LEASEHOLD_SCHEDULERS": ",".join((*SCHEDULERS, "kai-scheduler"))}
    async with stack(*flags, webhook=True, env=served) as started:
        yield started
