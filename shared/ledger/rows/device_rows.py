"""What is taken of nodes and devices, as the ledger's scripts keep and tell it.

The layouts are those of `N_…` and `D_…` in `scripts/layout.lua`. The feed carries the stored bytes
of all that changed, joined: each says where it ends. Surveys and refusals tell rows of the same
order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct, unpack_from
from typing import Any

from shared.model.device import DeviceUse
from shared.model.ledger import NodeUse
from shared.model.names import DeviceUuid, NodeName

_NODE = Struct("<BdbIB")
_DEVICE = Struct("<IIBIIIIdBBB")
_LENGTH = Struct("<H")
_DOUBLE_BYTES = 8

NO_TAGS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device as the scripts see it: what of its inventory decides, and what is taken."""

    uuid: DeviceUuid
    node: NodeName
    memory_mib: int
    slots: int
    unit_mib: int
    use: DeviceUse


def node_use(row: Sequence[Any]) -> tuple[NodeName, NodeUse]:
    """Read what is taken of a node's ordinary resources."""
    _, version, _, _, name, names, *amounts = row
    known = names.split("\n")[:-1]
    used = {known: int(used) for known, used in zip(known, amounts[1::2], strict=True) if used}
    return NodeName(name), NodeUse(version=int(version), used=used)


def device_state(row: Sequence[Any]) -> DeviceState:
    """Read a device's state."""
    memory_mib, slots, _, unit_mib, used_mib, cores, shares, fence, alone, *others = row
    _, uuid, node, taken, tags, layout = others
    return DeviceState(
        DeviceUuid(uuid),
        NodeName(node),
        memory_mib,
        slots,
        unit_mib,
        DeviceUse(
            memory_mib=used_mib,
            cores_percent=cores,
            shares=shares,
            fence=int(fence),
            anti_affinity_groups=frozenset(tags.strip("\n").split("\n")) if tags else NO_TAGS,
            exclusive=bool(alone),
            slots_taken=taken,
            layout=layout,
            claimed_by=alone > 1,
        ),
    )


def node_uses(values: bytes) -> dict[NodeName, NodeUse]:
    """Read the joined states of nodes."""
    return dict(map(node_use, _node_rows(values)))


def device_states(values: bytes) -> dict[DeviceUuid, DeviceState]:
    """Read the joined states of devices."""
    return {state.uuid: state for state in map(device_state, _device_rows(values))}


def _node_rows(values: bytes) -> Iterator[tuple[Any, ...]]:
    at = 0
    while at < len(values):
        count, version, known, number, length = _NODE.unpack_from(values, at)
        name, at = _string(values, at + _NODE.size, length)
        names, at = _long_string(values, at)
        amounts = unpack_from(f"<{2 * count}d", values, at)
        at += 2 * count * _DOUBLE_BYTES
        yield (count, version, known, number, name, names, *amounts)


def _device_rows(values: bytes) -> Iterator[tuple[Any, ...]]:
    at = 0
    while at < len(values):
        *numbers, length = _DEVICE.unpack_from(values, at)
        uuid, at = _string(values, at + _DEVICE.size, length)
        node, at = _string(values, at + 1, values[at])
        taken, at = _long_string(values, at)
        tags, at = _long_string(values, at)
        layout, at = _string(values, at + 1, values[at])
        yield (*numbers, uuid, node, taken, tags, layout)


def _string(values: bytes, at: int, length: int) -> tuple[str, int]:
    return values[at : at + length].decode(), at + length


def _long_string(values: bytes, at: int) -> tuple[str, int]:
    [length] = _LENGTH.unpack_from(values, at)
    return _string(values, at + _LENGTH.size, length)
