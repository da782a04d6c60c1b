"""The copy of a lease in an annotation of its pod, or in the status of its ResourceClaim; pure.

The ledger is rebuilt from these copies when Redis is lost; nothing else reads them, and nothing is
granted because of them.
"""

import json
from typing import Any

import msgspec

from shared.model.bounds import check_bounds
from shared.model.errors import RequestError
from shared.model.lease import (
    ClaimAllocation,
    Lease,
    LeaseState,
    MigPlacement,
    RequestedUnits,
    Share,
    ShareSize,
)
from shared.model.names import DeviceUuid, Namespace, NodeName, PodUid
from shared.model.request import SharingPolicy

ANNOTATION = "leasehold.dev/lease"
FORMAT = 1


def dump_lease(lease: Lease) -> str:
    """Encode a lease as compact JSON."""
    return msgspec.json.encode(copy_of(lease)).decode()


def copy_of(lease: Lease) -> dict[str, Any]:
    """Return a copy of a lease as a JSON object, with shares as rows."""
    return {
        "format": FORMAT,
        "pod": lease.pod,
        "node": lease.node,
        "dialect": lease.dialect,
        "version": lease.version,
        "at": lease.created_at,
        "shares": [
            [
                share.container,
                share.device,
                share.index,
                share.device_mib,
                share.device_model,
                share.memory_mib,
                share.cores_percent,
                share.unit_mib,
                share.whole,
                share.slotted,
                share.init,
                share.slot,
                share.fence,
            ]
            for share in lease.shares
        ],
        "resources": dict(lease.resources),
        "anti_affinity_groups": list(lease.anti_affinity_groups),
        "trace": lease.trace,
        **_more(lease),
    }


def load_lease(text: str, *, namespace: Namespace, name: str) -> Lease:
    """Decode a copy as a bound lease. Raises RequestError if the text is not one."""
    try:
        copy: dict[str, Any] = json.loads(text)
        if copy["format"] != FORMAT:
            raise RequestError(f"{ANNOTATION} of {namespace}/{name} has format {copy['format']}")
        lease = Lease(
            pod=PodUid(copy["pod"]),
            namespace=namespace,
            name=name,
            node=NodeName(copy["node"]),
            shares=tuple(
                _share(row, copy.get("more", {}).get(str(number), {}))
                for number, row in enumerate(copy["shares"])
            ),
            claim=_claim(copy.get("claim")),
            dialect=copy["dialect"],
            resources={str(key): int(amount) for key, amount in copy["resources"].items()},
            anti_affinity_groups=tuple(copy["anti_affinity_groups"]),
            gang=copy.get("gang", ""),
            memo=copy.get("memo", ""),
            trace=copy["trace"],
            state=LeaseState.BOUND,
            version=int(copy["version"]),
            created_at=float(copy["at"]),
            resized_at=float(copy.get("resized", 0.0)),
        )
    except (
        *(ValueError, TypeError, KeyError),
        *(AttributeError, OverflowError, RecursionError),
    ) as error:
        raise RequestError(
            f"{ANNOTATION} of {namespace}/{name} is not a lease: {error!r}"
        ) from error
    check_bounds(lease, f"{ANNOTATION} of {namespace}/{name}")
    return lease


def _size_mib(value: Any) -> int:
    """Return the memory of a device. Raises ValueError for what no device has."""
    if int(value) < 1:
        raise ValueError(f"no device has {value} MiB")
    return int(value)


def _more(lease: Lease) -> dict[str, Any]:
    """Encode fields that few leases have. A reader that does not know them may ignore them."""
    shares = {str(n): rest for n, share in enumerate(lease.shares) if (rest := _unusual(share))}
    more = {
        "more": shares,
        "gang": lease.gang,
        "memo": lease.memo,
        "resized": lease.resized_at,
        "claim": lease.claim and [lease.claim.generation, list(lease.claim.consumers)],
    }
    return {key: value for key, value in more.items() if value}


def _unusual(share: Share) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if share.sharing != _default_policy(share.whole, share.cores_percent):
        fields["sharing"] = int(share.sharing)
    if share.slots:
        fields["slots"] = share.slots
    if share.mig:
        fields["mig"] = [share.mig.layout, share.mig.position, share.mig.profile]
    if share.requested_units:
        terms = share.requested_units
        fields["requested_units"] = [
            terms.memory_mib,
            terms.memory_bytes,
            terms.memory_percent,
        ]
    if share.requested_size:
        fields["requested_size"] = [
            share.requested_size.memory_mib,
            share.requested_size.cores_percent,
        ]
    if share.share_id:
        fields["share_id"] = share.share_id
    return fields


def _share(row: list[Any], more: dict[str, Any]) -> Share:
    container, device, index, device_mib, device_model, memory, cores, unit, *others = row
    whole, slotted, init, slot, fence = others
    return Share(
        container=str(container),
        device=DeviceUuid(device),
        index=int(index),
        device_mib=_size_mib(device_mib),
        device_model=str(device_model),
        memory_mib=int(memory),
        cores_percent=int(cores),
        unit_mib=int(unit),
        whole=bool(whole),
        slotted=bool(slotted),
        init=bool(init),
        slot=None if slot is None else int(slot),
        fence=int(fence),
        sharing=SharingPolicy(more.get("sharing", _default_policy(bool(whole), int(cores)))),
        slots=int(more.get("slots", 0)),
        mig=_mig(more.get("mig")),
        requested_units=_terms(more.get("requested_units")),
        requested_size=_size(more.get("requested_size")),
        share_id=str(more.get("share_id", "")),
    )


def _default_policy(whole: bool, cores_percent: int) -> SharingPolicy:
    """Return the default policy: a share of all cores is exclusive."""
    return SharingPolicy.EXCLUSIVE if whole or cores_percent == 100 else SharingPolicy.SHARED


def _mig(row: list[Any] | None) -> MigPlacement | None:
    if row is None:
        return None
    layout, position, profile = row
    return MigPlacement(layout=str(layout), position=int(position), profile=str(profile))


def _terms(row: list[Any] | None) -> RequestedUnits | None:
    if row is None:
        return None
    memory_mib, memory_bytes, percent = row
    return RequestedUnits(
        memory_mib=int(memory_mib),
        memory_bytes=None if memory_bytes is None else int(memory_bytes),
        memory_percent=None if percent is None else int(percent),
    )


def _claim(row: list[Any] | None) -> ClaimAllocation | None:
    if row is None:
        return None
    generation, consumers = row
    return ClaimAllocation(
        generation=str(generation), consumers=tuple(PodUid(str(uid)) for uid in consumers)
    )


def _size(row: list[Any] | None) -> ShareSize | None:
    if row is None:
        return None
    memory_mib, cores_percent = row
    return ShareSize(memory_mib=int(memory_mib), cores_percent=int(cores_percent))
