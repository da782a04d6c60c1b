"""The copy of a lease in its pod's annotation, or in its claim's status; pure.

A lost ledger is rebuilt from these copies. They grant nothing.
"""

from typing import Any

import msgspec
from msgspec import structs

from shared.model.errors import UNDECODABLE, RequestError
from shared.model.leases.lease import Lease, LeaseState, Share
from shared.model.names import Namespace

ANNOTATION = "leasehold.dev/lease"
FORMAT = 1
_READ_AS = {
    "state": LeaseState.BOUND,
    "expires_at": 0.0,
    "activated_at": 0.0,
    "weighed": "",
    "claims": (),
}
"""A copy does not have these: it is read as a bound lease."""
_ELSEWHERE = {"namespace", "name", *_READ_AS}


class LeaseOutline(msgspec.Struct, frozen=True):
    created_at: float = 0.0
    resources: dict[str, int] = {}


def lease_outline(text: str) -> LeaseOutline:
    try:
        return msgspec.json.decode(text, type=LeaseOutline)
    except UNDECODABLE:
        return LeaseOutline()


def dump_lease(lease: Lease) -> str:
    return msgspec.json.encode(copy_of(lease)).decode()


def copy_of(lease: Lease) -> dict[str, Any]:
    fields = msgspec.to_builtins(lease)
    copied = {name: value for name, value in fields.items() if name not in _ELSEWHERE}
    rows = msgspec.to_builtins([structs.astuple(share) for share in lease.shares])
    return {"format": FORMAT, **copied, "shares": rows}


def load_lease(text: str, *, namespace: Namespace, name: str) -> Lease:
    """Decode a copy as a bound lease. Raises RequestError for any other text."""
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
