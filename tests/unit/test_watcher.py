"""What the watcher says of pods and nodes, and how it reads them."""

from dataclasses import replace

import msgspec
import pytest

from services.watcher import nodes, pods
from services.watcher.changes import TURNS, ForeignDevices, Nodes, Pods
from services.watcher.seen import PodSeen
from services.watcher.settings import WatcherSettings, load_rules
from shared.clients.kube_types import Node, Pod
from shared.dialects.dialect import Rules
from shared.model.device import Device
from shared.model.errors import RequestError
from shared.model.events import PodGated, PodGone, PodQueued, PodRejected
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import NodeFacts
from shared.model.node_events import DeviceReported
from shared.model.request import NodeTerm, PodRequest

WAITING = PodSeen(
    pod=PodUid("u1"),
    namespace=Namespace("ns"),
    name="p",
    resource_version="5",
    ours=True,
    created_at=100.0,
    resources={"cpu": 500, "pods": 1},
    request=PodRequest(priority=1),
)
BOUND = replace(WAITING, node=NodeName("a"), leased=True, resource_version="6")
FOREIGN = replace(BOUND, pod=PodUid("u2"), ours=False, leased=False)


READER = pods.PodReader(frozenset({"volcano"}), Rules())
VGPU = {"name": "c", "resources": {"limits": {"volcano.sh/vgpu-number": "1"}}}


def read(text: dict[str, object], **meta: object) -> PodSeen:
    whole = {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u1", "resourceVersion": "1", **meta},
        **text,
    }
    pod = msgspec.json.decode(msgspec.json.encode(whole), type=Pod)
    return READER.read(pod)


def test_a_waiting_pod_is_told_once_however_often_its_status_changes() -> None:
    known = Pods()

    first = known.see(WAITING, None)
    again = known.see(replace(WAITING, resource_version="7", explained=True), WAITING)

    assert [type(event) for event in first] == [PodQueued]
    assert again == []


def test_a_pod_whose_request_changes_is_told_again() -> None:
    known = Pods()
    known.see(WAITING, None)

    events = known.see(replace(WAITING, request=PodRequest(priority=2)), WAITING)

    assert [type(event) for event in events] == [PodQueued]


def test_a_pod_that_cannot_be_read_is_rejected_with_the_reason() -> None:
    events = Pods().see(replace(WAITING, request=None, fault="cores 101"), None)

    assert [(type(e), getattr(e, "reason", "")) for e in events] == [(PodRejected, "cores 101")]


def test_a_bound_pod_that_ends_is_gone_once() -> None:
    known = Pods()
    known.see(BOUND, None)
    ended = replace(BOUND, phase="Succeeded")

    events = [*known.see(ended, BOUND), *known.see(ended, ended), *known.miss(ended)]

    assert [(type(e), getattr(e, "phase", "")) for e in events] == [(PodGone, "Succeeded")]


def test_a_deleted_pod_is_gone_without_a_phase() -> None:
    known = Pods()
    known.see(BOUND, None)

    assert [(type(e), e.node, e.phase) for e in known.miss(BOUND) if isinstance(e, PodGone)] == [
        (PodGone, "a", "")
    ]


@pytest.mark.parametrize(
    "pod",
    [
        replace(WAITING, ours=False),
        replace(WAITING, deleting=True),
        replace(WAITING, gated=True),
        BOUND,
    ],
    ids=["not ours", "deleting", "gated", "bound"],
)
def test_pods_that_want_nothing_from_us_are_not_queued(pod: PodSeen) -> None:
    assert Pods().see(pod, None) == []


def test_a_pod_at_the_budgets_gate_is_told_once_and_queued_when_the_gate_is_open() -> None:
    known, held = Pods(), replace(WAITING, gated=True, held=True, priority=3)

    first = known.see(held, None)
    again = known.see(replace(held, resource_version="7"), held)
    reminded = known.again(9)
    turns = [event for turn in range(TURNS) for event in known.take_turn(5, turn)]
    opened = known.see(WAITING, held)

    assert [(type(event), event.pod) for event in first] == [(PodGated, WAITING.pod)]
    assert again == []
    assert [type(event) for event in reminded] == [PodGated]
    assert [type(event) for event in turns] == [PodGated]
    assert [type(event) for event in opened] == [PodQueued]
    assert known.held == {}
    assert [type(event) for event in known.again(10)] == [PodQueued]


def test_a_gated_pod_that_is_deleted_is_held_no_longer() -> None:
    known, held = Pods(), replace(WAITING, gated=True, held=True)
    known.see(held, None)

    known.see(replace(held, deleting=True), held)

    assert known.again(1) == []


def test_only_pods_without_a_lease_occupy_their_node() -> None:
    known = Pods()
    told = Nodes(known)
    told.see(NodeFacts(name=NodeName("a")), now_s=1.0)
    known.see(BOUND, None)
    known.see(FOREIGN, None)

    (change,) = told.occupied(now_s=2.0)

    assert change.facts.occupied == {"cpu": 500, "pods": 1}
    assert told.occupied(now_s=2.0) == []
    known.miss(FOREIGN)
    assert [c.facts.occupied for c in told.occupied(now_s=2.0)] == [{}]


def test_devices_of_another_plugin_are_told_when_they_come_change_and_go() -> None:
    name, known = NodeName("a"), ForeignDevices()
    gpu = Device(
        uuid=DeviceUuid("GPU-a"), index=0, model="T4", memory_mib=15360, slots=10, unit_mib=1
    )
    none = DeviceReported(node=name, devices=(), served=())
    some = replace(none, devices=(gpu,))

    told = [known.see(name, seen) for seen in (none, some, some, none, none, some)]

    assert told == [[], [some], [], [none], [], [some]]
    assert known.all(now_s=5.0) == [replace(some, reported_at=5.0)]
    assert known.see(name, None) == []
    assert known.see(name, some) == [some]


def test_a_node_that_our_agent_has_left_is_told_of_even_without_devices() -> None:
    name, known = NodeName("a"), ForeignDevices()
    none = DeviceReported(node=name, devices=(), served=(), foreign=True)

    told = [known.see(name, seen) for seen in (None, none, none)]

    assert told == [[], [none], []]
    assert known.all(now_s=5.0) == [replace(none, reported_at=5.0)]


def test_a_node_is_told_only_when_it_differs() -> None:
    told = Nodes(Pods())
    facts = NodeFacts(name=NodeName("a"), labels={"x": "1"})

    assert [change.seen_at for change in told.see(facts, now_s=1.0)] == [1.0]
    assert told.see(facts, now_s=2.0) == [], "when it was seen is no difference"
    gone = told.miss(facts.name, now_s=3.0)
    assert [(change.gone, change.seen_at) for change in gone] == [(True, 3.0)]
    assert told.miss(facts.name, now_s=4.0) == []


def test_unexplained_pods_are_told_again_and_the_ids_differ() -> None:
    known = Pods()
    (first,) = known.see(WAITING, None)

    (second,) = known.again(1, unexplained_before=101.0)

    assert first.event_id != second.event_id
    assert known.again(2, unexplained_before=99.0) == []


def test_explained_pods_have_their_turn_to_be_told_again_once_in_a_round() -> None:
    known = Pods()
    for number in range(50):
        pod = replace(WAITING, pod=PodUid(f"u{number}"), explained=number > 0)
        known.see(pod, None)

    told = [event for turn in range(TURNS) for event in known.take_turn(turn + 1, turn)]

    assert sorted(event.pod for event in told) == sorted(f"u{n}" for n in range(1, 50))
    assert not any(getattr(event, "unexplained", True) for event in told)


def test_a_pod_that_nobody_explained_is_told_again_as_such() -> None:
    known = Pods()
    (first,) = known.see(WAITING, None)

    (again,) = known.again(1)

    assert isinstance(first, PodQueued)
    assert isinstance(again, PodQueued)
    assert (first.unexplained, again.unexplained) == (False, True)


def test_a_pod_whose_binding_failed_is_told_again_if_it_still_waits() -> None:
    known = Pods()
    (first,) = known.see(WAITING, None)

    (again,) = known.tell([WAITING.pod, PodUid("gone")], 7)

    assert isinstance(again, PodQueued)
    assert (again.pod, again.event_id) != (first.pod, first.event_id)
    assert again.pod == WAITING.pod


def test_init_containers_count_by_their_largest_and_sidecars_add_up() -> None:
    def container(cpu: str, **more: str) -> dict[str, object]:
        return {"name": "c", "resources": {"requests": {"cpu": cpu}}, **more}

    seen = read(
        {
            "spec": {
                "initContainers": [container("100m", restartPolicy="Always"), container("2")],
                "containers": [container("1"), container("500m")],
                "overhead": {"cpu": "50m"},
            }
        }
    )

    assert seen.resources == {"cpu": 2150, "pods": 1}


def test_a_gpu_pod_is_read_with_what_it_demands_of_its_node() -> None:
    limits = {"volcano.sh/vgpu-number": 1, "memory": "1Gi", "rdma/hca": "1"}
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    seen = read(
        {
            "spec": {
                "schedulerName": "volcano",
                "nodeSelector": {"b": "2", "a": "1"},
                "affinity": {"nodeAffinity": required},
                "containers": [
                    {"name": "c", "resources": {"limits": limits}, "ports": [{"hostPort": 80}]}
                ],
            }
        }
    )

    assert seen.request is not None
    assert seen.request.resources == {"memory": 1 << 30, "rdma/hca": 1, "pods": 1}
    assert seen.request.demands.selector == (("a", "1"), ("b", "2"))
    assert seen.request.demands.required == ((NodeTerm(key="zone", operator="In", values=("a",)),),)
    assert seen.request.demands.host_ports == ("TCP/80",)


def test_pods_of_one_template_are_read_alike_and_other_annotations_make_a_difference() -> None:
    limits = {"volcano.sh/vgpu-number": 1}
    spec = {
        "schedulerName": "volcano",
        "containers": [{"name": "c", "resources": {"limits": limits}}],
    }

    one, two = (read({"spec": spec}, uid=uid, name=uid) for uid in ("one", "two"))
    other = read({"spec": spec}, annotations={"volcano.sh/vgpu-mode": "mig"})

    assert one.request == two.request
    assert (one.pod, two.pod) == ("one", "two")
    assert other.request is not None
    assert other.request.selection.mode == "mig"


def test_vcuda_memory_is_summed_as_the_kubelet_sums_it() -> None:
    limits = {"tencent.com/vcuda-core": 100, "tencent.com/vcuda-memory": 70}
    spec = {
        "schedulerName": "volcano",
        "containers": [{"name": "c", "resources": {"limits": limits}}],
    }
    shown = {"allocatable": {"tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "60"}}

    request = read({"spec": spec}).request
    facts = nodes.read(msgspec.convert({"metadata": {"name": "n"}, "status": shown}, Node))

    assert request is not None
    assert request.resources == {"tencent.com/vcuda-memory": 70, "pods": 1}
    assert facts.allocatable == {"tencent.com/vcuda-memory": 60}


def test_a_sidecar_that_asks_for_a_gpu_is_booked_beside_the_others() -> None:
    limits = {"limits": {"tencent.com/vcuda-core": 10, "tencent.com/vcuda-memory": 1}}
    ends: dict[str, object] = {"name": "ends", "resources": limits}
    stays: dict[str, object] = {"name": "stays", "restartPolicy": "Always"}
    main = {"name": "main", "resources": limits}

    def init_of(*init: dict[str, object]) -> list[bool]:
        seen = read(
            {"spec": {"schedulerName": "volcano", "containers": [main], "initContainers": init}}
        )
        assert seen.request is not None
        return [container.init for container in seen.request.containers]

    assert init_of(ends, stays) == [True, False], "a sidecar without a GPU changes nothing"
    assert init_of(ends, {**stays, "resources": limits}) == [False, False, False]


def test_constraints_that_placing_does_not_weigh_are_named() -> None:
    spread = {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    seen = read({"spec": {"schedulerName": "volcano", "topologySpreadConstraints": [spread]}})

    assert seen.request is not None
    assert seen.request.demands.unsupported == ("topologySpreadConstraints on zone",)


def test_a_bad_quantity_is_a_fault_and_no_crash() -> None:
    limits = {"volcano.sh/vgpu-number": "many"}
    seen = read(
        {
            "spec": {
                "schedulerName": "volcano",
                "containers": [{"name": "c", "resources": {"limits": limits}}],
            }
        }
    )

    assert "'many' is not a Kubernetes quantity" in seen.fault


def test_item_6_cards_that_the_annotation_lists_are_closed() -> None:
    node = msgspec.convert(
        {"metadata": {"name": "n", "annotations": {"volcano.sh/gpu-unhealthy-ids": "0,1,x, 3"}}},
        Node,
    )

    assert nodes.read(node).closed_devices == (0, 1, 3)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            WatcherSettings(gpu_scheduler_policy="spraed"),
            "--gpu-scheduler-policy: 'spraed' is none",
        ),
        (WatcherSettings(node_scheduler_policy="numa"), "--node-scheduler-policy must be binpack"),
        (WatcherSettings(dialects=("nvida",)), "there is no dialect 'nvida'"),
    ],
    ids=["gpu policy", "node policy", "dialect"],
)
def test_settings_that_mean_nothing_are_refused_at_the_start(
    settings: WatcherSettings, text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        load_rules(settings)


def test_pods_of_four_schedulers_are_ours_by_default() -> None:
    assert WatcherSettings().schedulers == (
        "leasehold",
        "volcano",
        "koord-scheduler",
        "hami-scheduler",
    )


def test_hami_cordoned_cards_are_closed_beside_those_that_volcanos_annotation_lists() -> None:
    notes = {
        "volcano.sh/gpu-unhealthy-ids": "3",
        "hami.io/device-cordon": "GPU-b",
        "hami.io/node-nvidia-register": '[{"id":"GPU-a"},{"id":"GPU-b","index":1}]',
    }
    node = msgspec.convert({"metadata": {"name": "n", "annotations": notes}}, Node)

    assert nodes.read(node).closed_devices == (1, 3)


def test_a_resource_that_the_kubelet_shows_as_0_is_not_served() -> None:
    shown = {"volcano.sh/vgpu-number": "0", "volcano.sh/gpu-memory": "5", "x/y": "0"}
    node = msgspec.convert({"metadata": {"name": "n"}, "status": {"allocatable": shown}}, Node)

    assert nodes.read(node).unserved == ("volcano.sh/vgpu-number",)


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
        Node,
    )

    report = nodes.foreign_devices(node, now_s=1.0)

    assert (None if report is None else len(report.devices)) == devices
    assert report is None or report.foreign


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"volumes": [{"name": "v", "hostPath": {"path": "/dev/nvidia0"}}]}, "/dev/nvidia0"),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/etc/ld.so.preload"}}]}, "preload"),
        ({"containers": [{**VGPU, "securityContext": {"privileged": True}}]}, "c is privileged"),
        (
            {"containers": [VGPU, {"name": "side", "securityContext": {"privileged": True}}]},
            "container side is privileged",
        ),
    ],
)
def test_gpusharing_35_what_the_webhook_would_have_denied_is_rejected_without_it(
    spec: dict[str, object], said: str
) -> None:
    seen = read({"spec": {"schedulerName": "volcano", "containers": [VGPU], **spec}})

    [event] = Pods().see(seen, None)

    assert isinstance(event, PodRejected)
    assert said in event.reason


def test_volumes_of_other_kinds_and_pods_without_a_gpu_are_let_through() -> None:
    config = {"name": "v", "configMap": {"name": "c"}}
    data = {"name": "d", "hostPath": {"path": "/data"}}
    devices = {"name": "v", "hostPath": {"path": "/dev/nvidia0"}}
    ours = {"schedulerName": "volcano", "containers": [VGPU], "volumes": [config, data]}
    asking = read({"spec": ours})
    no_gpu = {"schedulerName": "volcano", "containers": [{"name": "c"}], "volumes": [devices]}
    plain = read({"spec": no_gpu})

    assert (asking.fault, plain.fault) == ("", "")
