"""Budgets and GPU-time reports as text for a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.formats import age, timestamp
from services.cli.tables import keep_widths, new_table
from services.timekeeper.report.budget_reports import minutes
from services.timekeeper.report.showback import ShowbackRow, row_json
from shared.model.budget import Balance, BudgetState

BAR_WIDTH = 20
STYLES = {
    BudgetState.OK: "green",
    BudgetState.WARNING: "yellow",
    BudgetState.EXHAUSTED: "red",
    BudgetState.OVERDRAWN: "bold red",
    BudgetState.INVALID: "bold red",
}


def budgets(balances: Sequence[Balance]) -> RenderableType:
    """List budgets: a bar of the usage, the rest, the current rate, and when it runs out."""
    if not balances:
        return Text(
            "no namespace has a budget or has used a GPU yet; `leasehold up --budgets FILE` or "
            "`kubectl apply` of a GPUBudget gives it one"
        )
    table = new_table(
        *("NAMESPACE", "STATE", "", "USED", "OF", "LEFT", "CURRENT RATE", "LEASES"),
        *("RUNS OUT", "WINDOW"),
    )
    for balance in balances:
        table.add_row(
            balance.namespace,
            Text(str(balance.state), style=STYLES[balance.state]),
            Text(bar(balance), style=STYLES[balance.state]),
            minutes(balance.used_units),
            "no limit" if balance.allowed_units is None else minutes(balance.allowed_units),
            "-" if balance.remaining_units is None else minutes(balance.remaining_units),
            f"{balance.current_rate_milli_gpu / 1000:.3f} GPU",
            str(balance.leases),
            _runs_out(balance),
            balance.window.id + _window_end(balance),
        )
    keep_widths(table, "", "WINDOW")
    problems = [
        Text(f"{balance.namespace} is invalid: {balance.problem}", style="red")
        for balance in balances
        if balance.problem
    ]
    return Group(table, *problems, Text("amounts are GPU-minutes", style="dim"))


def bar(balance: Balance) -> str:
    """Draw the used part of the allowance."""
    if balance.allowed_units is None or balance.remaining_units is None:
        return ""
    whole = max(balance.allowed_units, 1)
    used = min(max(whole - balance.remaining_units, 0), whole)
    cells = -(-used * BAR_WIDTH // whole)
    return "[" + "#" * cells + "." * (BAR_WIDTH - cells) + "]"


def report(rows: Sequence[ShowbackRow], uncharged: Mapping[str, str]) -> RenderableType:
    """List GPU time by group, then the GPU-minutes that are not charged yet by namespace."""
    amounts = ", ".join(f"{name} {amount}" for name, amount in uncharged.items())
    note = Text(
        "a lease's time is charged when it ends, or every 15 minutes; `leasehold budget` counts it "
        + (f"at once: not charged yet are {amounts} GPU-minutes" if amounts else "at once"),
        style="dim",
    )
    if not rows:
        return Group(Text("no GPU time was charged in this range"), note)
    columns = [
        *("window", "namespace", "model", "class", "gpu_minutes", "core_minutes"),
        *("mem_gib_minutes", "wall_minutes", "leases", "grants", "rollover"),
    ]
    table = new_table(*(name.upper().replace("_", " ") for name in columns))
    for row in map(row_json, rows):
        table.add_row(*(str(row[name]) or "-" for name in columns))
    return Group(table, note)


def _runs_out(balance: Balance) -> str:
    if balance.exhausted_at_ms is None:
        return "-"
    left_s = (balance.exhausted_at_ms - balance.at_ms) / 1000
    return f"{age(-left_s)} ago" if left_s <= 0 else f"in {age(left_s)}"


def _window_end(balance: Balance) -> str:
    return (
        ""
        if balance.window.end_ms is None
        else f" until {timestamp(balance.window.end_ms // 1000)}"
    )
