"""How many violations of a pod, and of a node, are reported."""

from collections import Counter

from services.node_agent.usage.report_limits import (
    MOST_AT_ONCE,
    MOST_OF_POD,
    WINDOW_S,
    ReportLimits,
)
from shared.model.events.node_events import ViolationFound, ViolationReason
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid


def violation(namespace: str, pod: str, device: int = 0) -> ViolationFound:
    return ViolationFound(
        node=NodeName("node-0"),
        reason=ViolationReason.UNLEASED,
        pod=PodUid(pod),
        namespace=Namespace(namespace),
        name=pod,
        container="main",
        device=DeviceUuid(f"GPU-{device}"),
        message="",
    )


def test_a_pod_has_so_many_reports_within_its_window() -> None:
    limits = ReportLimits()
    due = [violation("a", "busy", device) for device in range(3 * MOST_OF_POD)]

    assert len(limits.admit(due, 0.0)) == MOST_OF_POD
    assert limits.admit(due, WINDOW_S - 1) == []
    assert len(limits.admit(due, WINDOW_S)) == MOST_OF_POD


def test_a_namespace_with_many_pods_leaves_room_for_the_others() -> None:
    flood = [violation("flood", f"pod-{number}") for number in range(1000)]
    quiet = [violation("quiet", "one"), violation("quiet", "two")]

    admitted = ReportLimits().admit([*flood, *quiet], 0.0)

    assert Counter(one.namespace for one in admitted) == {"flood": MOST_AT_ONCE - 2, "quiet": 2}


def test_what_was_put_off_is_reported_later() -> None:
    limits = ReportLimits()
    due = [violation("a", f"pod-{number}") for number in range(20)]

    first = limits.admit(due, 0.0)
    rest = limits.admit([one for one in due if one not in first], 5.0)

    assert {*first, *rest} == set(due)
