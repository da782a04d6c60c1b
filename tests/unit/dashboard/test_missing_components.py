"""Which parts the page misses."""

from typing import Any

from services.dashboard.missing_components import FORGET_S, PATIENCE_S, Parts
from shared.model.events.pod_events import (
    Heartbeat,
)
from shared.model.names import NodeName


def report(service: str, instance: str = "", **fields: Any) -> Heartbeat:
    return Heartbeat(service=service, instance=instance or service, **fields)


def all_report(parts: Parts, now: float) -> None:
    for service in ("watcher", "placer", "binder"):
        parts.hear(report(service), now)


def test_a_replica_that_was_heard_and_fell_silent_is_named_and_one_that_left_is_not() -> None:
    parts = Parts(0.0)
    all_report(parts, 100.0)
    parts.hear(report("placer", "placer-1"), 100.0)
    parts.hear(report("placer", "placer-2"), 100.0)
    parts.hear(report("placer", "placer-2", stopping=True), 101.0)
    all_report(parts, 116.0)

    assert [one.text for one in parts.silent([], 116.0)] == ["placer (placer-1) is silent"]
    all_report(parts, 100.0 + FORGET_S + 1)
    assert parts.silent([], 100.0 + FORGET_S + 1) == []


def test_what_is_needed_and_was_never_heard_of_is_missed_after_a_while() -> None:
    parts = Parts(0.0)
    parts.hear(report("watcher"), PATIENCE_S)

    assert parts.silent([], PATIENCE_S - 1) == []
    assert [one.service for one in parts.silent([], PATIENCE_S)] == ["placer", "binder"]


def test_agents_of_two_nodes_on_one_host_are_two() -> None:
    parts = Parts(0.0)
    all_report(parts, 20.0)
    for node in ("n1", "n2"):
        parts.hear(report("node-agent", "on-one-host", node=node), 20.0)

    assert parts.silent([NodeName("n1"), NodeName("n2")], 21.0) == []


def test_a_node_with_devices_and_without_an_agent_is_named() -> None:
    parts = Parts(0.0)
    all_report(parts, 20.0)
    parts.hear(report("node-agent", "agent-a", node="n1"), 20.0)

    (missed,) = parts.silent([NodeName("n1"), NodeName("n2")], 21.0)

    assert missed.text == "no node-agent of n2 is heard of"


def test_a_replica_that_is_not_ready_is_named_with_its_own_words() -> None:
    parts = Parts(0.0)
    all_report(parts, 20.0)
    parts.hear(report("binder", unready_reasons=("nats: not connected",)), 20.0)

    (missed,) = parts.silent([], 21.0)

    assert missed.text == "binder (binder) is not ready: nats: not connected"
