"""What is said on the bus of rules that containers break; pure."""

from collections.abc import Iterable

from services.node_agent.usage.snapshot import Violation
from shared.model.events.node_events import ViolationFound
from shared.model.names import NodeName


def violation_events(
    found: Iterable[Violation], node: NodeName, now: float
) -> list[ViolationFound]:
    """Return what is said of violations: those whose pod's name is known."""
    return [
        ViolationFound(
            node=node,
            pod=one.pod,
            namespace=one.namespace,
            name=one.name,
            container=one.container,
            reason=one.reason,
            message=one.message,
            found_at=now,
        )
        for one in found
        if one.name
    ]
