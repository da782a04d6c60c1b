"""Timeouts and intervals of the agent; pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    instances_ready_s: float = 20.0
    """Timeout of Allocate for MIG instances; the kubelet admits no other pod meanwhile."""
    sight_s: float = 120.0
    """How long successive calls of the kubelet may wait, all together, for what the agent cannot
    see. A kubelet whose main loop takes five minutes is unhealthy."""
    partition_step_s: float = 15.0
    """Time limit of the driver to create or destroy one MIG instance."""
    starting_s: float = 10.0
    """How long after Allocate a deleted pod's first process may still start."""
    registration_check_s: float = 20.0
    """Interval between checks that a registered resource is allocatable on the node."""
    status_late_s: float = 15.0
    """How long node status may show none of a resource after the kubelet got its list; the kubelet
    updates the status every 10 s by default."""
    limit_settle_s: float = 0.1
    """By then, allocations admitted before a limit was lowered have been counted."""
    new_files_s: float = 300.0
    """Younger files are never removed: their pod may not be listed yet."""
    library_unused_s: float = 600.0
    """How long an unused library version stays: a container may be starting with it."""
    relist_s: float = 90.0
    """How long after its Binding, and after an outage of the API server, a pod may reach the
    kubelet."""
    drain_s: float = 10.0
    """How long a stopping agent waits for containers to start, and for a kubelet that is away."""


DEFAULT_TIMING = AgentTiming()
