"""Timeouts and intervals of the agent; pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    instances_ready_s: float = 20.0
    """Timeout of Allocate for MIG instances; the kubelet admits no other pod meanwhile."""
    sight_s: float = 120.0
    """How long calls of the kubelet that follow one another may wait, all together, for what the
    agent cannot see. The kubelet sets no time limit for Allocate, but admits pods in its main loop,
    and reports itself as unhealthy once one turn of it, which may admit several pods, has taken
    five minutes. An API server that was away for a minute has been queried again by then, also
    where the kubelet caches a denial for 30 s."""
    partition_step_s: float = 15.0
    """Time limit of the driver to create or destroy one MIG instance."""
    starting_s: float = 10.0
    """How long after Allocate a pod's first process may start, although the pod was deleted."""
    registration_check_s: float = 20.0
    """Interval between checks that a registered resource is allocatable on the node."""
    status_late_s: float = 15.0
    """How long node status may show no allocatable amount of a resource after the kubelet got its
    list. The kubelet admits pods at once, and updates the status every 10 s by default:
    https://kubernetes.io/docs/reference/config-api/kubelet-config.v1beta1/"""
    limit_settle_s: float = 0.1
    """By this time, allocations admitted before a limit was lowered have been counted."""
    new_files_s: float = 300.0
    """Younger files are never removed: their pod may not be listed yet."""
    library_unused_s: float = 600.0
    """How long a library version stays that no container mounts: one may be starting."""
    relist_s: float = 90.0
    """How long after its Binding, and after an outage of the API server, a pod may reach the
    kubelet, whose attempts to read its pods are up to a minute apart after an outage."""
    drain_s: float = 10.0
    """How long a stopping agent waits for containers to start, and for a kubelet that is away."""


DEFAULT_TIMING = AgentTiming()
