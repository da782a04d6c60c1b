"""The commands about GPU time: budget, budget grant, report."""

import argparse
import asyncio
import getpass
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar
from uuid import uuid4

from services.cli import terminal
from services.cli.formats import timestamp
from services.cli.program import program, program_name
from services.cli.snapshot.location import ClusterLocation, locate, locate_ledger
from services.timekeeper.accounts.balance import balance
from services.timekeeper.report.budget_reports import minutes
from services.timekeeper.report.showback import GROUPS, EntryRange, ShowbackRow, add_up, as_csv
from services.timekeeper.report.showback import row_json as row_shape
from services.timekeeper.rest.grants import add_grant, parse_gpu_minutes
from shared.ledger.budgets import Budgets
from shared.model.budget import Account, Accounts, Balance, Budget
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import Namespace

GRANT = "grant"
T = TypeVar("T")


def budget(flags: argparse.Namespace) -> int:
    """Show budgets, or grant GPU time."""
    if flags.words[:1] == [GRANT] and len(flags.words) > 1:
        return _grant(flags)
    if len(flags.words) > 1:
        raise RequestError(
            f"{' '.join(flags.words)!r} is neither a namespace nor `grant NAMESPACE MINUTES`"
        )
    namespace = Namespace(flags.words[0]) if flags.words else None

    async def read(store: Budgets) -> list[Balance]:
        return await _balances(store, namespace)

    location = locate(flags)
    if location.redis_url:
        balances = _run(flags, read)
    else:
        balances = asyncio.run(_visible_balances(location, namespace))
    if namespace is not None and not balances:
        print(
            f"{program_name()} budget: namespace {namespace} has no budget and has used no GPU; "
            f"`{program()} budget` lists those that have",
            file=sys.stderr,
        )
        return 1
    if flags.output:
        terminal.print_document({"budgets": [shape(each) for each in balances]}, flags.output)
    else:
        from services.cli.admin import budget_render

        terminal.print_text(budget_render.budgets(balances))
    return 0


def report(flags: argparse.Namespace) -> int:
    """Sum up GPU time by group."""
    within = EntryRange(
        window=flags.window,
        from_ms=_milliseconds("--from", flags.begin),
        to_ms=_milliseconds("--to", flags.end),
    )
    group_by = [name for name in flags.group_by.split(",") if name] or list(GROUPS)

    async def read(store: Budgets) -> tuple[list[ShowbackRow], dict[str, str]]:
        names = sorted(await store.revisions())
        rows = await add_up(store, names, within, group_by)
        balances = [] if flags.end else await _balances(store, None)
        return rows, uncharged_minutes(balances, flags.window)

    rows, uncharged = _run(flags, read)
    if flags.csv:
        sys.stdout.write(as_csv(rows))
    elif flags.output:
        document = {"rows": [row_shape(row) for row in rows], "not_charged": uncharged}
        terminal.print_document(document, flags.output)
    else:
        from services.cli.admin import budget_render

        terminal.print_text(budget_render.report(rows, uncharged))
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


def shape(balance: Balance) -> dict[str, Any]:
    """Return the JSON form of a balance; units are text, since JSON numbers lose precision."""
    allowed, remaining = balance.allowed_units, balance.remaining_units
    exhausted_ms = balance.exhausted_at_ms
    return {
        "namespace": balance.namespace,
        "state": str(balance.state),
        "window": balance.window.id,
        "window_start_ms": balance.window.start_ms,
        "window_end_ms": balance.window.end_ms,
        "used_units": str(balance.used_units),
        "allowed_units": None if allowed is None else str(allowed),
        "remaining_units": None if remaining is None else str(remaining),
        "used_gpu_minutes": minutes(balance.used_units),
        "current_rate_milli_gpu": balance.current_rate_milli_gpu,
        "leases": balance.leases,
        "problem": balance.problem,
        "exhausted_at": None if exhausted_ms is None else timestamp(exhausted_ms // 1000),
    }


async def _balances(store: Budgets, namespace: Namespace | None) -> list[Balance]:
    """Return the balance of one namespace, or of all."""
    names = [namespace] if namespace is not None else sorted(await store.revisions())
    return _balances_of(await store.all_accounts(names))


def _balances_of(read: Accounts) -> list[Balance]:
    return [_balance(each, read.now_ms) for each in read.accounts if each.windows]


async def _visible_balances(
    location: ClusterLocation, namespace: Namespace | None
) -> list[Balance]:
    """Return the balances of one namespace, or of all that the user may see."""
    from services.cli.snapshot.dashboard_reader import open_dashboard_reader

    async with open_dashboard_reader(location) as reader:
        found = _balances_of(await reader.get("/api/v1/budgets", Accounts))
    return [each for each in found if namespace in {None, each.namespace}]


def _balance(account: Account, now_ms: int) -> Balance:
    return balance(account, account.budget or Budget(namespace=account.namespace), now_ms)


def _grant(flags: argparse.Namespace) -> int:
    if len(flags.words) != 3:
        raise RequestError(f"write `{program()} budget grant NAMESPACE MINUTES --reason TEXT`")
    _, name, amount = flags.words
    units = parse_gpu_minutes(amount)
    namespace = Namespace(name)

    async def write(store: Budgets) -> Sequence[Balance]:
        await add_grant(
            store,
            namespace,
            units,
            actor=_user_name(),
            reason=flags.reason,
            key=uuid4().hex,
        )
        return await _balances(store, namespace)

    (updated,) = _run(flags, write)
    remaining = updated.remaining_units
    left = "no limit" if remaining is None else f"{minutes(remaining)} left"
    print(f"granted {minutes(units)} GPU-minutes to {namespace}: {left}")
    return 0


def _user_name() -> str:
    """Return the user's name, or the uid where it has none, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _run(flags: argparse.Namespace, work: Callable[[Budgets], Awaitable[T]]) -> T:
    location = locate_ledger(flags)

    async def running() -> T:
        credentials = location.redis_credentials
        try:
            async with Budgets.connect(location.redis_url, credentials=credentials) as store:
                return await work(store)
        except UnavailableError as error:
            if location.hint:
                raise UnavailableError(f"{location.hint} ({error})") from error
            raise

    return asyncio.run(running())


def _milliseconds(flag: str, text: str) -> int | None:
    if not text:
        return None
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError as error:
        raise RequestError(
            f"{flag} must be a time such as 2031-05-01T00:00:00Z, got {text!r}"
        ) from error
