"""The JSON form of leases and waiting pods, for the command line and the dashboard; pure.

Amounts are MiB, percent of one device and Unix seconds.
"""

from typing import Any

from shared.model.lease import Lease, MigPlacement, Share
from shared.model.ledger import WaitingPod
from shared.model.usage import ShareMeasurement

Json = dict[str, Any]


def lease_json(lease: Lease) -> Json:
    """Return one lease with its shares."""
    return {
        "pod": lease.pod,
        "namespace": lease.namespace,
        "name": lease.name,
        "claim": lease.claim
        and {"generation": lease.claim.generation, "consumers": list(lease.claim.consumers)},
        "node": lease.node,
        "state": str(lease.state),
        "version": lease.version,
        "dialect": lease.dialect,
        "gang": lease.gang,
        "created_at": lease.created_at,
        "expires_at": lease.expires_at,
        "shares": [_share(share) for share in lease.shares],
    }


def _share(share: Share) -> Json:
    size = share.requested_size
    return {
        "container": share.container,
        "device": share.device,
        "index": share.index,
        "memory_mib": share.memory_mib,
        "cores_percent": share.cores_percent,
        "booked_cores": share.booked_cores,
        "slot": share.slot,
        "mig": mig_json(share.mig),
        "fence": share.fence,
        "init": share.init,
        "share_id": share.share_id,
        "requested_size": size
        and {"memory_mib": size.memory_mib, "cores_percent": size.cores_percent},
    }


def mig_json(mig: MigPlacement | None) -> Json | None:
    """Return the MIG instance of a share."""
    if mig is None:
        return None
    return {"layout": mig.layout, "position": mig.position, "profile": mig.profile}


def measured_json(measured: ShareMeasurement | None, *, is_idle: bool) -> Json | None:
    """Return the measured usage of a share; None: it was not measured."""
    if measured is None:
        return None
    return {
        "memory_mib": measured.memory_mib,
        "cores_percent": measured.cores_percent,
        "processes": measured.processes,
        "idle": is_idle,
        "idle_since": measured.idle_since,
    }


def waiting_json(waiting: WaitingPod) -> Json:
    """Return a waiting pod, and why it waits."""
    queued, refusal = waiting.queued, waiting.refusal
    gang = queued.request.gang
    return {
        "pod": queued.pod,
        "namespace": queued.namespace,
        "name": queued.name,
        "priority": queued.request.priority,
        "gang": gang.name if gang else "",
        "since": waiting.waiting_since or queued.created_at,
        "reason": refusal.reason,
        "hint": refusal.hint,
        "permanent": refusal.permanent,
    }
