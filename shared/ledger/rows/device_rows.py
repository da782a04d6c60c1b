"""The use of nodes and devices, as the ledger's scripts store and return it; pure.

The layouts are those of `N_*` and `D_*` in `scripts/common/state.lua`. The feed contains the stored
bytes of all changes, joined after their lengths. Other replies contain the same values as arrays.
"""

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Any

import msgspec

from shared.ledger.rows.joined_texts import split_texts
from shared.ledger.rows.unreadable import cut, readable
from shared.model.device import DeviceUse
from shared.model.ledger import NodeUse
from shared.model.names import DeviceUuid, NodeName

_NODE = Struct("<IdbII")
_DEVICE = Struct("<IIBIIIIdBBI")
_LENGTH = Struct("<I")
_OTHER_TEXTS = 4
"""Of a device, after its UUID: node, slot map, groups, layout."""

NO_GROUPS: frozenset[str] = frozenset()


class DeviceState(msgspec.Struct, frozen=True, gc=False):
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
    return NodeName(name), _node_use(version, names, amounts)


def _node_use(version: float, names: str, amounts: Sequence[float]) -> NodeUse:
    used = {
        name: int(amount)
        for name, amount in zip(_resource_names(names), amounts[1::2], strict=True)
        if amount
    }
    return NodeUse(version=int(version), used=used)


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
            anti_affinity_groups=frozenset(split_texts(groups_text[1:-1]))
            if groups_text
            else NO_GROUPS,
            exclusive=bool(exclusive),
            slots_taken=slot_map,
            layout=layout,
            claimed_by=exclusive > 1,
        ),
    )


def decode_node_values(values: bytes) -> dict[NodeName, NodeUse]:
    """Decode joined values of nodes; of a repeated node the last one counts."""
    return dict(readable(_decode_node, cut(values)))


def decode_device_values(values: bytes) -> dict[DeviceUuid, DeviceState]:
    """Decode joined values of devices; of a repeated device the last one counts."""
    return {state.uuid: state for state in readable(_decode_device, cut(values))}


def _decode_node(value: bytes) -> tuple[NodeName, NodeUse]:
    count, version, _, _, length = _NODE.unpack_from(value)
    name, at = _string(value, _NODE.size, length)
    names, at = _long_string(value, at)
    return NodeName(name), _node_use(version, names, _amounts(count).unpack(value[at:]))


def _decode_device(value: bytes) -> DeviceState:
    *numbers, length = _DEVICE.unpack_from(value)
    uuid, at = _string(value, _DEVICE.size, length)
    texts = []
    for _ in range(_OTHER_TEXTS):
        text, at = _long_string(value, at)
        texts.append(text)
    return decode_device_row((*numbers, uuid, *texts))


@lru_cache(maxsize=256)
def _amounts(count: int) -> Struct:
    return Struct(f"<{2 * count}d")


@lru_cache(maxsize=1024)
def _resource_names(names: str) -> tuple[str, ...]:
    return tuple(split_texts(names[:-1]))


def _string(values: bytes, at: int, length: int) -> tuple[str, int]:
    return values[at : at + length].decode(), at + length


def _long_string(values: bytes, at: int) -> tuple[str, int]:
    [length] = _LENGTH.unpack_from(values, at)
    return _string(values, at + _LENGTH.size, length)
