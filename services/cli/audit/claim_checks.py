"""Audit checks of the leases of ResourceClaims against what schedulers have allocated; pure."""

from collections.abc import Iterator

from services.cli.audit.differences import BIND_S, OUTLIVE_S, Difference
from services.cli.snapshot.snapshot import Snapshot
from shared.model.claim import LEASED, device_name
from shared.model.events.claim_events import AllocatedClaim
from shared.model.lease import Lease


def claims(snapshot: Snapshot) -> Iterator[Difference]:
    """S3, S7, P2: leases of ResourceClaims are exactly what is allocated to them."""
    if snapshot.claims is None:
        return
    leases = {lease.pod: lease for lease in snapshot.leases if lease.claim}
    for claim in snapshot.claims:
        lease = leases.pop(claim.claim, None)
        subject = f"claim {claim.namespace}/{claim.name}"
        if lease is None and claim.devices and claim.answer == LEASED:
            text = "it is answered as leased and holds no lease"
            yield Difference(invariant="S3", subject=subject, text=text, settles_s=BIND_S)
        if lease is not None and _allocated(claim) != _leased(lease):
            text = (
                f"it is allocated {_allocated(claim)} (request, device, share), its lease has "
                f"{_leased(lease)}"
            )
            yield Difference(invariant="S7", subject=subject, text=text, settles_s=OUTLIVE_S)
    for lease in leases.values():
        text = f"it has no allocation and its lease is {lease.state}, version {lease.version}"
        subject = f"claim {lease.namespace}/{lease.name}"
        yield Difference(invariant="P2", subject=subject, text=text, settles_s=OUTLIVE_S)


def _allocated(claim: AllocatedClaim) -> list[tuple[str, str, str]]:
    return sorted((each.request, each.device, each.share_id) for each in claim.devices)


def _leased(lease: Lease) -> list[tuple[str, str, str]]:
    shares = lease.shares
    return sorted((s.container, device_name(s.device, s.mig), s.share_id) for s in shares)
