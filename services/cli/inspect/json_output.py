"""What `--json` prints: plain dictionaries whose keys stay as they are.

`gpus`:    {"nodes": [{"node", "devices": [{"uuid", "index", "model", "mode", "healthy", "fault",
           "memory_mib", "used_memory_mib", "used_cores_percent", "slots", "used_shares", "fence",
           "layout", "shares": [{"pod", "namespace", "name", "container", "memory_mib",
           "cores_percent", "slot", "mig", "fence", "state"}]}]}]}; "layout" is that of a device in
           MIG mode of which instances are held, "mig" {"layout", "position", "profile"} or null.
`ps`:      {"leases": [{"pod", "namespace", "name", "node", "state", "version", "dialect",
           "created_at", "expires_at", "sick", "shares": [{"container", "device", "index",
           "memory_mib", "cores_percent", "slot", "mig", "fence", "init", "asked"}]}],
           "waiting": [{"pod", "namespace", "name", "since", "reason", "hint", "permanent"}]}
`audit`:   {"clean", "checked": {"nodes", "devices", "leases", "pods", "agents"},
           "differences": [{"invariant", "subject", "text"}]}
`explain`: {"verdict": "running" | "waiting" | "rejected" | "foreign" | "unknown", "pod",
           "namespace", "name", "text", "next", and, where there are any, "lease" (as in `ps`),
           "devices", "annotations", "refusal": {"reason", "hint", "permanent", "counts",
           "nearest": [{"node", "reason", "devices": [{"uuid", "index", "reason"}]}]},
           "queue": {"place", "of", "part", "share", "has_budget"}; "part" is the largest part of
           all healthy devices' cores or memory that the namespace holds}
`trace`:   {"trace", "spans": [{"span", "parent", "service", "name", "start_s", "duration_s",
           "ok", "text"}]}; `start_s` counts from the first span.
`topology`: {"edges": [{"says", "event", "as": "work" | "broadcast" | "request" | "observed",
           "hears"}]}
"asked" is null, or of a share that was resized what its pod asks for: {"memory_mib",
"cores_percent"}. "sick" lists the devices of a lease that are not healthy. Amounts are MiB, percent
of one device and Unix seconds.
"""

from collections.abc import Iterable
from typing import Any

from services.cli.audit.audit import account_numbers
from services.cli.audit.difference import Difference
from services.cli.inspect.facts import Facts, shares_on
from shared.model.lease import Lease, MigPlacement
from shared.model.ledger import NodeTotals, WaitingPod
from shared.model.placement import Refusal

Shape = dict[str, Any]


def gpus(accounts: Iterable[NodeTotals]) -> Shape:
    """Return every device and its shares."""
    return {"nodes": [_node(account) for account in accounts if account.node.devices]}


def ps(facts: Facts) -> Shape:
    """Return every lease and every waiting pod."""
    sick = facts.sick.keys()
    return {
        "leases": [
            lease_shape(lease) | {"sick": sorted({share.device for share in lease.shares} & sick)}
            for lease in facts.leases
        ],
        "waiting": [_waiting(waiting) for waiting in facts.waiting],
    }


def audit(facts: Facts, wrong: Iterable[Difference]) -> Shape:
    """Return what was checked and what does not add up."""
    nodes, devices, leases = account_numbers(facts.accounts)
    listed = [{"invariant": d.invariant, "subject": d.subject, "text": d.text} for d in wrong]
    return {
        "clean": not listed,
        "checked": {
            "nodes": nodes,
            "devices": devices,
            "leases": leases,
            "pods": len(facts.pods),
            "agents": len(facts.allocations),
        },
        "unseen": list(facts.unseen),
        "differences": listed,
    }


def lease_shape(lease: Lease) -> Shape:
    """Return one lease."""
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
                "asked": None
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
    """Return why a pod fits nowhere."""
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


def _mig(place: MigPlacement | None) -> Shape | None:
    if place is None:
        return None
    return {"layout": place.layout, "position": place.position, "profile": place.profile}


def _node(account: NodeTotals) -> Shape:
    return {
        "node": account.node.facts.name,
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
                    for lease, share in shares_on(account, device.uuid)
                ],
            }
            for device, use in sorted(account.node.devices, key=lambda pair: pair[0].index)
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
