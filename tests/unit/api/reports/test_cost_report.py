"""Reports of costs: prices of a file, amounts that add up, and their forms for other tools."""

import csv
import io
import shutil
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest

from services.api.reports.costs import (
    NOT_OF_GPUS,
    OTHERS,
    allocations,
    cost_view,
    window_ms,
)
from services.cli.admin.reports import FOCUS_COLUMNS, cost_table, focus_csv
from shared.kubernetes.kinds.gpu_prices import PriceFile, load_prices
from shared.model.budgets.budget import HOUR_MS
from shared.model.budgets.cost_records import FREE, WHOLE, CostHour, CostView
from shared.model.errors import RequestError
from shared.model.names import Namespace
from tests.support.snapshots import drawn

A, B = Namespace("team-a"), Namespace("team-b")
NOON = int(datetime(2031, 5, 7, 12, tzinfo=UTC).timestamp()) * 1000
T4 = "Tesla T4"
A100 = "NVIDIA A100-SXM4-80GB"
PRICES = 'currency: EUR\nmodels: {T4: 0.5, A100: "2.50", "A100-SXM4": 3}\n'


def hour(start: int) -> CostHour:
    """An hour of a T4, of which the second half was recorded, and of an A100 that was leased."""
    found = CostHour(start, start + HOUR_MS, HOUR_MS, {T4: HOUR_MS, A100: HOUR_MS})
    for name, model, use, milli_gpu in (
        (A, T4, 0, 250),
        (A, T4, 2, 250),
        (FREE, T4, 3, 100),
        (FREE, T4, 4, 400),
        (B, A100, 1, 1000),
    ):
        found.add(name, model, use, milli_gpu * HOUR_MS)
    return found


HOURS = {start: hour(start) for start in (NOON, NOON + HOUR_MS)}


@pytest.fixture
def prices(tmp_path: Path) -> PriceFile:
    (tmp_path / "prices.yaml").write_text(PRICES)
    return PriceFile(tmp_path / "prices.yaml")


def view(prices: PriceFile, *edges: int) -> CostView:
    return cost_view(HOURS, prices, pairwise(edges), lambda name: OTHERS if name == B else name)


def test_a_report_adds_up_to_the_capacity_and_names_only_what_the_viewer_may_see(
    prices: PriceFile,
) -> None:
    found = view(prices, NOON + HOUR_MS // 2, NOON + HOUR_MS, NOON + 2 * HOUR_MS)

    capacity = 3 * HOUR_MS // 2 * WHOLE
    assert found.capacity_units == {T4: str(capacity), A100: str(capacity)}
    assert sum(int(line.units) for line in found.lines) == 2 * capacity
    assert (found.currency, found.recorded_s, found.problem) == ("EUR", 5400, "")
    rows = [
        (line.namespace, line.use, line.gpu_hours, line.price, line.cost) for line in found.lines
    ]
    assert rows[5:] == [
        (FREE, "stranded", "0.100000", "0.500000", "0.050000"),
        (FREE, "unleased", "0.400000", "0.500000", "0.200000"),
        (OTHERS, "unmeasured", "1.000000", "3.000000", "3.000000"),
        (A, "used", "0.250000", "0.500000", "0.125000"),
        (A, "idle", "0.250000", "0.500000", "0.125000"),
    ]
    shown = drawn(cost_table(found), 200)
    assert "total" in shown
    assert "5.25" in shown
    assert "not recorded" not in shown
    assert "3600 s of that are not recorded" in drawn(
        cost_table(view(prices, NOON, NOON + 3 * HOUR_MS))
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models: {T4: 1}", "currency"),
        ("currency: euro\nmodels: {}", "currency"),
        ("currency: EUR\nmodels: {T4: -1}", "the price of T4, -1"),
        ("currency: EUR\nmodels: {T4: .nan}", "the price of T4"),
        ("currency: EUR\nmodels: {T4: '1e-999999'}", "six decimals"),
        ("currency: EUR\nmodels: {T4: 1, T4: 2}", "twice"),
        ("currency: EUR\nmodels: {T4: 1}\nunit: hour", "unit"),
        ("currency: EUR\nmodels: [T4]", "models"),
        ("x: " + "a" * 70_000, "more than 65536 bytes"),
        ("\x00\xff", "prices.yaml"),
    ],
)
def test_invalid_prices_are_refused_with_words_and_the_last_valid_ones_stay_in_force(
    prices: PriceFile, text: str, reason: str
) -> None:
    prices.read()
    assert prices.path is not None
    prices.path.write_text(text, encoding="latin-1")

    with pytest.raises(RequestError, match=reason):
        load_prices(prices.path)
    found = view(prices, NOON, NOON + HOUR_MS)
    assert reason in found.problem
    assert found.currency == "EUR"
    prices.path.write_text("currency: USD\nmodels: {'*': 1}\n")
    assert view(prices, NOON, NOON + HOUR_MS).currency == "USD"


def mount(volume: Path, version: str, **files: str) -> None:
    """Write a ConfigMap's keys as a kubelet does: all change by the rename of one link."""
    folder = volume / f"..{version}"
    link = volume / "..data_tmp"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    link.symlink_to(folder.name)
    before = volume / "..data"
    old = before.resolve() if before.exists() else None
    link.rename(before)
    for name in files:
        shown = volume / f"{name}.yaml"
        if not shown.is_symlink():
            shown.symlink_to(Path("..data") / shown.name)
    if old is not None:
        shutil.rmtree(old)


def test_prices_of_a_mounted_configmap_follow_its_changes(tmp_path: Path) -> None:
    volume = tmp_path / "prices"
    volume.mkdir()
    prices = PriceFile(volume / "prices.yaml")

    assert view(prices, NOON, NOON + HOUR_MS).currency == ""
    mount(volume, "2031_05_07", prices=PRICES)
    assert view(prices, NOON, NOON + HOUR_MS).currency == "EUR"
    mount(volume, "2031_05_08", prices="currency: USD\nmodels: {T4: 1}\n")
    assert view(prices, NOON, NOON + HOUR_MS).currency == "USD"
    mount(volume, "2031_05_09")  # the ConfigMap was deleted
    found = view(prices, NOON, NOON + HOUR_MS)
    assert (found.currency, found.problem) == ("USD", "")


def test_without_a_file_a_report_has_no_costs() -> None:
    found = view(PriceFile(Path("/missing")), NOON, NOON + HOUR_MS)

    assert {line.cost for line in found.lines} == {None}
    assert "there are no prices" in drawn(cost_table(found))
    assert len(focus_csv(found.lines, "").splitlines()) == 1


def test_the_csv_has_the_columns_of_focus_and_its_costs_are_quantity_times_price(
    prices: PriceFile,
) -> None:
    found = view(prices, NOON, NOON + HOUR_MS)
    rows = list(csv.DictReader(io.StringIO(focus_csv(found.lines, found.currency))))

    assert len(rows) == len(found.lines)
    assert all(tuple(row) == FOCUS_COLUMNS for row in rows)
    for row in rows:
        assert Decimal(row["BilledCost"]) == Decimal(row["PricingQuantity"]) * Decimal(
            row["ListUnitPrice"]
        )
        assert (row["BillingCurrency"], row["ChargeCategory"]) == ("EUR", "Usage")
        assert row["BillingPeriodStart"] == "2031-05-01T00:00:00Z"
        assert row["BillingPeriodEnd"] == "2031-06-01T00:00:00Z"
        assert row["ChargePeriodStart"] == "2031-05-07T12:00:00Z"
    assert {row["SubAccountId"] for row in rows} == {"", A, OTHERS}


@pytest.mark.parametrize("with_idle", [True, False])
def test_allocations_have_the_fields_of_opencost_and_one_set_for_each_step(
    prices: PriceFile, with_idle: bool
) -> None:
    found = view(prices, NOON, NOON + HOUR_MS, NOON + 2 * HOUR_MS)
    reply = allocations(found, with_idle=with_idle)

    assert (reply.code, len(reply.data)) == (200, 2)
    assert set(reply.data[0]) == {A, OTHERS} | ({"__idle__"} if with_idle else set())
    one = reply.data[1][A]
    assert one["window"] == {"start": "2031-05-07T13:00:00Z", "end": "2031-05-07T14:00:00Z"}
    assert one["properties"] == {"namespace": A}
    assert (one["gpuHours"], one["gpuCost"], one["totalCost"]) == (0.5, 0.25, 0.25)
    assert (one["minutes"], one["gpuCount"], one["gpuEfficiency"]) == (60, 0.5, 0.5)
    numbers = {key for key, value in one.items() if isinstance(value, int | float)}
    assert numbers >= set(NOT_OF_GPUS.split())
    assert one["cpuCost"] == one["ramCost"] == 0


WEDNESDAY = datetime(2031, 5, 7, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("today", "2031-05-07", "2031-05-08"),
        ("lastweek", "2031-04-27", "2031-05-04"),
        ("lastmonth", "2031-04-01", "2031-05-01"),
        ("12h", "2031-05-07", "2031-05-07T12:00"),
        ("2031-05-01T00:00:00Z,2031-05-02T00:00:00Z", "2031-05-01", "2031-05-02"),
    ],
)
def test_windows_are_read_as_opencost_reads_them(text: str, begin: str, end: str) -> None:
    expected = [datetime.fromisoformat(each).replace(tzinfo=UTC) for each in (begin, end)]

    assert window_ms(text, WEDNESDAY.timestamp()) == tuple(
        int(each.timestamp()) * 1000 for each in expected
    )


@pytest.mark.parametrize("text", ["", "ever", "0d", "99999999d", "1,2,3", "9999-99-99,"])
def test_other_windows_are_refused_with_words(text: str) -> None:
    with pytest.raises(RequestError, match="window="):
        window_ms(text, WEDNESDAY.timestamp())
