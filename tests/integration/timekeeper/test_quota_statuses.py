"""The status of a GPUQuota has what the ledger enforces of it, and what leases hold."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec import structs

from services.timekeeper.config.budget_sources import ConfiguredObjects
from services.timekeeper.report import status_publisher
from services.timekeeper.report.status_publisher import StatusPublisher
from services.watcher.quota_sources import QuotaReflectors
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kinds.custom_kinds import LatestSpecs
from shared.kubernetes.kinds.gpu_quotas import OBJECTS, parse_spec
from shared.kubernetes.kubeconfig import load_credentials
from shared.kubernetes.types import RawObject
from shared.model.budgets.quota import Quota
from shared.model.clock import end
from shared.model.names import Namespace
from tests.support.placer.ledger import NOW, reservation, reserve, share
from tests.support.simcluster.apiserver import api_server
from tests.support.simcluster.custom_kinds import older_definition
from tests.support.timekeeper.accounts import T0, TEAM, AccountLedger
from tests.support.waiting import until


class Cluster:
    """An API server with quotas, a watcher, and a timekeeper's publisher."""

    def __init__(self, kube: KubernetesClient, opened: AccountLedger) -> None:
        self.kube = kube
        self.quotas = opened.leases.quotas
        self.at_ms = T0
        self.objects = ConfiguredObjects(kube, OBJECTS, LatestSpecs(parse_spec))
        self.publisher = StatusPublisher(quotas=self.objects)

    async def watched(self, *names: str) -> None:
        """Save the quotas that a watcher reads when it starts."""
        read: asyncio.Queue[tuple[Quota, ...]] = asyncio.Queue()

        async def watch() -> None:
            async for batch in QuotaReflectors(self.kube).batches():
                read.put_nowait(batch)

        watching = asyncio.create_task(watch())
        quotas = await read.get()
        await end(watching)
        assert {quota.namespace for quota in quotas} == set(names)
        await self.quotas.save(quotas, read_at=NOW + self.at_ms)

    async def published(self, name: str, generation: int, *, after_s: int = 1) -> Any:
        """Publish once this version is read, and return the status."""
        self.at_ms += 1000 * after_s

        def read() -> RawObject:
            return self.objects.latest.items.get(Namespace(name), RawObject())

        await until(lambda: read().metadata.generation, generation.__eq__)
        await self.publisher.publish_quotas(self.quotas, self.at_ms)
        status = json.loads(await self.kube.read(f"{OBJECTS}/{name}"))["status"]
        await until(lambda: read().status, status.__eq__)
        applied, ready = status["conditions"]
        assert applied | {"type": "Ready"} == ready
        assert applied["observedGeneration"] == status["observedGeneration"] == generation
        return status


@pytest.fixture
async def cluster(opened: AccountLedger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    # The API server is in this process: a loaded machine may stop both for some seconds, and
    # after a write without a response nothing is written for 30 s.
    monkeypatch.setattr(status_publisher, "WRITE_TIMEOUT_S", 60.0)
    async with api_server() as api, KubernetesClient(load_credentials(api.kubeconfig)) as kube:
        api.store.create("customresourcedefinitions", older_definition("gpuquotas"))
        made = Cluster(kube, opened)
        watching = asyncio.create_task(made.objects.watch())
        yield made
        await end(watching)


def manifest(name: str, **spec: Any) -> Any:
    return {"metadata": {"name": name}, "spec": spec}


async def test_a_status_has_what_is_in_force_and_what_is_used(
    cluster: Cluster, opened: AccountLedger
) -> None:
    valid = {"maxMilliGPU": 4000, "maxMemory": "32Gi", "poolLabel": "pool"}
    await cluster.kube.create(OBJECTS, manifest(TEAM, **valid))
    pending = await cluster.published(TEAM, 1)
    await cluster.watched(TEAM)
    applied = await cluster.published(TEAM, 1)
    wanted = structs.replace(reservation("p", share("a", 0, 4_000)), namespace=TEAM)
    await reserve(opened.leases, wanted)
    soon = await cluster.published(TEAM, 1)
    used = await cluster.published(TEAM, 1, after_s=10)

    assert reason_of(pending) == ("False", "Pending")
    assert "specInForce" not in pending
    assert reason_of(applied) == ("True", "SpecInForce")
    assert applied["specInForce"] == valid | {"onlyModels": False}
    assert soon == applied
    assert used["used"] == {"milliGPU": 250, "corePercent": 25, "memory": "4000Mi", "cards": 1}
    assert used["conditions"] == applied["conditions"]


async def test_an_invalid_version_has_the_reason_and_what_is_in_force_instead(
    cluster: Cluster,
) -> None:
    await cluster.kube.create(OBJECTS, manifest(TEAM, maxCards=2))
    await cluster.watched(TEAM)
    before = await cluster.published(TEAM, 1)
    invalid = {"spec": {"maxMemory": "80"}}
    await cluster.kube.patch_merge(f"{OBJECTS}/{TEAM}", invalid)
    await cluster.kube.create(OBJECTS, manifest("new", **invalid["spec"]))
    await cluster.watched(TEAM, "new")  # also without what was valid before
    changed = await cluster.published(TEAM, 2)
    new = await cluster.published("new", 1)

    assert reason_of(changed) == reason_of(new) == ("False", "InvalidSpec")
    assert changed["specInForce"] == before["specInForce"]
    text = "from 1Mi to below 1E; "
    messages = [each["conditions"][0]["message"].partition(text)[2] for each in (changed, new)]
    assert messages == [
        "the last valid version stays in force",
        "no new pod is allowed until it is valid",
    ]
    since = [each["conditions"][0]["lastTransitionTime"] for each in (before, changed)]
    assert since[0] < since[1]


def reason_of(status: Any) -> tuple[str, str]:
    applied = status["conditions"][0]
    return applied["status"], applied["reason"]
