"""Showback: usage by window, namespace, model and class, added up from the ledger."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shared.ledger.budgets import Budgets
from shared.model.budgets.budget import UNITS_PER_GPU_MINUTE, ChargeEntry, LeaseClass, minutes
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.views.budgets import ShowbackGroup, ShowbackView

GROUPS = ("namespace", "model", "class")
LATEST_WINDOWS = 5


@dataclass(slots=True)
class ShowbackRow:
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
    adjust_units: int = 0

    def add(self, entry: ChargeEntry, length_ms: int) -> None:
        """Of a charge, only `length_ms` of its time counts."""
        if entry.kind != "charge":
            name = f"{entry.kind}_units"
            setattr(self, name, getattr(self, name) + entry.units)
            return
        units = entry.weight * length_ms
        self.units += units
        self.core_units += entry.cores_milli * length_ms
        self.memory_mib_ms += entry.memory_mib * length_ms
        self.wall_ms += length_ms
        if entry.lease_class == LeaseClass.GUARANTEED:
            self.in_budget_units += units
        else:
            self.out_of_budget_units += units

    def view(self) -> ShowbackGroup:
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
            units=str(self.units),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRange:
    """Entries of one window, or the parts of charges in an interval."""

    window: str = ""
    from_ms: int | None = None
    to_ms: int | None = None

    def length_ms(self, entry: ChargeEntry) -> int | None:
        """Return how long a charge counts, a number for another entry, or None."""
        begin, end = entry.from_ms, entry.to_ms
        if entry.kind != "charge":
            begin, end = entry.ts_ms, entry.ts_ms + 1
        if self.window:
            return end - begin if entry.window == self.window else None
        begin, end = (
            max(begin, self.from_ms or 0),
            end if self.to_ms is None else min(end, self.to_ms),
        )
        return end - begin if begin < end else None


async def add_up(
    store: Budgets,
    namespaces: Collection[Namespace],
    entry_range: EntryRange,
    group_by: Sequence[str] = GROUPS,
) -> list[ShowbackRow]:
    """Keep one page and the IDs of leases in memory.

    Raises RequestError for an unknown group, and for a window that no namespace has.
    """
    if unknown := [name for name in group_by if name not in GROUPS]:
        raise RequestError(f"groupBy={unknown[0]} is not one of {', '.join(GROUPS)}")
    if entry_range.window:
        await _check_window(store, namespaces, entry_range.window)
    rows: dict[tuple[str, str, str, str], ShowbackRow] = {}
    leases: dict[tuple[str, str, str, str], set[str]] = {}
    for namespace in namespaces:
        async for entry in store.all_entries(namespace):
            by = {"namespace": namespace, "model": entry.model, "class": entry.lease_class}
            name, model, kind = (by[group] if group in group_by else "" for group in GROUPS)
            key = (entry.window, name, model, kind)
            length_ms = entry_range.length_ms(entry)
            if length_ms is None or entry.kind == "close":
                continue
            row = rows.setdefault(key, ShowbackRow(*key))
            row.add(entry, length_ms)
            if entry.kind == "charge":
                leases.setdefault(key, set()).add(entry.lease)
    for key, ids in leases.items():
        rows[key].leases = len(ids)
    return [rows[key] for key in sorted(rows)]


async def _check_window(store: Budgets, namespaces: Iterable[Namespace], window: str) -> None:
    starts = {
        begun.id: begun.start_ms for name in namespaces for begun in await store.windows(name)
    }
    if window not in starts:
        latest = sorted(starts, key=starts.__getitem__, reverse=True)[:LATEST_WINDOWS]
        others = f"the latest are {', '.join(latest)}" if latest else "none has begun"
        raise RequestError(f"no namespace that you may see has a window {window}: {others}")


def showback_view(rows: Iterable[ShowbackRow]) -> ShowbackView:
    return ShowbackView(rows=tuple(row.view() for row in rows))


def entry_json(entry: ChargeEntry, namespace: str) -> dict[str, object]:
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
