"""What an agent's word about a lease counts for beside Kubernetes; pure.

An agent may be stolen. So its allocations say that a pod uses devices, and the copy of the lease,
which only binders write, says which and how much: the agent may have less, after a resize, and
never more. A binder writes a larger size into the copy before the agent gets it. Slots are a matter
of the agent's node alone, so they are those that the agent has given.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import structs

from shared.model.errors import RequestError
from shared.model.lease import Lease, Share
from shared.model.lease_copy import load_lease
from shared.model.names import DeviceUuid


@dataclass(frozen=True, slots=True)
class Evidence:
    """A lease that the ledger does not have, and who says so."""

    lease: Lease
    is_hearsay: bool
    """Its holder has no copy: only the agent of its node knows the lease."""


def evidence_of(reported: Lease, copy: str) -> Evidence | str:
    """Return the lease of a pod on its agent's node, by the pod's copy; or why it is none.

    Without a valid copy it is what the agent reports.
    """
    written = copy_for(reported, copy)
    if written is None:
        return Evidence(reported, is_hearsay=True)
    if places_of(written) != places_of(reported):
        return (
            f"pod {reported.pod} uses other devices than those of its lease, in the copy that pod "
            f"{reported.namespace}/{reported.name} carries"
        )
    own = {_place(share): share for share in reported.shares}
    shares = tuple(_least(share, own[_place(share)]) for share in written.shares)
    newest = max(reported, written, key=lambda lease: lease.version)
    version = newest.version
    if sizes_of(shares) != sizes_of(newest.shares):
        version += 1  # who knows that one follows newer leases only
    merged = structs.replace(
        written,
        shares=shares,
        version=version,
        resized_at=max(written.resized_at, reported.resized_at),
    )
    return Evidence(merged, is_hearsay=False)


def copy_for(lease: Lease, text: str) -> Lease | None:
    """Return the copy of the lease of this holder on this node; None: the text is no such copy."""
    if not text:
        return None
    try:
        copy = load_lease(text, namespace=lease.namespace, name=lease.name)
    except RequestError:
        return None
    is_its = (copy.pod, copy.node, generation_of(copy)) == (
        lease.pod,
        lease.node,
        generation_of(lease),
    )
    return copy if is_its else None


def slots_of(lease: Lease) -> frozenset[tuple[DeviceUuid, int | None]]:
    """Return the slots of a lease, with their devices."""
    return frozenset((share.device, share.slot) for share in lease.shares)


def generation_of(lease: Lease) -> str:
    """Return which allocation of a claim a lease is for; empty: it is that of a pod."""
    return lease.claim.generation if lease.claim else ""


def is_resized(lease: Lease, later: Lease) -> bool:
    """Return whether a lease has another size than the stored one, and a later one."""
    is_later = later.version > lease.version or later.resized_at > lease.resized_at
    return is_later and later.shares != lease.shares


def places_of(lease: Lease) -> frozenset[tuple[str, DeviceUuid, int | None]]:
    """Return what of a lease an agent cannot choose."""
    return frozenset(map(_place, lease.shares))


def sizes_of(shares: Iterable[Share]) -> set[tuple[object, ...]]:
    """Return the sizes of shares, with their places."""
    return {(*_place(share), share.memory_mib, share.cores_percent) for share in shares}


def _place(share: Share) -> tuple[str, DeviceUuid, int | None]:
    """Return the container and device of a share; the slot decides which MIG instance it is."""
    return share.container, share.device, share.slot if share.mig else None


def _least(written: Share, reported: Share) -> Share:
    """Return the share with its agent's slot, and the size that it gives, unless that is more."""
    if written.slot != reported.slot:
        written = structs.replace(written, slot=reported.slot, fence=reported.fence)
    memory_mib = min(written.memory_mib, reported.memory_mib)
    cores_percent = min(written.cores_percent, reported.cores_percent)
    if (memory_mib, cores_percent) == (written.memory_mib, written.cores_percent):
        return written
    requested = written.requested_size or reported.requested_size
    return structs.replace(
        written, memory_mib=memory_mib, cores_percent=cores_percent, requested_size=requested
    )
