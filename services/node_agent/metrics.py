"""Spans and counters of the node agent."""

import contextlib
import contextvars
import logging
from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram

from shared.model.errors import LeaseholdError
from shared.model.leases.lease import Lease
from shared.runtime import telemetry
from shared.runtime.span_attributes import CONTAINER, lease_attributes

logger = logging.getLogger(__name__)

ALLOCATIONS = Counter(
    "leasehold_allocations", "Allocate calls of the kubelet, by outcome.", ["resource", "outcome"]
)
ALLOCATING = Histogram(
    "leasehold_allocation_seconds",
    "Duration of one Allocate call.",
    ["resource"],
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
OVERCOMMITS = Counter(
    "leasehold_overcommits_refused",
    "Allocate calls refused because a device would have been over-committed.",
)
PARTITIONS = Counter(
    "leasehold_mig_partitions", "Changes of the MIG layout of a device, by outcome.", ["outcome"]
)
PARTITIONS.labels("failed")  # at 0 from the start, or the first one would be no increase
PARTITIONING = Histogram(
    "leasehold_mig_partition_seconds",
    "Time to change the MIG layout of a device.",
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20),
)
LEASES = Gauge("leasehold_agent_leases", "Live leases on this node.")
LEFTOVERS = Gauge(
    "leasehold_agent_leftovers",
    "Pods that are gone or have no lease, and of which processes still hold GPUs of the node.",
)
UNREGISTERED = Gauge(
    "leasehold_agent_unregistered", "1 while a resource is not registered with the kubelet."
)
HEALTH = Gauge(
    "leasehold_device_health",
    "1 for the state of health that a device is in.",
    ["device_uuid", "index", "state"],
)

ERRORS = Counter(
    "hw_errors",
    "Errors of a device by their type: `xid N` for XID events. OpenTelemetry's name.",
    ["hw_id", "hw_type", "error_type"],
)
LIBRARY = Gauge(
    "leasehold_library_info",
    "1 for the HAMi-core library that new containers mount; no series without a usable one.",
    ["version", "layout", "content"],
)


LIMITS_PUT_BACK = Counter(
    "leasehold_limits_put_back",
    "Limits of containers that differed from their leases when they were read back, by what holds "
    "them and whether they were set again.",
    ["enforcer", "outcome"],
)
DEVICE_LIST = Gauge(
    "leasehold_agent_device_list_info",
    "1 for how devices are passed to new containers, if the agent chooses that.",
    ["strategy"],
)
CONFIG_ERRORS = Gauge(
    "leasehold_agent_config_errors",
    "Errors in the latest version of a device configuration, which is then not in force.",
    ["config"],
)

OPEN_RUNTIME = Gauge(
    "leasehold_agent_open_runtime",
    "1 for each setting of the container runtime by which pods can get GPUs without a lease; "
    "`unreadable` if the settings cannot be read.",
    ["setting"],
)
LIMIT_HOOKS = Counter(
    "leasehold_memory_limit_hooks",
    "Containers for which the runtime called the hook that limits them, by outcome.",
    ["outcome"],
)
LIMIT_HOOKS.labels("refused")  # at 0 from the start, or the first one would be no increase
FOREIGN_LIMITS = Gauge(
    "leasehold_foreign_memory_limits",
    "Limits of the driver on cgroups without a lease, which other programs have set. The device "
    "offers no such limits to new leases meanwhile.",
    ["device_uuid"],
)
MPS_WEDGES = Counter(
    "leasehold_mps_wedges",
    "Servers of MPS whose clients hung, by whether the daemon works again.",
    ["outcome"],
)
MPS_WEDGES.labels("failed")  # at 0 from the start, or the first one would be no increase
MPS_DRAINED = Counter(
    "leasehold_mps_drained_processes",
    "Processes whose work on the GPU was ended before the kubelet killed them.",
)
PODS_UNREADABLE = Gauge(
    "leasehold_agent_pods_unreadable",
    "1 while the kubelet's pod list cannot be read, and pods are resolved by their requests.",
)


_given: contextvars.ContextVar[str] = contextvars.ContextVar("given", default="")


class AgentMetrics:
    def __init__(self, tracing: telemetry.Tracing) -> None:
        self.tracing = tracing

    @contextlib.contextmanager
    def traced(self, lease: Lease, container: str, resource: str) -> Iterator[str]:
        """Yields the trace context of the allocation, or the lease's."""
        facts = lease_attributes(lease) | {
            "leasehold.claim.request" if lease.claim else CONTAINER: container,
            "leasehold.resource": resource,
        }
        span = self.tracing.span("allocate devices", lease.trace, facts)
        context = lease.trace if span is None else telemetry.context_of(span)
        _given.set(context)
        failure: LeaseholdError | None = None
        try:
            yield context
        except LeaseholdError as error:
            failure = error
        logger.info(
            "container %s of %s/%s %s",
            container,
            lease.namespace,
            lease.name,
            f"is refused: {failure}" if failure else "has its shares",
            extra={"pod": lease.pod, "trace": context},
        )
        if span is not None:
            telemetry.end([span], failure)
        if failure is not None:
            raise failure

    def count_allocation(self, resource: str, outcome: str, seconds: float) -> None:
        ALLOCATIONS.labels(resource, outcome).inc()
        ALLOCATING.labels(resource).observe(seconds, telemetry.exemplar_of(_given.get()))
        _given.set("")

    def count_overcommit(self) -> None:
        OVERCOMMITS.inc()

    def partitioned(self, outcome: str, seconds: float) -> None:
        PARTITIONS.labels(outcome).inc()
        PARTITIONING.observe(seconds)
