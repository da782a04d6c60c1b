"""The use of nodes and devices, as the ledger's scripts store and return it; pure.

The layouts are those of `N_*` and `D_*` in `scripts/common/state.lua`. The feed contains the stored
bytes of all changes, joined: each value contains its length. Other replies contain the same values
as arrays.
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

NO_GROUPS: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device as the scripts store it: its capacity and its use."""

    uuid: DeviceUuid
    node: NodeName
    memory_mib: int
    slots: int
    unit_mib: int
    use: DeviceUse


def decode_node_row(row: Sequence[Any]) -> tuple[NodeName, NodeUse]:
    """Decode the use of a node's ordinary resources."""
    _, version, _, _, name, names, *amounts = row
    known = names.split("\n")[:-1]
    used = {known: int(used) for known, used in zip(known, amounts[1::2], strict=True) if used}
    return NodeName(name), NodeUse(version=int(version), used=used)


def decode_device_row(row: Sequence[Any]) -> DeviceState:
    """Decode a device's state."""
    memory_mib, slots, _, unit_mib, used_mib, cores, shares, fence, exclusive, *others = row
    _, uuid, node, slot_map, groups_text, layout = others
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
            anti_affinity_groups=frozenset(groups_text.strip("\n").split("\n"))
            if groups_text
            else NO_GROUPS,
            exclusive=bool(exclusive),
            slots_taken=slot_map,
            layout=layout,
            claimed_by=exclusive > 1,
        ),
    )


def decode_node_values(values: bytes) -> dict[NodeName, NodeUse]:
    """Decode the joined values of nodes."""
    return dict(map(decode_node_row, _node_value_rows(values)))


def decode_device_values(values: bytes) -> dict[DeviceUuid, DeviceState]:
    """Decode the joined values of devices."""
    return {state.uuid: state for state in map(decode_device_row, _device_value_rows(values))}


def _node_value_rows(values: bytes) -> Iterator[tuple[Any, ...]]:
    at = 0
    while at < len(values):
        count, version, known, number, length = _NODE.unpack_from(values, at)
        name, at = _string(values, at + _NODE.size, length)
        names, at = _long_string(values, at)
        amounts = unpack_from(f"<{2 * count}d", values, at)
        at += 2 * count * _DOUBLE_BYTES
        yield (count, version, known, number, name, names, *amounts)


def _device_value_rows(values: bytes) -> Iterator[tuple[Any, ...]]:
    at = 0
    while at < len(values):
        *numbers, length = _DEVICE.unpack_from(values, at)
        uuid, at = _string(values, at + _DEVICE.size, length)
        node, at = _string(values, at + 1, values[at])
        slot_map, at = _long_string(values, at)
        groups_text, at = _long_string(values, at)
        layout, at = _string(values, at + 1, values[at])
        yield (*numbers, uuid, node, slot_map, groups_text, layout)


def _string(values: bytes, at: int, length: int) -> tuple[str, int]:
    return values[at : at + length].decode(), at + length


def _long_string(values: bytes, at: int) -> tuple[str, int]:
    [length] = _LENGTH.unpack_from(values, at)
    return _string(values, at + _LENGTH.size, length)
