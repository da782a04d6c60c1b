"""An account ledger with one budget, and an API server with GPUBudgets."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.support.servers.valkey import ValkeyServer
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.custom_kinds import older_definition
from tests.support.timekeeper.accounts import AccountLedger, account_ledger, budget

DEFINITION = Path(__file__).parents[3] / "shared" / "kubernetes" / "kinds" / "gpubudgets.yaml"


@pytest.fixture
async def opened(server: ValkeyServer) -> AsyncIterator[AccountLedger]:
    async with account_ledger(server.url, budget(10)) as found:
        yield found


@pytest.fixture
async def lenient_api() -> AsyncIterator[ApiUnderTest]:
    """An API server with an older definition, which accepts any name as a time zone."""
    async with api_server() as started:
        started.store.create("customresourcedefinitions", older_definition("gpubudgets"))
        yield started


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with api_server() as started:
        started.store.create("customresourcedefinitions", yaml.safe_load(DEFINITION.read_text()))
        yield started
