"""Nodes, devices, totals and feed entries, as the ledger's functions return them; pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import msgspec

from shared.ledger.records import (
    DeviceRecord,
    DeviceReportRecord,
    NodeFactsRecord,
    NodeRecord,
    NodeRowRecord,
    ReportedDeviceRecord,
)
from shared.ledger.rows.joined_texts import escaped, split_texts
from shared.ledger.rows.lease_rows import decode_lease, text
from shared.ledger.rows.record_sizes import MOST_AMOUNT
from shared.ledger.rows.unreadable import cut, readable
from shared.model.devices.device import Device, DeviceMode, DeviceUse, Held
from shared.model.devices.node import HOSTNAME, AntiAffinityTerm, NodeFacts, NodeRevision
from shared.model.events.node_events import DeviceReported
from shared.model.leases.ledger import LedgerChange, LedgerNode, NodeTotals, NodeUse
from shared.model.names import NodeName
from shared.model.requests.host_ports import ports_in_use
from shared.model.requests.pod_rules import selected_in_use

NO_GROUPS: frozenset[str] = frozenset()

_decode_node = msgspec.msgpack.Decoder(NodeRecord).decode
_decode_device = msgspec.msgpack.Decoder(DeviceRecord).decode


def node_use(node: NodeRecord) -> NodeUse:
    used = {
        name: int(amount)
        for name, amount in zip(_resource_names(node.resources), node.amounts[1::2], strict=True)
        if amount
    }
    return NodeUse(version=node.version, used=used)


def device_use(device: DeviceRecord) -> DeviceUse:
    return DeviceUse(
        memory_mib=device.used_mib,
        cores_percent=device.used_cores,
        shares=device.shares,
        fence=device.fence,
        anti_affinity_groups=frozenset(split_texts(device.groups[1:-1]))
        if device.groups
        else NO_GROUPS,
        exclusive=device.exclusive or device.is_claimed,
        slots_taken=device.slot_map,
        layout=device.layout,
        mode=device.mode,
        claimed_by=device.is_claimed,
        claimed_until=0 if device.exclusive else device.claimed_until,
        held=_decode_held(device.held) if device.held else None,
    )


@lru_cache(maxsize=1024)
def _resource_names(names: str) -> tuple[str, ...]:
    return tuple(split_texts(names[:-1]))


_decode_facts = msgspec.json.Decoder(NodeFacts).decode
_decode_reported = msgspec.json.Decoder(Device).decode
_decode_held = msgspec.json.Decoder(Held).decode
_cut_devices = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_terms = msgspec.json.Decoder(tuple[tuple[AntiAffinityTerm, ...], ...]).decode


def _decode_devices(devices: str) -> Iterator[Device]:
    return readable(_decode_reported, _cut_devices(devices))


class _Served(msgspec.Struct):
    served: tuple[str, ...]
    newly_served: tuple[str, ...]


_decode_served = msgspec.json.Decoder(tuple[str, ...] | _Served).decode


def node_facts_record(facts: NodeFacts, revision: NodeRevision) -> NodeFactsRecord:
    repelling, facts = facts.repelling_pods, replace(facts, repelling_pods=())
    rules = replace(facts, allocatable={}, used_by_others={})
    room = [
        part
        for name, amount in facts.allocatable.items()
        for part in (escaped(name), _counted(amount - facts.used_by_others.get(name, 0)))
    ]
    for name, amount in ports_in_use(facts.used_by_others).items():
        room += (escaped(name), -_counted(amount))
    for name, amount in selected_in_use(facts.used_by_others).items():
        room += (escaped(name), -_counted(amount))
    is_wide = any(term.topology_key != HOSTNAME for term in facts.anti_affinity)
    return NodeFactsRecord(
        name=facts.name,
        facts=text(facts),
        rules=text(rules),
        room=tuple(room),
        excluded_devices=tuple(facts.excluded_devices),
        repelling_pods=tuple(repelling),
        is_wide=is_wide,
        revision=revision.node,
        pods_revision=revision.pods,
    )


def _counted(amount: int) -> int:
    return min(max(amount, -MOST_AMOUNT), MOST_AMOUNT)


def device_report_record(report: DeviceReported) -> DeviceReportRecord:
    fences = dict(report.fences)
    for allocation in report.allocations:
        for share in allocation.lease.shares:
            fences[share.device] = max(share.fence, fences.get(share.device, 0))
    devices = [
        ReportedDeviceRecord(
            uuid=device.uuid,
            memory_mib=device.memory_mib,
            slots=device.slots,
            is_healthy=device.healthy,
            unit_mib=device.unit_mib,
            index=device.index,
            is_mig=device.mode is DeviceMode.MIG,
            held=text(device.held) if device.held else "",
        )
        for device in report.devices
    ]
    served = _Served(report.served, report.newly_served) if report.newly_served else report.served
    return DeviceReportRecord(
        node=report.node,
        devices=text(report.devices),
        served=text(served),
        rows=tuple(devices),
        fences=tuple(part for item in fences.items() for part in item),
        reported_at=report.reported_at,
        by_agent=int(not report.other_plugin),
    )


def as_node(row: Sequence[Any]) -> NodeRecord:
    return msgspec.convert(row, NodeRecord)


def as_device(row: Sequence[Any]) -> DeviceRecord:
    return msgspec.convert(row, DeviceRecord)


def decode_node_rows(
    rows: Iterable[NodeRowRecord], leases: Iterator[bytes]
) -> Iterator[NodeTotals]:
    """Leave out what cannot be read."""
    return readable(
        lambda of_node: _decode_node_totals(*of_node),
        ((row, list(islice(leases, row.lease_count))) for row in rows),
    )


def _decode_node_totals(row: NodeRowRecord, leases: Iterable[bytes]) -> NodeTotals:
    name = NodeName(row.name)
    mismatches = row.mismatches
    states = list(readable(as_device, filter(None, row.states)))
    use = node_use(as_node(row.node))
    stored_leases = list(leases)
    decoded_leases = tuple(readable(decode_lease, stored_leases))
    if undecoded := len(stored_leases) - len(decoded_leases):
        mismatches = (*mismatches, f"{undecoded} leases on node {name} cannot be decoded")
    if undecoded := sum(map(bool, row.states)) - len(states):
        mismatches = (*mismatches, f"{undecoded} devices of node {name} cannot be decoded")
    return NodeTotals(
        node=_ledger_node(
            _facts_with(row.facts, row.terms) if row.facts else NodeFacts(name=name),
            use,
            row.devices,
            row.served,
            [device for device in states if device.node == name],
        ),
        leases=decoded_leases,
        index_mismatches=mismatches,
        is_known=is_known(row),
        reported=tuple(device.uuid for device in _decode_devices(row.devices) if device.healthy),
    )


def is_known(row: NodeRowRecord) -> bool:
    return bool(row.facts)


def decode_change(position: str, fields: Mapping[bytes, bytes]) -> LedgerChange:
    changed_nodes = [*readable(_decode_node, cut(fields[b"n"]))]
    uses = {node.name: node_use(node) for node in changed_nodes}
    devices = [*readable(_decode_device, cut(fields[b"d"]))]
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
                    [device for device in devices if device.node == name],
                ),
                (name for name, facts in by_kind["f"].items() if facts and name in uses),
            )
        ),
        removed=tuple(by_kind["x"]),
        used=uses,
        devices={device.uuid: device_use(device) for device in devices},
    )


def _facts_with(stored: str, repelling: str) -> NodeFacts:
    """`repelling` pods count like those that the watcher has reported."""
    facts = _decode_facts(stored)
    terms = set(chain.from_iterable(_decode_terms(repelling)))
    if not terms:
        return facts
    return replace(facts, anti_affinity=tuple(sorted(terms.union(facts.anti_affinity))))


def _ledger_node(
    facts: NodeFacts, use: NodeUse, devices: str, served: str, records: Iterable[DeviceRecord]
) -> LedgerNode:
    """A device that leases hold and that is not reported any more is unhealthy."""
    reported = {device.uuid: device for device in _decode_devices(devices)}
    resources = _decode_served(served)
    if not isinstance(resources, _Served):
        resources = _Served(resources, ())
    pairs = [
        (reported.get(record.uuid) or _unreported(record), device_use(record)) for record in records
    ]
    return LedgerNode(
        facts=facts,
        version=use.version,
        used=use.used,
        devices=tuple(sorted(pairs, key=lambda pair: (pair[0].index, pair[0].uuid))),
        served=resources.served,
        newly_served=resources.newly_served,
    )


def _unreported(record: DeviceRecord) -> Device:
    return Device(
        uuid=record.uuid,
        index=-1,
        model="",
        memory_mib=record.memory_mib,
        slots=record.slots,
        unit_mib=record.unit_mib,
        healthy=False,
        fault="NotReported: its node agent does not report it",
    )
