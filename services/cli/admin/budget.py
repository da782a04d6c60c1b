"""The commands about GPU time: budget, budget grant, report."""

import argparse
import asyncio
import getpass
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from services.cli.inspect import sources
from services.timekeeper.accounts.budget import balance
from services.timekeeper.report.showback import GROUPS, Range, Row, add_up, as_csv
from services.timekeeper.report.showback import shape as row_shape
from services.timekeeper.report.statuses import minutes, stamp
from services.timekeeper.rest.grants import grant, units_of
from shared.ledger.budgets import Budgets
from shared.model.budget import Account, Balance, Budget, PolicyType
from shared.model.errors import RequestError, UnavailableError
from shared.model.names import Namespace

UNBROKEN_WIDTH = 4_000
GRANT = "grant"


def budget(flags: argparse.Namespace) -> int:
    """Show how budgets stand, or grant."""
    if flags.words[:1] == [GRANT] and len(flags.words) > 1:
        return _grant(flags)
    if len(flags.words) > 1:
        raise RequestError(
            f"{' '.join(flags.words)!r} is neither a namespace nor `grant NAMESPACE MINUTES`"
        )
    wanted = Namespace(flags.words[0]) if flags.words else None

    async def read(store: Budgets) -> list[Balance]:
        return await _balances(store, wanted)

    found = _run(flags, read)
    if wanted is not None and not found:
        print(
            f"leasehold budget: namespace {wanted} has no budget and has used no GPU; "
            "`leasehold budget` lists those that have",
            file=sys.stderr,
        )
        return 1
    if flags.json:
        print(json.dumps({"budgets": [shape(each) for each in found]}, indent=1))
        return 0
    return _show(found)


def report(flags: argparse.Namespace) -> int:
    """Add up who used what."""
    within = Range(
        window=flags.window,
        from_ms=_instant("--from", flags.begin),
        to_ms=_instant("--to", flags.end),
    )
    group_by = [part for part in flags.group_by.split(",") if part] or list(GROUPS)

    async def read(store: Budgets) -> list[Row]:
        return await add_up(store, sorted(await store.revisions()), within, group_by)

    rows = _run(flags, read)
    if flags.csv:
        sys.stdout.write(as_csv(rows))
    elif flags.json:
        print(json.dumps({"rows": [row_shape(row) for row in rows]}, indent=1))
    else:
        from services.cli.admin import budget_render

        _print(budget_render.report(rows))
    return 0


def shape(seen: Balance) -> dict[str, Any]:
    """Return a balance for programs; units are text, since JSON numbers lose integers."""
    return {
        "namespace": seen.namespace,
        "state": str(seen.state),
        "window": seen.window.id,
        "window_start_ms": seen.window.start_ms,
        "window_end_ms": seen.window.end_ms,
        "used_units": str(seen.used_units),
        "allowed_units": None if seen.allowed_units is None else str(seen.allowed_units),
        "remaining_units": None if seen.remaining_units is None else str(seen.remaining_units),
        "used_gpu_minutes": minutes(seen.used_units),
        "burn_milli_gpu": seen.current_rate_milli_gpu,
        "leases": seen.leases,
        "exhausted_at": None if seen.exhausted_at_ms is None else stamp(seen.exhausted_at_ms),
    }


async def _balances(store: Budgets, wanted: Namespace | None) -> list[Balance]:
    names = [wanted] if wanted is not None else sorted(await store.revisions())
    now_ms = await store.now_ms()
    since = dict.fromkeys(names)
    accounts = await store.load(since)
    sliding = {
        each.namespace: now_ms - each.budget.policy.length_ms - each.budget.policy.bucket_ms
        for each in accounts
        if each.budget is not None and each.budget.policy.type is PolicyType.SLIDING
    }
    if sliding:
        whole = {each.namespace: each for each in await store.load(sliding)}
        accounts = [whole.get(each.namespace, each) for each in accounts]
    return [_balance(each, now_ms) for each in accounts if each.windows]


def _balance(account: Account, now_ms: int) -> Balance:
    return balance(account, account.budget or Budget(namespace=account.namespace), now_ms)


def _grant(flags: argparse.Namespace) -> int:
    if len(flags.words) != 3:
        raise RequestError("write `leasehold budget grant NAMESPACE MINUTES --reason TEXT`")
    _, name, amount = flags.words
    units = units_of(amount)
    namespace = Namespace(name)

    async def write(store: Budgets) -> Sequence[Balance]:
        await grant(
            store,
            namespace,
            units,
            actor=_who(),
            reason=flags.reason,
            key=uuid4().hex,
        )
        return await _balances(store, namespace)

    (seen,) = _run(flags, write)
    left = "no limit" if seen.remaining_units is None else f"{minutes(seen.remaining_units)} left"
    print(f"granted {minutes(units)} GPU-minutes to {namespace}: {left}")
    return 0


def _who() -> str:
    """Return who types: by name, or by number where nobody has one, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _run(flags: argparse.Namespace, work: Callable[[Budgets], Awaitable[Any]]) -> Any:
    where = sources.find(
        flags.state, redis_url=flags.redis_url, redis_keys=sources.redis_keys_of(flags)
    )

    async def running() -> Any:
        try:
            async with Budgets.connect(where.redis_url, credentials=where.redis_keys) as store:
                return await work(store)
        except UnavailableError as error:
            if where.hint:
                raise UnavailableError(f"{where.hint} ({error})") from error
            raise

    return asyncio.run(running())


def _instant(flag: str, text: str) -> int | None:
    if not text:
        return None
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError as error:
        raise RequestError(f"{flag} {text!r} is no time such as 2031-05-01T00:00:00Z") from error


def _show(found: Sequence[Balance]) -> int:
    from services.cli.admin import budget_render

    _print(budget_render.budgets(found))
    return 0


def _print(drawn: Any) -> None:
    from rich.console import Console

    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else UNBROKEN_WIDTH
    Console(highlight=False, width=width).print(drawn)
