"""The JSON of `/api/v1`, without the names of namespaces that the viewer may not see; pure.

For a namespace that a viewer may not see, it contains only how much of a device is in use and the
state of the lease: no names, no times, no reasons, no measured usage. Amounts are MiB, percent of
one device and Unix seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.dashboard.missing_components import MissingComponent
from services.dashboard.projection import (
    ChangeKey,
    DeviceView,
    NamespaceView,
    NodeView,
    Projection,
    ShareView,
)
from services.dashboard.recent_events import RecentEvent
from shared.model.budget import UNITS_PER_GPU_MINUTE
from shared.model.cluster_view import Json, measured_json, mig_json, waiting_json
from shared.model.device import DeviceMode, visible_fault
from shared.model.events.pod_events import BudgetChanged
from shared.model.ledger import WaitingPod
from shared.model.names import DeviceUuid, Namespace, NodeName

NamespaceFilter = Callable[[Namespace], bool]
MAX_WAITING = 200


def all_namespaces(_: Namespace) -> bool:
    """Allow all namespaces."""
    return True


def node_json(node: NodeView) -> Json:
    """Return a node without its devices."""
    return {
        "node": node.name,
        "devices": list(node.devices),
        "unschedulable": node.unschedulable,
        "deleted": node.deleted,
    }


def device_json(view: DeviceView, visible: NamespaceFilter) -> Json:
    """Return a device and its shares."""
    device, use = view.device, view.use
    return {
        "uuid": device.uuid,
        "node": view.node,
        "index": device.index,
        "model": device.model,
        "mode": str(device.mode),
        "healthy": device.healthy,
        "fault": visible_fault(device.fault, visible),
        "excluded": view.excluded,
        "memory_mib": device.memory_mib,
        "used_mib": use.memory_mib,
        "used_cores": use.cores_percent,
        "slots": _capacity(view),
        "used_shares": use.shares,
        "layout": use.layout,
        "numa": device.numa,
        "shares": [_share(share, visible) for share in view.shares],
    }


def _capacity(view: DeviceView) -> int:
    """Return how many shares, or instances of the live layout, fit on the device."""
    device = view.device
    if device.mode is not DeviceMode.MIG:
        return device.slots
    live = [layout for layout in device.layouts if layout.name == view.use.layout]
    return max((len(layout.positions) for layout in live or device.layouts), default=0)


def _share(view: ShareView, visible: NamespaceFilter) -> Json:
    share = view.share
    amounts: Json = {
        "state": view.state,
        "memory_mib": share.memory_mib,
        "cores_percent": share.booked_cores,
        "slot": share.slot,
        "init": share.init,
    }
    if not visible(view.namespace):
        return amounts
    return amounts | {
        "pod": view.pod,
        "namespace": view.namespace,
        "name": view.name,
        "container": share.container,
        "created_at": view.created_at,
        "expires_at": view.expires_at,
        "dialect": view.dialect,
        "gang": view.gang,
        "version": view.version,
        "fence": share.fence,
        "mig": mig_json(share.mig),
        "measured": measured_json(view.measured, is_idle=view.is_idle),
    }


def queue_json(queue: Sequence[WaitingPod], visible: NamespaceFilter) -> Json:
    """Count the waiting pods, and list the first visible ones with their positions."""
    pods: list[Json] = []
    hidden = 0
    for position, waiting in enumerate(queue, start=1):
        if not visible(waiting.queued.namespace):
            hidden += 1
        elif len(pods) < MAX_WAITING:
            pods.append(waiting_json(waiting) | {"position": position})
    return {"total": len(queue), "hidden": hidden, "pods": pods}


def events_json(
    events: Iterable[RecentEvent], visible: NamespaceFilter, *, after: int = 0
) -> list[Json]:
    """Return the visible events after a number, oldest first."""
    return [
        {
            "number": event.number,
            "at": event.at,
            "kind": event.kind,
            "namespace": event.namespace,
            "name": event.name,
            "pod": event.pod,
            "node": event.node,
            "text": event.text,
            "latency_s": event.latency_s,
            "for": f"{event.for_namespace}/{event.for_name}"
            if event.for_namespace and visible(event.for_namespace)
            else "",
        }
        for event in events
        if event.number > after and visible(event.namespace)
    ]


def namespace_json(view: NamespaceView) -> Json:
    """Return one namespace's leases, waiting pods and budget."""
    return {
        "namespace": view.namespace,
        "leases": view.leases,
        "devices": view.devices,
        "memory_mib": view.memory_mib,
        "cores_percent": view.cores_percent,
        "waiting": view.waiting,
        "budget": None if view.budget is None else _budget(view.budget),
    }


def _budget(event: BudgetChanged) -> Json:
    remaining = event.remaining_units
    return {
        "state": event.state,
        "lease_class": event.lease_class,
        "new_pods": event.new_pods,
        "window": event.window,
        "used_minutes": event.used_units / UNITS_PER_GPU_MINUTE,
        "remaining_minutes": None if remaining is None else remaining / UNITS_PER_GPU_MINUTE,
        "current_rate_milli_gpu": event.current_rate_milli_gpu,
        "exhausted_at": event.exhausted_at,
        "at": event.reported_at,
    }


def namespaces_json(views: Iterable[NamespaceView], visible: NamespaceFilter) -> list[Json]:
    """Return the namespaces that the viewer may see."""
    return [namespace_json(view) for view in views if visible(view.namespace)]


def missing_json(missing: Iterable[MissingComponent]) -> list[Json]:
    """Return the missing components."""
    return [
        {"service": each.service, "instance": each.instance, "since": each.since, "text": each.text}
        for each in missing
    ]


def delta_json(
    projection: Projection,
    missing: Iterable[MissingComponent],
    keys: Iterable[ChangeKey],
    visible: NamespaceFilter,
    *,
    after_event: int,
) -> Json:
    """Return the current values of these keys, and the names of removed items."""
    names: dict[str, list[str]] = {}
    for kind, name in sorted(keys):
        names.setdefault(kind, []).append(name)
    lists: dict[str, Callable[[], Any]] = {
        "waiting": lambda: queue_json(projection.queue(), visible),
        "namespaces": lambda: namespaces_json(projection.namespaces(), visible),
        "events": lambda: events_json(projection.events.latest, visible, after=after_event),
        "missing_components": lambda: missing_json(missing),
    }
    delta = _changed_devices(projection, names.get("device", []), visible)
    delta |= _changed_nodes(projection, names.get("node", []))
    delta |= {kind: value() for kind, value in lists.items() if kind in names}
    return delta


def _changed_devices(
    projection: Projection, uuids: Sequence[str], visible: NamespaceFilter
) -> Json:
    devices = projection.devices
    changed: Json = {
        "devices": [
            device_json(devices[DeviceUuid(uuid)], visible) for uuid in uuids if uuid in devices
        ],
        "removed_devices": [uuid for uuid in uuids if uuid not in devices],
    }
    return {key: value for key, value in changed.items() if value}


def _changed_nodes(projection: Projection, names: Sequence[str]) -> Json:
    nodes = projection.nodes
    changed: Json = {
        "nodes": [node_json(nodes[NodeName(name)]) for name in names if name in nodes],
        "removed_nodes": [name for name in names if name not in nodes],
    }
    return {key: value for key, value in changed.items() if value}


def state_json(
    projection: Projection,
    missing: Iterable[MissingComponent],
    visible: NamespaceFilter,
    *,
    position: str,
    now: float,
) -> Json:
    """Return everything, and the position in the change feed."""
    return {
        "id": position,
        "now": now,
        "nodes": [node_json(projection.nodes[name]) for name in sorted(projection.nodes)],
        "devices": [device_json(view, visible) for view in projection.devices.values()],
        "waiting": queue_json(projection.queue(), visible),
        "namespaces": namespaces_json(projection.namespaces(), visible),
        "events": events_json(projection.events.latest, visible),
        "missing_components": missing_json(missing),
    }
