"""Timeouts and intervals of the agent; pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    """Times in seconds, given to the constructors that wait; only tests use others than these."""

    gpu_probe_s: float = 5.0
    """Interval between probes of the GPUs."""
    instances_ready_s: float = 20.0
    """Timeout of Allocate for MIG instances; the kubelet admits no other pod meanwhile."""
    instance_release_s: float = 5.0
    """How long the kubelet may list containers that have ended: it polls the runtime every 2 s."""
    partition_step_s: float = 15.0
    """Time limit of the driver to create or destroy one MIG instance."""
    view_compare_s: float = 30.0
    """Interval between comparisons of the Node object with its desired state."""
    object_retry_s: float = 60.0
    """Before a custom object is retried whose kind is not defined, or which we may not write."""
    usage_scan_s: float = 5.0
    """Interval between scans of usage."""
    report_s: float = 10.0
    """Interval between device reports without a change."""
    cleanup_s: float = 10.0
    """Interval between cleanups of ended pods, and between probes of the disk."""
    lease_sync_s: float = 30.0
    """Interval between requests for all leases of the node."""
    lease_sync_retry_s: float = 1.0
    """After a request for all leases that got no reply."""
    resolve_s: float = 2.0
    """How long an ambiguous container is resolved again: the kubelet soon drops a pod that it
    rejects."""
    starting_s: float = 10.0
    """How long after Allocate a pod's first process may start, although the pod was deleted."""
    process_start_s: float = 2.0
    """How long after PreStartContainer the first process of a container may start."""
    lease_wait_s: float = 4.0
    """How long Allocate requests a lease that is unknown, or only reserved, and how long it waits
    for the rebuild of a lost checkpoint."""
    claim_wait_s: float = 40.0
    """How long a ResourceClaim's Prepare waits for its lease: the kubelet's limit is 45 s, and its
    next call follows only after a minute."""
    full_device_s: float = 15.0
    """How long Prepare waits for room on a device that is full by the checkpoint: containers of
    pods that have ended may still run."""
    claim_retry_s: float = 2.0
    """After this time, and after pauses that double from it, the kubelet is made to try again with
    claims that have leases and that it has not had prepared."""
    records_retry_s: float = 4.0
    """How long Allocate looks for ended pods on a device that is full by the checkpoint: longer
    than `process_start_s`, and than the 3 s for which the kubelet caches which pods run."""
    pod_list_retry_s: float = 5.0
    """Interval between attempts to read an unreadable pod list of the kubelet."""
    registration_check_s: float = 20.0
    """Interval between checks that a registered resource is allocatable on the node."""
    status_late_s: float = 15.0
    """How long node status may show no allocatable amount of a resource after the kubelet got its
    list. The kubelet admits pods at once, and updates the status every 10 s by default:
    https://kubernetes.io/docs/reference/config-api/kubelet-config.v1beta1/"""
    limit_check_s: float = 5.0
    """Interval between comparisons of limits with leases."""
    limit_hold_s: float = 20.0
    """How long a lowered limit stays without an update of its lease; a resize ends well before."""
    limit_settle_s: float = 0.1
    """By this time, allocations admitted before a limit was lowered have been counted."""
    new_files_s: float = 300.0
    """Younger files are never removed: their pod may not be listed yet."""
    library_unused_s: float = 600.0
    """How long a library version stays that no container mounts: one may be starting."""
    drain_s: float = 10.0
    """How long a stopping agent waits for admitted pods."""


DEFAULT_TIMING = AgentTiming()
