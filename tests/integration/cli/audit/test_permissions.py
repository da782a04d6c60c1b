"""What an audit says that it has no right to see."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.cli.admin import credentials
from services.cli.admin.credentials import Doors
from services.cli.inspect.sources import Reader, Where
from shared.credentials.logins import ClientCredentials
from shared.kubernetes.client import Page
from shared.ledger.leases import RedisLeases
from tests.support.placer.ledger import NOW
from tests.support.servers.valkey import ValkeyServer


class NoPods:
    """An API server that has none."""

    async def list_page(self, *_: object, **__: object) -> Page:
        return Page()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[ValkeyServer, Doors]]:
    written = credentials.write(tmp_path / "doors", [], nats=False)
    started = ValkeyServer()
    started.start("--aclfile", str(written.acl))
    await started.ready()
    yield started, written
    started.forget()


@asynccontextmanager
async def reader_as(user: str, server: tuple[ValkeyServer, Doors]) -> AsyncIterator[Reader]:
    started, written = server
    where = Where(
        redis_url=started.url,
        kubeconfig=None,
        redis_keys=ClientCredentials(credentials=written.redis(user)),
    )
    async with RedisLeases.connect(where.redis_url, credentials=where.redis_keys) as ledger:
        pods: Any = NoPods()
        yield Reader(where, ledger, pods)


async def test_a_binder_audits_all_but_budgets_and_says_so_and_an_operator_audits_them_too(
    server: tuple[ValkeyServer, Doors],
) -> None:
    async with reader_as("binder", server) as binder, reader_as("operator", server) as operator:
        token = await binder.ledger.begin_rebuild(now=NOW)
        assert token is not None
        await binder.ledger.finish_rebuild(token)

        by_binder = await binder.audited(now=NOW)
        by_operator = await operator.audited(now=NOW)

    assert [one.partition(":")[0] for one in by_binder.unseen] == ["budgets"]
    assert by_operator.unseen == ()
