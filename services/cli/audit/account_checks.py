"""Audit checks of namespaces' accounts: budget windows, costs; pure."""

from collections.abc import Iterable, Iterator

from services.cli.audit.snapshot import Snapshot, WindowTotals
from services.timekeeper.accounts.accrual import RESTORED
from shared.ledger.total_checks import BIND_S, Difference
from shared.model.budgets.budget import BudgetWindow, ChargeEntry
from shared.model.names import Namespace
from shared.model.quantity import timestamp


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


CHECKS = (budget_usage, costs)


def window_totals(
    namespace: Namespace, window: BudgetWindow, entries: Iterable[ChargeEntry]
) -> WindowTotals:
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
