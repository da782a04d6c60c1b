"""The output of `--json`: plain dictionaries with stable keys; pure.

`gpus`:    {"nodes": [{"node", "cordoned", "devices": [{"uuid", "index", "model", "mode",
           "healthy", "fault", "memory_mib", "used_memory_mib", "used_cores_percent", "slots",
           "used_shares", "fence", "layout", "shares": [{"pod", "namespace", "name", "container",
           "memory_mib", "cores_percent", "slot", "mig", "fence", "state", "measured"}]}]}],
           "unmeasured_nodes": [node], "problems": [text]}; "cordoned" is why a node gets no pods,
           empty if it does; "problems" are missing components and replies; "layout" is the MIG
           layout of a device with leased instances, "mig" is {"layout", "position", "profile"} or
           null, and "measured" is {"memory_mib", "cores_percent", "processes", "idle",
           "idle_since"} or null; "idle_since" is null while the share is in use, and "idle"
           whether that is longer ago than --idle-after.
`ps`:      {"leases": [{"pod", "namespace", "name", "node", "state", "version", "dialect",
           "created_at", "expires_at", "unhealthy_devices", "shares": [{"container", "device",
           "index", "memory_mib", "cores_percent", "booked_cores", "slot", "mig", "fence",
           "init", "requested_size", "measured"}]}],
           "waiting": [{"pod", "namespace", "name", "priority", "gang", "since", "reason", "hint",
           "permanent"}], "unmeasured_nodes"}
`explain`: {"verdict": "running" | "waiting" | "gated" | "rejected" | "foreign" | "ended" |
           "unknown", "pod", "namespace", "name", "text", "next", and, where there are any, "lease"
           (as in `ps`), "annotations", "gates", "gang", "refusal": {"reason", "hint", "permanent",
           "counts", "nearest": [{"node", "reason", "devices": [{"uuid", "index", "reason"}]}]},
           "queue": {"position", "of", "dominant_share", "weight", "has_budget"}}
`trace`:   {"trace", "spans": [{"span", "parent", "service", "name", "start_s", "duration_s",
           "ok", "text"}]}; `start_s` counts from the first span. In a cluster also "url", which is
           empty without --trace-url of the dashboard.
`topology`: {"edges": [{"publisher", "event", "delivery": "work" | "broadcast" | "request" |
           "observed", "consumer"}]}
"unmeasured_nodes" have leases, and their agents did not reply.
"requested_size" is null, or for a resized share what its pod requests: {"memory_mib",
"cores_percent"}. "dominant_share" is the largest part of all healthy devices' cores or memory that
the namespace holds. Amounts are MiB, percent of one device and Unix seconds.
"""

from collections.abc import Iterable
from typing import Any

from services.cli.snapshot.snapshot import MeasuredUsage, Snapshot, shares_on
from shared.model.cluster_view import lease_json, measured_json, mig_json, waiting_json
from shared.model.lease import Lease, Share
from shared.model.ledger import NodeTotals
from shared.model.node import cordon_reason
from shared.model.placement import Refusal

Shape = dict[str, Any]


def gpus(nodes: Iterable[NodeTotals], usage: MeasuredUsage) -> Shape:
    """Return every device and its shares."""
    return {
        "nodes": [_node(totals, usage) for totals in nodes if totals.node.devices],
        "unmeasured_nodes": list(usage.unmeasured_nodes),
        "problems": list(usage.notes),
    }


def ps(snapshot: Snapshot) -> Shape:
    """Return every lease and every waiting pod."""
    unhealthy = snapshot.device_faults.keys()
    return {
        "leases": [
            lease_shape(lease, snapshot.usage)
            | {"unhealthy_devices": sorted({share.device for share in lease.shares} & unhealthy)}
            for lease in snapshot.leases
        ],
        "waiting": [waiting_json(waiting) for waiting in snapshot.waiting],
        "unmeasured_nodes": list(snapshot.usage.unmeasured_nodes),
    }


def lease_shape(lease: Lease, usage: MeasuredUsage) -> Shape:
    """Return the JSON form of a lease with the usage of its shares."""
    shape = lease_json(lease)
    for share, form in zip(lease.shares, shape["shares"], strict=True):
        form["measured"] = measured_shape(usage, lease, share)
    return shape


def measured_shape(usage: MeasuredUsage, lease: Lease, share: Share) -> Shape | None:
    """Return the JSON form of a share's usage; None: it was not measured."""
    is_idle = usage.idle_since(lease, share) is not None
    return measured_json(usage.of(lease, share), is_idle=is_idle)


def refusal_shape(refusal: Refusal) -> Shape:
    """Return the JSON form of a refusal."""
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


def _node(totals: NodeTotals, usage: MeasuredUsage) -> Shape:
    return {
        "node": totals.node.facts.name,
        "cordoned": cordon_reason(totals.node.served),
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
                        "mig": mig_json(share.mig),
                        "fence": share.fence,
                        "state": str(lease.state),
                        "measured": measured_shape(usage, lease, share),
                    }
                    for lease, share in shares_on(totals, device.uuid)
                ],
            }
            for device, use in sorted(totals.node.devices, key=lambda pair: pair[0].index)
        ],
    }
