"""Which components the page reports as missing."""

from typing import Any

from services.api.missing_components import GRACE_PERIOD_S, RETENTION_S, ComponentMonitor
from shared.model.events.pod_events import Heartbeat
from shared.model.names import NodeName


def report(service: str, instance: str = "", **fields: Any) -> Heartbeat:
    return Heartbeat(service=service, instance=instance or service, **fields)


def all_report(components: ComponentMonitor, now: float) -> None:
    for service in ("watcher", "placer", "binder"):
        components.record(report(service), now)


def test_a_late_replica_is_missing_and_one_that_stops_on_purpose_is_not() -> None:
    components = ComponentMonitor(0.0)
    all_report(components, 100.0)
    components.record(report("placer", "placer-1"), 100.0)
    components.record(report("placer", "placer-2"), 100.0)
    components.record(report("placer", "placer-2", stopping=True), 101.0)
    all_report(components, 116.0)

    assert [one.text for one in components.missing([], 116.0)] == [
        "placer (placer-1) does not send heartbeats"
    ]
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

    (missing,) = components.missing([NodeName("n1"), NodeName("n2")], 21.0)

    assert missing.text == "no heartbeat of the node-agent of n2"


def test_a_replica_that_is_not_ready_is_reported_with_its_reasons() -> None:
    components = ComponentMonitor(0.0)
    all_report(components, 20.0)
    components.record(report("binder", unready_reasons=("nats: not connected",)), 20.0)

    (missing,) = components.missing([], 21.0)

    assert missing.text == "binder (binder) is not ready: nats: not connected"
