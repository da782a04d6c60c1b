"""Samples of a campaign, right in everything that a test does not change."""

from collections.abc import Mapping
from typing import Any

from tests.campaign.judge import Judge
from tests.campaign.observations import (
    AgentGrant,
    Grant,
    RawCharge,
    RawDevice,
    RawLease,
    RawLedger,
    RawShare,
    RegionLimits,
    Sample,
    SeenNode,
    SeenPod,
)
from tests.campaign.workload import Want

AT = 1000.0
NODE = "node-0"


def pod(uid: str = "a", mib: int = 1000, cores: int = 10, **changes: Any) -> SeenPod:
    """A pod that runs on `node-0` with a share of `gpu-0`."""
    values: dict[str, Any] = {
        "uid": uid,
        "name": f"pod-{uid}",
        "created_at": AT,
        "want": Want(1, mib, cores),
        "node": NODE,
        "phase": "Running",
        "lease_node": NODE,
        "devices": ("gpu-0",),
        "runs": True,
    }
    values |= changes
    copied = (values["want"].mib,) * len(values["devices"])
    return SeenPod(**{"copied_mib": copied} | values)


def waiting(uid: str = "a", mib: int = 1000, **changes: Any) -> SeenPod:
    """A pod that waits, with the reason in its condition."""
    values: dict[str, Any] = {
        "node": "",
        "phase": "Pending",
        "lease_node": "",
        "devices": (),
        "runs": False,
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient GPU memory. Request less.",
    }
    return pod(uid, mib, **values | changes)


def grant(uid: str = "a", mib: int = 1000, cores: int = 10, **changes: Any) -> Grant:
    """What the container of `pod` was given."""
    values: dict[str, Any] = {"node": NODE, "device": "gpu-0"}
    return Grant(pod=uid, mib=mib, cores=cores, **values | changes)


def limits(uid: str = "a", mib: int = 1000, cores: int = 10) -> dict[str, RegionLimits]:
    """What the region of the container of `pod` allows."""
    return {uid: RegionLimits(pod=uid, mib=(mib,), cores=(cores,))}


def agent_grant(uid: str = "a", slot: int = 0, fence: int = 1, **changes: Any) -> AgentGrant:
    """What the agent's checkpoint records of `pod`."""
    values: dict[str, Any] = {
        "node": NODE,
        "container": "main",
        "device": "gpu-0",
        "mib": 1000,
        "cores": 10,
        "activated_at": AT,
    }
    return AgentGrant(pod=uid, slot=slot, fence=fence, **values | changes)


def lease(
    uid: str = "a", mib: int = 1000, slot: int = 0, fence: int = 1, **changes: Any
) -> RawLease:
    """The lease of `pod`."""
    device, layout = changes.pop("device", "gpu-0"), changes.pop("layout", "")
    share = RawShare(
        container="main",
        device=device,
        mib=mib,
        cores=0 if layout else 10,
        slot=slot,
        fence=fence,
        layout=layout,
    )
    values: dict[str, Any] = {
        "node": NODE,
        "state": "active",
        "version": 1,
        "created_at": AT,
        "expires_at": 0.0,
        "shares": (share,),
    }
    return RawLease(pod=uid, **values | changes)


def ledger(*leases: RawLease, **changes: Any) -> RawLedger:
    """The ledger of two devices with these leases, and the right sums."""
    used = [share for one in leases for share in one.shares]
    devices = {
        uuid: RawDevice(
            uuid=uuid,
            node=NODE,
            healthy=True,
            used_mib=sum(share.mib for share in used if share.device == uuid),
            used_cores=sum(share.cores for share in used if share.device == uuid),
            shares=len(used),
            fence=99,
        )
        for uuid in ("gpu-0", "gpu-1")
    }
    values: dict[str, Any] = {
        "ready": True,
        "generation": "g",
        "leases": {one.pod: one for one in leases},
        "devices": devices,
        "nodes": frozenset({NODE}),
    }
    return RawLedger(**values | changes)


def charge(start_ms: int, end_ms: int, **changes: Any) -> RawCharge:
    """A charge of weight 10."""
    values: dict[str, Any] = {
        "lease": "a/1",
        "weight": 10,
        "units": 10 * (end_ms - start_ms),
        "kind": "charge",
        "window": "w",
    }
    return RawCharge(start_ms=start_ms, end_ms=end_ms, **values | changes)


def sample(*pods: SeenPod, at: float = AT, **changes: Any) -> Sample:
    """A sample of these pods, of one node, and of a ledger that agrees if none is given."""
    bound = [one for one in pods if one.lease_node and not one.ended]
    values: dict[str, Any] = {
        "pods": {one.uid: one for one in pods},
        "nodes": {NODE: SeenNode(name=NODE)},
        "ledger": ledger(
            *(
                lease(one.uid, one.want.mib, slot=number, fence=number + 1)
                for number, one in enumerate(bound)
            )
        ),
    }
    return Sample(at=at, **values | changes)


def found(*samples: Sample, cannot_work: Mapping[str, float] | None = None) -> set[str]:
    """Return the invariants that a judge of these samples finds violated."""
    judge = Judge()
    judge.end_faults(AT)
    for one in samples:
        judge.observe(one, cannot_work=cannot_work or {})
        judge.judge_liveness(one.at)
    return {violation.check for violation in judge.violations}
