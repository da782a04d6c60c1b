"""What `--json` prints: plain dictionaries with stable keys; pure.

`gpus`:    {"nodes": [{"node", "devices": [{"uuid", "index", "model", "mode", "healthy", "fault",
           "memory_mib", "used_memory_mib", "used_cores_percent", "slots", "used_shares", "fence",
           "layout", "shares": [{"pod", "namespace", "name", "container", "memory_mib",
           "cores_percent", "slot", "mig", "fence", "state"}]}]}]}; "layout" is the MIG layout of a
           device with leased instances, "mig" is {"layout", "position", "profile"} or null.
`ps`:      {"leases": [{"pod", "namespace", "name", "node", "state", "version", "dialect",
           "created_at", "expires_at", "unhealthy_devices", "shares": [{"container", "device",
           "index", "memory_mib", "cores_percent", "slot", "mig", "fence", "init",
           "requested_size"}]}],
           "waiting": [{"pod", "namespace", "name", "since", "reason", "hint", "permanent"}]}
`explain`: {"verdict": "running" | "waiting" | "gated" | "rejected" | "foreign" | "ended" |
           "unknown", "pod", "namespace", "name", "text", "next", and, where there are any, "lease"
           (as in `ps`), "annotations", "gates", "gang", "refusal": {"reason", "hint", "permanent",
           "counts", "nearest": [{"node", "reason", "devices": [{"uuid", "index", "reason"}]}]},
           "queue": {"position", "of", "dominant_share", "weight", "has_budget"}}
`trace`:   {"trace", "spans": [{"span", "parent", "service", "name", "start_s", "duration_s",
           "ok", "text"}]}; `start_s` counts from the first span.
`topology`: {"edges": [{"publisher", "event", "delivery": "work" | "broadcast" | "request" |
           "observed", "consumer"}]}
"requested_size" is null, or for a resized share what its pod requests: {"memory_mib",
"cores_percent"}. "dominant_share" is the largest part of all healthy devices' cores or memory that
the namespace holds. Amounts are MiB, percent of one device and Unix seconds.
"""

from collections.abc import Iterable
from typing import Any

from services.cli.snapshot.snapshot import Snapshot, shares_on
from shared.model.lease import Lease, MigPlacement
from shared.model.ledger import NodeTotals, WaitingPod
from shared.model.placement import Refusal

Shape = dict[str, Any]


def gpus(nodes: Iterable[NodeTotals]) -> Shape:
    """Return every device and its shares."""
    return {"nodes": [_node(totals) for totals in nodes if totals.node.devices]}


def ps(snapshot: Snapshot) -> Shape:
    """Return every lease and every waiting pod."""
    unhealthy = snapshot.device_faults.keys()
    return {
        "leases": [
            lease_shape(lease)
            | {"unhealthy_devices": sorted({share.device for share in lease.shares} & unhealthy)}
            for lease in snapshot.leases
        ],
        "waiting": [_waiting(waiting) for waiting in snapshot.waiting],
    }


def lease_shape(lease: Lease) -> Shape:
    """Return the JSON form of one lease."""
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
                "cores_percent": share.cores_percent,
                "slot": share.slot,
                "mig": _mig(share.mig),
                "fence": share.fence,
                "init": share.init,
                "requested_size": None
                if share.requested_size is None
                else {
                    "memory_mib": share.requested_size.memory_mib,
                    "cores_percent": share.requested_size.cores_percent,
                },
            }
            for share in lease.shares
        ],
    }


def refusal_shape(refusal: Refusal) -> Shape:
    """Return the JSON form of why a pod fits on no node."""
    return {
        "reason": refusal.reason,
        "hint": refusal.hint,
        "permanent": refusal.permanent,
        "counts": [{"reason": reason, "nodes": nodes} for reason, nodes in refusal.counts],
        "nearest": [
            {
                "node": verdict.node,
                "reason": verdict.reason,
                "devices": [
                    {"uuid": device.device, "index": device.index, "reason": device.reason}
                    for device in verdict.devices
                ],
            }
            for verdict in refusal.nearest_nodes
        ],
    }


def _mig(placement: MigPlacement | None) -> Shape | None:
    if placement is None:
        return None
    return {
        "layout": placement.layout,
        "position": placement.position,
        "profile": placement.profile,
    }


def _node(totals: NodeTotals) -> Shape:
    return {
        "node": totals.node.facts.name,
        "devices": [
            {
                "uuid": device.uuid,
                "index": device.index,
                "model": device.model,
                "mode": str(device.mode),
                "healthy": device.healthy,
                "fault": device.fault,
                "memory_mib": device.memory_mib,
                "used_memory_mib": use.memory_mib,
                "used_cores_percent": use.cores_percent,
                "slots": device.slots,
                "used_shares": use.shares,
                "fence": use.fence,
                "layout": use.layout,
                "shares": [
                    {
                        "pod": lease.pod,
                        "namespace": lease.namespace,
                        "name": lease.name,
                        "container": share.container,
                        "memory_mib": share.memory_mib,
                        "cores_percent": share.cores_percent,
                        "slot": share.slot,
                        "mig": _mig(share.mig),
                        "fence": share.fence,
                        "state": str(lease.state),
                    }
                    for lease, share in shares_on(totals, device.uuid)
                ],
            }
            for device, use in sorted(totals.node.devices, key=lambda pair: pair[0].index)
        ],
    }


def _waiting(waiting: WaitingPod) -> Shape:
    queued, refusal = waiting.queued, waiting.refusal
    return {
        "pod": queued.pod,
        "namespace": queued.namespace,
        "name": queued.name,
        "since": waiting.waiting_since or queued.created_at,
        "gang": queued.request.gang.name if queued.request.gang else "",
        "reason": refusal.reason,
        "hint": refusal.hint,
        "permanent": refusal.permanent,
    }
