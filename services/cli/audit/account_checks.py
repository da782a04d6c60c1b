"""Audit checks of namespaces' accounts: quotas, fair shares, budget windows; pure."""

from collections.abc import Iterable, Iterator

from services.cli.audit.snapshot import BIND_S, Difference, Snapshot, WindowTotals, pod_name
from services.timekeeper.accounts.accrual import RESTORED
from shared.model.budget import BudgetWindow, ChargeEntry
from shared.model.fair_share import GpuAmount, fair_share_of
from shared.model.names import Namespace, PodUid
from shared.model.quantity import timestamp
from shared.model.quota import QuotaUsage, total_of


def quota_usage(snapshot: Snapshot) -> Iterator[Difference]:
    """S1: the stored usage of a quota equals the sum of its charges."""
    quotas = snapshot.quotas
    charges: dict[Namespace, dict[str, list[QuotaUsage]]] = {}
    for namespace, usage_by_model in quotas.charges.values():
        for model, usage in usage_by_model.items():
            charges.setdefault(namespace, {}).setdefault(model, []).append(usage)
    for namespace in sorted(charges.keys() | quotas.used.keys()):
        charged, used = charges.get(namespace, {}), quotas.used.get(namespace, {})
        for model in sorted(charged.keys() | used.keys()):
            stored, summed = used.get(model, QuotaUsage()), total_of(charged.get(model, ()))
            if stored != summed:
                text = (
                    f"the ledger counts {stored.milli_gpu} milli-GPU, {len(stored.devices)} "
                    f"devices {f'of {model} ' if model else ''}as used, charges add up to "
                    f"{summed.milli_gpu} on {len(summed.devices)}"
                )
                yield Difference("S1", f"quota {namespace}", text)


def quota_charges(snapshot: Snapshot) -> Iterator[Difference]:
    """S1: every lease under a quota is charged to it, and nothing else is."""
    quotas = snapshot.quotas
    leases = {
        lease.pod: lease
        for lease in snapshot.leases
        if lease.shares and quotas.quota_of(lease.namespace)
    }
    for pod in sorted(leases.keys() ^ quotas.charges.keys()):
        lease = leases.get(PodUid(pod))
        subject = pod_name(lease) if lease else f"pod {pod}"
        text = (
            "its lease is not charged to its quota" if lease else "it is charged and has no lease"
        )
        yield Difference("S1", subject, text, BIND_S)


def fair_shares(snapshot: Snapshot) -> Iterator[Difference]:
    """S1: the usage that orders waiting pods equals what leases take of the healthy devices."""
    devices = [device for totals in snapshot.nodes for device, _ in totals.node.devices]
    counted = fair_share_of(devices, snapshot.leases, {})
    for namespace in sorted(counted.used.keys() | snapshot.fair_share.used.keys()):
        stored = snapshot.fair_share.used.get(namespace, GpuAmount())
        summed = counted.used.get(namespace, GpuAmount())
        if stored != summed:
            text = (
                f"the ledger counts {stored.cores_percent} % of cores and {stored.memory_mib} MiB "
                f"for it, its leases take {summed.cores_percent} % and {summed.memory_mib} MiB"
            )
            yield Difference("S1", f"namespace {namespace}", text, BIND_S)


def budget_usage(snapshot: Snapshot) -> Iterator[Difference]:
    """S6: the stored usage of a budget's window equals the sum of its entries."""
    for window in snapshot.budget_windows:
        if window.used_units != window.entered_units:
            text = (
                f"window {window.window} has {window.used_units} milli-GPU-milliseconds as used, "
                f"its entries add up to {window.entered_units}"
            )
            yield Difference("S6", f"budget {window.namespace}", text, BIND_S)


def costs(snapshot: Snapshot) -> Iterator[Difference]:
    """S6: what GPUs were used for adds up to their capacity, in each hour."""
    for hour in snapshot.cost_hours:
        subject = f"costs from {timestamp(hour.from_ms / 1000)}"
        for text in hour.imbalances():
            yield Difference("S6", subject, text)


CHECKS = (quota_usage, quota_charges, fair_shares, budget_usage, costs)


def window_totals(
    namespace: Namespace, window: BudgetWindow, entries: Iterable[ChargeEntry]
) -> WindowTotals:
    """Sum up a window's entries: charges, and the usage that a rebuild restored."""
    entered = sum(
        entry.units
        for entry in entries
        if entry.window == window.id
        if entry.kind == "charge" or (entry.kind == "adjust" and entry.reason.startswith(RESTORED))
    )
    return WindowTotals(
        namespace=namespace,
        window=window.id,
        used_units=window.used_units,
        entered_units=entered,
    )
