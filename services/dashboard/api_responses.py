"""What `/api/v1` answers: plain dictionaries, whose names of other tenants are left out.

A viewer's sight says of which namespaces it may see names. Of others it learns that something is in
use, how much of a device, and in which state; never whose, since when, or why something waits.
Amounts are MiB, percent of one device and Unix seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.dashboard.missing_components import Silent
from services.dashboard.projection import (
    DeviceShown,
    HeldShare,
    Key,
    NamespaceShown,
    NodeShown,
    Projection,
)
from services.dashboard.recent_events import Tick
from shared.model.budget import UNITS_PER_GPU_MINUTE
from shared.model.device import DeviceMode
from shared.model.events.pod_events import BudgetChanged
from shared.model.lease import Lease, MigPlacement
from shared.model.ledger import WaitingPod
from shared.model.names import DeviceUuid, Namespace, NodeName

Shape = dict[str, Any]
Sight = Callable[[Namespace], bool]
WAITING_SHOWN = 200


def everything(_: Namespace) -> bool:
    """See all namespaces."""
    return True


def node_shape(node: NodeShown) -> Shape:
    """Return a node without its devices."""
    return {
        "node": node.name,
        "devices": list(node.devices),
        "unschedulable": node.unschedulable,
        "gone": node.gone,
    }


def device_shape(shown: DeviceShown, sight: Sight) -> Shape:
    """Return a device and its shares."""
    device, use = shown.device, shown.use
    return {
        "uuid": device.uuid,
        "node": shown.node,
        "index": device.index,
        "model": device.model,
        "mode": str(device.mode),
        "healthy": device.healthy,
        "closed": shown.closed,
        "memory_mib": device.memory_mib,
        "used_mib": use.memory_mib,
        "used_cores": use.cores_percent,
        "slots": _places(shown),
        "used_shares": use.shares,
        "layout": use.layout,
        "numa": device.numa,
        "shares": [_share(held, sight) for held in shown.shares],
    }


def _places(shown: DeviceShown) -> int:
    """Return how many shares, or instances of the live layout, fit on the device."""
    device = shown.device
    if device.mode is not DeviceMode.MIG:
        return device.slots
    live = [layout for layout in device.layouts if layout.name == shown.use.layout]
    return max((len(layout.positions) for layout in live or device.layouts), default=0)


def _share(held: HeldShare, sight: Sight) -> Shape:
    share = held.share
    amounts: Shape = {
        "state": held.state,
        "memory_mib": share.memory_mib,
        "cores_percent": share.booked_cores,
        "slot": share.slot,
        "init": share.init,
    }
    if not sight(held.namespace):
        return amounts
    return amounts | {
        "pod": held.pod,
        "namespace": held.namespace,
        "name": held.name,
        "container": share.container,
        "created_at": held.created_at,
        "expires_at": held.expires_at,
        "dialect": held.dialect,
        "gang": held.gang,
        "version": held.version,
        "fence": share.fence,
        "mig": _mig(share.mig),
    }


def _mig(place: MigPlacement | None) -> Shape | None:
    if place is None:
        return None
    return {"layout": place.layout, "position": place.position, "profile": place.profile}


def waiting_shape(queue: Sequence[WaitingPod], sight: Sight) -> Shape:
    """Return how many wait, and the first of them that the viewer may know, with their places."""
    seen: list[Shape] = []
    hidden = 0
    for place, waiting in enumerate(queue, start=1):
        if not sight(waiting.queued.namespace):
            hidden += 1
        elif len(seen) < WAITING_SHOWN:
            seen.append(_waiting(waiting, place))
    return {"total": len(queue), "hidden": hidden, "pods": seen}


def _waiting(waiting: WaitingPod, place: int) -> Shape:
    queued, refusal = waiting.queued, waiting.refusal
    return {
        "place": place,
        "pod": queued.pod,
        "namespace": queued.namespace,
        "name": queued.name,
        "priority": queued.request.priority,
        "since": waiting.waiting_since or queued.created_at,
        "reason": refusal.reason,
        "hint": refusal.hint,
        "permanent": refusal.permanent,
    }


def ticker_shape(ticks: Iterable[Tick], sight: Sight, *, after: int = 0) -> list[Shape]:
    """Return the lines after a number, oldest first."""
    return [
        {
            "number": tick.number,
            "at": tick.at,
            "kind": tick.kind,
            "namespace": tick.namespace,
            "name": tick.name,
            "pod": tick.pod,
            "node": tick.node,
            "text": tick.text,
            "latency_s": tick.latency_s,
        }
        for tick in ticks
        if tick.number > after and sight(tick.namespace)
    ]


def namespace_shape(shown: NamespaceShown) -> Shape:
    """Return what one namespace holds, and how its budget stands."""
    return {
        "namespace": shown.namespace,
        "leases": shown.leases,
        "devices": shown.devices,
        "memory_mib": shown.memory_mib,
        "cores_percent": shown.cores_percent,
        "waiting": shown.waiting,
        "budget": None if shown.budget is None else _budget(shown.budget),
    }


def _budget(event: BudgetChanged) -> Shape:
    remaining = event.remaining_units
    return {
        "state": event.state,
        "lease_class": event.lease_class,
        "new_pods": event.new_pods,
        "window": event.window,
        "used_minutes": event.used_units / UNITS_PER_GPU_MINUTE,
        "remaining_minutes": None if remaining is None else remaining / UNITS_PER_GPU_MINUTE,
        "burn_milli_gpu": event.current_rate_milli_gpu,
        "exhausted_at": event.exhausted_at,
        "at": event.at,
    }


def namespaces_shape(found: Iterable[NamespaceShown], sight: Sight) -> list[Shape]:
    """Return the namespaces that the viewer may know."""
    return [namespace_shape(shown) for shown in found if sight(shown.namespace)]


def silent_shape(silent: Iterable[Silent]) -> list[Shape]:
    """Return who is missed."""
    return [
        {"service": one.service, "instance": one.instance, "since": one.since, "text": one.text}
        for one in silent
    ]


def delta_shape(
    projection: Projection,
    silent: Iterable[Silent],
    keys: Iterable[Key],
    sight: Sight,
    *,
    after_tick: int,
) -> Shape:
    """Return what is behind the keys, as it is now; what is gone only by its name."""
    kinds: dict[str, list[str]] = {}
    for kind, name in sorted(keys):
        kinds.setdefault(kind, []).append(name)
    devices, nodes = kinds.get("device", []), kinds.get("node", [])
    known, named = projection.devices, projection.nodes
    found: Shape = {
        "devices": [
            device_shape(known[DeviceUuid(uuid)], sight) for uuid in devices if uuid in known
        ],
        "gone_devices": [uuid for uuid in devices if uuid not in known],
        "nodes": [node_shape(named[NodeName(name)]) for name in nodes if name in named],
        "gone_nodes": [name for name in nodes if name not in named],
    }
    if "waiting" in kinds:
        found["waiting"] = waiting_shape(projection.queue(), sight)
    if "namespaces" in kinds:
        found["namespaces"] = namespaces_shape(projection.namespaces(), sight)
    if "ticker" in kinds:
        found["ticker"] = ticker_shape(projection.ticker.lines, sight, after=after_tick)
    if "silent" in kinds:
        found["silent"] = silent_shape(silent)
    return {key: value for key, value in found.items() if value or key not in _LISTS}


_LISTS = frozenset({"devices", "gone_devices", "nodes", "gone_nodes"})


def lease_shape(lease: Lease) -> Shape:
    """Return one lease whole; only for those who may see its namespace."""
    return {
        "pod": lease.pod,
        "namespace": lease.namespace,
        "name": lease.name,
        "node": lease.node,
        "state": str(lease.state),
        "version": lease.version,
        "dialect": lease.dialect,
        "gang": lease.gang,
        "created_at": lease.created_at,
        "expires_at": lease.expires_at,
        "shares": [
            {
                "container": share.container,
                "device": share.device,
                "index": share.index,
                "memory_mib": share.memory_mib,
                "cores_percent": share.booked_cores,
                "slot": share.slot,
                "mig": _mig(share.mig),
                "fence": share.fence,
                "init": share.init,
            }
            for share in lease.shares
        ],
    }


def verdict_shape(waiting: WaitingPod, place: int) -> Shape:
    """Return why one pod waits, with the nodes that came nearest."""
    return _waiting(waiting, place) | {
        "nearest": [
            {"node": verdict.node, "reason": verdict.reason}
            for verdict in waiting.refusal.nearest_nodes
        ]
    }


def state_shape(
    projection: Projection, silent: Iterable[Silent], sight: Sight, *, id_: str, now: float
) -> Shape:
    """Return everything."""
    return {
        "id": id_,
        "now": now,
        "nodes": [node_shape(projection.nodes[name]) for name in sorted(projection.nodes)],
        "devices": [device_shape(shown, sight) for shown in projection.devices.values()],
        "waiting": waiting_shape(projection.queue(), sight),
        "namespaces": namespaces_shape(projection.namespaces(), sight),
        "ticker": ticker_shape(projection.ticker.lines, sight),
        "silent": silent_shape(silent),
    }
