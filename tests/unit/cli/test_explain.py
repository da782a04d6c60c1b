"""explain: why a pod runs on its node, or why it waits, as text and JSON."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from services.cli.arguments import own_schedulers
from services.cli.inspect import render
from services.cli.inspect.explanation import explanation_of
from services.cli.pod_summary import summary_of
from shared.dialects import KUBE_SCHEDULER
from shared.kubernetes.types import ApiPod
from shared.model.devices.device import DeviceUse, Hardware, XidEvent
from shared.model.devices.enforcers import ComputeEnforcer, MemoryEnforcer
from shared.model.devices.node import CORDON_PREFIX
from shared.model.events.pod_events import PodQueued
from shared.model.leases.lease import LeaseState, ProcessUse, ShareMeasurement
from shared.model.leases.ledger import NodeTotals, WaitingPod
from shared.model.names import BUDGET_GATE, DeviceUuid, Namespace, NodeName, PodUid
from shared.model.requests.placement import Refusal
from shared.model.requests.request import Gang, PodRequest, Term, VolumeRule
from shared.model.views.gpus import NodeDevices
from shared.model.views.pods import ReasonCount, TraceView
from shared.placing.advice import RECOVERS
from shared.placing.node_filters import WAITS
from tests.support.snapshots import (
    DEVICE,
    EMPTY,
    HELD,
    LEASE,
    MEASURED,
    NODE,
    OURS,
    POD,
    WAITING,
    cluster_of,
    drawn,
    explained,
)


def test_explain_of_a_running_pod_says_in_few_lines_what_its_user_wants() -> None:
    bound = replace(POD, node="node-0", phase="Running", annotations={"volcano.sh/vgpu-node": "x"})
    term = Term(max_run_s=3600, grace_s=45)
    ending = structs.replace(LEASE, term=term, activated_at=900.0)
    timed = cluster_of(replace(NODE, leases=(ending,)))
    timed.projection.run_times.learn([(ending, 60.0), (ending, 60.0)])
    cluster = cluster_of(NODE, measured=[MEASURED])

    answer = explained(bound, cluster)
    text, wide = (drawn(render.explanation(answer, wide=wide)) for wide in (False, True))

    assert answer.verdict == "running"
    assert answer.lines == (
        "GPU         2 of node node-0, Tesla T4",
        "share       3000 of 15000 MiB, 30 % of its cores",
        "uses        1200 MiB and 0% of its cores, processes: 2, idle for 10m",
        "held        memory by HAMi-core, cores by HAMi-core",
        "since       1970-01-01T00:14:40Z, 2m ago",
        "idle        for 10m, since 1970-01-01T00:06:40Z: its pod holds it without using it",
        "until       its pod ends",
    )
    until = drawn(render.explanation(explained(bound, timed)), 120)
    assert "until       1970-01-01T01:16:00Z at the latest: its maximum run time; " in until
    assert "; expected 1970-01-01T00:16:00Z" in until
    assert "1970-01-01T01:16:00Z" in drawn(render.ps(timed.leases(), wide=True), 300)
    assert "number" not in wide, "the number of its lease is of no use"
    assert "volcano.sh" not in text
    assert "main: share 1, GPU" in wide
    assert "3000 of 15000 MiB, 30 % of its cores in 1 of 4 shares" in wide
    assert "volcano.sh/vgpu-node: x" in wide
    assert answer.lease is not None
    assert answer.lease.version == 7


@pytest.mark.parametrize(
    ("memory", "compute", "amounts", "lines"),
    [
        (
            "driver",
            "hami-core",
            {"held_memory_mib": 3_000, "held_cores_percent": 30},
            (
                "held        memory by the driver, cores by HAMi-core",
                "read back   3000 MiB and 30 % of the cores at 1970-01-01T00:16:30Z",
            ),
        ),
        (
            "driver",
            "none",
            {"held_memory_mib": 3_000},
            (
                "held        memory by the driver, cores not held",
                "read back   3000 MiB at 1970-01-01T00:16:30Z",
            ),
        ),
        (
            "driver",
            "none",
            {"held_memory_mib": 9_000, "held_difference": "the driver has 9000 MiB"},
            (
                "held        memory by the driver, cores not held",
                "DIFFERS     GPU 2: the driver has 9000 MiB (read back 1970-01-01T00:16:30Z)",
            ),
        ),
        (
            "none",
            "none",
            {"read_back_at": 0.0, "held_difference": "uses 9000 MiB"},
            ("held        memory not held, cores not held", "DIFFERS     GPU 2: uses 9000 MiB"),
        ),
    ],
)
def test_explain_says_what_holds_a_share_and_as_what_it_was_read_back(
    memory: MemoryEnforcer,
    compute: ComputeEnforcer,
    amounts: dict[str, Any],
    lines: tuple[str, ...],
) -> None:
    share = structs.replace(LEASE.shares[0], memory=memory, compute=compute)
    held = replace(NODE, leases=(structs.replace(LEASE, shares=(share,)),))
    measured = replace(MEASURED, **({"read_back_at": 990.0} | amounts))
    bound = replace(POD, node="node-0", phase="Running")

    answer = explained(bound, cluster_of(held, measured=[measured]))

    assert answer.lines[3:5] == lines


@pytest.mark.parametrize(
    ("controller", "advice"),
    [
        (
            "Job night",
            "kubectl delete pod p -n ns: Job night creates another one, on a healthy GPU",
        ),
        ("", "kubectl get pod p -n ns -o yaml > p.yaml && kubectl replace --force -f p.yaml"),
    ],
)
def test_explain_says_how_a_pod_leaves_an_unhealthy_gpu_without_being_lost(
    controller: str, advice: str
) -> None:
    sick = replace(DEVICE, healthy=False, fault="Xid 79")
    node = replace(NODE, node=replace(NODE.node, devices=((sick, DeviceUse()),)))
    pod = replace(POD, namespace=Namespace("ns"), name="p", controller=controller)

    assert advice in explained(pod, cluster_of(node)).next


def test_explain_names_what_is_wrong_with_components() -> None:
    unheard = replace(POD, pod=PodUid("unheard"))
    problem = "NATS delivers no heartbeats: api, binder"

    running = explanation_of(POD, HELD.pod(POD.pod, TraceView(trace="")), OURS, problems=[problem])
    unknown = explanation_of(unheard, None, OURS, problems=[problem])

    assert running.lines[-1] == unknown.lines[-1] == f"problem     {problem}"
    assert unknown.next == "leasehold doctor"
    assert explanation_of(unheard, None, OURS).next == "leasehold audit"


def test_explain_names_the_processes_of_a_pod_on_its_gpu() -> None:
    running = (
        ProcessUse(pid=4711, inner_pid=12, command="python3", memory_mib=900, cores_percent=40),
        ProcessUse(pid=4712),
    )

    lines = explained(POD, cluster_of(NODE, measured=[replace(MEASURED, running=running)])).lines

    at = lines.index("processes   PID 4711, 12 in main: python3, GPU 2, 900 MiB, 40 % of the cores")
    assert lines[at + 1] == "            PID 4712: ?, GPU 2"


def test_explain_shows_heat_and_xids_of_its_gpu_since_the_pod_has_it() -> None:
    xids = tuple(
        XidEvent(number=number, at=at, meaning="restart it")
        for number, at in ((13, LEASE.created_at + 5), (31, LEASE.created_at - 5))
    )
    sensors = Hardware(
        device=DEVICE.uuid, at=1.0, temperature_c=93, throttle=("temperature",), xids=xids
    )
    cluster = cluster_of(NODE)
    cluster.projection.hardware[DEVICE.uuid] = sensors

    view = cluster.pod(POD.pod, TraceView(trace=""))
    lines = explanation_of(POD, view, OURS, nodes=cluster.gpus().nodes).lines

    assert "SLOW        GPU 2 is slowed down by its temperature (93 °C)" in lines
    assert [line for line in lines if line.startswith("XID")] == [
        "XID 13      GPU 2 at 1970-01-01T00:14:45Z: restart it"
    ]


def test_explain_adds_up_what_equal_shares_use_and_names_the_one_that_is_used_least() -> None:
    gpus = [replace(DEVICE, uuid=DeviceUuid(f"GPU-{at}"), index=at) for at in (0, 1, 2, 5)]
    sick = replace(gpus[3], healthy=False, fault="Xid 79")
    devices = tuple((each, DeviceUse()) for each in (*gpus[:3], sick))
    whole = structs.replace(LEASE.shares[0], memory_mib=15_000, cores_percent=100, whole=True)
    shares = tuple(structs.replace(whole, device=one.uuid, index=one.index) for one in gpus)
    held = structs.replace(LEASE, shares=shares)
    node = NodeTotals(node=replace(NODE.node, devices=devices), leases=(held,))
    used = [
        replace(MEASURED, device=one.uuid, memory_mib=100 * (1 + one.index), cores_percent=cores)
        for one, cores in zip(gpus, (90, 0, 60, 50), strict=True)
    ]
    busy = [replace(each, idle_since=None) if each.cores_percent else each for each in used]

    def lines(*measured: ShareMeasurement, idle_after_s: float = 600.0) -> tuple[str, ...]:
        cluster = cluster_of(node, measured=measured, idle_after_s=idle_after_s)
        return explained(POD, cluster).lines

    assert lines(*busy)[:9] == (
        "3 GPUs      0, 1, 2 of node node-0, Tesla T4",
        "share       each the whole GPU: 15000 of 15000 MiB, 100 % of its cores",
        "uses        600 MiB and 50% of their cores; 1 of them idle",
        "least used  GPU 1: 200 MiB and 0% of its cores, processes: 2, idle for 10m",
        "held        memory by HAMi-core, cores by HAMi-core",
        "GPU         5 of node node-0, Tesla T4, UNHEALTHY: Xid 79",
        "share       the whole GPU: 15000 of 15000 MiB, 100 % of its cores",
        "uses        600 MiB and 50% of its cores, processes: 2",
        "held        memory by HAMi-core, cores by HAMi-core",
    )
    assert "uses        400 MiB and 75% of their cores; 0 of them idle, 1 not measured" in lines(
        busy[0], busy[2]
    )
    assert lines(*busy, idle_after_s=601.0)[2:4] == (
        "uses        600 MiB and 50% of their cores; 0 of them idle",
        "least used  GPU 1: 200 MiB and 0% of its cores, processes: 2, not used for 10m",
    )


def test_explain_shows_why_a_reservation_on_a_cordoned_node_is_not_bound() -> None:
    node = replace(NODE.node, served=(f"{CORDON_PREFIX}its agent does not answer",))
    reserved = structs.replace(LEASE, state=LeaseState.RESERVED)

    stuck = replace(NODE, node=node, leases=(reserved,))
    active = replace(NODE, node=node)

    def output(node: NodeTotals) -> str:
        snapshot = cluster_of(node)
        return "\n".join(explained(POD, snapshot).lines)

    assert "waits for   its agent does not answer" in output(stuck)
    assert "waits for" not in output(active)


def test_explain_shows_for_which_claim_a_reservation_waits() -> None:
    text = "its share is reserved on node node-0, but it must wait: claim data is not bound yet"
    waiting = replace(POD, unschedulable_message=text)
    reserved = structs.replace(LEASE, state=LeaseState.RESERVED)

    lines = explained(waiting, cluster_of(replace(NODE, leases=(reserved,)))).lines

    assert "waits       claim data is not bound yet" in lines
    assert not any("claim data" in line for line in explained(waiting, cluster_of(NODE)).lines)


def test_explain_shows_what_the_placement_policy_weighed() -> None:
    weighed = structs.replace(LEASE, weighed="policy fragmentation compared 2 nodes: 0.47 on n1")
    node = replace(NODE, leases=(weighed,))

    lines = explained(POD, cluster_of(node)).lines

    assert "chosen      policy fragmentation compared 2 nodes: 0.47 on n1" in lines
    assert not any(line.startswith("chosen") for line in explained(POD, HELD).lines)


def test_explain_says_which_other_nodes_have_room_and_what_the_others_lack() -> None:
    view = cluster_of(NODE).pod(POD.pod, TraceView(trace=""))
    [own] = cluster_of(NODE).gpus().nodes
    [device] = own.devices
    empty = structs.replace(device, used_memory_mib=0, used_cores_percent=0, used_shares=0)

    def node(name: str, *changes: dict[str, Any], **facts: Any) -> NodeDevices:
        devices = tuple(structs.replace(empty, **change) for change in changes)
        return structs.replace(own, node=NodeName(name), devices=devices, **facts)

    nodes = [
        own,
        node("room", {"used_memory_mib": 14_000}, {}),
        node("full", {"used_memory_mib": 14_000}, {"used_memory_mib": 15_000, "index": 3}),
        node("busy", {"used_cores_percent": 80}),
        node("shut", {}, cordoned="it is cordoned"),
        node("sick", {"healthy": False}),
    ]

    lines = explanation_of(POD, view, OURS, nodes=nodes).lines

    here = sum(it.memory_mib - it.used_memory_mib for it in own.devices)
    there = 2 * device.memory_mib - 14_000
    assert lines[-7:] == (
        "others      1 of 5 have room for 1 GPU with 3000 MiB and 30 % of the cores now",
        f"            room: room ({there} MiB free)",
        f"            here: {here} MiB of its GPUs are free; policy binpack prefers nodes with "
        "less, spread those with more",
        "            full: GPU 2 has 1000 of 3000 MiB free",
        "            busy: GPU 2 has 20 of 30 % of its cores free",
        "            shut: it gets no pods: it is cordoned",
        "            nodes without room that are not listed: 1",
    )


def test_explain_of_a_waiting_pod_names_every_device_and_the_next_thing_to_try() -> None:
    found = cluster_of(waiting=[WAITING]).pod(POD.pod, TraceView(trace=""))
    assert found is not None
    assert found.waiting is not None
    unending = structs.replace(found.waiting, no_end="no end in sight")
    answer = explanation_of(POD, structs.replace(found, waiting=unending), OURS)
    text = drawn(render.explanation(answer))

    assert answer.verdict == "waiting"
    assert "has waited for 100s" in text
    assert answer.lines[0] == "start       no end in sight"
    assert "node node-0 (the nearest fit): Insufficient GPU memory" in text
    assert "device 2: 9 MiB are requested, 4 are free" in text
    assert "next: ask for at most 4 MiB" in text
    assert answer.waiting is not None
    assert answer.waiting.counts == (ReasonCount(reason="InsufficientGpuMemory", nodes=1),)


@pytest.mark.parametrize(
    ("holder", "is_own"),
    [
        ("ns/server-5c4f8d-x7k2p", True),
        ("ns/server-6d9c7b-abcde", False),
        ("other/server-5c4f8d-x7k2p", False),
        ("ns/server-next-5c4f8d-x7k2p", False),
        ("ns/train", False),
    ],
)
def test_explain_says_that_a_deployment_keeps_its_older_pod(holder: str, *, is_own: bool) -> None:
    found = cluster_of(waiting=[WAITING]).pod(POD.pod, TraceView(trace=""))
    assert found is not None
    assert found.waiting is not None
    pod = replace(POD, namespace=Namespace("ns"), deployment="server", revision="6d9c7b")
    no_end = f"no end in sight: no maximum run time is set for {holder}, which would have to end"
    waiting = structs.replace(found.waiting, no_end=no_end)

    answer = explanation_of(pod, structs.replace(found, waiting=waiting), OURS)

    assert ("its own Deployment server keeps the older pod" in answer.next) is is_own
    assert ("Recreate" in answer.next) is is_own


def test_the_deployment_of_a_pod_is_that_of_its_replica_set() -> None:
    meta = {
        "name": "server-6d9c7b-abcde",
        "namespace": "ns",
        "labels": {"pod-template-hash": "6d9c7b"},
        "ownerReferences": [{"kind": "ReplicaSet", "name": "server-6d9c7b", "controller": True}],
    }

    found = summary_of(msgspec.convert({"metadata": meta}, ApiPod))

    assert (found.deployment, found.revision) == ("server", "6d9c7b")
    assert found.controller == "ReplicaSet server-6d9c7b"


@pytest.mark.parametrize(
    ("hint", "retried"),
    [
        ("in container main set nvidia.com/gpumem: 4, as node n has room for it now", True),
        ("waiting does not help: change the node selector zone to b, as node n has", False),
        ("waiting alone does not help: tolerate the taint a=b:NoSchedule, and wait", False),
        ("ask an administrator: kubectl uncordon n", False),
    ],
)
def test_explain_promises_a_retry_only_where_freed_capacity_helps(hint: str, retried: bool) -> None:
    waiting = replace(WAITING, refusal=structs.replace(WAITING.refusal, hint=hint))

    lines = explained(POD, cluster_of(waiting=[waiting])).lines

    assert ("it is placed as soon as enough capacity is free" in lines) == retried
    assert (
        "waiting does not help: change the pod, or have an administrator change the cluster"
        in lines
    ) != retried


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (WAITS, "it is placed as soon as its PersistentVolumeClaims can be used"),
        (
            VolumeRule.ZONE,
            "it is placed as soon as its volumes can be reached from a node with enough capacity",
        ),
    ],
)
def test_explain_promises_nothing_by_capacity_alone_to_a_pod_with_volumes(
    code: str, line: str
) -> None:
    refusal = structs.replace(WAITING.refusal, counts=((code, 2),), hint="create it")

    lines = explained(POD, cluster_of(waiting=[replace(WAITING, refusal=refusal)])).lines

    assert [text for text in lines if text.startswith("it is placed")] == [line]


def test_explain_says_that_a_sick_gpu_may_recover() -> None:
    sick = f"ask an administrator: check node n: device 0: XID 79; {RECOVERS}"
    waiting = replace(WAITING, refusal=structs.replace(WAITING.refusal, hint=sick))

    lines = explained(POD, cluster_of(waiting=[waiting])).lines

    assert "it is placed as soon as a GPU that fits it has recovered" in lines
    assert not any("does not help" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "verdict", "then"),
    [
        ({"scheduler": "default-scheduler"}, "foreign", "set spec.schedulerName to leasehold and"),
        ({"phase": "Succeeded"}, "ended", "leasehold trace first -n team"),
        (
            {"unschedulable_message": "volcano.sh/vgpu-cores must be at most 100"},
            "rejected",
            "fix what the message names",
        ),
        ({"gates": ("example.com/gate",)}, "gated", "kubectl get pod first -n team -o yaml"),
        (
            {"gates": (BUDGET_GATE,), "unschedulable_message": "Scheduling is blocked"},
            "gated",
            "leasehold budget team",
        ),
        ({}, "unknown", "leasehold audit"),
    ],
)
def test_explain_of_a_pod_with_neither_lease_nor_refusal(
    changes: dict[str, Any], verdict: str, then: str
) -> None:
    answer = explained(replace(POD, **changes), EMPTY)

    assert (answer.verdict, then in answer.next) == (verdict, True)


def test_explain_shows_the_extenders_verdict_of_a_pod_that_kube_scheduler_places() -> None:
    pod = replace(POD, scheduler=KUBE_SCHEDULER, unschedulable_message="0/3 nodes are available")
    snapshot = cluster_of(waiting=[WAITING])

    refused = explained(pod, snapshot, own_schedulers(()))
    elsewhere = explained(pod, EMPTY, own_schedulers(()))

    assert refused.verdict == elsewhere.verdict == "waiting"
    assert WAITING.refusal.reason in refused.text
    assert "node node-0 (the nearest fit): Insufficient GPU memory" in refused.lines
    assert elsewhere.text.endswith("kube-scheduler reports: 0/3 nodes are available")


def test_explain_names_the_resource_that_was_meant() -> None:
    answer = explained(
        replace(POD, scheduler="default-scheduler", unknown={"amd.com/gpu": 1}), EMPTY
    )

    assert "requests amd.com/gpu, which no agent of Leasehold serves" in answer.text
    assert answer.next.startswith("did you mean nvidia.com/gpu?")


@pytest.mark.parametrize(
    ("limits", "next_text"),
    [
        ({}, "write `nvidia.com/gpu: 1`"),
        ({"nvidia.com/gpu": "0"}, "write `nvidia.com/gpu: 1`"),
        ({"volcano.sh/vgpu-memory": 0}, "write `volcano.sh/vgpu-memory: 4096`"),
        ({"habana.ai/gaudi": "1"}, "did you mean nvidia.com/gpu?"),
        ({"aliyun.com/gpu-mem": "3"}, "did you mean nvidia.com/gpumem: 3072?"),
        ({"habana.ai/gaudi": 1, "nvidia.com/gpu": 1}, "remove it, as the pod requests nvidia.com"),
        ({"nvidia.com/gpu": "1"}, "set spec.schedulerName to leasehold"),
        ({"nvidia.com/gpu": "one"}, "set spec.schedulerName to leasehold"),
    ],
)
def test_a_pod_without_gpus_is_not_sent_to_a_scheduler(
    limits: dict[str, Any], next_text: str
) -> None:
    spec = {"containers": [{"name": "main", "resources": {"limits": limits}}]}
    pod = summary_of(msgspec.convert({"metadata": {"name": "p", "uid": "u"}, "spec": spec}, ApiPod))

    answer = explained(replace(pod, scheduler="default-scheduler"), EMPTY)

    assert (answer.verdict, answer.next.startswith(next_text)) == ("foreign", True)


@pytest.mark.parametrize("scheduler", ["default-scheduler", "runai-scheduler"])
def test_a_part_of_a_gpu_by_annotations_is_advised_as_resources(scheduler: str) -> None:
    meta = {"name": "p", "uid": "u", "annotations": {"run.ai/gpu-memory": "4Gi"}}
    spec = {"containers": [{"name": "main"}]}
    pod = summary_of(msgspec.convert({"metadata": meta, "spec": spec}, ApiPod))

    answer = explained(replace(pod, scheduler=scheduler), EMPTY)

    assert answer.next == (
        "in container main set nvidia.com/gpu: 1, nvidia.com/gpumem: 4096, and recreate the pod"
    )


def test_explain_names_the_claims_that_another_scheduler_has_to_allocate() -> None:
    message = "0/1 nodes are available: 1 cannot allocate all claims"
    pod = replace(
        POD, scheduler="default-scheduler", claims=("gpu",), unschedulable_message=message
    )

    waiting = explained(pod, EMPTY)
    bound = explained(replace(pod, node="n1"), EMPTY)

    assert waiting.verdict == "waiting"
    assert "default-scheduler to allocate its ResourceClaims (gpu)" in waiting.text
    assert waiting.text.endswith(message)
    assert bound.verdict == "foreign"


def test_explain_shows_the_whole_gang_of_a_pod_that_waits_and_of_one_that_runs() -> None:
    gang = Gang(name="team/g", min_member=3)
    queued = PodQueued(
        pod=POD.pod,
        namespace=POD.namespace,
        name="first",
        resource_version="1",
        request=PodRequest(gang=gang),
    )
    waiting = WaitingPod(queued=queued, refusal=Refusal(reason="2 of 3 pods exist"), capacity=1)
    peer = structs.replace(LEASE, pod=PodUid("other"), name="second", gang=gang.name)
    node = replace(NODE, leases=(peer,))
    snapshot = cluster_of(node, waiting=[waiting])

    first = explained(POD, snapshot)
    second = explained(replace(POD, pod=PodUid("other"), name="second"), snapshot)

    expected = (
        "gang        team/g, at least 3 run together or none: 1 of its pods hold a lease, 1 wait",
        "            hold: second",
        "            wait: first",
    )
    assert first.lines[:3] == expected == second.lines[:3]
    assert not any(line.startswith("it is placed as soon as") for line in first.lines)
    assert first.gang is not None
    assert first.gang.holding == ("second",)
    assert explained(POD, HELD).gang is None


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"reason": "DeadlineExceeded", "message": "too long"}, "DeadlineExceeded: too long"),
        (
            {
                "containerStatuses": [
                    {"name": "log", "state": {"terminated": {"exitCode": 0}}},
                    {
                        "name": "main",
                        "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    },
                ]
            },
            "container main: OOMKilled, exit code 137",
        ),
    ],
)
def test_a_pod_that_failed_is_explained_with_its_reason(status: dict[str, Any], why: str) -> None:
    ran = [{"name": "main", "state": {"terminated": {"exitCode": 137}}}]
    failed = {
        "metadata": {"name": "p", "namespace": "team", "uid": "u"},
        "spec": {"schedulerName": "leasehold", "nodeName": "node-0"},
        "status": {"phase": "Failed", "containerStatuses": ran} | status,
    }
    summary = summary_of(msgspec.convert(failed, ApiPod))

    answer = explanation_of(summary, None, OURS)

    assert answer.text == f"team/p has failed ({why}); its lease has ended"
    assert answer.next.startswith("kubectl logs p -n team --all-containers; ")


@pytest.mark.parametrize(
    ("rejection", "line"),
    [
        ("OutOfcpu: Node didn't have enough resource: cpu", "which took its last cpu"),
        ("UnexpectedAdmissionError: Allocate failed", "its lease has ended"),
    ],
)
def test_a_pod_that_its_kubelet_rejected_is_explained(rejection: str, line: str) -> None:
    rejected = replace(POD, node="node-0", phase="Failed", rejection=rejection)

    answer = explained(rejected, cluster_of(replace(NODE, leases=())))

    assert answer.verdict == "ended"
    assert f"rejected by the kubelet of node node-0: {rejection}" in answer.text
    assert line in " ".join(answer.lines)
    assert ("which took" in " ".join(answer.lines)) == rejection.startswith("OutOf")
