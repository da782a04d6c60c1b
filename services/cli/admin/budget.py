"""The commands about GPU time: budget, budget grant, report."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote
from uuid import uuid4

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from services.cli import terminal
from services.cli.admin.idle import report_idle
from services.cli.api_client import ApiClient, locate
from services.cli.commands import BudgetArguments, Report
from services.cli.formats import age, keep_widths, new_table, timestamp
from services.cli.program import program, program_name
from services.timekeeper.accounts.balance import balance
from shared.model.budget import (
    Accounts,
    Balance,
    Budget,
    BudgetState,
    ShowbackGroup,
    ShowbackView,
    minutes,
)
from shared.model.errors import RequestError
from shared.model.names import Namespace
from shared.model.views import GrantOrder, GrantView, View

BAR_WIDTH = 20
STYLES = {
    BudgetState.OK: "green",
    BudgetState.WARNING: "yellow",
    BudgetState.EXHAUSTED: "red",
    BudgetState.OVERDRAWN: "bold red",
    BudgetState.INVALID: "bold red",
}


def budget_table(balances: Sequence[Balance]) -> RenderableType:
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
    for each in balances:
        table.add_row(
            each.namespace,
            Text(str(each.state), style=STYLES[each.state]),
            Text(bar(each), style=STYLES[each.state]),
            minutes(each.used_units),
            "no limit" if each.allowed_units is None else minutes(each.allowed_units),
            "-" if each.remaining_units is None else minutes(each.remaining_units),
            f"{each.current_rate_milli_gpu / 1000:.3f} GPU",
            str(each.leases),
            _runs_out(each),
            each.window.id + _window_end(each),
        )
    keep_widths(table, "", "WINDOW")
    problems = [
        Text(f"{each.namespace} is invalid: {each.problem}", style="red")
        for each in balances
        if each.problem
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


def report_table(rows: Sequence[ShowbackGroup], uncharged: Mapping[str, str]) -> RenderableType:
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
    for row in map(msgspec.to_builtins, rows):
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


GRANT = "grant"


def budget(flags: BudgetArguments) -> int:
    """Show budgets, or grant GPU time."""
    if flags.words[:1] == (GRANT,) and len(flags.words) > 1:
        return _grant(flags)
    if len(flags.words) > 1:
        raise RequestError(
            f"{' '.join(flags.words)!r} is neither a namespace nor `grant NAMESPACE MINUTES`"
        )
    namespace = Namespace(flags.words[0]) if flags.words else None

    balances = _balances(ApiClient(locate(flags)), namespace)
    if namespace is not None and not balances:
        print(
            f"{program_name()} budget: namespace {namespace} has no budget and has used no GPU; "
            f"`{program()} budget` lists those that have",
            file=sys.stderr,
        )
        return 1
    if flags.output:
        terminal.print_document(
            BudgetsView(budgets=tuple(map(budget_view, balances))), flags.output
        )
    else:
        terminal.print_text(budget_table(balances))
    return 0


def report(flags: Report) -> int:
    """Sum up GPU time by group."""
    if flags.idle:
        return report_idle(flags)
    api = ApiClient(locate(flags))
    query = {"window": flags.window, "from": flags.from_, "to": flags.to}
    found = api.get("/api/v1/reports/showback", ShowbackView, groupBy=flags.group_by, **query)
    if flags.csv:
        sys.stdout.write(found.as_csv())
        return 0
    uncharged = uncharged_minutes([] if flags.to else _balances(api, None), flags.window)
    if flags.output:
        document = ReportView(rows=found.rows, not_charged=uncharged)
        terminal.print_document(document, flags.output)
    else:
        terminal.print_text(report_table(found.rows, uncharged))
    return 0


def uncharged_minutes(balances: Iterable[Balance], window: str) -> dict[str, str]:
    """Return the GPU-minutes of running leases that reports do not contain yet, by namespace.

    Only of open windows, and of those only `window` unless it is empty.
    """
    uncharged = {
        each.namespace: each.window_used_units - each.window.used_units
        for each in balances
        if window in {"", each.window.id}
    }
    return {name: minutes(units) for name, units in uncharged.items() if units}


class BudgetView(View, frozen=True, kw_only=True):
    """A namespace's budget; units are text, since JSON numbers lose precision."""

    namespace: Namespace
    state: str
    window: str
    window_start_ms: int
    window_end_ms: int | None
    used_units: str
    allowed_units: str | None
    remaining_units: str | None
    used_gpu_minutes: str
    current_rate_milli_gpu: int
    leases: int
    problem: str
    exhausted_at: str | None


class BudgetsView(View, frozen=True, kw_only=True):
    """The budgets of namespaces."""

    budgets: tuple[BudgetView, ...]


class ReportView(ShowbackView, frozen=True, kw_only=True):
    """GPU time, and the GPU-minutes of running leases that it does not contain yet."""

    not_charged: dict[str, str]


def budget_view(balance: Balance) -> BudgetView:
    """Return what `-o json` prints of a balance."""
    allowed, remaining = balance.allowed_units, balance.remaining_units
    exhausted_ms = balance.exhausted_at_ms
    return BudgetView(
        namespace=balance.namespace,
        state=str(balance.state),
        window=balance.window.id,
        window_start_ms=balance.window.start_ms,
        window_end_ms=balance.window.end_ms,
        used_units=str(balance.used_units),
        allowed_units=None if allowed is None else str(allowed),
        remaining_units=None if remaining is None else str(remaining),
        used_gpu_minutes=minutes(balance.used_units),
        current_rate_milli_gpu=balance.current_rate_milli_gpu,
        leases=balance.leases,
        problem=balance.problem,
        exhausted_at=None if exhausted_ms is None else timestamp(exhausted_ms // 1000),
    )


def _balances(api: ApiClient, namespace: Namespace | None) -> list[Balance]:
    """Return the balance of one namespace, or of all that the user may see."""
    found = api.get("/api/v1/budgets", Accounts)
    return [
        balance(each, each.budget or Budget(namespace=each.namespace), found.now_ms)
        for each in found.accounts
        if each.windows and namespace in {None, each.namespace}
    ]


def _grant(flags: BudgetArguments) -> int:
    if len(flags.words) != 3:
        raise RequestError(f"write `{program()} budget grant NAMESPACE MINUTES --reason TEXT`")
    _, namespace, amount = flags.words
    order = GrantOrder(minutes=amount, reason=flags.reason, key=uuid4().hex)
    path = f"/api/v1/budgets/{quote(namespace, safe='')}/grants"
    view = ApiClient(locate(flags)).post(path, order, GrantView)
    left = view.remaining_minutes
    rest = "no limit" if left is None else f"{left} left"
    print(f"granted {view.granted_minutes} GPU-minutes to {namespace}: {rest}")
    return 0
