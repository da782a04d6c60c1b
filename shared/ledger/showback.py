"""Showback: usage by window, namespace, model and class, added up from the ledger."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.ledger.budgets import Budgets
from shared.model.budget import (
    UNITS_PER_GPU_MINUTE,
    ChargeEntry,
    LeaseClass,
    ShowbackGroup,
    ShowbackView,
    minutes,
)
from shared.model.errors import RequestError
from shared.model.names import Namespace

GROUPS = ("namespace", "model", "class")


@dataclass(slots=True, kw_only=True)
class ShowbackRow:
    """Sums of one group, in whole units."""

    window: str
    namespace: str = ""
    model: str = ""
    lease_class: str = ""
    units: int = 0
    """Weighted milli-GPU-milliseconds."""
    core_units: int = 0
    """Thousandths of devices' cores times milliseconds."""
    memory_mib_ms: int = 0
    wall_ms: int = 0
    leases: int = 0
    in_budget_units: int = 0
    out_of_budget_units: int = 0
    rollover_units: int = 0
    grant_units: int = 0
    credit_units: int = 0
    adjust_units: int = 0

    def view(self) -> ShowbackGroup:
        """Return the row as text."""
        return ShowbackGroup(
            window=self.window,
            namespace=self.namespace,
            model=self.model,
            lease_class=self.lease_class,
            gpu_minutes=minutes(self.units),
            core_minutes=minutes(self.core_units),
            mem_gib_minutes=minutes(self.memory_mib_ms * UNITS_PER_GPU_MINUTE // (60_000 * 1024)),
            wall_minutes=minutes(self.wall_ms * 1000),
            leases=self.leases,
            charged_in_budget=minutes(self.in_budget_units),
            charged_out_of_budget=minutes(self.out_of_budget_units),
            rollover=minutes(self.rollover_units),
            grants=minutes(self.grant_units),
            credits=minutes(self.credit_units),
            units=str(self.units),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRange:
    """The entries that count: those of one window, or the parts of charges in an interval."""

    window: str = ""
    from_ms: int | None = None
    to_ms: int | None = None

    def cut(self, entry: ChargeEntry) -> tuple[int, int] | None:
        """Return the part of a charge that counts, or None."""
        if self.window:
            return (entry.from_ms, entry.to_ms) if entry.window == self.window else None
        begin = max(entry.from_ms, self.from_ms if self.from_ms is not None else entry.from_ms)
        end = min(entry.to_ms, self.to_ms if self.to_ms is not None else entry.to_ms)
        return (begin, end) if begin < end else None

    def contains(self, entry: ChargeEntry) -> bool:
        """Return whether an entry without an interval counts."""
        if self.window:
            return entry.window == self.window
        after = self.from_ms is None or entry.ts_ms >= self.from_ms
        return after and (self.to_ms is None or entry.ts_ms < self.to_ms)


class ShowbackSums:
    """Adds up ledgers page by page; of the entries it stores only the ids of leases."""

    def __init__(self, entry_range: EntryRange, group_by: Sequence[str] = GROUPS) -> None:
        """Raise RequestError for an unknown group."""
        unknown = [name for name in group_by if name not in GROUPS]
        if unknown:
            raise RequestError(f"groupBy={unknown[0]} is not one of {', '.join(GROUPS)}")
        self._entry_range = entry_range
        self._group_by = group_by
        self._rows: dict[tuple[str, ...], ShowbackRow] = {}
        self._leases: dict[tuple[str, ...], set[str]] = {}

    def add(self, namespace: str, entries: Iterable[ChargeEntry]) -> None:
        """Add entries of a namespace's ledger."""
        for entry in entries:
            key = _key(entry, namespace, self._group_by)
            if entry.kind == "charge":
                part = self._entry_range.cut(entry)
                if part is not None:
                    _add_charge(self._row(key), entry, part[1] - part[0])
                    self._leases.setdefault(key, set()).add(entry.lease)
            elif entry.kind != "close" and self._entry_range.contains(entry):
                row = self._row(key)
                name = f"{entry.kind}_units"
                setattr(row, name, getattr(row, name) + entry.units)

    def rows(self) -> list[ShowbackRow]:
        """Return the sums, sorted, so that equal ledgers give equal text."""
        for key, leases in self._leases.items():
            self._rows[key].leases = len(leases)
        return [self._rows[key] for key in sorted(self._rows)]

    def _row(self, key: tuple[str, ...]) -> ShowbackRow:
        return self._rows.setdefault(key, _row(key))


async def add_up(
    store: Budgets,
    namespaces: Iterable[Namespace],
    entry_range: EntryRange,
    group_by: Sequence[str] = GROUPS,
) -> list[ShowbackRow]:
    """Add up the ledgers of namespaces, with one page in memory at a time."""
    sums = ShowbackSums(entry_range, group_by)
    for namespace in namespaces:
        after = ""
        while page := await store.entries(namespace, after=after):
            sums.add(namespace, page)
            after = page[-1].id
    return sums.rows()


def showback_view(rows: Iterable[ShowbackRow]) -> ShowbackView:
    """Return the rows as text."""
    return ShowbackView(rows=tuple(row.view() for row in rows))


def _key(entry: ChargeEntry, namespace: str, group_by: Sequence[str]) -> tuple[str, ...]:
    by = {"namespace": namespace, "model": entry.model, "class": entry.lease_class}
    return (entry.window, *(by[name] if name in group_by else "" for name in GROUPS))


def _row(key: tuple[str, ...]) -> ShowbackRow:
    window, namespace, model, lease_class = key
    return ShowbackRow(window=window, namespace=namespace, model=model, lease_class=lease_class)


def _add_charge(row: ShowbackRow, entry: ChargeEntry, length_ms: int) -> None:
    units = entry.weight * length_ms
    row.units += units
    row.core_units += entry.cores_milli * length_ms
    row.memory_mib_ms += entry.memory_mib * length_ms
    row.wall_ms += length_ms
    if entry.lease_class == LeaseClass.GUARANTEED:
        row.in_budget_units += units
    else:
        row.out_of_budget_units += units


def entry_json(entry: ChargeEntry, namespace: str) -> dict[str, object]:
    """Return an entry with its fields in a fixed order; those that do not apply are omitted."""
    line: dict[str, object] = {
        "id": entry.id,
        "ts": entry.ts_ms,
        "ns": namespace,
        "window": entry.window,
        "kind": entry.kind,
    }
    if entry.kind == "charge":
        line |= {
            "lease": entry.lease,
            "pod": entry.pod,
            "from": entry.from_ms,
            "to": entry.to_ms,
            "w": entry.weight,
            "class": entry.lease_class,
            "model": entry.model,
        }
    line |= {"units": str(entry.units), "actor": entry.actor}
    return line | ({"reason": entry.reason} if entry.reason else {})
