"""Nodes, devices, totals and feed entries, as the ledger's scripts tell them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from shared.clients.ledger_rows import lease_of, text
from shared.model.device import Device, DeviceUse
from shared.model.events import DeviceReported
from shared.model.ledger import Full, LedgerChange, LedgerNode, NodeAccount, NodeUse
from shared.model.names import DeviceUuid, NodeName, PodUid
from shared.model.node import NodeFacts

_facts_of = msgspec.json.Decoder(NodeFacts).decode
_devices_of = msgspec.json.Decoder(tuple[Device, ...]).decode
_served_of = msgspec.json.Decoder(tuple[str, ...]).decode

NO_TAGS: frozenset[str] = frozenset()


def facts_row(facts: NodeFacts) -> list[Any]:
    """Pack a node's facts: whole, what decides placing besides amounts, and the room."""
    rules = replace(facts, allocatable={}, occupied={})
    room = [
        part
        for name, amount in facts.allocatable.items()
        for part in (name, amount - facts.occupied.get(name, 0))
    ]
    return [facts.name, text(facts), text(rules), room]


def report_row(report: DeviceReported) -> list[Any]:
    """Pack a node's devices, and the fences that its agent has honoured."""
    fences: dict[str, int] = {}
    for activation in report.activations:
        for share in activation.lease.shares:
            fences[share.device] = max(share.fence, fences.get(share.device, 0))
    return [
        report.node,
        text(report.devices),
        text(report.served),
        [
            [device.uuid, device.memory_mib, device.slots, int(device.healthy), device.unit_mib]
            for device in report.devices
        ],
        [part for item in fences.items() for part in item],
        report.reported_at,
    ]


def used_of(node: Sequence[Any]) -> dict[str, int]:
    """Read what is taken of a node's ordinary resources."""
    names = node[2].split("\n")[:-1]
    return {name: used for name, used in zip(names, node[4::2], strict=True) if used}


def use_of(state: Sequence[Any]) -> DeviceUse:
    """Read what is taken of a device."""
    return DeviceUse(
        memory_mib=state[5],
        cores_percent=state[6],
        shares=state[7],
        fence=state[8],
        tags=frozenset(state[10].strip("\n").split("\n")) if state[10] else NO_TAGS,
    )


def full_of(pod: PodUid, row: Sequence[Any]) -> Full:
    """Read why no candidate fits."""
    _, reason, nodes, devices = row
    return Full(
        pod=pod,
        reason=reason,
        devices={DeviceUuid(uuid): use_of(state) for uuid, state in devices},
        nodes={
            NodeName(name): NodeUse(version=node[0], used=used_of(node)) for name, node in nodes
        },
    )


def node_of(
    node: Sequence[Any],
    facts: NodeFacts,
    told: tuple[str, str],
    states: Iterable[tuple[str, Sequence[Any]]],
) -> LedgerNode:
    """Put a node together from its state, facts, devices and services (`told`), and uses.

    A device that leases hold and its agent no longer reports is there, unhealthy.
    """
    devices, served = told
    reported = {device.uuid: device for device in _devices_of(devices)}
    pairs = [
        (reported.get(DeviceUuid(uuid)) or _missing(uuid, state), use_of(state))
        for uuid, state in states
    ]
    return LedgerNode(
        facts=facts,
        version=node[0],
        used=used_of(node),
        devices=tuple(sorted(pairs, key=lambda pair: (pair[0].index, pair[0].uuid))),
        served=_served_of(served),
    )


def account_of(row: Sequence[Any]) -> NodeAccount:
    """Read one row of a survey."""
    name, node, facts, devices, served, uuids, states, leases, stray = row
    pairs = zip(uuids, states, strict=True)
    return NodeAccount(
        node=node_of(
            node,
            _facts_of(facts) if facts else NodeFacts(name=NodeName(name)),
            (devices, served),
            ((uuid, state) for uuid, state in pairs if state and state[0] == name),
        ),
        leases=tuple(lease_of(lease) for lease in leases),
        stray=tuple(stray),
    )


def is_known(row: Sequence[Any]) -> bool:
    """Say whether the API server has told of the node in this row of a survey."""
    return bool(row[2])


def change_of(position: str, fields: Mapping[bytes, bytes]) -> LedgerChange:
    """Read one entry of the feed."""
    cause, capacity = "", 0
    parts: dict[str, dict[str, bytes]] = {kind: {} for kind in "ndfgsx"}
    for key, value in fields.items():
        kind, name = chr(key[0]), key[1:].decode()
        if kind == "c":
            capacity = int(value)
        elif kind == "w":
            cause = value.decode()
        elif kind in parts:
            parts[kind][name] = value
    nodes = {name: msgspec.msgpack.decode(value) for name, value in parts["n"].items()}
    devices = {uuid: msgspec.msgpack.decode(value) for uuid, value in parts["d"].items()}
    return LedgerChange(
        position=position,
        cause=cause,
        capacity=capacity,
        nodes=tuple(
            node_of(
                nodes[name],
                _facts_of(facts),
                (parts["g"][name].decode(), parts["s"][name].decode()),
                (pair for pair in devices.items() if pair[1][0] == name),
            )
            for name, facts in parts["f"].items()
            if facts and name in nodes
        ),
        removed=tuple(NodeName(name) for name in parts["x"]),
        used={
            NodeName(name): NodeUse(version=node[0], used=used_of(node))
            for name, node in nodes.items()
        },
        devices={DeviceUuid(uuid): use_of(state) for uuid, state in devices.items()},
    )


def _missing(uuid: str, state: Sequence[Any]) -> Device:
    return Device(
        uuid=DeviceUuid(uuid),
        index=-1,
        model="",
        memory_mib=state[1],
        slots=state[2],
        unit_mib=state[4],
        healthy=False,
    )
