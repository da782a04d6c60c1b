"""How long the agent waits, and how often it looks; pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    """Times in seconds, given to the constructors that wait; only tests use others than these."""

    nvml_look_s: float = 5.0
    """Between two looks at real GPUs."""
    simulated_look_s: float = 1.0
    """Between two looks at simulated GPUs."""
    simulated_backoff_s: float = 1.0
    """First backoff of a simulated GPU that was cordoned."""
    simulated_hang_limit_s: float = 1.0
    """Time limit of a probe while a simulated GPU hangs."""
    instances_ready_s: float = 20.0
    """How long Allocate waits for MIG instances; the kubelet admits no other pod meanwhile."""
    instance_release_s: float = 5.0
    """How long the kubelet may list containers that have ended: it polls the runtime every 2 s."""
    partition_step_s: float = 15.0
    """Time limit of the driver to create or destroy one MIG instance."""
    view_compare_s: float = 10.0
    """Between two comparisons of the Node object with what it should show."""
    object_retry_s: float = 60.0
    """Before a custom object is retried whose kind is not defined, or not ours to write."""
    usage_look_s: float = 5.0
    """Between two looks at what containers use."""
    report_s: float = 10.0
    """Between two device reports while nothing changes."""
    cleanup_s: float = 10.0
    """Between two removals of what ended pods left, and between two probes of the disk."""
    lease_sync_s: float = 30.0
    """Between two requests for all leases of the node."""
    lease_sync_retry_s: float = 1.0
    """After a request for all leases that got no reply."""
    resolve_s: float = 2.0
    """How long several possible containers are looked at again: the kubelet soon drops a pod that
    it rejects."""
    lease_wait_s: float = 4.0
    """How long Allocate requests a lease that is unknown, or only reserved."""
    pod_list_retry_s: float = 5.0
    """Between two attempts to read the kubelet's pod list while it is unreadable."""
    registration_check_s: float = 20.0
    """Between two checks that the node shows a registered resource as allocatable."""
    limit_look_s: float = 1.0
    """Between two comparisons of limits with leases."""
    limit_hold_s: float = 20.0
    """How long a lowered limit stays without an update of its lease; a resize ends well before."""
    limit_settle_s: float = 0.1
    """Within this, an allocation is counted that was admitted before a limit was lowered."""
    new_files_s: float = 300.0
    """Files this young stay whichever pod they are for: the pod may not be listed yet."""
    library_unused_s: float = 600.0
    """How long a library version stays that no container mounts: a container may be on its way."""
    drain_s: float = 10.0
    """How long a stopping agent waits for pods that are on their way."""

    def gpu_look_s(self, *, simulated: bool) -> float:
        """Return the time between two looks at the node's GPUs."""
        return self.simulated_look_s if simulated else self.nvml_look_s


DEFAULT_TIMING = AgentTiming()
