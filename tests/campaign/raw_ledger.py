"""Redis' raw values, decoded by the layouts that `scripts/common/state.lua` documents; pure."""

import json
from collections.abc import Mapping, Sequence
from struct import Struct, calcsize, unpack_from
from typing import Any

import msgspec

from tests.campaign.observations import RawCharge, RawDevice, RawLease, RawShare
from tests.campaign.workload import INIT

_LEASE = Struct("<BddddII")
_GRANT = "<id"
_DEVICE = Struct("<IIBIIIIdBBI")
_LENGTH = Struct("<I")
_STATES = ("", "reserved", "bound", "active", "released", "expired")
_CLAIMED = 2
"""Added to the mark of exclusive use while a device is claimed."""
_REFUSED = b"its agent's messages are refused"
_CONTAINER, _MIG = 6, 11
"""Positions in a share's values, after the node's name is taken off."""


def decode_lease(pod: str, value: bytes) -> RawLease:
    """Decode a field of `leases`."""
    state, version, _, created_at, expires_at, count, length = _LEASE.unpack_from(value)
    grants, at = [], _LEASE.size
    for _ in range(count):
        grants.append(unpack_from(_GRANT, value, at))
        at += calcsize(_GRANT)
    node, *demand = msgspec.msgpack.decode(value[at + length :])
    shares = demand[2] if demand[0] is False else [demand]
    return RawLease(
        pod=pod,
        node=node,
        state=_STATES[state],
        version=int(version),
        created_at=created_at,
        expires_at=expires_at,
        shares=tuple(
            _share(values, slot, int(fence))
            for values, (slot, fence) in zip(shares, grants, strict=True)
            if values[_CONTAINER] != INIT
        ),
    )


def _share(values: Sequence[Any], slot: int, fence: int) -> RawShare:
    mig = values[_MIG]
    return RawShare(
        device=values[0],
        mib=values[1],
        cores=0 if mig else values[2],  # nothing else uses those of an instance
        layout=mig["layout"] if mig else "",
        container=values[_CONTAINER],
        slot=slot,
        fence=fence,
    )


def decode_device(value: bytes) -> RawDevice:
    """Decode a field of `devices`."""
    _, _, status, _, *used, exclusive, _, length = _DEVICE.unpack_from(value)
    used_mib, used_cores, shares, fence = used
    at = _DEVICE.size
    uuid, at = value[at : at + length].decode(), at + length
    [length] = _LENGTH.unpack_from(value, at)
    node = value[at + _LENGTH.size :][:length].decode()
    return RawDevice(
        uuid=uuid,
        node=node,
        healthy=status == 1,
        used_mib=used_mib,
        used_cores=used_cores,
        shares=shares,
        fence=int(fence),
        is_claimed=exclusive >= _CLAIMED,
    )


def is_known_node(value: bytes) -> bool:
    """Whether a field of `nodes` is of a node that the API server has reported and not removed."""
    _, _, status = unpack_from("<Idb", value)
    return bool(status == 1)


def distrusted_nodes(cordons: Mapping[bytes, bytes]) -> frozenset[str]:
    """Return the nodes in `cordons` whose reason is that messages of their agents are refused."""
    return frozenset(
        node.decode() for node, reason in cordons.items() if reason.startswith(_REFUSED)
    )


def decode_charges(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> tuple[RawCharge, ...]:
    """Decode the entries of a budget's stream."""
    found = []
    for _, entry in entries:
        values = json.loads(entry[b"e"])
        found.append(
            RawCharge(
                lease=values.get("lease", ""),
                start_ms=values.get("from_ms", 0),
                end_ms=values.get("to_ms", 0),
                weight=values.get("weight", 0),
                units=values["units"],
                kind=values["kind"],
                window=values["window"],
                reason=values.get("reason", ""),
            )
        )
    return tuple(found)
