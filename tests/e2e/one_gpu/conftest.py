"""One node with one T4, whose components send their spans to a receiver of the tests.

The node offers limits of cores by GPU time, if the machine has a C compiler.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.node_agent.compute_time.build_library import LIBRARY, build_library
from shared.dialects import SCHEDULERS
from simcluster.gpu_driver.build import compiler
from tests.support.servers.otlp import Spans, otlp_receiver
from tests.support.stack import Stack, stack


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def spans() -> AsyncIterator[Spans]:
    async with otlp_receiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole(spans: Spans, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    library: Path = tmp_path_factory.mktemp("compute-time") / LIBRARY
    if compiler() is not None:
        build_library(library)
    by_time = {"LEASEHOLD_COMPUTE_BY_TIME": "force", "LEASEHOLD_TIME_LIBRARY": str(library)}
    flags = ("--nodes", "1", "--gpus", "1xT4", "--otlp-endpoint", spans.url)
    served = {"LEASEHOLD_SCHEDULERS": ",".join((*SCHEDULERS, "kai-scheduler"))}
    async with stack(*flags, webhook=True, env=served | by_time) as started:
        yield started
