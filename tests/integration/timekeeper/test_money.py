"""Budgets in money, on a real valkey-server: leases are charged at the prices of a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.timekeeper.config.budget_sources import BudgetFile, ConfiguredBudgets
from services.timekeeper.service import Timekeeper
from shared.kubernetes.kinds.custom_kinds import API_VERSION
from shared.kubernetes.kinds.gpu_prices import PriceFile
from shared.model.budgets.budget import HOUR_MS, Balance, amount
from shared.model.events.request_reply import GrantRequest
from tests.support.timekeeper.accounts import T0, TEAM, AccountLedger, lease

LIMIT = {"limitMoney": {"amount": "10.00", "currency": "EUR"}}
POLICY = {"timeZone": "Europe/Berlin", "rollover": {"percent": 100}}
MONEY = LIMIT | {"policy": POLICY}
WHOLE_MIB = 16_000


class Configured:
    """A budget and prices in files, and the timekeeper that reads them."""

    def __init__(self, folder: Path, opened: AccountLedger) -> None:
        self.budgets = folder / "b.yaml"
        self.prices = folder / "p.yaml"
        self.opened = opened
        self.write(MONEY)
        prices = PriceFile(self.prices)
        self.file = BudgetFile(self.budgets, prices)
        self.file.load()
        configuration = ConfiguredBudgets(file=self.file, prices=prices)
        self.keeper: Timekeeper = opened.timekeeper(configuration=configuration)

    def write(self, spec: dict[str, Any]) -> None:
        item = {
            "apiVersion": API_VERSION,
            "kind": "GPUBudget",
            "metadata": {"name": TEAM},
            "spec": spec,
        }
        self.budgets.write_text(json.dumps(item))

    def price(self, text: str) -> None:
        self.prices.write_text(text)

    async def balance(self, hours: float) -> Balance:
        await self.opened.count(T0 + round(hours * HOUR_MS), keeper=self.keeper)
        return self.keeper.balance_of(TEAM)


@pytest.fixture
def configured(tmp_path: Path, opened: AccountLedger) -> Configured:
    return Configured(tmp_path, opened)


def used(found: Balance) -> tuple[str, str]:
    return str(found.state), amount(found.used_units, found.currency)


async def test_a_lease_costs_the_price_at_which_it_began_and_the_budget_is_used_up(
    configured: Configured,
) -> None:
    opened = configured.opened
    configured.price("currency: EUR\nmodels: {A100: 9, T4: 0.50, '*': 1}\n")
    await configured.balance(0)
    first = lease("first", created_ms=T0, mib=WHOLE_MIB)
    await opened.journal("held", T0, first)
    assert used(await configured.balance(2)) == ("ok", "1.000 EUR")

    configured.price("currency: EUR\nmodels: {'*': 4}\n")
    later = lease("later", gpu=1, created_ms=T0, mib=WHOLE_MIB // 2)
    await opened.journal("held", T0 + 2 * HOUR_MS, later)

    assert used(await configured.balance(4)) == ("ok", "6.000 EUR")
    assert used(await configured.balance(6)) == ("exhausted", "11.000 EUR")
    order = GrantRequest(namespace=TEAM, minutes="5.5", reason="a test", key="k", actor="me")
    reply = await configured.keeper.grant(order)
    assert (reply.granted, reply.remaining, reply.refusal) == ("5.500 EUR", "4.500 EUR", "")


@pytest.mark.parametrize(
    ("prices", "why"),
    [
        ("", "no prices in EUR, but in no currency"),
        ("currency: USD\nmodels: {'*': 1}\n", "no prices in EUR, but in USD"),
        ("currency: EUR\nmodels: {T4: 1}\n", "no price of *"),
    ],
)
async def test_without_prices_in_its_currency_a_budget_is_invalid_until_there_are(
    configured: Configured, prices: str, why: str
) -> None:
    if prices:
        configured.price(prices)
    found = await configured.balance(1)
    assert (str(found.state), why in found.problem) == ("invalid", True)

    configured.price("currency: EUR\nmodels: {'*': 1}\n")
    assert used(await configured.balance(1)) == ("ok", "0.000 EUR")


async def test_another_unit_begins_another_window_and_nothing_rolls_over_to_it(
    configured: Configured,
) -> None:
    configured.price("currency: EUR\nmodels: {'*': 1}\n")
    configured.write({"policy": POLICY, "limitGPUMinutes": 600})
    configured.file.load()
    before = await configured.balance(0)
    configured.write(MONEY)
    configured.file.load()

    after = await configured.balance(1)

    assert before.window.id != after.window.id
    assert amount(after.allowed_units or 0, after.currency) == "10.000 EUR"
