"""Checks of the ledger's totals: each must be the sum of its leases, or of its charges; pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shared.model.budgets.fair_share import FairShare, GpuAmount, fair_share_of
from shared.model.budgets.quota import QuotaTotals, QuotaUsage, total_of
from shared.model.devices.device import DeviceUse
from shared.model.leases.lease import Lease
from shared.model.leases.ledger import NodeTotals, UnreadableRecord, counted_use
from shared.model.names import Namespace, NodeName, PodUid

BIND_S = 3.0
"""A lease or a claim may be in one reading and not in the next for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReading:
    generation: str = ""
    is_of_one_moment: bool = True
    nodes: tuple[NodeTotals, ...] = ()
    quotas: QuotaTotals = field(default_factory=QuotaTotals)
    preemption_claims: Mapping[NodeName, Mapping[str, int]] = field(default_factory=dict)
    fair_share: FairShare = field(default_factory=FairShare)
    unreadable: tuple[UnreadableRecord, ...] = ()

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Every live lease, oldest first."""
        leases = [lease for node in self.nodes for lease in node.leases]
        return tuple(sorted(leases, key=lambda lease: (lease.created_at, lease.name)))


@dataclass(frozen=True, slots=True)
class Difference:
    invariant: str
    subject: str
    text: str
    settles_s: float = 0.0
    """How long it may last in a healthy system."""


def device_totals(reading: LedgerReading) -> Iterator[Difference]:
    """S1: the stored total of every device equals the sum of its leases."""
    for totals in reading.nodes:
        counted, _ = counted_use(totals.leases)
        stored = {device.uuid: use for device, use in totals.node.devices}
        for uuid in sorted(counted.keys() | stored.keys()):
            yield from _compare_totals(uuid, stored.get(uuid), counted.get(uuid, DeviceUse()))
        for mismatch in totals.index_mismatches:
            yield Difference("S1", totals.node.facts.name, mismatch)


def node_totals(reading: LedgerReading) -> Iterator[Difference]:
    """S1: a node's stored totals of ordinary resources equal the sum of its leases and claims."""
    for totals in reading.nodes:
        name = totals.node.facts.name
        counted = counted_use(totals.leases)[1].get(name, {})
        claimed = reading.preemption_claims.get(name, {})
        for resource in sorted(counted.keys() | totals.node.used.keys()):
            stored = totals.node.used.get(resource, 0)
            summed = counted.get(resource, 0) + claimed.get(resource, 0)
            if stored != summed:
                text = f"the ledger counts {stored} of {resource}, its leases add up to {summed}"
                yield Difference("S1", f"node {name}", text, BIND_S)


def quota_usage(reading: LedgerReading) -> Iterator[Difference]:
    """S1: the stored usage of a quota equals the sum of its charges."""
    quotas = reading.quotas
    charges: dict[Namespace, dict[str, list[QuotaUsage]]] = {}
    for namespace, usage_by_model in quotas.charges.values():
        for model, usage in usage_by_model.items():
            charges.setdefault(namespace, {}).setdefault(model, []).append(usage)
    for namespace in sorted(charges.keys() | quotas.used.keys()):
        charged = charges.get(namespace, {})
        used = quotas.used.get(namespace, {})
        for model in sorted(charged.keys() | used.keys()):
            stored = used.get(model, QuotaUsage())
            summed = total_of(charged.get(model, ()))
            if stored != summed:
                text = (
                    f"the ledger counts {stored.milli_gpu} milli-GPU, {len(stored.devices)} "
                    f"devices {f'of {model} ' if model else ''}as used, charges add up to "
                    f"{summed.milli_gpu} on {len(summed.devices)}"
                )
                yield Difference("S1", f"quota {namespace}", text)


def quota_charges(reading: LedgerReading) -> Iterator[Difference]:
    """S1: every lease under a quota is charged to it, and nothing else is."""
    quotas = reading.quotas
    leases = {
        lease.pod: lease
        for lease in reading.leases
        if lease.shares and quotas.quota_of(lease.namespace)
    }
    for pod in sorted(leases.keys() ^ quotas.charges.keys()):
        lease = leases.get(PodUid(pod))
        subject = f"pod {lease.namespace}/{lease.name}" if lease else f"pod {pod}"
        text = (
            "its lease is not charged to its quota" if lease else "it is charged and has no lease"
        )
        yield Difference("S1", subject, text, BIND_S)


def fair_shares(reading: LedgerReading) -> Iterator[Difference]:
    """S1: the usage that orders waiting pods equals what leases take of the healthy devices."""
    devices = [device for totals in reading.nodes for device, _ in totals.node.devices]
    counted = fair_share_of(devices, reading.leases, {})
    for namespace in sorted(counted.used.keys() | reading.fair_share.used.keys()):
        stored = reading.fair_share.used.get(namespace, GpuAmount())
        summed = counted.used.get(namespace, GpuAmount())
        if stored != summed:
            text = (
                f"the ledger counts {stored.cores_percent} % of cores and {stored.memory_mib} MiB "
                f"for it, its leases take {summed.cores_percent} % and {summed.memory_mib} MiB"
            )
            yield Difference("S1", f"namespace {namespace}", text, BIND_S)


def _compare_totals(uuid: str, stored: DeviceUse | None, summed: DeviceUse) -> Iterator[Difference]:
    if stored is None:
        text = f"leases hold {summed.memory_mib} MiB of a device that is not in the ledger"
        yield Difference("S1", f"device {uuid}", text)
        return
    for unit, counted, added in (
        ("MiB", stored.memory_mib, summed.memory_mib),
        ("% of its cores", stored.cores_percent, summed.cores_percent),
        ("shares", stored.shares, summed.shares),
        (
            "anti-affinity groups",
            ",".join(sorted(stored.anti_affinity_groups)),
            ",".join(sorted(summed.anti_affinity_groups)),
        ),
        (
            "exclusive leases",
            int(stored.exclusive),
            int(summed.exclusive or stored.claimed_by),
        ),
        ("as MIG layout", stored.layout or "none", summed.layout or "none"),
        ("as sharing mode", stored.mode or "none", summed.mode or "none"),
        ("as shares held", stored.slots_taken or "none", summed.slots_taken or "none"),
    ):
        if counted != added:
            text = f"the ledger counts {counted} {unit}, its leases add up to {added}"
            yield Difference("S1", f"device {uuid}", text)


NODE_CHECKS = (device_totals,)
CHECKS = (*NODE_CHECKS, node_totals, quota_usage, quota_charges, fair_shares)
