"""Quotas that an API server refuses to list: the ledger keeps those that it has."""

import asyncio
from collections.abc import Sequence

import pytest

from services.watcher import quota_sources
from services.watcher.quota_sources import QuotaReflectors
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kinds.gpu_quotas import OBJECTS
from shared.kubernetes.kubeconfig import ClusterCredentials
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.clock import end
from shared.model.names import Namespace
from tests.support.kubernetes.scripted_apiserver import (
    Exchange,
    ScriptedApiserver,
    Step,
    hang,
    lists,
    refuses,
)

TEAM_A = {"metadata": {"name": "team-a", "resourceVersion": "1"}, "spec": {"maxCards": 2}}


async def first_batch(answers: Sequence[Step]) -> tuple[Quota, ...]:
    """Return what is published first, if lists of GPUQuotas are answered so one after the other."""
    left = list(answers)

    async def answer(exchange: Exchange) -> None:
        if "watch" in exchange.request.query:
            await hang(exchange)
        elif exchange.request.path.startswith(OBJECTS):
            await (left.pop(0) if len(left) > 1 else left[0])(exchange)
        else:
            await lists(version=1)(exchange)

    async with (
        ScriptedApiserver(*[answer] * 50) as server,
        KubernetesClient(ClusterCredentials(server=server.url)) as kube,
    ):
        published: asyncio.Queue[tuple[Quota, ...]] = asyncio.Queue()

        async def watch() -> None:
            async for batch in QuotaReflectors(kube).batches():
                published.put_nowait(batch)

        watching = asyncio.create_task(watch())
        first = await published.get()
        await end(watching)
        return first


async def test_none_are_published_before_they_could_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quota_sources, "UNKNOWN_KIND_RETRY_S", 0.05)
    denied = refuses(403, "Forbidden")

    [quota] = await first_batch([denied, denied, lists(TEAM_A, version=2)])

    assert (quota.namespace, quota.limits) == (Namespace("team-a"), QuotaLimits(cards=2))


async def test_without_the_permission_the_other_sources_count_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quota_sources, "UNKNOWN_KIND_RETRY_S", 0.05)
    monkeypatch.setattr(quota_sources, "REFUSED_S", 0.2)

    assert await first_batch([refuses(403, "Forbidden")]) == ()


async def test_without_the_kind_the_other_sources_count_at_once() -> None:
    assert await first_batch([refuses(404, "NotFound")]) == ()
