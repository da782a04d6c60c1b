"""An audit reports what its user has no right to read."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.cli import credentials
from services.cli.audit.snapshot_reader import SnapshotReader
from services.cli.credentials import CredentialFiles
from shared.credentials.logins import ClientCredentials
from shared.kubernetes.client import Page
from shared.ledger.leases import RedisLeases
from tests.support.placer.ledger import NOW, rebuild
from tests.support.servers.valkey import ValkeyServer


class NoPods:
    """An API server that has none."""

    async def pages(self, _: str) -> AsyncIterator[Page]:
        yield Page()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[ValkeyServer, CredentialFiles]]:
    files = credentials.write(tmp_path / "credentials", [], nats=False)
    server = ValkeyServer()
    server.start("--aclfile", str(files.acl))
    await server.ready()
    yield server, files
    server.forget()


@asynccontextmanager
async def reader_as(
    user: str, server: tuple[ValkeyServer, CredentialFiles]
) -> AsyncIterator[SnapshotReader]:
    valkey, files = server
    login = ClientCredentials(login_file=files.redis(user))
    async with RedisLeases.connect(valkey.url, credentials=login) as ledger:
        pods: Any = NoPods()
        yield SnapshotReader(ledger, pods, None)


async def test_a_binder_audits_all_but_budgets_and_an_operator_audits_them_too(
    server: tuple[ValkeyServer, CredentialFiles],
) -> None:
    async with reader_as("binder", server) as binder, reader_as("operator", server) as operator:
        await rebuild(binder.ledger)

        by_binder = await binder.snapshot(NOW)
        by_operator = await operator.snapshot(NOW)

    assert [one.partition(":")[0] for one in by_binder.not_checked] == ["budgets"]
    assert by_operator.not_checked == ()
