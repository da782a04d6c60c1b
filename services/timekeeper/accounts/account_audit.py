"""Whether an account's window says what its ledger entries add up to. No clock, no store."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.timekeeper.accounts.accrual import RESTORED
from shared.model.budget import BudgetWindow, ChargeEntry
from shared.model.names import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """What is written of one window, twice."""

    namespace: Namespace
    window: str
    used_units: int
    """As the window says."""
    entered_units: int
    """As its entries add up to."""


def book_of(namespace: Namespace, window: BudgetWindow, entries: Iterable[ChargeEntry]) -> Book:
    """Add up the entries of a window: charges, and what it was opened with after a loss."""
    entered = sum(
        entry.units
        for entry in entries
        if entry.window == window.id
        if entry.kind == "charge" or (entry.kind == "adjust" and entry.reason.startswith(RESTORED))
    )
    return Book(
        namespace=namespace,
        window=window.id,
        used_units=window.used_units,
        entered_units=entered,
    )
