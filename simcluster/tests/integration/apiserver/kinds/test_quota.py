"""Quotas and priorities over HTTP: what is refused, in which words, and what is shown."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.dialects import GPU_RESOURCES
from simcluster.apimachinery.objects import Json
from simcluster.apiserver.registry import open_store
from simcluster.apiserver.storage.persistence import SqliteBackend
from tests.support.simcluster.apiserver import (
    PODS,
    ApiUnderTest,
    Client,
    a_pod,
    api_server,
    create,
    read,
    refusal,
)

QUOTAS = "/api/v1/namespaces/default/resourcequotas"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


async def status_of(client: Client, name: str) -> Json:
    status: Json = (await read(client, f"{QUOTAS}/{name}"))["status"]
    return status


async def assert_installed(client: Client, name: str, hard: Json, **spec: Any) -> None:
    body = {"metadata": {"name": name}, "spec": {"hard": hard, **spec}}
    await create(client, QUOTAS, body)


async def test_excess_over_a_quota_is_refused_with_kubernetes_texts(client: Client) -> None:
    await client.post(PODS, json=a_pod("first", {"nvidia.com/gpu": "3", "memory": "1Gi"}))
    await assert_installed(client, "gpus", {"requests.nvidia.com/gpu": "4", "pods": "5"})
    assert await status_of(client, "gpus") == {
        "hard": {"requests.nvidia.com/gpu": "4", "pods": "5"},
        "used": {"requests.nvidia.com/gpu": "3", "pods": "1"},
    }

    message = await refusal(client, PODS, a_pod("second", {"nvidia.com/gpu": "2"}), code=403)

    assert message == (
        'pods "second" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=2, '
        "used: requests.nvidia.com/gpu=3, limited: requests.nvidia.com/gpu=4"
    )
    dry = await client.post(
        PODS, json=a_pod("dry", {"nvidia.com/gpu": "2"}), params={"dryRun": "All"}
    )
    assert dry.status == 403
    assert (await client.post(PODS, json=a_pod("third", {"nvidia.com/gpu": "1"}))).status == 201
    assert (await status_of(client, "gpus"))["used"]["requests.nvidia.com/gpu"] == "4"


async def test_the_usage_of_a_finished_pod_is_released(api: ApiUnderTest, client: Client) -> None:
    await assert_installed(client, "cpu", {"requests.cpu": "2", "limits.memory": "2Gi"})
    limits = {"cpu": "1500m", "memory": "512Mi"}
    await client.post(PODS, json=a_pod("web", limits))
    assert (await status_of(client, "cpu"))["used"] == {
        "requests.cpu": "1500m", "limits.memory": "512Mi"}  # fmt: skip
    assert "exceeded quota: cpu" in await refusal(client, PODS, a_pod("b", limits), code=403)

    api.store.patch(
        "pods", "default", "web", {"status": {"phase": "Succeeded"}}, subresource="status"
    )

    assert (await status_of(client, "cpu"))["used"] == {"requests.cpu": "0", "limits.memory": "0"}
    assert (await client.post(PODS, json=a_pod("b", limits))).status == 201
    await client.delete(f"{PODS}/b")
    assert (await status_of(client, "cpu"))["used"]["requests.cpu"] == "0"


async def test_many_writers_never_exceed_a_quota(client: Client) -> None:
    await assert_installed(client, "few", {"count/pods": "5"})

    answers = await asyncio.gather(
        *(client.post(PODS, json=a_pod(f"web-{number}")) for number in range(20))
    )

    assert sorted(answer.status for answer in answers) == [201] * 5 + [403] * 15
    assert (await status_of(client, "few"))["used"] == {"count/pods": "5"}


async def test_a_quota_on_cpu_requires_cpu_of_every_container(client: Client) -> None:
    await assert_installed(client, "cpu", {"limits.cpu": "4"})

    assert await refusal(client, PODS, a_pod("web"), code=403) == (
        'pods "web" is forbidden: failed quota: cpu: must specify limits.cpu for: main'
    )


async def test_a_quota_for_a_priority_counts_only_its_pods(client: Client) -> None:
    await client.post(CLASSES, json={"metadata": {"name": "high"}, "value": 1000})
    chosen = {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}
    await assert_installed(
        client, "high", {"pods": "1"}, scopeSelector={"matchExpressions": [chosen]}
    )

    plain = [await client.post(PODS, json=a_pod(f"plain-{n}")) for n in range(2)]
    high = [
        await client.post(PODS, json=a_pod(f"high-{n}", priorityClassName="high")) for n in range(2)
    ]

    assert [response.status for response in plain + high] == [201, 201, 201, 403]
    assert (await status_of(client, "high"))["used"] == {"pods": "1"}


async def test_other_objects_are_counted_and_invalid_quotas_refused(client: Client) -> None:
    await assert_installed(client, "maps", {"configmaps": "1", "resourcequotas": "1"})
    maps = "/api/v1/namespaces/default/configmaps"

    assert (await client.post(maps, json={"metadata": {"name": "a"}})).status == 201
    assert (await client.post(maps, json={"metadata": {"name": "b"}})).status == 403
    assert (await status_of(client, "maps"))["used"] == {"configmaps": "1", "resourcequotas": "1"}
    assert "exceeded quota: maps" in await refusal(
        client, QUOTAS, {"metadata": {"name": "b"}, "spec": {"hard": {"pods": "1"}}}, code=403
    )
    bad = {"metadata": {"name": "bad"}, "spec": {"hard": {"pods": "many"}, "scopes": ["Some"]}}
    assert (await client.post(QUOTAS, json=bad)).status == 422


async def test_a_changed_quota_is_counted_anew_also_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "objects.sqlite"
    async with api_server(store=open_store(SqliteBackend(path))) as first, first.client() as client:
        await client.post(PODS, json=a_pod("web", {"cpu": "1"}))
        await assert_installed(client, "all", {"pods": "1"})
        first.store.patch("resourcequotas", "default", "all", {"spec": {"hard": {"cpu": "3"}}})
        assert (await status_of(client, "all"))["used"] == {"pods": "1", "cpu": "1"}
        first.store.close()

    async with (
        api_server(store=open_store(SqliteBackend(path))) as second,
        second.client() as client,
    ):
        assert "exceeded quota: all" in await refusal(
            client, PODS, a_pod("more", {"cpu": "1"}), code=403
        )
        second.store.close()


async def test_priorities_come_from_classes_only(client: Client) -> None:
    default = {"metadata": {"name": "usual"}, "value": 7, "globalDefault": True}
    await client.post(CLASSES, json=default)

    usual = await create(client, PODS, a_pod("a"))
    critical = await create(client, PODS, a_pod("b", priorityClassName="system-node-critical"))
    wrong = await refusal(client, PODS, a_pod("c", priority=3), code=403)
    unknown = await refusal(client, PODS, a_pod("d", priorityClassName="none"), code=403)
    never = await refusal(client, PODS, a_pod("e", preemptionPolicy="Never"), code=403)
    second = await refusal(client, CLASSES, {**default, "metadata": {"name": "x"}}, code=403)
    system = await client.post(CLASSES, json={"metadata": {"name": "system-mine"}, "value": 1})

    assert (usual["spec"]["priority"], usual["spec"]["priorityClassName"]) == (7, "usual")
    assert critical["spec"]["priority"] == 2_000_001_000
    assert "the integer value of priority (3) must not be provided in pod spec" in wrong
    assert unknown.endswith("no PriorityClass with name none was found")
    assert "the string value of PreemptionPolicy (Never) must not be provided" in never
    assert second.endswith("PriorityClass usual is already marked as default. "
                           "Only one default can exist")  # fmt: skip
    assert system.status == 422


async def test_a_pod_that_is_replaced_keeps_its_priority(client: Client) -> None:
    created = await create(client, PODS, a_pod("web", priorityClassName="system-node-critical"))
    again = {**created, "metadata": {"name": "web", "labels": {"a": "b"}}}
    del again["spec"]["priority"], again["spec"]["preemptionPolicy"]

    replaced = await (await client.put(f"{PODS}/web", json=again)).json()

    assert replaced["spec"]["priority"] == 2_000_001_000
    assert replaced["metadata"]["labels"] == {"a": "b"}


@pytest.mark.parametrize(
    "resource", sorted(name for name in GPU_RESOURCES if "kubernetes.io/" not in name)
)
async def test_every_gpu_resource_can_be_limited_by_a_quota(client: Client, resource: str) -> None:
    # Names in kubernetes.io, Koordinator's oldest, are no extended resources: no quota counts them.
    await assert_installed(client, "gpus", {f"requests.{resource}": "3"})
    assert (await client.post(PODS, json=a_pod("two", {resource: "2"}))).status == 201

    over = await refusal(client, PODS, a_pod("more", {resource: "2"}), code=403)
    assert f"exceeded quota: gpus, requested: requests.{resource}=2" in over
    assert (await client.post(PODS, json=a_pod("one", {resource: "1"}))).status == 201
    assert (await status_of(client, "gpus"))["used"] == {f"requests.{resource}": "3"}
