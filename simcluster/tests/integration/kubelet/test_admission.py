"""Admission by a simulated kubelet: one pod at a time, devices first, everything else after."""

from collections.abc import Mapping
from typing import Any

import grpc
import pytest

from shared.kubelet_api.podresources import api_pb2, api_pb2_grpc
from simcluster.apimachinery.objects import Json
from simcluster.kubelet.settings import NodeSettings
from tests.support.simcluster.kubelet import (
    FAST,
    SLOT,
    PluginRefusalError,
    container,
    one_kubelet,
    pod,
    refusing,
    slots,
)
from tests.support.waiting import until


def requesting_containers(obj: Json) -> list[tuple[str, str]]:
    """Return the containers of a pod that ask for a slot."""
    return [
        (obj["metadata"]["name"], container["name"])
        for container in obj["spec"]["containers"]
        if SLOT in (container["resources"].get("limits") or {})
    ]


async def test_thirty_pods_at_once_are_admitted_one_by_one_in_order() -> None:
    async with slots(*(f"d{number:02}" for number in range(30))) as (node, plugin):
        candidates: list[list[tuple[str, str]]] = []

        async def observe(_devices: list[str]) -> Mapping[str, str]:
            allocated = await node.allocated_devices()
            wanting = [
                container
                for pod in await node.list_pods()
                if pod["status"].get("phase") not in {"Failed", "Succeeded"}
                for container in requesting_containers(pod)
            ]
            candidates.append([container for container in wanting if not allocated.get(container)])
            return {"NTH": str(len(candidates))}

        plugin.on_allocate = observe
        for number in range(30):
            node.create(pod(f"p{number:02}", limits={SLOT: 1}))
        for number in range(30):
            await node.phase(f"p{number:02}", "Running")

        assert candidates == [[(f"p{number:02}", "main")] for number in range(30)]
        assert node.container("p07").env["NTH"] == "8"


async def test_inside_allocate_pod_resources_shows_the_containers_served_before() -> None:
    async with slots("a", "b") as (node, plugin):
        seen: list[dict[tuple[str, str], set[str]]] = []

        async def observe(_devices: list[str]) -> Mapping[str, str]:
            seen.append(await node.allocated_devices())
            return {}

        plugin.on_allocate = observe
        both = [container("first", limits={SLOT: 1}), container("second", limits={SLOT: 1})]
        await node.run("one", containers=both)

        assert seen == [
            {("one", "first"): set(), ("one", "second"): set()},
            {("one", "first"): {"a"}, ("one", "second"): set()},
        ]


async def test_the_plugin_s_preference_decides_and_the_call_carries_one_container() -> None:
    async with slots("a", "b", "c", prefers=True) as (node, plugin):

        async def last_ones(request: Any) -> list[str]:
            return sorted(request.available_deviceIDs)[-request.allocation_size :]

        plugin.on_preferred = last_ones
        await node.run("one", limits={SLOT: 2})

        assert plugin.device_ids("GetPreferredAllocation") == [("a", "b", "c")]
        assert plugin.device_ids("Allocate") == [("b", "c")]
        assert [len(request.container_requests) for request in plugin.requests] == [1, 1]


async def test_an_incomplete_preference_is_filled_up() -> None:
    async with slots("a", "b", "c", prefers=True) as (node, plugin):

        async def odd(_request: Any) -> list[str]:
            return ["c", "c", "nonsense"]

        plugin.on_preferred = odd
        await node.run("one", limits={SLOT: 2})

        assert plugin.device_ids("Allocate") == [("a", "c")]


async def test_a_refused_allocation_fails_the_pod_with_the_reason() -> None:
    async with slots("a") as (node, plugin):
        plugin.on_allocate = refusing("no lease for this pod")
        node.create(pod("one", limits={SLOT: 1}))
        failed = await node.phase("one", "Failed")

        text = (
            "Allocate failed due to rpc error: code = Unknown desc = no lease for this pod, "
            "which is unexpected"
        )
        assert failed["status"]["reason"] == "UnexpectedAdmissionError"
        assert failed["status"]["message"] == f"Pod was rejected: {text}"
        events = node.store.list("events", "default")
        assert [(e["reason"], e["message"]) for e in events] == [("UnexpectedAdmissionError", text)]
        assert [pod["status"]["phase"] for pod in await node.list_pods()] == ["Failed"]


async def test_too_few_devices_are_counted_in_the_message() -> None:
    async with slots("a", "b", "c") as (node, _plugin):
        node.create(pod("one", limits={SLOT: 2}))
        node.create(pod("two", limits={SLOT: 2}))
        failed = await node.phase("two", "Failed")

        assert "Requested: 2, Available: 1" in failed["status"]["message"]


async def test_a_finished_pod_s_devices_serve_the_next_one() -> None:
    async with slots("a") as (node, plugin):
        brief = {"sim.leasehold.dev/run-for": "50ms"}
        node.create(pod("one", limits={SLOT: 1}, annotations=brief, restartPolicy="Never"))
        await node.phase("one", "Succeeded")
        await node.run("two", limits={SLOT: 1})

        assert plugin.device_ids("Allocate") == [("a",), ("a",)]
        assert ("one", "main") not in await node.allocated_devices()


async def test_containers_reuse_devices_of_finished_init_containers_but_not_of_sidecars() -> None:
    async with slots("a", "b", "c") as (node, plugin):
        init = [
            container("prepare", limits={SLOT: 1}),
            container("beside", limits={SLOT: 1}, restartPolicy="Always"),
        ]
        await node.run("one", limits={SLOT: 1}, initContainers=init)

        assert plugin.device_ids("Allocate") == [("a",), ("a",), ("b",)]
        allocated = await node.allocated_devices()
        assert allocated == {("one", "beside"): {"a"}, ("one", "main"): {"b"}}


async def test_devices_are_allocated_before_the_predicates_and_freed_if_those_fail() -> None:
    async with slots("a", settings=NodeSettings(cpu="2")) as (node, plugin):
        node.create(pod("greedy", limits={SLOT: 1, "cpu": 3}))
        failed = await node.phase("greedy", "Failed")
        await node.run("modest", limits={SLOT: 1, "cpu": 1})

        assert failed["status"]["reason"] == "OutOfcpu"
        assert "requested: 3000, used: 0, capacity: 2000" in failed["status"]["message"]
        assert plugin.device_ids("Allocate") == [("a",), ("a",)]


async def test_extended_resources_without_a_plugin_count_only_if_the_node_lists_them() -> None:
    patch = {"status": {part: {"example.com/mib": "100"} for part in ("capacity", "allocatable")}}
    async with one_kubelet(FAST) as node:
        node.store.patch("nodes", None, "node-0", patch, subresource="status")
        await node.run("fits", limits={"example.com/mib": 60})
        node.create(pod("does-not", limits={"example.com/mib": 60}))
        failed = await node.phase("does-not", "Failed")
        node.create(pod("unheard-of", limits={"example.com/other": 60}))

        assert failed["status"]["reason"] == "OutOfexample.com/mib"
        await node.phase("unheard-of", "Running")


async def test_a_pod_is_rejected_if_its_selector_does_not_match() -> None:
    async with one_kubelet() as node:
        node.create(pod("stray", nodeSelector={"zone": "far"}))
        failed = await node.phase("stray", "Failed")

        assert failed["status"]["reason"] == "NodeAffinity"


async def test_a_pod_deleted_before_its_admission_is_never_admitted() -> None:
    async with slots("a", "b") as (node, plugin):

        async def delete_the_next(_devices: list[str]) -> Mapping[str, str]:
            node.store.delete("pods", "default", "two")
            return {}

        plugin.on_allocate = delete_the_next
        node.create(pod("one", limits={SLOT: 1}))
        node.create(pod("two", limits={SLOT: 1}))
        await node.phase("one", "Running")
        await until(lambda: not node.exists("two"))

        assert len(plugin.device_ids("Allocate")) == 1


async def test_changes_in_lost_history_are_found_by_listing_again() -> None:
    async with slots("a", "b") as (node, plugin):

        async def much_happens(_devices: list[str]) -> Mapping[str, str]:
            if len(plugin.device_ids("Allocate")) == 2:
                node.store.delete("pods", "default", "first", grace_s=0)
                node.create(pod("third", limits={SLOT: 1}))
                node.store.compact()
            return {}

        plugin.on_allocate = much_happens
        await node.run("first", limits={SLOT: 1})
        node.create(pod("second", limits={SLOT: 1}))

        await node.phase("second", "Running")
        await node.phase("third", "Running")
        assert sorted(pod["metadata"]["name"] for pod in await node.list_pods()) == [
            "second",
            "third",
        ]


async def test_pod_resources_answers_for_one_pod_and_for_all_healthy_devices() -> None:
    async with slots("a", "b") as (node, _plugin):
        await node.run("one", limits={SLOT: 1})
        socket = f"unix:{node.kubelet.files.pod_resources_socket}"
        local = (("grpc.default_authority", "localhost"),)
        async with grpc.aio.insecure_channel(socket, options=local) as channel:
            stub = api_pb2_grpc.PodResourcesListerStub(channel)
            named = api_pb2.GetPodResourcesRequest(pod_name="one", pod_namespace="default")
            answer = await stub.Get(named)
            every = await stub.GetAllocatableResources(api_pb2.AllocatableResourcesRequest())
            with pytest.raises(grpc.aio.AioRpcError) as missing:
                await stub.Get(api_pb2.GetPodResourcesRequest(pod_name="two", pod_namespace="x"))

        (only,) = answer.pod_resources.containers[0].devices
        assert (only.resource_name, list(only.device_ids)) == (SLOT, ["a"])
        assert [list(device.device_ids) for device in every.devices] == [["a"], ["b"]]
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(("lag_s", "seen"), [(0.0, "Failed"), (60.0, "Pending")])
async def test_the_delay_of_statuses_in_pods_is_configurable(lag_s: float, seen: str) -> None:
    async with slots("a", settings=NodeSettings(pods_lag_s=lag_s)) as (node, plugin):
        phases: list[str] = []

        async def refuse_the_first(_devices: list[str]) -> Mapping[str, str]:
            if len(plugin.device_ids("Allocate")) == 1:
                raise PluginRefusalError("no")
            phases.append((await node.list_pods())[0]["status"]["phase"])
            return {}

        plugin.on_allocate = refuse_the_first
        node.create(pod("first", limits={SLOT: 1}))
        await node.run("second", limits={SLOT: 1})

        assert phases == [seen]
