"""Budgets as text for a terminal; nothing here does I/O."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.inspect.explain import age
from services.timekeeper.report.showback import Row, shape
from services.timekeeper.report.statuses import minutes, stamp
from shared.model.budget import Balance, BudgetState

BAR = 20
STYLES = {
    BudgetState.OK: "green",
    BudgetState.WARNING: "yellow",
    BudgetState.EXHAUSTED: "red",
    BudgetState.OVERDRAWN: "bold red",
}


def budgets(found: Sequence[Balance]) -> RenderableType:
    """List how budgets stand: a bar of what is used, what is left, how fast it goes."""
    if not found:
        return Text(
            "no namespace has a budget or has used a GPU yet; `leasehold up --budgets FILE` or "
            "`kubectl apply` of a GPUBudget gives it one"
        )
    table = _table(
        *("NAMESPACE", "STATE", "", "USED", "OF", "LEFT", "BURN", "LEASES", "EMPTY", "WINDOW")
    )
    for seen in found:
        table.add_row(
            seen.namespace,
            Text(str(seen.state), style=STYLES[seen.state]),
            Text(bar(seen), style=STYLES[seen.state]),
            minutes(seen.used_units),
            "no limit" if seen.allowed_units is None else minutes(seen.allowed_units),
            "-" if seen.remaining_units is None else minutes(seen.remaining_units),
            f"{seen.current_rate_milli_gpu / 1000:.3f} GPU",
            str(seen.leases),
            _empty(seen),
            seen.window.id + _end(seen),
        )
    return Group(table, Text("amounts are GPU-minutes", style="dim"))


def bar(seen: Balance) -> str:
    """Draw what is used of what may be used."""
    if seen.allowed_units is None or seen.remaining_units is None:
        return ""
    whole = max(seen.allowed_units, 1)
    used = min(max(whole - seen.remaining_units, 0), whole)
    cells = -(-used * BAR // whole)
    return "[" + "#" * cells + "." * (BAR - cells) + "]"


def report(rows: Sequence[Row]) -> RenderableType:
    """List who used what."""
    if not rows:
        return Text(
            "no GPU time was charged there; time that is held gets its entry when its lease ends, "
            "or after a quarter of an hour (`leasehold budget` counts it at once)"
        )
    shapes = [shape(row) for row in rows]
    shown = [
        *("window", "namespace", "model", "class", "gpu_minutes", "core_minutes"),
        *("mem_gib_minutes", "wall_minutes", "leases", "grants", "rollover"),
    ]
    table = _table(*(name.upper().replace("_", " ") for name in shown))
    for line in shapes:
        table.add_row(*(str(line[name]) or "-" for name in shown))
    return table


def _empty(seen: Balance) -> str:
    if seen.exhausted_at_ms is None:
        return "-"
    left_s = (seen.exhausted_at_ms - seen.at_ms) / 1000
    return "now" if left_s <= 0 else f"in {age(left_s)}"


def _end(seen: Balance) -> str:
    return "" if seen.window.end_ms is None else f" until {stamp(seen.window.end_ms)}"


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table
