"""Metrics of the cluster and of vendors' schedulers, and which components are missing."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import REGISTRY, Metric

from services.api.aggregated.objects import KINDS
from services.api.projection.problems import (
    GRACE_PERIOD_S,
    RETENTION_S,
    AffectedObject,
    ComponentMonitor,
    DataAge,
    clock_problems,
    problems_of,
    slow_servers,
)
from services.api.projection.projection import Projection
from services.api.projection.visible_cluster import all_namespaces
from services.api.reports.cluster_metrics import export_cluster, export_servers, observe_bound
from services.api.reports.legacy_metrics import LEFT_OUT, metric_families
from services.node_agent.gpus.device_faults import Xid
from shared.model.devices.device import Hardware
from shared.model.devices.enforcers import MissingEnforcer
from shared.model.devices.node import CORDON_PREFIX
from shared.model.events.pod_events import Heartbeat, PodBound
from shared.model.leases.lease import MIB, Lease
from shared.model.leases.ledger import NodeTotals, counted_use
from shared.model.names import Namespace, NodeName
from shared.model.requests.placement import Refusal
from shared.nats.subjects import MOST_OF_A_NODE
from tests.support import build
from tests.support.api.board import lease, node_totals, projected, seen, usage, waiting


def report(service: str, instance: str = "", **fields: Any) -> Heartbeat:
    return Heartbeat(service=service, instance=instance or service, **fields)


def all_report(components: ComponentMonitor, now: float) -> None:
    for service in ("watcher", "placer", "binder"):
        components.record(report(service), now)


def problem_texts(
    components: ComponentMonitor, now: float, nodes: Iterable[NodeName] = ()
) -> list[str]:
    missing = components.missing(nodes, now)
    found = problems_of(Projection(), missing, DataAge(), visible=all_namespaces, now=now)
    return [each.text for each in found]


def test_a_late_replica_is_missing_and_one_that_stops_on_purpose_is_not() -> None:
    components = ComponentMonitor(0.0)
    all_report(components, 100.0)
    components.record(report("placer", "placer-1"), 100.0)
    components.record(report("placer", "placer-2"), 100.0)
    components.record(report("placer", "placer-2", stopping=True), 101.0)
    all_report(components, 116.0)

    assert problem_texts(components, 116.0) == ["No heartbeats: placer-1"]
    all_report(components, 100.0 + RETENTION_S + 1)
    assert components.missing([], 100.0 + RETENTION_S + 1) == []


def test_a_required_service_without_heartbeats_is_missing_after_the_grace_period() -> None:
    components = ComponentMonitor(0.0)
    components.record(report("watcher"), GRACE_PERIOD_S)

    assert components.missing([], GRACE_PERIOD_S - 1) == []
    assert [one.service for one in components.missing([], GRACE_PERIOD_S)] == ["placer", "binder"]


def test_agents_of_two_nodes_on_one_host_count_as_two() -> None:
    components = ComponentMonitor(0.0)
    all_report(components, 20.0)
    for node in ("n1", "n2"):
        components.record(report("node-agent", "on-one-host", node=node), 20.0)

    assert components.missing([NodeName("n1"), NodeName("n2")], 21.0) == []


def test_a_node_with_devices_and_without_an_agent_is_reported() -> None:
    components = ComponentMonitor(0.0)
    all_report(components, 20.0)
    components.record(report("node-agent", "agent-a", node="n1"), 20.0)

    nodes = [NodeName("n1"), NodeName("n2")]
    assert problem_texts(components, 21.0, nodes) == ["No heartbeats: node-agent of n2"]


def test_an_agent_that_invents_replicas_has_as_many_as_an_agent_can_have() -> None:
    components = ComponentMonitor(0.0)
    all_report(components, 20.0)
    components.record(report("node-agent", "agent-b", node="n2"), 20.0)
    for number in range(3_000):
        name = f"invented-{number}"
        reasons = (f"fault {number}: {'x' * 900}",)
        event = report("node-agent", name, node="n1", unready_reasons=reasons)
        components.record(event, 20.0 + number / 3_000)

    missing = components.missing([NodeName("n1"), NodeName("n2")], 22.0)

    assert [one.cause.partition(" ")[0] for one in missing] == ["x" * 900] * MOST_OF_A_NODE
    all_report(components, 22.0 + RETENTION_S)
    later = components.missing([NodeName("n2")], 22.0 + RETENTION_S)
    assert [one.name for one in later] == ["node-agent of n2"]


def test_what_lacks_the_same_is_one_problem_with_its_first_time_and_a_hint() -> None:
    components = ComponentMonitor(0.0)
    reason = "redis: the call to the ledger failed; check that the server runs"
    for number, (service, at) in enumerate([("watcher", 20.0), ("placer", 30.0), ("binder", 25.0)]):
        for name in (service, f"{service}-b"):
            reasons = (reason, "nats: not connected") if number == 1 else (reason,)
            components.record(report(service, name, unready_reasons=reasons), at)
            components.record(report(service, name, unready_reasons=reasons), 31.0)

    found = problems_of(
        Projection(), components.missing([], 32.0), DataAge(), visible=all_namespaces, now=32.0
    )

    assert [(each.text, each.hint, each.since) for each in found] == [
        (
            "the call to the ledger failed: binder, binder-b, placer and 3 more",
            "check that the server runs",
            20.0,
        ),
        ("not connected: placer, placer-b", "", 30.0),
    ]
    assert found[0].count == len(found[0].affected) == 6


def test_sick_and_closed_gpus_and_old_data_are_problems_by_reason() -> None:
    sick, well = build.devices(2, "n1")
    sick = replace(sick, healthy=False, fault="cordoned: Full: it holds default/secret and no more")
    node = build.ledger_node(
        *("n1", sick, well),
        excluded_devices=(1,),
        exclusions=("fan is loud",),
        unschedulable=True,
    )
    projection = projected(NodeTotals(node=node, leases=()))

    def texts(visible: Callable[[Namespace], bool]) -> list[tuple[str, str]]:
        data = DataAge(ledger_at=10.0)
        found = problems_of(projection, [], data, visible=visible, now=50.0)
        return [(each.severity, each.text) for each in found]

    rest = [
        ("info", "Closed to new pods: fan is loud: GPU 1 of n1"),
        ("info", "kubectl cordon: n1"),
    ]
    old = ("error", "Leases cannot be read from Redis: everything shown is old")
    shown = ("warning", "Unhealthy: it holds default/secret and no more: GPU 0 of n1")
    assert texts(all_namespaces) == [old, shown, *rest]
    hidden = ("warning", "Unhealthy: the agent reports no reason: GPU 0 of n1")
    assert texts({"other"}.__contains__) == [old, hidden, *rest]


def test_old_data_has_a_hint_that_names_a_command() -> None:
    data = DataAge(ledger_at=10.0)

    (problem,) = problems_of(Projection(), [], data, visible=all_namespaces, now=50.0)

    assert "leasehold doctor" in problem.hint


def test_a_sick_gpu_is_one_problem_whose_hint_is_the_remedy() -> None:
    sick, other = build.devices(2, "n1")
    fault = f"cordoned: {Xid(sick.uuid, 95).fault}"
    both = (replace(device, healthy=False, fault=fault) for device in (sick, other))
    projection = projected(NodeTotals(node=build.ledger_node("n1", *both), leases=()))

    (problem,) = problems_of(projection, [], DataAge(), visible=all_namespaces, now=50.0)

    assert problem.text == "Unhealthy: Xid 95, uncontained memory error: GPU 0 of n1, GPU 1 of n1"
    assert problem.hint.startswith("drain the GPU and reset it before it gets new pods")


def test_a_gpu_that_its_temperature_slows_down_is_a_problem_while_it_does() -> None:
    hot, cold = build.devices(2, "n1")
    projection = projected(NodeTotals(node=build.ledger_node("n1", hot, cold), leases=()))
    for device, reasons in ((hot, ("temperature (hardware)",)), (cold, ("power limit",))):
        projection.hardware[device.uuid] = Hardware(device=device.uuid, at=1.0, throttle=reasons)

    (problem,) = problems_of(projection, [], DataAge(), visible=all_namespaces, now=50.0)

    assert (problem.severity, problem.text) == (
        "warning",
        "Slowed down by temperature: GPU 0 of n1",
    )


def test_a_node_that_its_full_disk_closes_is_a_warning_and_a_cordoned_one_is_none() -> None:
    (device,) = build.devices(1, "n1")
    closed = build.ledger_node("n1", device, served=(f"{CORDON_PREFIX}its disk is full",))
    cordoned = build.ledger_node("n2", *build.devices(1, "n2"), unschedulable=True)
    nodes = (NodeTotals(node=node, leases=()) for node in (closed, cordoned))
    projection = projected(*nodes)

    found = problems_of(projection, [], DataAge(), visible=all_namespaces, now=40.0)
    export_cluster(projection, [], 40.0)

    assert [(problem.severity, problem.text) for problem in found] == [
        ("warning", "its disk is full: n1"),
        ("info", "kubectl cordon: n2"),
    ]
    assert REGISTRY.get_sample_value("leasehold_closed_nodes") == 1.0


def test_an_enforcer_that_a_node_lost_is_one_warning_while_leases_need_it() -> None:
    lost = MissingEnforcer(name="hami-core", reason="its library is missing")
    unused = MissingEnforcer(name="driver", reason="the driver is older")
    leases = lease("p1"), lease("p2", gpu=1)
    missing = {"missing": (lost, unused)}
    projection = projected(
        node_totals(*leases, devices=build.devices(2, "n1", **missing)),
        node_totals(name="n2", devices=build.devices(2, "n2", **missing)),
    )
    projection.update_measured(NodeName("n1"), usage(), now=30.0, idle_after_s=600.0)

    found = problems_of(projection, [], DataAge(), visible=all_namespaces, now=40.0)
    export_cluster(projection, [], 40.0)

    assert [(problem.severity, problem.text) for problem in found] == [
        ("warning", "its library is missing: n1")
    ]
    lost_at = [
        REGISTRY.get_sample_value("leasehold_lost_enforcers", {"node": name, "enforcer": enforcer})
        for name in ("n1", "n2")
        for enforcer in ("hami-core", "driver")
    ]
    assert lost_at == [1.0, None, None, None]
    projection.update_nodes([], [node_totals(*leases)])
    assert not problems_of(projection, [], DataAge(), visible=all_namespaces, now=40.0)


def test_an_agent_that_is_silent_is_one_problem() -> None:
    """Its node is closed, and its usage unknown, for the same reason."""
    components = ComponentMonitor(0.0)
    all_report(components, 40.0)
    closed = f"{CORDON_PREFIX}the agent of node n1 does not respond: no responders"
    (device,) = build.devices(1, "n1")
    node = build.ledger_node("n1", device, served=(closed,))
    projection = projected(NodeTotals(node=node, leases=(lease("p"),)))
    names = list(projection.unmeasured_nodes())
    missing = components.missing([NodeName("n1")], 40.0)

    found = problems_of(projection, missing, DataAge(), visible=all_namespaces, now=40.0)

    assert names == ["n1"]
    assert [problem.text for problem in found] == ["No heartbeats: node-agent of n1"]


def test_a_clock_that_differs_from_most_is_a_problem_and_late_messages_are_none() -> None:
    components = ComponentMonitor(0.0)
    for at in (100.0, 105.0, 110.0):
        late_s = 9.0 if at == 105.0 else 0.0
        for service in ("api", "watcher", "placer"):
            components.record(report(service, sent_at=at - late_s), at)
        components.record(report("binder", sent_at=at + 45.0), at)

    clocks = components.clocks({"redis": -7.0}, 111.0)

    texts = [affected.name for affected in clock_problems(clocks)]
    assert texts == ["binder is 45 s ahead", "redis is 7 s behind"]
    export_servers(clocks, {})
    name = "leasehold_clock_difference_seconds"
    assert REGISTRY.get_sample_value(name, {"service": "binder"}) == 45.0
    assert REGISTRY.get_sample_value(name, {"service": "placer"}) == 0.0


def test_a_server_that_replies_late_is_a_problem() -> None:
    components = ComponentMonitor(0.0)
    for at, late_s in ((100.0, 0.0), (105.0, 3.5), (110.0, 0.0)):
        for service in ("api", "watcher", "placer"):
            components.record(report(service, sent_at=at - late_s), at)

    replies_s = {"redis": 1.4, "nats": components.lateness_s(), "api-server": 2.0}
    missing = list(slow_servers(replies_s))
    found = problems_of(Projection(), missing, DataAge(), visible=all_namespaces, now=111.0)

    assert [problem.text for problem in found] == [
        "NATS is slow: leases and events arrive late",
        "The API server is slow: pods are seen, placed and bound late",
    ]
    export_servers({}, replies_s)
    name = "leasehold_server_reply_seconds"
    assert REGISTRY.get_sample_value(name, {"service": "nats"}) == 3.5


def test_usage_that_comes_late_through_a_slow_nats_is_no_problem_of_its_agent() -> None:
    projection = projected(node_totals(lease("p")))

    def texts(replies_s: dict[str, float]) -> list[str]:
        slow = slow_servers(replies_s)
        found = problems_of(projection, slow, DataAge(), visible=all_namespaces, now=40.0)
        return [problem.text for problem in found]

    assert texts({"redis": 9.0}) == [
        "Redis is slow: pods are placed late",
        "Agents report no usage: n1",
    ]
    assert texts({"nats": 9.0}) == ["NATS is slow: leases and events arrive late"]


def test_a_wrong_clock_of_the_api_is_its_own() -> None:
    components = ComponentMonitor(0.0)
    for at in (100.0, 105.0, 110.0):
        components.record(report("api", sent_at=at), at)
        for service in ("watcher", "placer", "binder"):
            components.record(report(service, sent_at=at - 60.0), at)

    texts = [affected.name for affected in clock_problems(components.clocks({}, 111.0))]

    assert texts == ["api is 60 s ahead"]


def test_if_no_component_is_heard_nats_is_the_cause() -> None:
    components = ComponentMonitor(0.0)
    for service in ("api", "watcher", "placer", "binder"):
        components.record(report(service), 100.0)

    (text,) = problem_texts(components, 120.0)

    assert text.startswith("NATS delivers no heartbeats, not even those of the API: api, binder")


NOW = 1000.0


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"leasehold_{name}", labels)


def test_waiting_pods_are_counted_by_system_and_reason_with_the_longest_wait() -> None:
    shown = Projection()
    full = Refusal(reason="0/2 nodes", counts=(("GpuMemoryTaken", 2), ("GpuUnhealthy", 1)))
    pods = [
        replace(waiting("p1", since=400.0), refusal=full),
        replace(waiting("p2", since=900.0), refusal=full),
        replace(waiting("p3", since=100.0), refusal=structs.replace(full, quota="team")),
        replace(waiting("p4", since=100.0), refusal=Refusal(reason="1 of 2 exist", forming=True)),
    ]
    shown.update_waiting(pods)

    export_cluster(shown, [], NOW)

    dialect = pods[0].queued.request.dialect
    assert value("waiting_pods", system=dialect, reason="GpuMemoryTaken") == 2
    assert value("waiting_oldest_seconds", system=dialect, reason="GpuMemoryTaken") == 600
    assert value("waiting_pods", system=dialect, reason="GpuQuota") == 1
    assert value("waiting_pods", system=dialect, reason="GangIncomplete") == 1

    shown.update_waiting([])
    export_cluster(shown, [], NOW)

    assert value("waiting_pods", system=dialect, reason="GpuMemoryTaken") is None


def test_capacity_is_counted_by_state_and_the_largest_free_share_of_usable_devices() -> None:
    held = lease("p1", 0)
    shown = projected(node_totals(held))
    (first, second) = shown.devices.values()
    model = first.model
    total = first.memory_mib

    export_cluster(shown, [], NOW)

    assert value("devices", model=model, state="usable") == 2
    leased = held.shares[0].memory_mib
    assert value("capacity_memory_bytes", model=model, state="usable") == 2 * total * MIB
    assert value("leased_memory_bytes", model=model, state="usable") == leased * MIB
    assert value("largest_free_share_bytes", model=model) == second.memory_mib * MIB

    shown.devices[second.uuid] = structs.replace(second, healthy=False)
    export_cluster(shown, [], NOW)

    assert value("devices", model=model, state="unhealthy") == 1
    assert value("largest_free_share_bytes", model=model) == (total - leased) * MIB

    shown.devices[first.uuid] = structs.replace(first, healthy=False)
    export_cluster(shown, [], NOW)

    assert value("leased_memory_bytes", model=model, state="unhealthy") == leased * MIB
    assert value("leased_memory_bytes", model=model, state="usable") is None
    assert value("largest_free_share_bytes", model=model) is None


def test_a_device_of_a_node_that_is_gone_is_closed_in_metrics_and_for_kubectl() -> None:
    shown = projected(node_totals(lease(), devices=1, allocatable={}))

    export_cluster(shown, [], NOW)
    (found,) = KINDS[0].read(seen(shown))

    assert value("device_cordoned", node="n1", gpu="0", reason="the node is gone") == 1
    assert (found.status.phase, found.status.message) == ("Closed", "the node is gone")


def test_idle_leases_and_missing_components_are_counted() -> None:
    held = lease("p1", 0)
    shown = projected(node_totals(held))
    measured = build.measurement(held, idle_since=100.0)
    shown.update_measured(NodeName("n1"), usage(measured), now=NOW, idle_after_s=600)
    late = AffectedObject(service="binder", name="b-1", since=0.0, cause="late")

    export_cluster(shown, [late], NOW)

    assert value("idle_leases", namespace=held.namespace) == 1
    assert value("missing_components", service="binder") == 1


@pytest.mark.parametrize(
    ("steps", "waited", "took_s"),
    [
        ({"queued": 10.0, "bound": 10.0}, "no", 0.25),
        ({"queued": 10.0, "waiting": 11.0, "bound": 40.0}, "yes", 30),
        ({"bound": 40.0}, "no", 0),
    ],
)
def test_the_time_to_bind_is_observed_and_whether_the_pod_waited(
    steps: dict[str, float], waited: str, took_s: float
) -> None:
    trace = f"00-{1:032x}-{2:016x}-01"
    dialect = str(steps)
    bound = PodBound(
        lease=structs.replace(lease("p1", 0), dialect=dialect), latency_s=0.25, trace=trace
    )

    observe_bound(bound, steps)

    assert (value("time_to_bind_seconds_sum", system=dialect, waited=waited) or 0) == took_s


DEVICE = {"devID", "NodeName"}
D = {"node", "device_uuid", "device_index", "device_type"}
P = {"namespace", "node", "pod", "container_index", "device_uuid"}
UNTYPED = {"nodeid", "deviceuuid", "deviceidx"}
OLD = UNTYPED | {"devicetype"}
OLD_P = {"podnamespace", "nodename", "podname", "containeridx", "deviceuuid"}
VOLCANO = {
    "volcano_vgpu_device_shared_number": DEVICE,
    "volcano_vgpu_device_allocated_memory": DEVICE,
    "volcano_vgpu_device_allocated_cores": DEVICE,
    "volcano_vgpu_device_memory_limit": DEVICE,
    "volcano_vgpu_device_memory_allocation_for_a_certain_pod": DEVICE | {"podName"},
    "volcano_vgpu_device_core_allocation_for_a_certain_pod": DEVICE | {"podName"},
}
HAMI = {
    "hami_gpu_memory_limit_bytes": D,
    "hami_gpu_core_limit_ratio": D,
    "hami_gpu_memory_allocated_bytes": D | {"device_cores"},
    "hami_gpu_shared_count": D,
    "hami_gpu_core_allocated_ratio": D,
    "hami_node_gpu_memory_allocated_ratio": D,
    "hami_node_gpu_overview": D | {"device_cores", "device_memory_limit"},
    "hami_vgpu_memory_allocated_bytes": P,
    "hami_vgpu_core_allocated_ratio": P,
    "GPUDeviceMemoryLimit": OLD,
    "GPUDeviceCoreLimit": OLD,
    "GPUDeviceMemoryAllocated": OLD | {"devicecores"},
    "GPUDeviceSharedNum": OLD,
    "GPUDeviceCoreAllocated": OLD,
    "nodeGPUMemoryPercentage": UNTYPED,
    "vGPUMemoryAllocated": OLD_P,
    "vGPUCoreAllocated": OLD_P,
}


def scraped(*leases: Lease, unit_mib: int = 1) -> dict[str, Metric]:
    uses, _ = counted_use(leases)
    device = build.device("GPU-a", unit_mib=unit_mib)
    held = (device, uses[device.uuid]) if device.uuid in uses else device
    board = Projection()
    board.update_nodes([], [NodeTotals(node=build.ledger_node("n1", held), leases=leases)])
    return {family.name: family for family in metric_families(board)}


def leased(pod: str = "u1", *, mib: int = 2000, cores: int = 30, **fields: str) -> Lease:
    share = build.share(memory_mib=mib, cores_percent=cores, fence=1)
    return build.lease(pod, "n1", share, **({"name": "train"} | fields))


def values(family: Metric) -> list[float]:
    return [sample.value for sample in family.samples]


def test_item_49_the_schedulers_names_labels_and_types_are_the_published_ones() -> None:
    found = scraped(leased())

    for name, labels in (VOLCANO | HAMI).items():
        (sample,) = found[name].samples
        assert (found[name].type, sample.name, set(sample.labels)) == ("gauge", name, labels)


def test_item_49_volcanos_memory_is_in_the_units_of_its_node_and_hamis_in_bytes() -> None:
    found = scraped(leased(), unit_mib=10)

    assert values(found["volcano_vgpu_device_allocated_memory"]) == [200]
    assert values(found["volcano_vgpu_device_memory_limit"]) == [3276]
    assert values(found["volcano_vgpu_device_memory_allocation_for_a_certain_pod"]) == [200]
    assert values(found["volcano_vgpu_device_allocated_cores"]) == [30]
    assert values(found["hami_gpu_memory_allocated_bytes"]) == [2000 * MIB]
    assert values(found["hami_node_gpu_memory_allocated_ratio"]) == [2000 / 32768]


def test_pods_of_one_name_are_summed_in_the_vendors_series_and_separate_in_our_own() -> None:
    found = scraped(leased("u1", namespace="a"), leased("u2", namespace="b", mib=500))

    assert values(found["volcano_vgpu_device_memory_allocation_for_a_certain_pod"]) == [2500]
    ours = found["leasehold_share_memory_bytes"].samples
    assert {(s.labels["namespace"], s.labels["pod_uid"], s.value) for s in ours} == {
        ("a", "u1", 2000 * MIB),
        ("b", "u2", 500 * MIB),
    }


def test_item_49_series_of_a_pod_end_with_its_lease_and_those_of_its_device_stay() -> None:
    found = scraped()

    assert values(found["volcano_vgpu_device_shared_number"]) == [0]
    assert found["volcano_vgpu_device_memory_allocation_for_a_certain_pod"].samples == []
    assert found["hami_vgpu_memory_allocated_bytes"].samples == []


def test_series_of_a_node_that_vanished_are_gone() -> None:
    board = Projection()
    board.update_nodes([], [NodeTotals(node=build.ledger_node("n1", build.device()), leases=())])

    board.update_nodes([NodeName("n1")], [])

    assert [one.name for family in metric_families(board) for one in family.samples] == [
        LEFT_OUT[0]
    ]
