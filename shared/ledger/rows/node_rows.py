"""Nodes, devices, totals and feed entries, as the ledger's scripts tell them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec

from shared.ledger.rows.device_rows import (
    DeviceState,
    device_state,
    device_states,
    node_use,
    node_uses,
)
from shared.ledger.rows.lease_rows import decode_lease, text
from shared.ledger.rows.quota_rows import decode_excesses
from shared.model.device import Device, DeviceMode
from shared.model.events.node_events import DeviceReported
from shared.model.ledger import LedgerChange, LedgerNode, NoCapacity, NodeTotals, NodeUse
from shared.model.names import NodeName, PodUid
from shared.model.node import NodeFacts

_facts_of = msgspec.json.Decoder(NodeFacts).decode
_devices_of = msgspec.json.Decoder(tuple[Device, ...]).decode
_served_of = msgspec.json.Decoder(tuple[str, ...]).decode


def encode_node_facts(facts: NodeFacts) -> list[Any]:
    """Pack a node's facts: whole, what decides besides amounts, the room, what is closed."""
    rules = replace(facts, allocatable={}, used_by_others={})
    room = [
        part
        for name, amount in facts.allocatable.items()
        for part in (name, amount - facts.used_by_others.get(name, 0))
    ]
    return [facts.name, text(facts), text(rules), room, facts.excluded_devices]


def encode_device_report(report: DeviceReported) -> list[Any]:
    """Pack a node's devices, and the fences that its agent has honoured."""
    fences: dict[str, int] = {}
    for activation in report.allocations:
        for share in activation.lease.shares:
            fences[share.device] = max(share.fence, fences.get(share.device, 0))
    return [
        report.node,
        text(report.devices),
        text(report.served),
        [
            [
                device.uuid,
                device.memory_mib,
                device.slots,
                int(device.healthy),
                device.unit_mib,
                device.index,
                int(device.mode is DeviceMode.MIG),
            ]
            for device in report.devices
        ],
        [part for item in fences.items() for part in item],
        report.reported_at,
        int(not report.other_plugin),
    ]


def decode_refusal(pod: PodUid, packed: bytes) -> NoCapacity:
    """Read why no candidate fits."""
    reason, nodes, devices, quotas, reserved_for_other = msgspec.msgpack.decode(packed)
    states = map(device_state, devices)
    return NoCapacity(
        pod=pod,
        reason=reason,
        devices={state.uuid: state.use for state in states},
        nodes=dict(map(node_use, nodes)),
        quotas=decode_excesses(quotas),
        reserved_for_other=reserved_for_other,
    )


def decode_resize_refusal(
    pod: PodUid, reason: str, devices: Sequence[Any], quotas: Sequence[Any]
) -> NoCapacity:
    """Read why a lease cannot have the shares that it was to get."""
    states = map(device_state, devices)
    return NoCapacity(
        pod=pod,
        reason=reason,
        devices={state.uuid: state.use for state in states},
        quotas=decode_excesses(quotas),
    )


def node_of(
    facts: NodeFacts, use: NodeUse, told: tuple[str, str], states: Iterable[DeviceState]
) -> LedgerNode:
    """Put a node together from its facts, its use, devices and services (`told`), and their uses.

    A device that leases hold and its agent no longer reports is there, unhealthy.
    """
    devices, served = told
    reported = {device.uuid: device for device in _devices_of(devices)}
    pairs = [(reported.get(state.uuid) or _missing(state), state.use) for state in states]
    return LedgerNode(
        facts=facts,
        version=use.version,
        used=use.used,
        devices=tuple(sorted(pairs, key=lambda pair: (pair[0].index, pair[0].uuid))),
        served=_served_of(served),
    )


def decode_node_totals(row: Sequence[Any], leases: Iterator[bytes]) -> NodeTotals:
    """Read one row of a survey, and as many of the leases that follow as it says."""
    name, node, facts, devices, served, _, rows, count, stray = row
    states = [device_state(state) for state in rows if state]
    _, use = node_use(node)
    return NodeTotals(
        node=node_of(
            _facts_of(facts) if facts else NodeFacts(name=NodeName(name)),
            use,
            (devices, served),
            [state for state in states if state.node == name],
        ),
        leases=tuple(map(decode_lease, islice(leases, count))),
        index_mismatches=tuple(stray),
    )


def is_known(row: Sequence[Any]) -> bool:
    """Say whether the API server has told of the node in this row of a survey."""
    return bool(row[2])


def decode_change(position: str, fields: Mapping[bytes, bytes]) -> LedgerChange:
    """Read one entry of the feed."""
    uses, states = node_uses(fields[b"n"]), device_states(fields[b"d"])
    parts: dict[str, dict[NodeName, str]] = {kind: {} for kind in "fgsx"}
    for key, value in fields.items():
        if len(key) > 1:
            parts[chr(key[0])][NodeName(key[1:].decode())] = value.decode()
    return LedgerChange(
        position=position,
        cause=fields[b"w"].decode(),
        capacity=int(fields[b"c"]),
        nodes=tuple(
            node_of(
                _facts_of(facts),
                uses[name],
                (parts["g"][name], parts["s"][name]),
                [state for state in states.values() if state.node == name],
            )
            for name, facts in parts["f"].items()
            if facts and name in uses
        ),
        removed=tuple(parts["x"]),
        used=uses,
        devices={uuid: state.use for uuid, state in states.items()},
    )


def _missing(state: DeviceState) -> Device:
    return Device(
        uuid=state.uuid,
        index=-1,
        model="",
        memory_mib=state.memory_mib,
        slots=state.slots,
        unit_mib=state.unit_mib,
        healthy=False,
    )
