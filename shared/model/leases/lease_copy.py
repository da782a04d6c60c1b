"""The copy of a lease in an annotation of its pod, or in the status of its ResourceClaim; pure.

The ledger is rebuilt from these copies when Redis is lost; nothing is granted because of them.
"""

from typing import Any

import msgspec
from msgspec import structs

from shared.model.errors import UNDECODABLE, RequestError
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.names import Namespace

ANNOTATION = "leasehold.dev/lease"
FORMAT = 1
_READ_AS = {"state": LeaseState.BOUND, "expires_at": 0.0, "activated_at": 0.0, "weighed": ""}
"""What a copy does not have: it is read as that of a bound lease."""
_ELSEWHERE = {"namespace", "name", *_READ_AS}


class LeaseOutline(msgspec.Struct, frozen=True):
    """What is read of a copy elsewhere than in a rebuild."""

    created_at: float = 0.0
    """Unix seconds; 0: there is no copy."""
    resources: dict[str, int] = {}


def lease_outline(text: str) -> LeaseOutline:
    """Decode what a copy is read for elsewhere; a text that is no copy is read as none."""
    try:
        return msgspec.json.decode(text, type=LeaseOutline)
    except UNDECODABLE:
        return LeaseOutline()


def dump_lease(lease: Lease) -> str:
    """Encode a lease as compact JSON."""
    return msgspec.json.encode(copy_of(lease)).decode()


def copy_of(lease: Lease) -> dict[str, Any]:
    """Return a copy of a lease as a JSON object, with each share as a row of its fields."""
    fields = msgspec.to_builtins(lease)
    copied = {name: value for name, value in fields.items() if name not in _ELSEWHERE}
    rows = msgspec.to_builtins([structs.astuple(share) for share in lease.shares])
    return {"format": FORMAT, **copied, "shares": rows}


def load_lease(text: str, *, namespace: Namespace, name: str) -> Lease:
    """Decode a copy as a bound lease. Raises RequestError if the text is not one."""
    place = f"{ANNOTATION} of {namespace}/{name}"
    try:
        copy = msgspec.json.decode(text, type=dict[str, Any])
        if copy["format"] != FORMAT:
            raise RequestError(f"{place} has format {copy['format']}")
        shares = [dict(zip(Share.__struct_fields__, row, strict=True)) for row in copy["shares"]]
        given = {"namespace": namespace, "name": name, "shares": shares, **_READ_AS}
        lease = msgspec.convert(copy | given, Lease)
    except (
        *UNDECODABLE,
        *(ValueError, TypeError, KeyError, OverflowError),
    ) as error:
        raise RequestError(f"{place} is not a lease: {error!r}") from error
    for share in lease.shares:
        if share.device_mib < 1:
            raise RequestError(f"{place} is not a lease: no device has {share.device_mib} MiB")
    return lease
