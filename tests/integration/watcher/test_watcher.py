"""The watcher against a simulated API server and a real nats-server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY

from services.watcher.quota_sources import QuotaReflectors
from services.watcher.wiring import build_watcher
from shared.dialects.dialect import Rules
from shared.dialects.nvidia import annotations as hami
from shared.dialects.volcano import device_register, gpushare
from shared.kubernetes.client import KubernetesClient
from shared.kubernetes.kinds.gpu_quotas import OBJECTS
from shared.kubernetes.kubeconfig import load_credentials
from shared.model.budgets.quota import Quota, QuotaLimits
from shared.model.clock import end
from shared.model.events.event import Event
from shared.model.events.pod_events import (
    BindingFailed,
    NodeChanged,
    NodesListed,
    PodHandedOver,
    PodQueued,
    PodRejected,
    PodsListed,
    PodTerminated,
    ResyncRequested,
)
from shared.model.names import Namespace
from shared.model.requests.request import Gang
from shared.nats.bus import Bus
from shared.nats.inbox import Inbox
from shared.pods.pod_parser import PodParser
from shared.runtime.runner import Runner
from shared.runtime.telemetry import Tracing
from tests.support.servers.nats import nats_server
from tests.support.simcluster.apiserver import ApiUnderTest, api_server
from tests.support.simcluster.custom_kinds import older_definition
from tests.support.waiting import until
from tools.generate.pages import ROOT

MERGE = {"Content-Type": "application/merge-patch+json"}
OURS = frozenset({"volcano"})
CLASSES = ROOT / "k8s" / "components" / "dra" / "device-classes.yaml"


def pod(name: str, **limits: object) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "schedulerName": "volcano",
            "containers": [
                {"name": "c", "image": "x", "resources": {"limits": limits, "requests": limits}}
            ],
        },
    }


@asynccontextmanager
async def watching(api: ApiUnderTest) -> AsyncIterator[Bus]:
    async with (
        nats_server() as nats,
        Bus.connect(nats.url, name="watcher") as bus,
        KubernetesClient(load_credentials(api.kubeconfig)) as kube,
    ):
        watcher = build_watcher(kube, PodParser(OURS, Rules()), retry_s=0.5)
        started = asyncio.Event()
        task = asyncio.create_task(
            Runner("watcher", watcher, bus, Tracing("watcher", None)).run(started)
        )
        await asyncio.wait_for(started.wait(), 10)
        try:
            yield bus
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def received(inbox: Inbox, count: int, limit_s: float = 30.0) -> list[Event]:
    events: list[Event] = []
    async with asyncio.timeout(limit_s):
        while len(events) < count:
            for delivered in await inbox.batch():
                events += delivered.events
                delivered.confirm()
    return events


async def test_a_pod_is_queued_bound_and_terminated() -> None:
    async with api_server() as api, watching(api) as bus, api.client() as client:
        inbox = await bus.subscribe([PodQueued, PodRejected, PodTerminated], group="test")
        pods = "/api/v1/namespaces/default/pods"

        await client.post(pods, json=pod("good", **{"volcano.sh/vgpu-number": "1"}))
        (queued,) = await received(inbox, 1)
        await client.post(pods, json=pod("bad", **{"volcano.sh/vgpu-memory": "1"}))
        (rejected,) = await received(inbox, 1)
        await client.delete(f"{pods}/good")
        (gone,) = await received(inbox, 1)

        assert isinstance(queued, PodQueued)
        assert queued.request.dialect == "volcano-vgpu"
        assert isinstance(rejected, PodRejected)
        assert "needs volcano.sh/vgpu-number" in rejected.reason
        assert isinstance(gone, PodTerminated)
        assert gone.pod == queued.pod


async def test_a_pod_of_another_scheduler_waits_for_our_claim_until_it_is_deleted() -> None:
    async with api_server() as api, watching(api) as bus, api.client() as client:
        inbox = await bus.subscribe([PodHandedOver, PodTerminated], group="test")
        resource = "/apis/resource.k8s.io/v1"
        pods = "/api/v1/namespaces/default/pods"
        for manifest in yaml.safe_load_all(CLASSES.read_text()):
            await client.post(f"{resource}/deviceclasses", json=manifest)
        for name, of_class in (("theirs", "gpu.nvidia.com"), ("ours", "whole-gpu.leasehold.dev")):
            requests = [{"name": "gpu", "exactly": {"deviceClassName": of_class}}]
            claim = {"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}}
            await client.post(f"{resource}/namespaces/default/resourceclaims", json=claim)
            manifest = pod(name)
            uses = [{"name": "gpu", "resourceClaimName": name}]
            manifest["spec"] |= {"schedulerName": "default-scheduler", "resourceClaims": uses}
            assert (await client.post(pods, json=manifest)).status == 201

            condition = {"type": "PodScheduled", "status": "False", "message": "no device"}
            await client.patch(
                f"{pods}/{name}/status", json={"status": {"conditions": [condition]}}, headers=MERGE
            )

        (waits,) = await received(inbox, 1)
        for name in ("theirs", "ours"):
            await client.delete(f"{pods}/{name}")
        (gone,) = await received(inbox, 1)

        assert isinstance(waits, PodHandedOver)
        assert (waits.queued.name, waits.queued.scheduler) == ("ours", "default-scheduler")
        assert isinstance(gone, PodTerminated)
        assert gone.pod == waits.queued.pod


DIGITS = "9" * 5000
"""More than Python converts into a number."""
HOSTILE_NODES: Sequence[dict[str, str]] = (
    {gpushare.UNHEALTHY: f"1,{DIGITS}"},
    {hami.CORDON: "a", hami.REGISTER: '[{"id": "a", "index": 1e999}]'},
    {hami.CORDON: "a", hami.REGISTER: "[" * 50_000},
    {device_register.REGISTER: f"GPU-a,{DIGITS},1,T4,true:"},
)


async def test_other_nodes_are_published_whatever_one_writes_into_its_annotations() -> None:
    async with api_server() as api, watching(api) as bus, api.client() as client:
        inbox = await bus.observe([NodeChanged])
        slots = {"volcano.sh/vgpu-number": "1"}
        for number, annotations in enumerate(({}, *HOSTILE_NODES)):
            node = {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": f"n{number}", "annotations": annotations},
                "status": {"allocatable": slots, "capacity": slots},
            }
            assert (await client.post("/api/v1/nodes", json=node)).status == 201

        found = await received(inbox, len(HOSTILE_NODES) + 1)

        assert {each.node.name for each in found if isinstance(each, NodeChanged)} == {
            f"n{number}" for number in range(len(HOSTILE_NODES) + 1)
        }


async def test_the_first_list_of_nodes_is_published_for_those_that_were_deleted_before() -> None:
    async with api_server() as api:
        api.store.create("nodes", {"metadata": {"name": "left"}})
        async with watching(api) as bus:
            inbox = await bus.subscribe([NodesListed], group="test")

            (listed,) = await received(inbox, 1)

    assert isinstance(listed, NodesListed)
    assert listed.nodes == ("left",)
    assert listed.revision > 0


async def test_everything_is_published_at_the_start_and_on_request() -> None:
    async with api_server() as api, watching(api) as bus, api.client() as client:
        inbox = await bus.subscribe([PodsListed], group="test-listing")
        waiting = await bus.subscribe([PodQueued], group="test-pods")
        (first,) = await received(inbox, 1)
        pods = "/api/v1/namespaces/default/pods"
        await client.post(pods, json=pod("one"))
        await client.post(pods, json=pod("two"))
        await received(waiting, 2)
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": "one", "annotations": {"leasehold.dev/lease": "x"}},
            "target": {"kind": "Node", "name": "n"},
        }
        answer = await client.post(f"{pods}/one/binding", json=binding)
        assert answer.status == 201
        # Once it has this pod, the watcher has the Binding, too.
        await client.post(pods, json=pod("three"))
        await received(waiting, 1)

        await bus.publish([ResyncRequested(reason="a test", request_id="r")])

        (second,) = await received(inbox, 1)
        again = await received(waiting, 2)
        assert isinstance(first, PodsListed)
        assert isinstance(second, PodsListed)
        assert first.pods.bound == ()
        assert [(p.name, p.node, p.lease) for p in second.pods.bound] == [("one", "n", "x")]
        assert set(second.pods.unbound) == {
            event.pod for event in again if isinstance(event, PodQueued)
        }
        assert sorted(getattr(event, "name", "") for event in again) == ["three", "two"]


async def test_a_pod_whose_binding_failed_is_queued_again() -> None:
    async with api_server() as api, watching(api) as bus, api.client() as client:
        inbox = await bus.subscribe([PodQueued], group="test")
        await client.post("/api/v1/namespaces/default/pods", json=pod("unlucky"))
        (first,) = await received(inbox, 1)
        assert isinstance(first, PodQueued)

        failed = BindingFailed(
            pod=first.pod, namespace=first.namespace, name=first.name, reason="a test"
        )
        for _ in range(2):
            await bus.publish([failed])

            async with asyncio.timeout(10):  # before it counts as unexplained
                (again,) = await received(inbox, 1)
            assert isinstance(again, PodQueued)
            assert again.pod == first.pod


async def test_a_node_is_published_with_the_usage_of_its_other_pods() -> None:
    async with api_server() as api, watching(api) as bus, api.client() as client:
        inbox = await bus.subscribe([NodeChanged], group="test-nodes")
        allocatable = {"cpu": "4", "pods": "110", "volcano.sh/vgpu-number": "10"}
        status = {"allocatable": allocatable}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n.a"}, "status": status}
        await client.post("/api/v1/nodes", json=node)
        (bare,) = await received(inbox, 1)
        foreign = pod("other", cpu="500m")
        foreign["spec"] |= {"schedulerName": "default-scheduler", "nodeName": "n.a"}

        await client.post("/api/v1/namespaces/default/pods", json=foreign)

        (loaded,) = await received(inbox, 1)
        assert isinstance(bare, NodeChanged)
        assert isinstance(loaded, NodeChanged)
        assert bare.node.used_by_others == {}
        assert "volcano.sh/vgpu-number" not in bare.node.allocatable
        assert loaded.node.used_by_others == {"cpu": 500, "pods": 1}


def group_definition(system: str = "volcano") -> dict[str, Any]:
    text = (Path(__file__).parents[2] / f"support/crds/{system}_podgroup.yaml").read_text()
    definition: dict[str, Any] = yaml.safe_load(text)
    return definition


async def test_a_pod_of_a_group_is_queued_with_its_gang_once_the_group_exists() -> None:
    async with api_server() as api, watching(api) as bus, api.client() as client:
        inbox = await bus.subscribe([PodQueued, PodRejected], group="test")
        pods = "/api/v1/namespaces/default/pods"
        member = pod("p")
        member["metadata"]["annotations"] = {"scheduling.k8s.io/group-name": "g"}

        await client.post(pods, json=member)
        (alone,) = await received(inbox, 1)
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        answer = await client.post(definitions, json=group_definition())
        assert answer.status == 201
        (rejected,) = await received(inbox, 1)
        groups = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"
        group = {
            "apiVersion": "scheduling.volcano.sh/v1beta1",
            "kind": "PodGroup",
            "metadata": {"name": "g"},
            "spec": {"minMember": 3},
        }
        assert (await client.post(groups, json=group)).status == 201
        (queued,) = await received(inbox, 1)

        assert isinstance(alone, PodQueued)
        assert alone.request.gang is None
        assert isinstance(rejected, PodRejected)
        assert "does not exist in" in rejected.reason
        assert isinstance(queued, PodQueued)
        assert queued.request.gang == Gang(name="default/g", min_member=3)


async def test_a_pod_group_of_kubernetes_says_why_its_pods_wait_and_when_they_are_placed() -> None:
    async with api_server() as api, api.client() as client:
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        assert (await client.post(definitions, json=group_definition("kubernetes"))).status == 201
        groups = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups"
        disruption = {"type": "DisruptionTarget", "status": "False"}
        group = {
            "apiVersion": "scheduling.k8s.io/v1alpha2",
            "kind": "PodGroup",
            "metadata": {"name": "g"},
            "spec": {"schedulingPolicy": {"gang": {"minCount": 2}}},
        }
        assert (await client.post(groups, json=group)).status == 201
        marked = {"status": {"conditions": [disruption]}}
        await client.patch(f"{groups}/g/status", json=marked, headers=MERGE)
        pods = "/api/v1/namespaces/default/pods"

        async def scheduled() -> dict[str, Any] | None:
            found = await (await client.get(f"{groups}/g")).json()
            conditions = {each["type"]: each for each in found["status"]["conditions"]}
            assert conditions.pop("DisruptionTarget") == disruption
            return conditions.get("PodGroupScheduled")

        async with watching(api) as bus:
            inbox = await bus.subscribe([PodQueued, PodRejected], group="test")
            for name in "ab":
                member = pod(name)
                member["spec"]["schedulingGroup"] = {"podGroupName": "g"}
                assert (await client.post(pods, json=member)).status == 201
            queued = await received(inbox, 2)
            assert [each.request.gang for each in queued if isinstance(each, PodQueued)] == [
                Gang(name="default/g", min_member=2)
            ] * 2
            waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            reason = {"status": {"conditions": [{**waits, "message": "0/1 nodes"}]}}
            await client.patch(f"{pods}/a/status", json=reason, headers=MERGE)
            found = await until(scheduled, lambda now: now and now["message"] == "pod a: 0/1 nodes")
            assert (found["status"], found["reason"]) == ("False", "Unschedulable")
            for name in "ab":
                target = {"target": {"kind": "Node", "name": "n1"}, "metadata": {"name": name}}
                await client.post(f"{pods}/{name}/binding", json=target)
            found = await until(scheduled, lambda now: now and now["status"] == "True")
            assert (found["reason"], found["message"]) == ("Scheduled", "2 pods have a node")


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
    assert "GPUQuota team-a: spec.maxMemory: must be a quantity of bytes" in caplog.text
    assert valid[0].limits == QuotaLimits(memory_mib=1024, cards=2)
    assert next(quota for quota in later if quota.namespace == TEAM) == valid[0]
