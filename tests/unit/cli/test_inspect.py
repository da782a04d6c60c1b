"""explain, trace, gpus and ps: a snapshot in, text and JSON out."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console, RenderableType

from services.cli.formats import age
from services.cli.inspect import json_output, render, top, traces
from services.cli.inspect.explanation import explain, shape
from services.cli.snapshot.snapshot import MeasuredUsage, PodSummary, Snapshot
from shared.dialects import SCHEDULERS
from shared.model.device import Device, DeviceMode, DeviceUse, MigLayout, MigProfile
from shared.model.events.pod_events import PodQueued
from shared.model.lease import Lease, LeaseState, MigPlacement, Share
from shared.model.ledger import LedgerNode, NodeTotals, WaitingPod
from shared.model.names import BUDGET_GATE, DeviceUuid, Namespace, NodeName, PodUid
from shared.model.node import CORDON_PREFIX, NodeFacts
from shared.model.placement import DeviceVerdict, NodeVerdict, Refusal
from shared.model.request import Gang, PodRequest
from shared.model.usage import ShareMeasurement

OURS = frozenset({"volcano", "leasehold"})
GPU = DeviceUuid("GPU-0")
DEVICE = Device(uuid=GPU, index=2, model="Tesla T4", memory_mib=15_000, slots=4)
POD = PodSummary(
    pod=PodUid("6f1e0f5a-8d0e-4a55-b3a0-0f6f5f0a7c11"),
    namespace=Namespace("team"),
    name="first",
    phase="Pending",
    scheduler="volcano",
)
LEASE = Lease(
    pod=POD.pod,
    namespace=POD.namespace,
    name=POD.name,
    node=NodeName("node-0"),
    dialect="volcano-vgpu",
    state=LeaseState.ACTIVE,
    version=7,
    created_at=880.0,
    shares=(
        Share(
            container="main",
            device=GPU,
            index=2,
            memory_mib=3_000,
            cores_percent=30,
            slot=1,
            fence=5,
        ),
    ),
)
NODE = NodeTotals(
    node=LedgerNode(
        facts=NodeFacts(name=NodeName("node-0")),
        devices=((DEVICE, DeviceUse(memory_mib=3_000, cores_percent=30, shares=1, fence=5)),),
    ),
    leases=(LEASE,),
)
WAITING = WaitingPod(
    queued=PodQueued(
        pod=POD.pod,
        namespace=POD.namespace,
        name=POD.name,
        resource_version="1",
        request=PodRequest(),
        created_at=900.0,
    ),
    refusal=Refusal(
        reason="0/1 nodes are available: 1 Insufficient GPU memory.",
        counts=(("InsufficientGpuMemory", 1),),
        nearest_nodes=(
            NodeVerdict(
                node=NodeName("node-0"),
                reason="Insufficient GPU memory",
                devices=(
                    DeviceVerdict(device=GPU, index=2, reason="9 MiB are requested, 4 are free"),
                ),
            ),
        ),
        hint="ask for at most 4 MiB",
    ),
    capacity=1,
)
HELD = Snapshot(read_at=1_000.0, nodes=(NODE,))
NOT_MEASURED = MeasuredUsage()
MEASURED = ShareMeasurement(
    pod=POD.pod,
    namespace=POD.namespace,
    name=POD.name,
    container="main",
    device=GPU,
    memory_mib=1_200,
    cores_percent=0,
    processes=2,
    idle_since=400.0,
)


def drawn(renderable: RenderableType, width: int = 120) -> str:
    text = io.StringIO()
    Console(file=text, width=width, highlight=False).print(renderable)
    return text.getvalue()


def test_explain_of_a_running_pod_names_lease_device_slot_and_fence() -> None:
    bound = replace(POD, node="node-0", phase="Running", annotations={"volcano.sh/vgpu-node": "x"})

    answer = explain(bound, HELD, OURS)
    text = drawn(render.explanation(answer))

    assert answer.verdict == "running"
    assert "lease on node node-0" in text
    assert "3000 MiB, 30 % of the cores of device 2, slot 1, fence 5" in text
    assert "3000 of 15000 MiB, 30 % of its cores in 1 of 4 shares" in text
    assert "volcano.sh/vgpu-node: x" in text
    assert shape(bound, answer)["lease"]["version"] == 7


def test_explain_shows_why_a_reservation_on_a_cordoned_node_is_not_bound() -> None:
    node = replace(NODE.node, served=(f"{CORDON_PREFIX}its agent does not answer",))
    reserved = structs.replace(LEASE, state=LeaseState.RESERVED)

    stuck = replace(NODE, node=node, leases=(reserved,))
    active = replace(NODE, node=node)

    def output(node: NodeTotals) -> str:
        snapshot = Snapshot(read_at=1_000.0, nodes=(node,))
        return "\n".join(explain(POD, snapshot, OURS).lines)

    assert "waits for   its agent does not answer" in output(stuck)
    assert "waits for" not in output(active)


def test_explain_of_a_waiting_pod_names_every_device_and_the_next_thing_to_try() -> None:
    answer = explain(POD, Snapshot(read_at=1_000.0, waiting=(WAITING,)), OURS)
    text = drawn(render.explanation(answer))

    assert answer.verdict == "waiting"
    assert "has waited for 100s" in text
    assert "node node-0 (the nearest fit): Insufficient GPU memory" in text
    assert "device 2: 9 MiB are requested, 4 are free" in text
    assert "next: ask for at most 4 MiB" in text
    assert json.loads(json.dumps(shape(POD, answer)))["refusal"]["counts"] == [
        {"reason": "InsufficientGpuMemory", "nodes": 1}
    ]


@pytest.mark.parametrize(
    ("pod", "verdict"),
    [
        (replace(POD, scheduler="default-scheduler"), "foreign"),
        (replace(POD, phase="Succeeded"), "ended"),
        (
            replace(POD, unschedulable_message="volcano.sh/vgpu-cores must be at most 100"),
            "rejected",
        ),
        (replace(POD, gates=("example.com/gate",)), "gated"),
        (
            replace(POD, gates=(BUDGET_GATE,), unschedulable_message="Scheduling is blocked"),
            "gated",
        ),
        (POD, "unknown"),
    ],
)
def test_explain_of_a_pod_with_neither_lease_nor_refusal(pod: PodSummary, verdict: str) -> None:
    answer = explain(pod, Snapshot(read_at=1_000.0), OURS)

    assert answer.verdict == verdict
    assert answer.next


def test_explain_names_our_own_scheduler_to_pods_of_another() -> None:
    foreign = replace(POD, scheduler="default-scheduler")

    answer = explain(foreign, Snapshot(read_at=1_000.0), frozenset(SCHEDULERS))

    assert "set spec.schedulerName to leasehold" in answer.next


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (119, "119s"), (120, "2m"), (7_200, "2h"), (200_000, "2d")]
)
def test_ages_read_as_kubectl_writes_them(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_gpus_draws_a_bar_that_fits_the_width() -> None:
    narrow = drawn(render.gpus([NODE], 80, NOT_MEASURED), 80)
    wide = drawn(render.gpus([NODE], 140, NOT_MEASURED), 140)

    assert all(len(line) <= 80 for line in narrow.splitlines())
    assert wide.count("A") == 1 + round(3_000 * 48 / 15_000)
    assert "team/first main  3000 MiB  30 %  slot 1  active" in wide


def with_an_instance() -> NodeTotals:
    profiles = (
        MigProfile(name="2g.10gb", memory_mib=10_240, count=3),
        MigProfile(name="1g.5gb", memory_mib=5_120, count=1),
    )
    device = replace(
        DEVICE,
        memory_mib=40_960,
        mode=DeviceMode.MIG,
        layouts=(MigLayout(name="group2", profiles=profiles),),
    )
    place = MigPlacement(layout="group2", position=1, profile="2g.10gb")
    held = structs.replace(LEASE.shares[0], memory_mib=10_240, cores_percent=0, mig=place)
    use = DeviceUse(memory_mib=10_240, shares=1, fence=5, layout="group2", slots_taken="0100")
    return NodeTotals(
        node=LedgerNode(facts=NODE.node.facts, devices=((device, use),)),
        leases=(structs.replace(LEASE, shares=(held,)),),
    )


def test_an_instance_is_shown_with_its_profile_and_real_size() -> None:
    node = with_an_instance()
    snapshot = Snapshot(read_at=1_000.0, nodes=(node,))

    text = drawn(render.gpus([node], 160, NOT_MEASURED), 160)
    row = drawn(render.ps(snapshot), 160).splitlines()[1]
    (node,) = json_output.gpus([node], NOT_MEASURED)["nodes"]

    output = explain(replace(POD, node="node-0", phase="Running"), snapshot, OURS).lines

    assert "instance 2g.10gb at position 1 of layout group2 of device 2" in " ".join(output)
    assert "10240/40960 MiB  MIG: group2 (3 x 2g.10gb + 1 x 1g.5gb), 1/4 instances" in text
    assert "team/first main  10240 MiB  2g.10gb  position 1  active" in text
    assert row.split()[:6] == ["team/first", "node-0", "2", "10240", "-", "2g.10gb"]
    assert (node["devices"][0]["mode"], node["devices"][0]["layout"]) == ("mig", "group2")
    assert node["devices"][0]["shares"][0]["mig"] == {
        "layout": "group2", "position": 1, "profile": "2g.10gb"
    }  # fmt: skip


def test_an_idle_device_in_mig_mode_is_shown_as_idle() -> None:
    node = with_an_instance()
    ((device, _),) = node.node.devices
    idle = replace(node, node=replace(node.node, devices=((device, DeviceUse()),)), leases=())

    assert "MIG: idle, 1 possible layouts" in drawn(render.gpus([idle], 160, NOT_MEASURED), 160)


def test_gpus_without_a_device_prints_what_to_check() -> None:
    assert "are the node agents running?" in drawn(render.gpus([], 80, NOT_MEASURED))


def test_ps_lists_leases_and_waiting_pods() -> None:
    text = drawn(render.ps(replace(HELD, waiting=(WAITING,))), 160)

    assert "team/first  node-0  2        3000  -     30%    -     active  2m   volcano-vgpu" in text
    assert "Ask for at most 4 MiB." in text


def test_the_json_of_gpus_names_each_share_of_each_device() -> None:
    ((device,),) = [node["devices"] for node in json_output.gpus([NODE], NOT_MEASURED)["nodes"]]

    assert (device["used_memory_mib"], device["slots"], device["fence"]) == (3_000, 4, 5)
    assert device["shares"][0]["name"] == "first"


def test_an_unhealthy_device_and_its_leases_are_marked() -> None:
    sick = replace(DEVICE, healthy=False, fault="cordoned: XidError: Xid 79")
    ((_, use),) = NODE.node.devices
    node = replace(NODE, node=replace(NODE.node, devices=((sick, use),)))
    held = replace(HELD, nodes=(node,))

    bars = drawn(render.gpus([node], 120, NOT_MEASURED))
    assert "UNHEALTHY" in bars
    assert "cordoned: XidError: Xid 79" in bars
    assert "active, on an unhealthy device" in drawn(render.ps(held), 160)
    assert json_output.ps(held)["leases"][0]["unhealthy_devices"] == [GPU]
    assert json_output.gpus([node], NOT_MEASURED)["nodes"][0]["devices"][0]["fault"] == sick.fault
    assert any("UNHEALTHY: cordoned" in line for line in explain(POD, held, OURS).lines)


def test_usage_is_shown_beside_each_lease() -> None:
    usage = MeasuredUsage(shares={MEASURED.key: MEASURED})
    snapshot = replace(HELD, usage=usage)

    running = explain(POD, snapshot, OURS)

    assert "in use: 1200 MiB, 0%" in drawn(render.gpus([NODE], 160, usage))
    assert "3000  1200  30%    0%" in drawn(render.ps(snapshot))
    assert any("uses 1200 MiB and 0% of the cores; processes: 2, idle for 10m" in line
               for line in running.lines)  # fmt: skip
    ((device,),) = [node["devices"] for node in json_output.gpus([NODE], usage)["nodes"]]
    ((lease,), explained) = json_output.ps(snapshot)["leases"], shape(POD, running)["lease"]
    for share in (device["shares"][0], lease["shares"][0], explained["shares"][0]):
        assert share["measured"] == {
            "memory_mib": 1_200,
            "cores_percent": 0,
            "processes": 2,
            "idle_since": 400.0,
        }


def test_missing_usage_is_a_dash_and_nodes_without_a_reply_are_named() -> None:
    usage = MeasuredUsage(unmeasured_nodes=(NodeName("node-0"),))
    snapshot = replace(HELD, usage=usage)

    for text in (drawn(render.gpus([NODE], 160, usage)), drawn(render.ps(snapshot))):
        assert "no usage from the agents of: node-0" in text
    assert "in use: - MiB, -" in drawn(render.gpus([NODE], 160, usage))
    assert json_output.ps(snapshot)["leases"][0]["shares"][0]["measured"] is None
    assert json_output.ps(snapshot)["unmeasured_nodes"] == ["node-0"]


def test_top_sorts_by_usage_and_filters_by_namespace_and_node() -> None:
    other = structs.replace(LEASE, pod=PodUid("other"), name="second", namespace=Namespace("b"))
    nodes = [replace(NODE, leases=(other, LEASE))]
    usage = MeasuredUsage(shares={MEASURED.key: MEASURED})

    by_memory = top.top_rows(nodes, usage, sort="memory")
    by_pod = top.top_rows(nodes, usage, sort="pod")
    of_b = top.top_rows(nodes, usage, sort="cores", namespace="b")

    assert [row.lease.name for row in by_memory] == ["first", "second"]
    assert [row.lease.name for row in by_pod] == ["second", "first"]
    assert [row.lease.name for row in of_b] == ["second"]
    assert top.top_rows(nodes, usage, sort="idle", node="elsewhere") == []
    text = drawn(top.top_table(by_memory, usage, 1_000.0))
    assert "1200 of 3000  0% of 30%  2          10m" in text
    assert "- of 3000     - of 30%   -          -" in text
    assert [share["measured"] for share in top.top_shape(of_b, usage)["shares"]] == [None]


TRACE = POD.pod.replace("-", "")


def line(span: str, parent: str, start_ms: int, end_ms: int, **changes: object) -> str:
    fields = {
        "trace": TRACE,
        "span": span,
        "parent": parent,
        "name": f"step {span}",
        "service": "leasehold-placer",
        "start_ns": start_ms * 1_000_000,
        "end_ns": end_ms * 1_000_000,
        "ok": True,
        "text": "",
        "attributes": {
            "k8s.namespace.name": "team",
            "k8s.pod.name": "first",
            "k8s.pod.uid": POD.pod,
        },
    }
    return json.dumps({**fields, **changes}) + "\n"


@pytest.fixture
def trace_files(tmp_path: Path) -> Path:
    (tmp_path / "watcher.jsonl").write_text(
        line("a", "", 0, 10) + line("x", "", 0, 9, trace="other")
    )
    (tmp_path / "placer.jsonl").write_text(
        line("b", "a", 10, 40) + line("c", "b", 40, 100, ok=False, text="no room", attributes={})
    )
    (tmp_path / "binder.jsonl").write_text('{"trace": "' + TRACE + '", "span": "cut sho')
    (tmp_path / "other.jsonl").write_text(line("y", "", 0, 5, attributes={"k8s.pod.name": "first"}))
    return tmp_path


def test_a_trace_is_found_by_the_pods_name_or_uid_and_a_cut_line_is_skipped(
    trace_files: Path,
) -> None:
    named = traces.read_spans(trace_files, namespace="team", name="first")
    by_uid = traces.read_spans(trace_files, namespace="default", name=POD.pod)

    assert named == by_uid
    assert {"a", "b", "c"} <= {span.span for span in named}
    assert traces.read_spans(trace_files, namespace="team", name="second") == ()


def test_the_newest_trace_of_a_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        line("old", "", 0, 1, trace="1" * 32) + line("new", "", 500, 501, trace="2" * 32)
    )

    (span,) = traces.read_spans(tmp_path, namespace="team", name="first")

    assert span.span == "new"


def test_a_pods_own_admission_is_the_first_step(
    tmp_path: Path,
) -> None:
    unknown = {"k8s.namespace.name": "team", "k8s.pod.name": "first"}
    admission = {"trace": "9" * 32, "name": "webhook review", "attributes": unknown}
    text = line("r", "", 5, 8, **admission) + line("z", "", 900, 903, **admission)
    text += line("a", "", 10, 20, links=["r", "nowhere"]) + line("b", "a", 20, 40)
    (tmp_path / "a.jsonl").write_text(text)

    spans = traces.read_spans(tmp_path, namespace="team", name="first")
    shown = traces.shape(spans)

    assert [span.span for span in spans] == ["r", "a", "b"]
    assert traces.waterfall(spans, 100)[0].startswith("webhook review")
    assert traces.waterfall(spans, 100)[0].endswith("0.0 +3.0 ms")
    assert shown["trace"] == TRACE
    assert shown["spans"][0]["duration_s"] == pytest.approx(0.003)


def test_the_waterfall_indents_children_and_shows_times_and_failures(tmp_path: Path) -> None:
    text = (
        line("a", "", 0, 10) + line("b", "a", 10, 40) + line("c", "b", 40, 100, ok=False, text="x")
    )
    (tmp_path / "a.jsonl").write_text(text)

    spans = traces.read_spans(tmp_path, namespace="team", name="first")
    drawn_lines = traces.waterfall(spans, 100)

    assert [row.index("step") for row in drawn_lines] == [0, 2, 4]
    assert drawn_lines[1].endswith("10.0 +30.0 ms")
    assert drawn_lines[2].endswith("40.0 +60.0 ms  failed: x")
    assert traces.shape(spans)["spans"][2]["duration_s"] == pytest.approx(0.06)


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
    snapshot = Snapshot(read_at=1_000.0, nodes=(node,), waiting=(waiting,))

    first = explain(POD, snapshot, OURS)
    second = explain(replace(POD, pod=PodUid("other"), name="second"), snapshot, OURS)

    expected = (
        "gang        team/g, at least 3 run together or none: 1 of its pods hold a lease, 1 wait",
        "            hold: second",
        "            wait: first",
    )
    assert first.lines[:3] == expected == second.lines[:3]
    assert shape(POD, first)["gang"]["holding"] == ["second"]
    assert "gang" not in shape(POD, explain(POD, Snapshot(read_at=1.0, nodes=(NODE,)), OURS))
