"""The cluster as one viewer may see it, and the JSON of its leases and waiting pods; pure.

The dashboard's API sends it to the commands. Amounts are MiB, percent of one device and Unix
seconds.
"""

from dataclasses import dataclass, field
from typing import Any

from shared.model.fair_share import FairShare
from shared.model.lease import Lease, MigPlacement, Share
from shared.model.ledger import NodeTotals, WaitingPod
from shared.model.names import NodeName, PodUid
from shared.model.usage import ShareMeasurement

Json = dict[str, Any]
HIDDEN = PodUid("")
"""In the queue: a pod that the viewer may not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What the commands show, at one moment.

    Of namespaces that the viewer may not see, it contains how much of a device is in use: their
    leases have no namespace and no names, and their waiting pods are only counted.
    """

    read_at: float
    """Unix seconds."""
    nodes: tuple[NodeTotals, ...] = ()
    waiting: tuple[WaitingPod, ...] = ()
    """The visible ones."""
    queue: tuple[PodUid, ...] = ()
    """All waiting pods in the order in which freed capacity is offered; see `HIDDEN`."""
    fair_share: FairShare = field(default_factory=FairShare)
    """With the usage of visible namespaces only; the total is that of all devices."""
    usage: tuple[ShareMeasurement, ...] = ()
    unmeasured_nodes: tuple[NodeName, ...] = ()
    """Nodes with leases whose agent did not report usage."""
    problems: tuple[str, ...] = ()
    """Missing components, as text."""


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
