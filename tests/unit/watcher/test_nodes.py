"""Which events follow from the observed states of nodes, and how nodes are parsed."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from services.watcher.node_sources import foreign_devices, parse_node
from services.watcher.node_trackers import ForeignDeviceTracker, NodeTracker
from services.watcher.pod_tracker import PodTracker
from shared.kubernetes.types import ApiNode
from shared.model.devices.device import Device
from shared.model.devices.node import NodeFacts
from shared.model.errors import RequestError
from shared.model.events.node_events import DevicesRegistered
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.request import PodRequest
from shared.pods.observed_pod import ObservedPod

WAITING = ObservedPod(
    pod=PodUid("u1"),
    namespace=Namespace("ns"),
    name="p",
    resource_version="5",
    ours=True,
    created_at=100.0,
    resources={"cpu": 500, "pods": 1},
    request=PodRequest(priority=1),
)


FOREIGN = structs.replace(WAITING, pod=PodUid("u2"), ours=False)


def test_devices_of_another_plugin_are_published_when_they_change() -> None:
    name = NodeName("a")
    known = ForeignDeviceTracker()
    gpu = Device(
        uuid=DeviceUuid("GPU-a"), index=0, model="T4", memory_mib=15360, slots=10, unit_mib=1
    )
    none = DevicesRegistered(node=name, devices=(), served=())
    some = replace(none, devices=(gpu,))

    events = [known.update(name, seen) for seen in (none, some, some, none, none, some)]

    assert events == [[], [some], [], [none], [], [some]]
    assert known.resync(now_s=5.0) == [replace(some, reported_at=5.0)]
    assert known.update(name, None) == []
    assert known.update(name, some) == [some]


def test_a_node_whose_agent_has_left_is_published_even_without_devices() -> None:
    name = NodeName("a")
    known = ForeignDeviceTracker()
    none = DevicesRegistered(node=name, devices=(), served=())

    events = [known.update(name, seen) for seen in (None, none, none)]

    assert events == [[], [none], []]
    assert known.resync(now_s=5.0) == [replace(none, reported_at=5.0)]


def test_a_node_is_published_only_when_it_has_changed() -> None:
    events = NodeTracker(PodTracker())
    facts = NodeFacts(name=NodeName("a"), labels={"x": "1"})

    assert [change.revision.node for change in events.update(facts, 1)] == [1]
    assert events.update(facts, 2) == [], "another revision is no difference"
    removal = events.remove(facts.name, 3)
    assert [(change.deleted, change.revision.node) for change in removal] == [(True, 3)]
    assert events.remove(facts.name, 4) == []


def test_a_resource_that_no_node_has_is_published_of_pods_of_other_schedulers() -> None:
    nodes = NodeTracker(PodTracker())
    nodes.update(NodeFacts(name=NodeName("a"), allocatable={"nvidia.com/mig-1g.5gb": 1}), 1)
    waiting = structs.replace(FOREIGN, node=None, resources={"cpu": 1, "nvidia.com/GPU": 1})
    pods = (
        waiting,
        structs.replace(waiting, node=NodeName("a")),
        structs.replace(waiting, ours=True),
        structs.replace(waiting, phase="Failed"),
        structs.replace(waiting, resources={"nvidia.com/mig-1g.5gb": 1, "nvidia.com/gpu": 1}),
    )

    early = nodes.unknown_resources(waiting)
    nodes.revision = 1
    events = [nodes.unknown_resources(pod) for pod in pods]

    assert early == []
    assert events[1:] == [[], [], [], []]
    ((event,),) = events[:1]
    assert (event.pod, event.foreign) == (waiting.pod, True)
    assert (
        event.reason == "no node of this cluster has nvidia.com/GPU: did you mean nvidia.com/gpu?"
    )
    beside = structs.replace(waiting, resources={"nvidia.com/gpu": 1, "habana.ai/gaudi": 1})
    assert [event.reason for event in nodes.unknown_resources(beside)] == [
        "no node of this cluster has habana.ai/gaudi: remove it, as the pod requests "
        "nvidia.com/gpu, too"
    ]


def test_item_6_cards_are_closed_by_each_annotation_with_its_reason() -> None:
    notes = {
        "cordon.leasehold.dev/gpu-0": "fan is loud",
        "cordon.leasehold.dev/gpu-2": "",
        "cordon.leasehold.dev/gpu-x": "no index",
        "volcano.sh/gpu-unhealthy-ids": "x, 3,99999,-7",
        "hami.io/device-cordon": "GPU-b",
        "hami.io/node-nvidia-register": '[{"id":"GPU-a"},{"id":"GPU-b","index":1}]',
    }
    node = msgspec.convert({"metadata": {"name": "n", "annotations": notes}}, ApiNode)

    assert parse_node(node).closed_devices == {
        0: "cordoned: fan is loud",
        1: "listed in the node's annotation hami.io/device-cordon",
        2: "cordoned",
        3: "listed in the node's annotation volcano.sh/gpu-unhealthy-ids",
    }


CORDON_0 = "cordon.leasehold.dev/gpu-0"


@pytest.mark.parametrize(
    ("manager", "author"),
    [
        ("leasehold:ada", " by ada"),
        ("node-maintenance", " by node-maintenance"),
        ("kubectl-annotate", ""),
        ("kubectl-cordon", ""),
        ("leasehold", ""),
    ],
)
def test_a_cordon_names_who_made_it_as_the_api_server_has_recorded(
    manager: str, author: str
) -> None:
    written: dict[str, Any] = {"f:metadata": {"f:annotations": {f"f:{CORDON_0}": {}}}}
    entries = [
        {"manager": "kubelet", "fieldsV1": {"f:metadata": {"f:annotations": {".": {}}}}},
        {"manager": manager, "fieldsV1": {**written, "f:spec": {"f:unschedulable": {}}}},
    ]
    meta = {"name": "n", "annotations": {CORDON_0: "fan"}, "managedFields": entries}
    node = msgspec.convert({"metadata": meta, "spec": {"unschedulable": True}}, ApiNode)

    facts = parse_node(node)

    assert facts.closed_devices == {0: f"cordoned{author}: fan"}
    assert facts.cordoned_by == author.removeprefix(" by ")


def test_a_long_reason_of_a_cordon_is_cut_and_the_node_stays_open() -> None:
    meta = {"name": "n", "annotations": {CORDON_0: "fan " * 100}}
    node = msgspec.convert({"metadata": meta}, ApiNode)

    assert parse_node(node).closed_devices[0] == f"cordoned: {('fan ' * 100)[:200]}"


@pytest.mark.parametrize(
    ("status", "manager"),
    [("True", "condition gpu-fractioning.nvidia.com/Ready"), ("False", ""), ("Unknown", "")],
)
def test_a_node_on_which_another_manager_is_ready_says_so(status: str, manager: str) -> None:
    conditions = [
        {"type": "Ready", "status": "True"},
        {"type": "gpu-fractioning.nvidia.com/Ready", "status": status},
    ]
    node = msgspec.convert(
        {"metadata": {"name": "n"}, "status": {"conditions": conditions}}, ApiNode
    )

    assert parse_node(node).other_manager == manager


def test_a_resource_that_the_kubelet_shows_as_0_is_not_served() -> None:
    shown = {"volcano.sh/vgpu-number": "0", "volcano.sh/gpu-memory": "5", "x/y": "0"}
    node = msgspec.convert({"metadata": {"name": "n"}, "status": {"allocatable": shown}}, ApiNode)

    assert parse_node(node).unserved_resources == ("volcano.sh/vgpu-number",)


@pytest.mark.parametrize(
    ("notes", "number", "devices"),
    [
        ({"volcano.sh/node-vgpu-register": "GPU-a,10,15360,NVIDIA-T4,false:"}, "10", 1),
        ({"volcano.sh/node-vgpu-register": "GPU-a,10,15360,NVIDIA-T4,false:"}, "0", 0),
        ({"volcano.sh/node-vgpu-register": "rubbish"}, "10", 0),
        (
            {
                "volcano.sh/node-vgpu-register": "GPU-a,10,15360,NVIDIA-T4,true,hami-core:",
                "leasehold.dev/agent": "1",
            },
            "10",
            None,
        ),
        ({}, "10", 0),
        (
            {
                "volcano.sh/node-vgpu-register": "GPU-a,10,15360,NVIDIA-T4,false:",
                "volcano.sh/node-vgpu-handshake": "Deleted_2026.08.20 10:00:00",
            },
            "10",
            0,
        ),
    ],
    ids=[
        "item 15",
        "item 34: no slots",
        "item 34: unreadable",
        "our agent",
        "no annotation",
        "item 16",
    ],
)
def test_devices_of_volcanos_own_plugin_are_taken_from_its_annotation(
    notes: dict[str, str], number: str, devices: int | None
) -> None:
    node = msgspec.convert(
        {
            "metadata": {"name": "n", "annotations": notes},
            "status": {"allocatable": {"volcano.sh/vgpu-number": number}},
        },
        ApiNode,
    )

    report = foreign_devices(node, now_s=1.0)

    assert (None if report is None else len(report.devices)) == devices
    assert report is None or report.other_plugin


def test_a_node_that_is_too_large_to_publish_is_refused() -> None:
    labels = {f"example.com/{number}": "x" * 63 for number in range(4000)}
    resources = {f"example.com/{number}": "1" for number in range(257)}

    for content in (
        {"metadata": {"name": "n", "labels": labels}},
        {"status": {"allocatable": resources}},
    ):
        with pytest.raises(RequestError, match=r"at most 262144|length <= 256"):
            parse_node(msgspec.convert(content, ApiNode))
