"""What the ledger adds up beside devices and nodes, added up anew: quotas, turns, budgets."""

from collections.abc import Iterator

from services.cli.audit.difference import BIND_S, Difference
from services.cli.inspect.facts import Facts
from shared.model.fair_share import GpuAmount, fair_share_of
from shared.model.lease import Lease
from shared.model.names import Namespace, PodUid
from shared.model.quota import QuotaUsage, total_of


def quotas(facts: Facts) -> Iterator[Difference]:
    """S1: what a namespace holds under a quota is what its leases are charged, and all are."""
    accounts = facts.quotas
    charged: dict[Namespace, dict[str, list[QuotaUsage]]] = {}
    for namespace, rows in accounts.charges.values():
        for model, row in rows.items():
            charged.setdefault(namespace, {}).setdefault(model, []).append(row)
    for namespace in sorted(charged.keys() | accounts.used.keys()):
        counted, held = charged.get(namespace, {}), accounts.used.get(namespace, {})
        for model in sorted(counted.keys() | held.keys()):
            stored, summed = held.get(model, QuotaUsage()), total_of(counted.get(model, ()))
            if stored != summed:
                text = (
                    f"the ledger counts {stored.milli_gpu} milli-GPU, {len(stored.devices)} cards "
                    f"{f'of {model} ' if model else ''}as held, charges sum up to "
                    f"{summed.milli_gpu} on {len(summed.devices)}"
                )
                yield Difference(invariant="S1", subject=f"quota {namespace}", text=text)
    under = {
        lease.pod: lease
        for lease in facts.leases
        if lease.shares and accounts.quota_of(lease.namespace)
    }
    for pod in sorted(under.keys() ^ accounts.charges.keys()):
        lease = under.get(PodUid(pod))
        subject = _leased(lease) if lease else f"pod {pod}"
        text = (
            "its lease is not charged to its quota" if lease else "it is charged and has no lease"
        )
        yield Difference(invariant="S1", subject=subject, text=text, settles_s=BIND_S)


def turns(facts: Facts) -> Iterator[Difference]:
    """S1: what decides whose turn it is, is what namespaces' leases take of the healthy devices."""
    devices = [device for account in facts.accounts for device, _ in account.node.devices]
    counted = fair_share_of(devices, facts.leases, {})
    for namespace in sorted(counted.used.keys() | facts.turns.used.keys()):
        stored = facts.turns.used.get(namespace, GpuAmount())
        summed = counted.used.get(namespace, GpuAmount())
        if stored != summed:
            text = (
                f"the ledger counts {stored.cores_percent} % of cores and {stored.memory_mib} MiB "
                f"for it, its leases take {summed.cores_percent} % and {summed.memory_mib} MiB"
            )
            yield Difference(
                invariant="S1", subject=f"namespace {namespace}", text=text, settles_s=BIND_S
            )


def budgets(facts: Facts) -> Iterator[Difference]:
    """S6: what a budget's window says was used is what its ledger entries add up to."""
    for book in facts.books:
        if book.used_units != book.entered_units:
            text = (
                f"window {book.window} says that {book.used_units} milli-GPU-milliseconds are "
                f"used, its entries add up to {book.entered_units}"
            )
            yield Difference(
                invariant="S6",
                subject=f"budget {book.namespace}",
                text=text,
                settles_s=BIND_S,
            )


def _leased(lease: Lease) -> str:
    return f"pod {lease.namespace}/{lease.name}"
