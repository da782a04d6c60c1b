"""The ledger's bytes, decoded without any of the product's code; pure.

The layouts are those of `L_*` and `D_*` in `shared/ledger/scripts/common/state.lua`.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

RESERVED = 1
ACTIVE = 3
MIG = 11
"""Where a share has its MIG instance."""


@dataclass(frozen=True, slots=True)
class RawShare:
    """What a lease takes of a device."""

    device: str
    memory_mib: int
    cores_percent: int
    layout: str
    """Of the MIG instance that it is; empty: it is none."""
    position: int


@dataclass(frozen=True, slots=True)
class RawLease:
    """A live lease."""

    pod: str
    node: str
    gang: str
    state: int
    version: float
    expires_at: float
    shares: tuple[RawShare, ...]


@dataclass(frozen=True, slots=True)
class RawDevice:
    """A device with what is counted as taken."""

    node: str
    memory_mib: int
    slots: int
    status: int
    memory_used: int
    cores_used: int
    share_count: int
    fence: int
    in_mig_mode: bool
    layout: str
    """MIG layout of its leases; empty: they need none."""


@dataclass(frozen=True, slots=True)
class RawLedger:
    """Everything that the judge reads."""

    ready: bool
    generation: bytes
    leases: Mapping[str, RawLease]
    devices: Mapping[str, RawDevice]
    nodes: frozenset[str]
    """Those that the API server had when they were last written."""
    waiting: frozenset[str]
    gone: frozenset[str]
    """Pods that were reported as gone."""
    cordoned: frozenset[str]
    """Nodes that are cordoned in the API server, as far as the ledger knows."""


def decode(raw: Mapping[str, Mapping[bytes, bytes]]) -> RawLedger:
    leases = {pod.decode(): _lease(value) for pod, value in raw["leases"].items()}
    return RawLedger(
        ready=raw["ledger"].get(b"ready") == b"1",
        generation=raw["ledger"].get(b"generation", b""),
        leases=leases,
        devices={uuid.decode(): _device(value) for uuid, value in raw["devices"].items()},
        nodes=frozenset(name.decode() for name, value in raw["nodes"].items() if _known(value)),
        waiting=frozenset(pod.decode() for pod in raw["waiting"]),
        gone=frozenset(pod.decode() for pod in raw["gone"]),
        cordoned=frozenset(
            key.removeprefix("facts:")
            for key, value in raw.items()
            if b'"unschedulable":true' in value.get(b"facts", b"")
        ),
    )


def _lease(value: bytes) -> RawLease:
    state, version, _, _, expires_at, count, _ = struct.unpack_from("<BddddII", value)
    unpacker = msgpack.Unpacker()
    unpacker.feed(value[41 + 12 * count :])
    _, _, pod, gang, *_ = unpacker.unpack()
    node, first, *others = unpacker.unpack()
    rows = others[1] if first is False else [[first, *others]]
    return RawLease(pod, node, gang, state, version, expires_at, tuple(map(_share, rows)))


def _share(row: Sequence[Any]) -> RawShare:
    instance = row[MIG] or {}
    cores_percent = 0 if instance else row[2]
    layout, position = instance.get("layout", ""), instance.get("position", 0)
    return RawShare(row[0], row[1], cores_percent, layout, position)


def _device(value: bytes) -> RawDevice:
    numbers = "<IIBIIIIdBB"
    memory, slots, status, _, used, cores, shares, fence, _, mode = struct.unpack_from(
        numbers, value
    )
    at = struct.calcsize(numbers)
    texts = []
    for _ in range(5):
        (length,) = struct.unpack_from("<I", value, at)
        at += 4
        texts.append(value[at : at + length].decode())
        at += length
    _, node, _, _, layout = texts
    return RawDevice(
        node, memory, slots, status, used, cores, shares, int(fence), mode == 1, layout
    )


def _known(value: bytes) -> bool:
    return bool(struct.unpack_from("<Idb", value)[2] == 1)
