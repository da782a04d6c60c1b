"""How GPUBudget objects are read, what a lease weighs, and how ledgers are added up."""

import tracemalloc
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from services.api.reports.showback import EntryRange, add_up
from services.timekeeper.accounts.accrual import advance, apply_update
from services.timekeeper.config.budget_sources import BudgetFile, ConfiguredBudgets, load_file
from services.timekeeper.config.budget_spec import parse_spec, parse_status
from services.timekeeper.report.budget_reports import budget_status
from services.timekeeper.settings import parse_factors
from shared.kubernetes.types import RawObject
from shared.ledger.budgets import Budgets
from shared.model.budgets.balance import balance
from shared.model.budgets.budget import (
    Budget,
    BudgetPolicy,
    ChargeEntry,
    OnExhausted,
    Period,
    PolicyType,
    WeightMode,
    minutes,
)
from shared.model.budgets.weights import weigh
from shared.model.errors import RequestError
from shared.model.leases.lease import Share
from shared.model.names import Namespace
from tests.support import build
from tests.support.timekeeper.accounts import T0, account, budget, lease, units

PAGE = 500


@dataclass
class Endless(Budgets):
    """A ledger of so many pages, each made on request."""

    pages: int

    async def entries(
        self, namespace: Namespace, *, after: str = "", most: int = PAGE
    ) -> list[ChargeEntry]:
        begin = int(after or 0)
        return [
            ChargeEntry(
                id=str(number),
                window="2031-05",
                kind="charge",
                units=10,
                lease="a",
                from_ms=10 * number,
                to_ms=10 * number + 10,
                weight=1,
                reason=f"{namespace} {number:0500}",
            )
            for number in range(begin + 1, min(begin + most, self.pages * PAGE) + 1)
        ]


async def test_a_long_ledger_is_summed_with_the_memory_of_one_page() -> None:
    tracemalloc.start()
    try:
        (row,) = await add_up(Endless(pages=40), [Namespace("team-a")], EntryRange())
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (row.units, row.leases, row.wall_ms) == (40 * PAGE * 10, 1, 40 * PAGE * 10)
    assert most_bytes < 5_000_000, "40 pages are 20 MB"


MODELS = {
    "T4": ("Tesla T4", 16_384),
    "A100": ("NVIDIA A100-SXM4-40GB", 40_960),
    "A100b": ("NVIDIA A100-SXM4-40GB", 40_960),
}


def share(uuid: str, **fields: Any) -> Share:
    model, mib = MODELS[uuid]
    return build.share(uuid, device_model=model, **({"device_mib": mib} | fields))


def weight(*shares: Share, factors: dict[str, Fraction] | None = None, **fields: Any) -> int:
    return weigh(lease("p", shares=shares), budget(**fields), factors or {}).milli_gpu


def half(uuid: str = "A100", **more: Any) -> Share:
    return share(uuid, memory_mib=20_480, cores_percent=30, **more)


def test_gpusharing_11_weights_of_each_dialect() -> None:
    vcuda = share("T4", memory_mib=15 * 256, cores_percent=50)
    koordinator = (half("A100"), half("A100b"))
    whole = share("T4", memory_mib=16_384, cores_percent=100, whole=True)

    assert weight(vcuda) == 500
    assert weight(half()) == 500
    assert weight(*koordinator) == 1000
    assert weight(whole) == 1000
    assert weight(whole, share("A100", memory_mib=1, whole=True)) == 2000


@pytest.mark.parametrize(
    ("mode", "expected"), [("dominant", 500), ("sum", 400), ("core", 300), ("memory", 500)]
)
def test_the_modes_weigh_cores_and_memory_differently(mode: str, expected: int) -> None:
    assert weight(half(), weight_mode=WeightMode(mode)) == expected


def test_a_share_without_a_core_limit_counts_as_its_memory_or_as_configured() -> None:
    uncapped = share("T4", memory_mib=4_096)

    assert weight(uncapped) == 250
    assert weight(uncapped, uncapped_core_percent=60) == 600


def test_init_containers_and_those_beside_each_other_count_as_the_larger() -> None:
    beside = [share("T4", memory_mib=4_096, container=name) for name in "ab"]
    before = share("T4", memory_mib=12_288, container="i", init=True)

    assert weight(*beside) == 500
    assert weight(before, *beside) == 750


def test_a_sidecar_is_weighed_with_the_init_containers_after_it() -> None:
    sidecar, main = (share("T4", memory_mib=2_048, container=name) for name in ("side", "main"))
    before = share("T4", memory_mib=4_096, container="i", init=True)

    assert weight(sidecar, before, main) == 375
    assert weight(before, sidecar, main) == 250


def test_the_longest_matching_model_name_gives_the_factor_and_the_sum_is_rounded_up_once() -> None:
    third = share("T4", memory_mib=1, cores_percent=33)

    assert weight(half(), factors={"a100": Fraction("2.5"), "A100-SXM4": Fraction(3)}) == 1500
    assert weight(third, factors={"T4": Fraction("0.001")}) == 1
    assert weight(half(), factors={"T4": Fraction(9), "*": Fraction(2)}) == 1000


def test_a_share_whose_device_had_no_memory_counts_as_the_whole_device() -> None:
    assert weight(share("T4", device_mib=0, memory_mib=4_096)) == 1000


TEAM = Namespace("team-a")
WHOLE = """
apiVersion: leasehold.dev/v1beta1
kind: GPUBudget
metadata: {name: team-a}
spec:
  limitGPUMinutes: 1200
  policy: {type: fixed, window: week, timeZone: Europe/Berlin,
           rollover: {percent: 25, maxGPUMinutes: 200}}
  weightMode: sum
  warnAt: [95, 80]
  debtLimitGPUMinutes: 120
  onExhausted: deny
  onDebt: {action: evict, graceMinutes: 5}
  share: 2
"""


def item(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "leasehold.dev/v1beta1",
        "kind": "GPUBudget",
        "metadata": {"name": "team-a"},
        "spec": spec,
    }


def test_every_field_is_read() -> None:
    assert parse_spec(TEAM, yaml.safe_load(WHOLE)["spec"]) == Budget(
        namespace=Namespace("team-a"),
        limit_units=units(1200),
        policy=BudgetPolicy(
            period=Period.WEEK,
            time_zone="Europe/Berlin",
            rollover_percent=25,
            rollover_max_units=units(200),
        ),
        weight_mode=WeightMode.SUM,
        warn_at=(80, 95),
        debt_limit_units=units(120),
        on_exhausted=OnExhausted.DENY,
        evict_on_debt=True,
        debt_grace_minutes=5,
        share=2,
    )


def test_omitted_fields_have_their_defaults() -> None:
    assert parse_spec(TEAM, {"limitGPUMinutes": 0}).limit_units == 0
    assert parse_spec(TEAM, {}) == Budget(namespace=Namespace("team-a"))
    filled = {"type": "bucket", "refillGPUMinutesPerHour": 10}
    money = parse_spec(TEAM, {"limitMoney": {"amount": "12.50", "currency": "EUR"}})
    assert (money.limit_units, money.currency) == (units(750), "EUR")
    bucket = parse_spec(TEAM, {"limitGPUMinutes": 60, "policy": filled})
    assert bucket.policy.type is PolicyType.BUCKET
    assert bucket.policy.refill_units_per_hour == units(10)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"limitGPUMinutes": "many"}, "'many'"),
        (
            {"limit": 5},
            "unknown field `limit`; known fields are limitGPUMinutes, limitMoney, policy",
        ),
        ({"policy": {"type": "lunar"}}, "fixed, sliding, bucket, none"),
        ({"policy": {"timeZone": 7}}, "timeZone"),
        ({"policy": "fixed"}, "spec.policy: Expected `object`"),
        ({"onDebt": {"action": "shout"}}, "onDebt.action"),
        ({"share": True}, "spec.share"),
        ({"share": 10**30}, "spec.share: Expected `int` <= 1000000"),
        ({"graceMinutes": 10**30}, "spec.graceMinutes: Expected `int` <= 525600"),
        *(
            ({"limitGPUMinutes": amount}, "spec.limitGPUMinutes")
            for amount in ("1e1000000000", "1e308", "NaN", float("inf"))
        ),
        ({"limitGPUMinutes": 10**12}, "spec.limitGPUMinutes must be at most 153722867280"),
        (
            {"limitMoney": {"amount": "3000000000.50", "currency": "KRW"}},
            "spec.limitMoney.amount must be at most 2562047788, not '3000000000.50'",
        ),
        ({"limitGPUMinutes": 5, "debtLimitGPUMinutes": -5}, "spec.debtLimitGPUMinutes"),
        ({"warnAt": [50] * 10_000}, "spec.warnAt"),
        ({"policy": {"window": "fortnight"}}, "spec.policy.window"),
        ({"policy": {"timeZone": "x" * 1_000_000}}, "spec.policy.timeZone"),
    ],
)
def test_an_invalid_field_is_refused_with_its_path(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        parse_spec(TEAM, spec)


def test_a_file_has_budgets_of_namespaces_and_one_for_all_others(tmp_path: Path) -> None:
    path = tmp_path / "budgets.yaml"
    everybody = item(limitGPUMinutes=5) | {"metadata": {"name": "*"}}
    path.write_text(f"{WHOLE}---\n{yaml.safe_dump(everybody)}")
    file = BudgetFile(path)
    file.load()
    configured = ConfiguredBudgets(file=file)

    assert configured.budget_of(Namespace("team-a")).share == 2
    assert configured.budget_of(Namespace("else")) == budget(5, "else")
    assert set(configured.namespaces()) == {"team-a"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is not valid YAML"),
        (f"{WHOLE}kind: Pod", "the key 'kind' is there twice"),
        ("kind: Pod", "GPUBudget"),
        (f"{WHOLE}---{WHOLE}", "defined twice"),
        (WHOLE.replace("1200", "x"), "limitGPUMinutes"),
        (WHOLE.replace("v1beta1", "v9"), "v9"),
    ],
)
def test_an_invalid_file_is_refused_with_its_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "budgets.yaml"
    path.write_text(text)

    with pytest.raises(RequestError, match=named) as refused:
        load_file(path)

    assert str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["A100", "A100=x", "=2", "A100=0.0001", "A100=-1"])
def test_factors_have_three_decimals_at_most(text: str) -> None:
    assert parse_factors(("A100=2.5", "T4=0.125")) == {
        "A100": Fraction(5, 2),
        "T4": Fraction(1, 8),
    }
    with pytest.raises(RequestError, match="FACTOR"):
        parse_factors((text,))


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0.000"), (59_999, "0.000"), (60_000, "0.001"), (-90_000_000, "-1.500")],
)
def test_minutes_are_rounded_towards_zero(amount: int, text: str) -> None:
    assert minutes(amount) == text


def test_a_malformed_status_is_ignored() -> None:
    wanted = budget(10)

    strange: list[Any] = [None, [], {}, {"checkpointAt": 1}, {"checkpointAt": "x", "window": {}}]
    for status in strange:
        assert parse_status(status, wanted) is None


def test_a_written_status_is_parsed_with_the_same_window() -> None:
    wanted = budget(10)
    step = advance(account(), wanted, T0, charge_every_ms=0)
    assert step is not None
    after = apply_update(account(), step)
    status = budget_status(after, balance(after, wanted, T0), RawObject(), None)
    written = msgspec.to_builtins(status)
    copy = parse_status(written, wanted)

    assert copy is not None
    assert (copy.window, copy.at_ms) == (after.windows[-1], T0)
    # No account could be read with these.
    for changed in (
        {"windowUsedUnits": "9" * 32},
        {"window": written["window"] | {"start": -1}},
        {"checkpointAt": 1 << 60},
    ):
        assert parse_status(written | changed, wanted) is None
