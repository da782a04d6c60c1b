"""Nodes, devices, totals and feed entries, as the ledger's functions return them; pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from struct import Struct
from typing import Any

import msgspec

from shared.ledger.rows.joined_texts import escaped, split_texts
from shared.ledger.rows.lease_rows import decode_lease, text
from shared.ledger.rows.record_sizes import MOST_AMOUNT
from shared.ledger.rows.unreadable import cut, readable
from shared.model.devices.device import Device, DeviceMode, DeviceUse, Held
from shared.model.devices.node import AntiAffinityTerm, NodeFacts
from shared.model.events.node_events import DeviceReported
from shared.model.leases.ledger import LedgerChange, LedgerNode, NodeTotals, NodeUse
from shared.model.names import DeviceUuid, NodeName

_NODE = Struct("<IdbII")
_DEVICE = Struct("<IIBIIIIdBBII")
_LENGTH = Struct("<I")
_OTHER_TEXTS = 5
"""Of a device, after its UUID: node, slot map, groups, layout, what is held beyond leases."""

_CLAIMED = 2
"""A device that is claimed, and that no lease has exclusively."""

NO_GROUPS: frozenset[str] = frozenset()


class DeviceState(msgspec.Struct, frozen=True, gc=False):
    """A device as the functions store it: its capacity and its use."""

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
    _, claimed_until, uuid, node, slot_map, groups_text, layout, held = others
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
            claimed_until=claimed_until if exclusive == _CLAIMED else 0,
            held=_decode_held(held) if held else None,
        ),
    )


def decode_node_values(values: bytes) -> dict[NodeName, NodeUse]:
    """Decode joined values of nodes; of a repeated node the last one counts."""
    return dict(readable(_node_in, cut(values)))


def decode_device_values(values: bytes) -> dict[DeviceUuid, DeviceState]:
    """Decode joined values of devices; of a repeated device the last one counts."""
    return {state.uuid: state for state in readable(_device_in, cut(values))}


def _node_in(value: bytes) -> tuple[NodeName, NodeUse]:
    count, version, _, _, length = _NODE.unpack_from(value)
    name, at = _string(value, _NODE.size, length)
    names, at = _long_string(value, at)
    return NodeName(name), _node_use(version, names, _amounts(count).unpack(value[at:]))


def _device_in(value: bytes) -> DeviceState:
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


_decode_facts = msgspec.json.Decoder(NodeFacts).decode
_decode_device = msgspec.json.Decoder(Device).decode
_decode_held = msgspec.json.Decoder(Held).decode
_cut_devices = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_terms = msgspec.json.Decoder(tuple[tuple[AntiAffinityTerm, ...], ...]).decode


def _decode_devices(devices: str) -> Iterator[Device]:
    return readable(_decode_device, _cut_devices(devices))


_LEASE_COUNT = 7
"""Where a row has it."""


class _Served(msgspec.Struct):
    served: tuple[str, ...]
    newly_served: tuple[str, ...]


_decode_served = msgspec.json.Decoder(tuple[str, ...] | _Served).decode


def encode_node_facts(facts: NodeFacts) -> list[object]:
    """Pack a node's facts: all, those that decide placement, its room, excluded devices, pods."""
    repelling, facts = facts.repelling_pods, replace(facts, repelling_pods=())
    rules = replace(facts, allocatable={}, used_by_others={})
    room = [
        part
        for name, amount in facts.allocatable.items()
        for part in (escaped(name), _counted(amount - facts.used_by_others.get(name, 0)))
    ]
    return [facts.name, text(facts), text(rules), room, facts.excluded_devices, repelling]


def _counted(amount: int) -> int:
    return min(max(amount, -MOST_AMOUNT), MOST_AMOUNT)


def encode_device_report(report: DeviceReported) -> list[object]:
    """Pack a node's devices, and the fences that its agent has honoured."""
    fences = dict(report.fences)
    for allocation in report.allocations:
        for share in allocation.lease.shares:
            fences[share.device] = max(share.fence, fences.get(share.device, 0))
    devices = [
        (
            device.uuid,
            device.memory_mib,
            device.slots,
            int(device.healthy),
            device.unit_mib,
            device.index,
            int(device.mode is DeviceMode.MIG),
            text(device.held) if device.held else "",
        )
        for device in report.devices
    ]
    return [
        report.node,
        text(report.devices),
        text(_Served(report.served, report.newly_served) if report.newly_served else report.served),
        devices,
        [part for item in fences.items() for part in item],
        report.reported_at,
        int(not report.other_plugin),
    ]


def decode_node_rows(
    rows: Iterable[Sequence[Any]], leases: Iterator[bytes]
) -> Iterator[NodeTotals]:
    """Decode rows of `read_nodes.lua`, and as many of the leases that follow as each counts.

    What cannot be read is left out.
    """
    return readable(
        lambda of_node: _decode_node_totals(*of_node),
        ((row, list(islice(leases, row[_LEASE_COUNT]))) for row in rows),
    )


def _decode_node_totals(row: Sequence[Any], leases: Iterable[bytes]) -> NodeTotals:
    name, node, facts, devices, served, _, device_rows, _, mismatches, terms = row
    states = list(readable(decode_device_row, filter(None, device_rows)))
    _, use = decode_node_row(node)
    stored_leases = list(leases)
    decoded_leases = tuple(readable(decode_lease, stored_leases))
    if undecoded := len(stored_leases) - len(decoded_leases):
        mismatches = [*mismatches, f"{undecoded} leases on node {name} cannot be decoded"]
    if undecoded := sum(map(bool, device_rows)) - len(states):
        mismatches = [*mismatches, f"{undecoded} devices of node {name} cannot be decoded"]
    return NodeTotals(
        node=_ledger_node(
            _facts_with(facts, terms) if facts else NodeFacts(name=NodeName(name)),
            use,
            devices,
            served,
            [state for state in states if state.node == name],
        ),
        leases=decoded_leases,
        index_mismatches=tuple(mismatches),
        known=is_known(row),
        reported=tuple(each.uuid for each in _decode_devices(devices) if each.healthy),
    )


def is_known(row: Sequence[Any]) -> bool:
    """Whether the API server has the node in this row of `read_nodes.lua`."""
    return bool(row[2])


def decode_change(position: str, fields: Mapping[bytes, bytes]) -> LedgerChange:
    """Decode one entry of the feed."""
    uses = decode_node_values(fields[b"n"])
    states = decode_device_values(fields[b"d"])
    by_kind: dict[str, dict[NodeName, str]] = {kind: {} for kind in "fgsrx"}
    for key, value in fields.items():
        if chr(key[0]) in by_kind:
            by_kind[chr(key[0])][NodeName(key[1:].decode())] = value.decode()
    return LedgerChange(
        position=position,
        cause=fields[b"w"].decode(),
        version=int(fields.get(b"v", 0)),
        capacity=int(fields[b"c"]),
        nodes=tuple(
            readable(
                lambda name: _ledger_node(
                    _facts_with(by_kind["f"][name], by_kind["r"].get(name, "[]")),
                    uses[name],
                    by_kind["g"][name],
                    by_kind["s"][name],
                    [state for state in states.values() if state.node == name],
                ),
                (name for name, facts in by_kind["f"].items() if facts and name in uses),
            )
        ),
        removed=tuple(by_kind["x"]),
        used=uses,
        devices={uuid: state.use for uuid, state in states.items()},
    )


def _facts_with(stored: str, repelling: str) -> NodeFacts:
    """Decode facts; `repelling` pods count as those do that the watcher has reported."""
    facts = _decode_facts(stored)
    terms = set(chain.from_iterable(_decode_terms(repelling)))
    if not terms:
        return facts
    return replace(facts, anti_affinity=tuple(sorted(terms.union(facts.anti_affinity))))


def _ledger_node(
    facts: NodeFacts, use: NodeUse, devices: str, served: str, states: Iterable[DeviceState]
) -> LedgerNode:
    """Build a node; a device that leases hold and that is not reported any more is unhealthy."""
    reported = {device.uuid: device for device in _decode_devices(devices)}
    resources = _decode_served(served)
    if not isinstance(resources, _Served):
        resources = _Served(resources, ())
    pairs = [(reported.get(state.uuid) or _unreported(state), state.use) for state in states]
    return LedgerNode(
        facts=facts,
        version=use.version,
        used=use.used,
        devices=tuple(sorted(pairs, key=lambda pair: (pair[0].index, pair[0].uuid))),
        served=resources.served,
        newly_served=resources.newly_served,
    )


def _unreported(state: DeviceState) -> Device:
    return Device(
        uuid=state.uuid,
        index=-1,
        model="",
        memory_mib=state.memory_mib,
        slots=state.slots,
        unit_mib=state.unit_mib,
        healthy=False,
        fault="NotReported: its node agent does not report it",
    )
