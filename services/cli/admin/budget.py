"""The commands budget and budget grant."""

from collections.abc import Sequence
from urllib.parse import quote
from uuid import uuid4

from msgspec import structs
from rich.console import Group, RenderableType
from rich.text import Text

from services.cli.api_client import ApiClient, NothingFoundError
from services.cli.commands import BudgetArguments
from services.cli.formats import FittedTable, age
from services.cli.listing import present_list
from services.cli.terminal import program
from shared.model.budgets.budget import BudgetState, amount
from shared.model.errors import RequestError
from shared.model.quantity import timestamp
from shared.model.views.budgets import BudgetsView, BudgetView
from shared.model.views.orders import GrantOrder, GrantView

BAR_WIDTH = 20
STYLES = {
    BudgetState.OK: "green",
    BudgetState.WARNING: "yellow",
    BudgetState.EXHAUSTED: "red",
    BudgetState.OVERDRAWN: "bold red",
    BudgetState.INVALID: "bold red",
}


def budget_table(
    budgets: Sequence[BudgetView], now: float, *, wide: bool = False, headers: bool = True
) -> RenderableType:
    if not budgets:
        return Text(
            "no namespace has a budget or has used a GPU yet; `leasehold up --budgets FILE` or "
            "`kubectl apply` of a GPUBudget gives it one"
        )
    table = FittedTable(
        *("NAMESPACE", "STATE", "", "USED", "OF", "LEFT", "CURRENT RATE", "LEASES"),
        *("RUNS OUT", "WINDOW"),
        least=("", "WINDOW", "LEASES", "CURRENT RATE", "OF"),
        wide=wide,
        headers=headers,
    )
    for budget in budgets:
        table.add_row(
            budget.namespace,
            Text(budget.state, style=STYLES[budget.state]),
            Text(_bar(budget), style=STYLES[budget.state]),
            amount(int(budget.used_units), budget.currency),
            _amount(budget, budget.allowed_units, "no limit"),
            _amount(budget, budget.remaining_units, "-"),
            f"{budget.current_rate_milli_gpu / 1000:.3f} {budget.currency or 'GPU'}"
            + ("/h" if budget.currency else ""),
            str(budget.leases),
            _runs_out(budget, now),
            budget.window.partition("+")[0] + _window_end(budget),
        )
    problems = [
        Text(f"{budget.namespace} is invalid: {budget.problem}", style="red")
        for budget in budgets
        if budget.problem
    ]
    return Group(table, *problems, Text("amounts without a currency are GPU-minutes", style="dim"))


def _amount(budget: BudgetView, units: str | None, none: str) -> str:
    return none if units is None else amount(int(units), budget.currency)


def _bar(budget: BudgetView) -> str:
    if budget.allowed_units is None or budget.remaining_units is None:
        return ""
    whole = max(int(budget.allowed_units), 1)
    used = min(max(whole - int(budget.remaining_units), 0), whole)
    cells = -(-used * BAR_WIDTH // whole)
    return "[" + "#" * cells + "." * (BAR_WIDTH - cells) + "]"


def _runs_out(budget: BudgetView, now: float) -> str:
    if budget.exhausted_at is None:
        return "-"
    left_s = budget.exhausted_at - now
    return f"{age(-left_s)} ago" if left_s <= 0 else f"in {age(left_s)}"


def _window_end(budget: BudgetView) -> str:
    end_ms = budget.window_end_ms
    return "" if end_ms is None else f" until {timestamp(end_ms // 1000)}"


GRANT = "grant"


def budget(flags: BudgetArguments) -> int:
    if flags.words[:1] == (GRANT,) and len(flags.words) > 1:
        if flags.namespace:
            raise RequestError("grant names its namespace without -n: grant NAMESPACE MINUTES")
        return _grant(flags)
    if len(flags.words) > 1:
        raise RequestError(
            f"{' '.join(flags.words)!r} is neither a namespace nor `grant NAMESPACE MINUTES`"
        )
    if flags.reason:
        raise RequestError("--reason has an effect with grant NAMESPACE MINUTES only")
    api = ApiClient(flags)
    namespace = "".join(flags.words) or flags.namespace
    if flags.namespace not in {"", namespace}:
        raise RequestError(f"name one namespace: {namespace}, or -n {flags.namespace}")
    wide = flags.output == "wide"

    def read() -> BudgetsView:
        view = api.get("/api/v1/budgets", BudgetsView)
        chosen = [budget for budget in view.budgets if namespace in {"", budget.namespace}]
        if namespace and not chosen:
            raise NothingFoundError(
                f"namespace {namespace} has no budget and has used no GPU; `{program()} budget` "
                "lists those that have"
            )
        return structs.replace(view, budgets=tuple(chosen))

    return present_list(
        flags,
        ("budgets",),
        read,
        lambda view: budget_table(
            view.budgets, view.read_at, wide=wide, headers=not flags.no_headers
        ),
        lambda view: [f"namespace/{budget.namespace}" for budget in view.budgets],
    )


def _grant(flags: BudgetArguments) -> int:
    if len(flags.words) != 3:
        raise RequestError(f"write `{program()} budget grant NAMESPACE MINUTES --reason TEXT`")
    _, namespace, amount = flags.words
    order = GrantOrder(minutes=amount, reason=flags.reason, key=uuid4().hex)
    path = f"/api/v1/budgets/{quote(namespace, safe='')}/grants"
    view = ApiClient(flags).post(path, order, GrantView)
    left = view.remaining_minutes
    rest = "no limit" if left is None else f"{left} left"
    more = view.missing_minutes and f"; it stays exhausted without {view.missing_minutes} more"
    granted, _, currency = view.granted_minutes.partition(" ")
    print(f"granted {granted} {currency or 'GPU-minutes'} to {namespace}: {rest}{more or ''}")
    return 0
