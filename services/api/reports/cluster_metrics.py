"""The cluster on /metrics: waiting pods, capacity, idle leases, missing components.

Each replica exports the whole cluster: take the maximum over replicas, not the sum.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import Gauge, Histogram

from services.api.projection.lease_views import idle_milli_gpu
from services.api.projection.problems import AffectedObject, lost_enforcers
from services.api.projection.projection import Projection
from shared.model.devices.device import DeviceMode
from shared.model.events.pod_events import PodBound
from shared.model.leases.lease import MIB
from shared.model.leases.ledger import WaitingPod
from shared.model.views.gpus import DeviceView
from shared.runtime.telemetry import exemplar_of

WAITING = Gauge(
    "leasehold_waiting_pods",
    "Waiting pods, by the system of their resource names and the code of most nodes' reason.",
    ["system", "reason"],
)
OLDEST = Gauge(
    "leasehold_waiting_oldest_seconds",
    "How long the pod that has waited longest waits.",
    ["system", "reason"],
)
TIME_TO_BIND = Histogram(
    "leasehold_time_to_bind_seconds",
    "From the first event of a pod to its Binding; waited: whether it had to wait for capacity.",
    ["system", "waited"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300, 1800, 7200, 28800, 86400),
)
DEVICES = Gauge(
    "leasehold_devices", "Devices by state: usable, cordoned, unhealthy.", ["model", "state"]
)
CLOSED = Gauge(
    "leasehold_device_cordoned",
    "1 for each healthy device that gets no new pods, with the reason.",
    ["node", "gpu", "reason"],
)
MEMORY = Gauge(
    "leasehold_capacity_memory_bytes", "Memory of devices, by their state.", ["model", "state"]
)
LEASED_MEMORY = Gauge(
    "leasehold_leased_memory_bytes", "Leased memory of devices, by their state.", ["model", "state"]
)
LEASED_GPUS = Gauge(
    "leasehold_leased_gpus",
    "Leased, in GPUs: of each pod the larger part of a device's memory or cores, as budgets weigh.",
    ["model"],
)
LEASED_CORES = Gauge(
    "leasehold_leased_cores",
    "Leased cores of devices, in GPUs, by their state.",
    ["model", "state"],
)
IDLE_GPUS = Gauge("leasehold_idle_gpus", "What idle leases have of that, in GPUs.", ["model"])
PHASES = Gauge(
    "leasehold_device_phases",
    "Devices by phase: Unhealthy, Closed, Reserved, Leased (in part, or all), Free.",
    ["model", "phase"],
)
LARGEST = Gauge(
    "leasehold_largest_free_share_bytes",
    "The largest share that a usable device outside MIG mode has free; 0: none.",
    ["model"],
)
HELD = Gauge(
    "leasehold_held_shares",
    "Leased shares by what holds their memory and their cores; none: nothing does.",
    ["node", "memory", "compute"],
)
LOST = Gauge(
    "leasehold_lost_enforcers",
    "1 for each node that no longer offers what holds leases on it, such as HAMi-core's library.",
    ["node", "enforcer"],
)
IDLE = Gauge("leasehold_idle_leases", "Leases with an idle share.", ["namespace"])
MISSING = Gauge(
    "leasehold_missing_components", "Replicas that are missing or not ready.", ["service"]
)
CLOCK = Gauge(
    "leasehold_clock_difference_seconds",
    "The largest difference of a service's clock, or of Redis', from most, ahead or behind.",
    ["service"],
)
CLOSED_NODES = Gauge(
    "leasehold_closed_nodes",
    "Nodes that get no pods because of their agent or its disk, without kubectl cordon.",
)
REPLY = Gauge(
    "leasehold_server_reply_seconds",
    "The longest of the latest times that redis or api-server took to reply, or that messages of "
    "nats were late.",
    ["service"],
)
USABLE = "usable"
CORDONED = "cordoned"
UNHEALTHY = "unhealthy"
WHOLE = 100
ALL = (
    WAITING,
    OLDEST,
    DEVICES,
    CLOSED,
    MEMORY,
    LEASED_MEMORY,
    LEASED_GPUS,
    LEASED_CORES,
    IDLE_GPUS,
    PHASES,
    LARGEST,
    HELD,
    LOST,
    IDLE,
    MISSING,
)


def export_cluster(projection: Projection, missing: Iterable[AffectedObject], now: float) -> None:
    for gauge in ALL:
        gauge.clear()
    CLOSED_NODES.set(sum(bool(node.cordoned) for node in projection.nodes.values()))
    _export_waiting(projection.waiting_pods(), now)
    devices = projection.devices.values()
    _export_capacity((view, _export_state(view, projection)) for view in devices)
    for view in projection.devices.values():
        PHASES.labels(view.model, view.phase).inc()
        LEASED_GPUS.labels(view.model).inc(view.milli_gpu / 1000)
        IDLE_GPUS.labels(view.model).inc(idle_milli_gpu(view.shares) / 1000)
    _export_idle(projection.devices.values())
    held = Counter(
        (view.node, share.memory, share.compute)
        for view in projection.devices.values()
        for share in view.shares
    )
    for labels, count in held.items():
        HELD.labels(*labels).set(count)
    for node, lost in lost_enforcers(projection.devices.values()):
        LOST.labels(node, lost.name).set(1)
    replicas = {(affected.service, affected.name) for affected in missing}
    for service, count in Counter(service for service, _ in replicas).items():
        MISSING.labels(service).set(count)


def export_servers(clocks: Mapping[str, tuple[str, float]], replies_s: Mapping[str, float]) -> None:
    CLOCK.clear()
    differences: dict[str, float] = {}
    for service, ahead_s in clocks.values():
        differences[service] = max(differences.get(service, 0.0), abs(ahead_s))
    for service, difference_s in differences.items():
        CLOCK.labels(service).set(difference_s)
    for service, reply_s in replies_s.items():
        REPLY.labels(service).set(reply_s)


def observe_bound(bound: PodBound, times: Mapping[str, float]) -> None:
    """Steps that were observed together took at least as long as the last one reports."""
    if {"queued", "bound"} <= times.keys():
        series = TIME_TO_BIND.labels(bound.lease.dialect, "yes" if "waiting" in times else "no")
        took_s = max(times["bound"] - times["queued"], bound.latency_s)
        series.observe(took_s, exemplar_of(bound.trace))


def _export_waiting(pods: Iterable[WaitingPod], now: float) -> None:
    ages: dict[tuple[str, str], list[float]] = {}
    for waiting in pods:
        since = waiting.waiting_since or waiting.queued.created_at
        labels = waiting.queued.request.dialect, waiting.reason_code
        ages.setdefault(labels, []).append(max(now - since, 0.0))
    for labels, waited_s in ages.items():
        WAITING.labels(*labels).set(len(waited_s))
        OLDEST.labels(*labels).set(max(waited_s))


def _export_state(view: DeviceView, projection: Projection) -> str:
    """Return the state of a device."""
    closed = projection.closed_by(view) if view.healthy else ""
    if closed:
        CLOSED.labels(view.node, view.index, closed).set(1)
    state = CORDONED if closed else USABLE if view.healthy else UNHEALTHY
    DEVICES.labels(view.model, state).inc()
    return state


def _export_capacity(devices: Iterable[tuple[DeviceView, str]]) -> None:
    largest: dict[str, int] = {}
    for view, state in devices:
        MEMORY.labels(view.model, state).inc(view.memory_mib * MIB)
        LEASED_MEMORY.labels(view.model, state).inc(view.used_memory_mib * MIB)
        LEASED_CORES.labels(view.model, state).inc(view.used_cores_percent / 100)
        if state == USABLE:
            free_mib = view.memory_mib - view.used_memory_mib if _has_room(view) else 0
            largest[view.model] = max(largest.get(view.model, 0), free_mib)
    for model, free_mib in largest.items():
        LARGEST.labels(model).set(free_mib * MIB)


def _export_idle(devices: Iterable[DeviceView]) -> None:
    shares = (
        share for view in devices for share in view.shares if share.measured and share.measured.idle
    )
    idle = {(share.namespace, share.pod) for share in shares}
    for namespace, count in Counter(namespace for namespace, _ in idle).items():
        IDLE.labels(namespace).set(count)


def _has_room(view: DeviceView) -> bool:
    has_slot = view.mode != DeviceMode.MIG and view.used_shares < view.slots
    return has_slot and view.used_cores_percent < WHOLE
