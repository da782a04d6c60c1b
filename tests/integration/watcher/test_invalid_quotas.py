"""GPUQuotas that cannot be read let nothing new in."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.watcher.quota_sources import QuotaReflectors
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.gpu_quotas import OBJECTS
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import end
from shared.model.names import Namespace
from shared.model.quota import Quota, QuotaLimits
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.custom_kinds import older_definition

TEAM = Namespace("team-a")


def manifest(spec: dict[str, Any]) -> dict[str, Any]:
    kind = {"apiVersion": "leasehold.dev/v1beta1", "kind": "GPUQuota"}
    return {**kind, "metadata": {"name": str(TEAM)}, "spec": spec}


@pytest.fixture
async def lenient_api() -> AsyncIterator[ApiUnderTest]:
    """An API server with an older definition, which accepts any text as memory."""
    async with api_server() as started:
        started.store.create("customresourcedefinitions", older_definition("gpuquotas"))
        yield started


async def test_an_invalid_quota_lets_nothing_new_in_and_the_last_valid_one_stays_in_force(
    lenient_api: ApiUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    seen: asyncio.Queue[tuple[Quota, ...]] = asyncio.Queue()

    async def collect(quotas: QuotaReflectors) -> None:
        async for batch in quotas.batches():
            seen.put_nowait(batch)

    async with KubernetesClient(load_credentials(lenient_api.kubeconfig)) as kube:
        await kube.create(OBJECTS, manifest({"maxMemory": "abc"}))
        collecting = asyncio.create_task(collect(QuotaReflectors(kube)))
        new = await seen.get()
        shown = REGISTRY.get_sample_value("leasehold_quota_invalid", {"name": str(TEAM)})
        await kube.patch_merge(f"{OBJECTS}/{TEAM}", {"spec": {"maxMemory": "1Gi", "maxCards": 2}})
        valid = await seen.get()
        await kube.patch_merge(f"{OBJECTS}/{TEAM}", {"spec": {"maxMemory": "abc"}})
        other = {**manifest({}), "metadata": {"name": "other"}}
        await kube.create(OBJECTS, other)
        later = await seen.get()
        await end(collecting)

    nothing = QuotaLimits(cores_milli=0, milli_gpu=0, memory_mib=0, cards=0)
    assert new == (Quota(namespace=TEAM, limits=nothing),)
    assert shown == 1
    assert "GPUQuota team-a: spec: maxMemory: 'abc' is not a Kubernetes quantity" in caplog.text
    assert valid[0].limits == QuotaLimits(memory_mib=1024, cards=2)
    assert next(quota for quota in later if quota.namespace == TEAM) == valid[0]
