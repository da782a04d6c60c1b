"""GPUQuotas that cannot be read are refused where they are written, or let nothing new in."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from services.watcher.quota_sources import OBJECTS, QuotaReflectors
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.clock import end
from shared.model.names import Namespace
from shared.model.quota import Quota, QuotaLimits
from tests.support.simcluster.apiserver import ApiUnderTest, api_server

DEFINITION = Path(__file__).parents[3] / "shared" / "kubernetes" / "kinds" / "gpuquotas.yaml"
TEAM = Namespace("team-a")


def manifest(spec: dict[str, Any]) -> dict[str, Any]:
    kind = {"apiVersion": "leasehold.dev/v1alpha1", "kind": "GPUQuota"}
    return {**kind, "metadata": {"name": str(TEAM)}, "spec": spec}


@pytest.fixture
async def api() -> AsyncIterator[ApiUnderTest]:
    async with api_server() as started:
        started.store.create("customresourcedefinitions", yaml.safe_load(DEFINITION.read_text()))
        yield started


@pytest.fixture
async def lenient_api() -> AsyncIterator[ApiUnderTest]:
    """An API server with an older definition, which accepts any text as memory."""
    definition = yaml.safe_load(DEFINITION.read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in ("pattern", "minimum"):
        del schema["properties"]["spec"]["properties"]["maxMemory"][name]
    async with api_server() as started:
        started.store.create("customresourcedefinitions", definition)
        yield started


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"maxMemory": "abc"}, "maxMemory"),
        ({"maxMemory": "-1Gi"}, "maxMemory"),
        ({"maxMemory": -1}, "maxMemory"),
        ({"maxMemory": "NaN"}, "maxMemory"),
        ({"maxMemory": "1e308"}, "maxMemory"),
        ({"maxCards": -1}, "maxCards"),
        ({"maxMilliGPU": 2**63}, "maxMilliGPU"),
        ({"models": [{"name": "T4"}, {"name": "T4"}]}, "models"),
        ({"models": [{"name": "T4", "maxMemory": "many"}]}, "maxMemory"),
        ({"models": [{"name": f"m{n}"} for n in range(10_000)]}, "models"),
    ],
)
async def test_an_unreadable_gpuquota_is_refused_by_the_api_server(
    api: ApiUnderTest, spec: dict[str, Any], field: str
) -> None:
    async with api.client() as client, client.post(OBJECTS, json=manifest(spec)) as answer:
        body = await answer.json()

    assert answer.status in {400, 422}
    assert field in body["message"]


@pytest.mark.parametrize("memory", [0, 80, "80Gi", "1.5Ti", "500M", "1e9"])
async def test_any_quantity_is_accepted(api: ApiUnderTest, memory: str | int) -> None:
    wanted = manifest({"maxMemory": memory})
    async with api.client() as client, client.post(OBJECTS, json=wanted) as answer:
        assert answer.status == 201, await answer.text()


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
    assert "GPUQuota team-a: spec.maxMemory: 'abc' is not a Kubernetes quantity" in caplog.text
    assert valid[0].limits == QuotaLimits(memory_mib=1024, cards=2)
    assert next(quota for quota in later if quota.namespace == TEAM) == valid[0]
